"""A sweep's table: for each setting the mean over seeds and its 95 % confidence interval.

The interval is the two-sided Student t interval of the mean over seeds: it says how well the mean
over all seeds is known from these, not how far a single run may lie from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gear_offline.evaluation.results import mean_interval
from gear_offline.plots import short
from gear_offline.sweep.results import TrialResult

INTERVAL = "two-sided 95 % Student t interval of the mean over seeds"
RANKING = ("return", "normalized_score", "loss")  # of several tasks there is no common return
METRICS = ("return", "best_return", "normalized_score", "loss")
LEAST_SEEDS = 3  # for an interval: that of two is 9 times as wide as they lie apart


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds, and half the width of its 95 % interval; None of fewer than three."""

    mean: float
    half: float | None
    values: tuple[float, ...]

    def __str__(self) -> str:
        return short(self.mean) if self.half is None else f"{short(self.mean)} ± {short(self.half)}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of a sweep: all its `trials`, those that `failed`, and the complete `seeds`.

    `estimates` are over these, by metric: ``return``, ``best_return``, ``normalized_score`` and
    ``loss``, as far as there are values; of evaluations they are the last ones, or the best.
    """

    label: str
    settings: Mapping[str, Any]
    trials: int
    seeds: tuple[int, ...]
    failed: tuple[str, ...]
    estimates: Mapping[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a sweep, the best first by `metric`: one of `RANKING`, the first there is."""

    rows: tuple[Row, ...]
    metric: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able document."""
        return {"interval": INTERVAL, "metric": self.metric, "rows": [asdict(r) for r in self.rows]}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """(n, M) values of n seeds at the (M,) optimizer steps that every complete trial has."""

    steps: tuple[int, ...]
    values: np.ndarray[Any, np.dtype[np.float64]]

    def estimates(self) -> list[Estimate]:
        """Return the mean over seeds and its interval at each step."""
        return [estimate(column) for column in self.values.T.tolist()]


def _metrics(result: TrialResult) -> dict[str, float | None]:
    last, best = result.last, result.best
    return {
        "return": last.mean_return if last else None,
        "best_return": best.mean_return if best else None,
        "normalized_score": last.normalized_score if last else None,
        "loss": result.loss,
    }


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, of one seed each, with its interval."""
    array = np.asarray(values, np.float64)
    half = None
    if array.size >= LEAST_SEEDS:
        low, high = mean_interval(array)
        half = (high - low) / 2
    return Estimate(mean=float(array.mean()), half=half, values=tuple(array.tolist()))


def by_label(results: Sequence[TrialResult]) -> dict[str, list[TrialResult]]:
    """Return the trials of each setting."""
    groups: dict[str, list[TrialResult]] = {}
    for result in results:
        groups.setdefault(result.trial.label, []).append(result)
    return groups


def make_table(results: Sequence[TrialResult]) -> Table:
    """Return the table of trials; equal settings stay in the order of the trials."""
    rows = []
    for label, members in by_label(results).items():
        complete = [result for result in members if result.status == "complete"]
        found = [_metrics(result) for result in complete]
        estimates = {}
        for name in METRICS:
            values = [value for metrics in found if (value := metrics[name]) is not None]
            if values:
                estimates[name] = estimate(values)
        rows.append(
            Row(
                label=label,
                settings=members[0].trial.settings,
                trials=len(members),
                seeds=tuple(result.trial.recipe.seed for result in complete),
                failed=tuple(r.trial.name for r in members if r.status == "failed"),
                estimates=estimates,
            )
        )
    metric = next((m for m in RANKING if any(m in row.estimates for row in rows)), "loss")
    sign = 1.0 if metric == "loss" else -1.0

    def rank(row: Row) -> float:
        return sign * row.estimates[metric].mean if metric in row.estimates else np.inf

    return Table(rows=tuple(sorted(rows, key=rank)), metric=metric)


def make_curves(results: Sequence[TrialResult], metric: str) -> dict[str, Curve]:
    """Return the curve of each setting with complete trials, by label; `metric` as in `RANKING`."""
    curves = {}
    for label, members in by_label(results).items():
        runs = [_points(one, metric) for one in members if one.status == "complete"]
        steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
        if steps:
            values = np.array([[run[step] for step in steps] for run in runs], np.float64)
            curves[label] = Curve(steps=tuple(steps), values=values)
    return curves


def _points(result: TrialResult, metric: str) -> dict[int, float]:
    if metric == "loss":
        return result.losses
    field = "mean_return" if metric == "return" else metric
    points = ((one.step, getattr(one, field)) for one in result.evaluations)
    return {step: value for step, value in points if step is not None and value is not None}
