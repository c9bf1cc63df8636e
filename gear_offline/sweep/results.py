"""What the runs of a sweep came to, read from their directories."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gear_offline.core.files import open_regular
from gear_offline.sweep.trials import Trial
from gear_offline.training.records import (
    EvaluationRecord,
    MetricsRecord,
    RunSummary,
    read_document,
    read_lines,
)

TAIL_BYTES = 4096  # holds the last line of a run's metrics


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How one trial of a sweep stands.

    Attributes
    ----------
    path
        Its run directory, as `train` writes it.
    status, error
        ``"complete"``; ``"failed"`` with ``"CODE: what was wrong"``; ``"open"``: not done yet.
    losses
        Mean training loss by step.
    evaluations
        Those that did not fail, in the order of steps.
    """

    trial: Trial
    path: Path
    status: Literal["complete", "failed", "open"]
    error: str | None
    losses: dict[int, float]
    evaluations: tuple[EvaluationRecord, ...]

    @property
    def loss(self) -> float | None:
        """The last one."""
        return self.losses[max(self.losses)] if self.losses else None

    @property
    def last(self) -> EvaluationRecord | None:
        """The last evaluation that did not fail."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best(self) -> EvaluationRecord | None:
        """The evaluation with the highest return, the latest of equals."""
        return max(self.evaluations, key=lambda e: (e.ranking, e.step), default=None)


def read_result(trial: Trial, path: Path, error: str | None) -> TrialResult:
    """Return what a run directory says; `error` if the trial has failed."""
    metrics = read_lines(path / "metrics.jsonl", MetricsRecord)
    evaluations = read_lines(path / "evaluations.jsonl", EvaluationRecord)
    status: Literal["complete", "failed", "open"] = "open" if error is None else "failed"
    if is_complete(trial, path):
        status, error = "complete", None
    return TrialResult(
        trial=trial,
        path=path,
        status=status,
        error=error,
        losses={row.step: row.loss for row in metrics if row.loss is not None},
        evaluations=tuple(one for one in evaluations if one.ranking is not None),
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
