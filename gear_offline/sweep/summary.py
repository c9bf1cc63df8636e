"""A sweep's table: for each setting the mean over seeds and its 95 % confidence interval.

The interval is the two-sided Student t interval of the mean over seeds: it says how well the mean
over all seeds is known from these, not how far a single run may lie from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gear_offline.evaluation.results import mean_interval
from gear_offline.sweep.points import SweepPoint
from gear_offline.sweep.results import RunResult
from gear_offline.training.metrics import finite, ranking, read_records

INTERVAL = "two-sided 95 % Student t interval of the mean over seeds"


def _score(evaluation: Mapping[str, Any] | None) -> float | None:
    """Return the normalised score of the target that returned most; None without a reference."""
    return None if evaluation is None else evaluation.get("normalized_score")


def _return(evaluation: Mapping[str, Any] | None) -> float | None:
    return None if evaluation is None else ranking(evaluation)


METRICS: dict[str, Callable[[RunResult], float | None]] = {
    "return_last": lambda result: _return(result.evaluation_last),
    "return_best": lambda result: _return(result.evaluation_best),
    "score_last": lambda result: _score(result.evaluation_last),
    "score_best": lambda result: _score(result.evaluation_best),
    "loss": lambda result: result.loss,
}


def summarize(points: Sequence[SweepPoint], results: Sequence[RunResult]) -> dict[str, Any]:
    """Return the table, JSON-able: a row a setting, over the seeds whose runs are complete.

    Rows are in the order of the points; `best` is the label of the one with the highest mean of
    ``return_last``, or the lowest ``loss`` where nothing was evaluated.
    """
    groups: dict[str, list[tuple[SweepPoint, RunResult]]] = {}
    for point, result in zip(points, results, strict=True):
        groups.setdefault(point.label, []).append((point, result))
    rows = []
    for label, members in groups.items():
        complete = [result for _, result in members if result.status == "complete"]
        row: dict[str, Any] = {
            "label": label,
            "settings": dict(members[0][0].settings),
            "runs": len(members),
            "complete": len(complete),
            "failed": [result.name for _, result in members if result.status == "failed"],
            "seeds": [result.recipe.seed for result in complete],
        }
        for name, read in METRICS.items():
            values = [read(result) for result in complete]
            row[name] = _interval([value for value in values if value is not None])
        rows.append(row)
    return {"interval": INTERVAL, "rows": finite(rows), "best": _best(rows)}


def _interval(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    array = np.asarray(values, np.float64)
    low, high = mean_interval(array)
    std = float(array.std(ddof=1)) if array.size > 1 else None
    return {"mean": float(array.mean()), "ci95": [low, high], "std": std, "values": list(values)}


def _best(rows: Sequence[Mapping[str, Any]]) -> str | None:
    for name, sign in (("return_last", 1.0), ("loss", -1.0)):
        scored = [row for row in rows if row[name] is not None]
        if scored:
            return str(max(scored, key=lambda row: sign * row[name]["mean"])["label"])
    return None


def curves(
    points: Sequence[SweepPoint], results: Sequence[RunResult]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return mean and interval over seeds at each step, by label: ``loss`` and ``return``.

    Steps that not all complete runs of a setting have are left out.
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for label in dict.fromkeys(point.label for point in points):
        members = [
            result
            for point, result in zip(points, results, strict=True)
            if point.label == label and result.status == "complete"
        ]
        found[label] = {
            name: _curve([_column(result, file, key) for result in members])
            for name, file, key in (
                ("loss", "metrics.jsonl", "loss"),
                ("return", "evaluations.jsonl", "return"),
            )
        }
    return found


def _column(result: RunResult, file: str, key: str) -> dict[int, float]:
    rows = read_records(result.path / file)
    return {int(row["step"]): float(row[key]) for row in rows if row.get(key) is not None}


def _curve(runs: Sequence[Mapping[int, float]]) -> list[dict[str, Any]]:
    if not runs:
        return []
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    rows = []
    for step in steps:
        values = np.array([run[step] for run in runs], np.float64)
        low, high = mean_interval(values)
        rows.append({"step": step, "mean": float(values.mean()), "ci95": [low, high]})
    return rows
