"""What the runs of a sweep came to, read from their directories, and the table over seeds.

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
from gear_offline.evaluation.results import mean_interval
from gear_offline.runs.run import Run
from gear_offline.sweep.trials import Trial
from gear_offline.training.metrics import (
    EvaluationRecord,
    MetricsRecord,
    RunSummary,
    read_document,
    read_lines,
)

INTERVAL = "two-sided 95 % Student t interval of the mean over seeds"
RANKING = ("return", "normalized_score", "loss")  # of several tasks there is no common return
METRICS = ("return", "best_return", "normalized_score", "loss")
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
    evaluations: tuple[EvaluationRecord, ...]  # that did not fail, in the order of steps

    @property
    def last(self) -> EvaluationRecord | None:
        """The last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    def metrics(self) -> dict[str, float | None]:
        """Return what the table has of it, by `METRICS`."""
        best = max(self.evaluations, key=lambda e: (e.ranking, e.step), default=None)
        return {
            "return": self.last.mean_return if self.last else None,
            "best_return": best.mean_return if best else None,
            "normalized_score": self.last.normalized_score if self.last else None,
            "loss": self.losses[max(self.losses)] if self.losses else None,
        }

    def curve(self, metric: str) -> dict[int, float]:
        """Return values of one of `RANKING` by step."""
        if metric == "loss":
            return self.losses
        field = "mean_return" if metric == "return" else metric
        points = ((one.step, getattr(one, field)) for one in self.evaluations)
        return {step: value for step, value in points if step is not None and value is not None}


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


@dataclass(frozen=True, kw_only=True)
class Curve:
    """(n, M) values of n seeds at the (M,) optimizer steps that every complete trial has."""

    steps: tuple[int, ...]
    values: np.ndarray[Any, np.dtype[np.float64]]

    def estimates(self) -> list[Estimate]:
        """Return the mean over seeds and its interval at each step."""
        return [estimate(column) for column in self.values.T.tolist()]


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


def make_table(results: Sequence[TrialResult]) -> Table:
    """Return the table of trials; equal settings stay in the order of the trials."""
    rows = []
    for label, members in by_label(results).items():
        complete = [result for result in members if result.status == "complete"]
        found = [result.metrics() for result in complete]
        values = {m: [one[m] for one in found if one[m] is not None] for m in METRICS}
        rows.append(
            Row(
                label=label,
                settings=members[0].trial.settings,
                trials=len(members),
                seeds=tuple(result.trial.recipe.seed for result in complete),
                failed=tuple(r.trial.name for r in members if r.status == "failed"),
                estimates={m: estimate(known) for m, known in values.items() if known},  # type: ignore[arg-type]
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
        runs = [one.curve(metric) for one in members if one.status == "complete"]
        steps = sorted(set.intersection(*map(set, runs))) if runs else []
        if steps:
            values = np.array([[run[step] for step in steps] for run in runs], np.float64)
            curves[label] = Curve(steps=tuple(steps), values=values)
    return curves
