"""The trials of a sweep on one GPU: those of equal shapes stacked, the others on streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError, UnavailableError
from gear_offline.sweep.stack import StackTurns
from gear_offline.sweep.trials import Trial
from gear_offline.sweep.turns import Turns
from gear_offline.tables.joint import TableData
from gear_offline.training.stack import check_stackable


def train_concurrently(
    trials: Sequence[Trial],
    *,
    folder: Path,
    device: torch.device,
    parallel: int,
    exact: bool,
    open_data: Callable[[Recipe], TableData],
    ended: Callable[[Trial, GearError | None], None],
    moved: Callable[[Trial, int], None],
) -> None:
    """Train each trial into ``folder/NAME``, `parallel` at a time."""
    by_name = {trial.name: trial for trial in trials}

    class Display:
        def step(self, name: str, done: int) -> None:
            moved(by_name[name], done)

    try:
        for trial in trials:
            check_stackable(trial.recipe)
        stacked = not exact
    except UnavailableError:
        stacked = False
    turns = (StackTurns if stacked else Turns)(
        device,
        parallel=parallel,
        prepare=open_data,
        place=lambda trial: folder / trial.name,
        display=Display(),
    )
    turns.complete(trials, ended)
