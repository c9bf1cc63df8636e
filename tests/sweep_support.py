"""Sweeps in one process, without what `run_sweep` does around them."""

from __future__ import annotations

from pathlib import Path

import torch

from gear_offline.errors import GearError
from gear_offline.runs.preparation import prepare_dataset
from gear_offline.sweep.display import SweepDisplay
from gear_offline.sweep.points import SweepPoint
from gear_offline.sweep.turns import Turns

CPU = torch.device("cpu")


def in_turns(
    kind: type[Turns], points: tuple[SweepPoint, ...], folder: Path, *, parallel: int
) -> dict[str, GearError | None]:
    """Run points in one process, as on a GPU; return how each ended."""
    display = SweepDisplay("test", {p.name: p.recipe.train.steps for p in points}, quiet=True)
    display.begin({})
    turns = kind(
        CPU,
        parallel=parallel,
        prepare=lambda point: prepare_dataset(point.recipe, quiet=True),
        place=lambda point: folder / point.name,
        display=display,
    )
    ended: dict[str, GearError | None] = {}

    def note(point: SweepPoint, error: GearError | None) -> None:
        assert point.name not in ended, "told once"
        ended[point.name] = error

    turns.complete(points, note)
    return ended
