"""What the trials of a sweep came to, read from their run directories, and the table over seeds.

The interval of a mean is the two-sided Student t interval over seeds: it says how well the mean
over all seeds is known from these, not how far a single run may lie from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gear_offline.core.files import open_regular
from gear_offline.core.text import short
from gear_offline.runs.run import Run
from gear_offline.sweep.trials import Trial
from gear_offline.training.records import (
    EvaluationReport,
    MetricsRecord,
    RunSummary,
    mean_interval,
    read_document,
    read_lines,
)

INTERVAL = "two-sided 95 % Student t interval of the mean over seeds"
METRICS = {  # by name, with the heading of a table
    "return": "return",
    "best_return": "best return",
    "normalized_score": "score",
    "loss": "loss",
}
RANKING = ("return", "normalized_score", "loss")  # of several tasks there is no common return
LEAST_SEEDS = 3  # for an interval: that of two is 9 times as wide as they lie apart
TAIL_BYTES = 4096  # holds the last line of a run's metrics


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How one trial of a sweep stands."""

    trial: Trial
    path: Path  # its run directory, as `train` writes it
    status: Literal["complete", "failed", "open"]  # open: not done yet
    error: str | None  # of a failed one, "CODE: what was wrong"
    losses: dict[int, float]  # mean training loss by step
    evaluations: tuple[EvaluationReport, ...]  # that did not fail, in the order of steps

    @property
    def last(self) -> EvaluationReport | None:
        """The last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    def curve(self, metric: str) -> dict[int, float]:
        """Return the values of one of `RANKING` by step."""
        if metric == "loss":
            return self.losses
        field = "mean_return" if metric == "return" else metric
        points = ((one.step, getattr(one, field)) for one in self.evaluations)
        return {step: value for step, value in points if step is not None and value is not None}

    def metrics(self) -> dict[str, float]:
        """Return the `METRICS` that it has; the last ones, and the best return."""
        found = {name: self.curve(name) for name in RANKING}
        last = {name: curve[max(curve)] for name, curve in found.items() if curve}
        returns = found["return"].values()
        return last | ({"best_return": max(returns)} if returns else {})


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
    """One setting of a sweep."""

    label: str
    settings: Mapping[str, Any]
    trials: int
    seeds: tuple[int, ...]  # of the complete ones
    failed: tuple[str, ...]
    estimates: Mapping[str, Estimate]  # over `seeds`, by `METRICS`, as far as there are values


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a sweep, the best first by `metric`: one of `RANKING`, the first there is."""

    rows: tuple[Row, ...]
    metric: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able document."""
        return {"interval": INTERVAL, "metric": self.metric, "rows": [asdict(r) for r in self.rows]}


def read_result(trial: Trial, path: Path, error: str | None = None) -> TrialResult:
    """Return what a run directory says; `error` if the trial has failed."""
    metrics, done = read_lines(path / "metrics.jsonl", MetricsRecord), is_complete(trial, path)
    return TrialResult(
        trial=trial,
        path=path,
        status="complete" if done else "open" if error is None else "failed",
        error=None if done else error,
        losses={row.step: row.loss for row in metrics if row.loss is not None},
        evaluations=tuple(Run(path).played()),
    )


def is_complete(trial: Trial, path: Path) -> bool:
    """Return whether a run has done all the steps of its trial and written its summary."""
    summary = read_document(path / "summary.json", RunSummary)
    return summary is not None and summary.steps == trial.recipe.train.steps


def steps_done(path: Path) -> int:
    """Return the step of the last whole line of a run's metrics, reading no more than its end."""
    try:
        with open(open_regular(path / "metrics.jsonl"), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # the last one is torn, or empty
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # for the display only


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


def make_row(members: Sequence[TrialResult]) -> Row:
    """Return the row of the trials of one setting."""
    complete = [result for result in members if result.status == "complete"]
    found = [result.metrics() for result in complete]
    values = {name: [one[name] for one in found if name in one] for name in METRICS}
    return Row(
        label=members[0].trial.label,
        settings=members[0].trial.settings,
        trials=len(members),
        seeds=tuple(result.trial.recipe.seed for result in complete),
        failed=tuple(result.trial.name for result in members if result.status == "failed"),
        estimates={name: estimate(known) for name, known in values.items() if known},
    )


def make_table(results: Sequence[TrialResult]) -> Table:
    """Return the table of trials; equal settings stay in the order of the trials."""
    rows = [make_row(members) for members in by_label(results).values()]
    metric = next((m for m in RANKING if any(m in row.estimates for row in rows)), "loss")
    sign = 1.0 if metric == "loss" else -1.0

    def rank(row: Row) -> float:
        return sign * row.estimates[metric].mean if metric in row.estimates else np.inf

    return Table(rows=tuple(sorted(rows, key=rank)), metric=metric)
