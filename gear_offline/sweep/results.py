"""What the runs of a sweep came to, read from their directories."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gear_offline.config.recipe import Recipe
from gear_offline.sweep.points import SweepPoint
from gear_offline.training.metrics import best_evaluation, read_records


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How one run of a sweep ended.

    Attributes
    ----------
    name
        Of its directory.
    recipe
        The point, as given.
    path
        Its run directory, as `train` writes it.
    status
        ``"complete"``, or ``"failed"`` with `error`, or ``"open"``: not done yet.
    error
        ``"CODE: what was wrong"`` of a failed run.
    steps
        Optimiser steps that metrics were written of.
    loss
        Mean loss of the last line of ``metrics.jsonl``.
    evaluation_last, evaluation_best
        Lines of ``evaluations.jsonl``; None without any.
    """

    name: str
    recipe: Recipe
    path: Path
    status: Literal["complete", "failed", "open"]
    error: str | None = None
    steps: int = 0
    loss: float | None = None
    evaluation_last: dict[str, Any] | None = None
    evaluation_best: dict[str, Any] | None = None


def read_result(point: SweepPoint, path: Path, *, error: str | None = None) -> RunResult:
    """Return what the run directory of a point says; `error` if the run has failed."""
    metrics = read_records(path / "metrics.jsonl")
    evaluations = read_records(path / "evaluations.jsonl")
    status: Literal["complete", "failed", "open"] = "open"
    if is_complete(point, path):
        status, error = "complete", None
    elif error is not None:
        status = "failed"
    return RunResult(
        name=point.name,
        recipe=point.recipe,
        path=path,
        status=status,
        error=error,
        steps=int(metrics[-1]["step"]) if metrics else 0,
        loss=metrics[-1].get("loss") if metrics else None,
        evaluation_last=evaluations[-1] if evaluations else None,
        evaluation_best=best_evaluation(evaluations),
    )


def is_complete(point: SweepPoint, path: Path) -> bool:
    """Return whether the run of a point has done all its steps and written its summary."""
    try:
        summary = json.loads((path / "summary.json").read_text())
        return bool(summary["steps"] == point.recipe.train.steps)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def steps_done(path: Path) -> int:
    """Return the step of the last whole line of a run's metrics, reading no more than its end."""
    try:
        with open(path / "metrics.jsonl", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            if line.endswith(b"\n"):
                return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
