"""What the runs of a sweep came to, read from their directories."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gear_offline.core.files import open_regular, read_regular
from gear_offline.errors import InputError
from gear_offline.sweep.trials import Trial
from gear_offline.training.metrics import read_records

SUMMARY_BYTES = 64 << 20
TAIL_BYTES = 4096  # holds the last line of a run's metrics


class TaskEvaluation(BaseModel):
    """What an evaluation says of one task."""

    mean_return: float | None = Field(None, alias="return")
    normalized_score: float | None = None


class Evaluation(TaskEvaluation):
    """A line of ``evaluations.jsonl``.

    The return of several tasks is None, as their units differ, and of an evaluation that failed;
    their normalized score is the mean of theirs.
    """

    step: int
    tasks: dict[str, TaskEvaluation] = {}

    @property
    def ranking(self) -> float | None:
        """What evaluations are compared by; None where there is nothing to compare."""
        return self.normalized_score if self.mean_return is None else self.mean_return


class _Metrics(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)
    step: int
    loss: float | None = None


class _Summary(BaseModel):
    steps: int


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
    evaluations: tuple[Evaluation, ...]

    @property
    def loss(self) -> float | None:
        """The last one."""
        return self.losses[max(self.losses)] if self.losses else None

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation that did not fail."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest return, the latest of equals."""
        return max(self.evaluations, key=lambda e: (e.ranking, e.step), default=None)


def read_result(trial: Trial, path: Path, error: str | None) -> TrialResult:
    """Return what a run directory says; `error` if the trial has failed."""
    metrics = [_checked(_Metrics, row, path) for row in read_records(path / "metrics.jsonl")]
    rows = read_records(path / "evaluations.jsonl")
    played = [_checked(Evaluation, row, path) for row in rows]
    status: Literal["complete", "failed", "open"] = "open" if error is None else "failed"
    if is_complete(trial, path):
        status, error = "complete", None
    return TrialResult(
        trial=trial,
        path=path,
        status=status,
        error=error,
        losses={row.step: row.loss for row in metrics if row.loss is not None},
        evaluations=tuple(one for one in played if one.ranking is not None),
    )


def is_complete(trial: Trial, path: Path) -> bool:
    """Return whether a run has done all the steps of its trial and written its summary."""
    summary = path / "summary.json"
    if not os.path.lexists(summary):
        return False
    try:
        content = read_regular(summary, most=SUMMARY_BYTES)
        return _Summary.model_validate_json(content).steps == trial.recipe.train.steps
    except (OSError, ValueError) as error:
        raise _damaged(summary, error) from error


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


def _checked(kind: type[Any], row: dict[str, Any], path: Path) -> Any:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:200]
    remedy = "move that run away: the sweep makes it again"
    return InputError("RUN_DAMAGED", f"a file cannot be read: {reason}", str(path), remedy)
