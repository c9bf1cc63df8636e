"""Trials in one process, as on a GPU, without what a sweep does around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError
from gear_offline.runs.preparation import prepare_dataset
from gear_offline.sweep.results import is_complete, read_result
from gear_offline.sweep.run import run_trials
from gear_offline.sweep.stack import StackTurns
from gear_offline.sweep.trials import Trial, flat, make_trials
from gear_offline.sweep.turns import Turns

CPU = torch.device("cpu")


def grid(
    recipe: Recipe, options: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[Recipe]:
    """Return the recipes of a grid."""
    return [trial.recipe for trial in make_trials(recipe, options, seeds)]


def name_points(recipes: Sequence[Recipe], names: Sequence[str] | None = None) -> list[Trial]:
    """Return trials named by what their recipes differ in, and the seed, unless by `names`."""
    leaves = [flat(recipe.to_dict()) for recipe in recipes]
    differ = [k for k in leaves[0] if k != "seed" and len({str(row[k]) for row in leaves}) > 1]
    trials = []
    for place, (recipe, row) in enumerate(zip(recipes, leaves, strict=True)):
        label = ",".join(f"{key.rpartition('.')[2]}={row[key]:g}" for key in differ)
        name = names[place] if names else ",".join(filter(None, [label, f"s{recipe.seed}"]))
        trials.append(Trial(name=name, label=label, recipe=recipe, settings={}))
    return trials


def in_turns(
    kind: type[Turns], points: Sequence[Trial], folder: Path, *, parallel: int
) -> dict[str, GearError | None]:
    """Run trials in one process; return how each ended."""
    turns = kind(
        CPU,
        parallel=parallel,
        prepare=lambda recipe: prepare_dataset(recipe, quiet=True),
        place=lambda point: folder / point.name,
        display=SimpleNamespace(step=lambda name, done: None),
    )
    ended: dict[str, GearError | None] = {}

    def note(point: Trial, error: GearError | None) -> None:
        assert point.name not in ended, "told once"
        ended[point.name] = error

    turns.complete(points, note)
    return ended


def run_sweep(
    recipes: Sequence[Recipe],
    out: Path,
    *,
    mode: str,
    parallel: int | None = None,
    quiet: bool = True,
    report: bool = True,
) -> list[Any]:
    """Run a sweep, on a CPU as on a GPU; return for each trial how it ended."""
    points = name_points(recipes)
    if points[0].recipe.train.device == "cpu" and mode in ("stacked", "streams"):
        kind = StackTurns if mode == "stacked" else Turns
        waiting = [p for p in points if not is_complete(p, out / "runs" / p.name)]
        ended = in_turns(kind, waiting, out / "runs", parallel=parallel or 16) if waiting else {}
        errors = {name: f"{error.code}: {error.message}" for name, error in ended.items() if error}
        results = [read_result(p, out / "runs" / p.name, errors.get(p.name)) for p in points]
    else:
        at_once = 1 if mode == "serial" else parallel
        found = run_trials(points, out, parallel=at_once, exact=mode == "streams", quiet=quiet)
        results = list(found.trials)
    return [
        SimpleNamespace(
            name=one.trial.name,
            recipe=one.trial.recipe,
            path=one.path,
            status=one.status,
            error=one.error,
            steps=max(one.losses, default=0),
        )
        for one in results
    ]
