"""The runs of a comparison: every strategy with every seed, same data, same model, same budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from gear_offline.analysis.candidates import Candidate
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.errors import InputError
from gear_offline.sampling import sampler_class
from gear_offline.training.checkpoint_folder import list_checkpoints

MOST_SEEDS = 64
MOST_POINTS = 200
KEPT = 1_000_000  # checkpoints of a run: every one, those that were saved at a stop besides
CURVE_SHARE = 10  # points before the last play one of so many episodes ...
CURVE_LEAST = 5  # ... but so many, if the last point does
OF_FOLDERS = "RUN_"  # how the codes of errors of run directories begin


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a comparison.

    Attributes
    ----------
    candidate
        Its strategy.
    seed
        Of weights, dropout and selection; runs of a seed begin with the same weights.
    recipe
        Resolved, without evaluation: policies are judged from the run's checkpoints.
    path
        Its run directory, ``OUT/training/runs/NAME``.
    """

    candidate: Candidate
    seed: int
    recipe: Recipe
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def identity(self) -> str:
        """A digest of everything in the recipe that decides what is learnt."""
        from gear_offline.runs.trainer import RESUMABLE

        content = self.recipe.to_dict()
        for key in RESUMABLE:
            section, _, name = key.partition(".")
            if name:
                del content[section][name]
            else:
                del content[section]
        for section in ("name", "evaluate"):
            del content[section]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def is_complete(self) -> bool:
        """Whether the run is there, whole.

        Raises
        ------
        InputError
            ``RUN_RECIPE`` when what is there was made by another recipe.
        """
        directory = self.path
        if not (directory / "summary.json").is_file():
            return False
        from gear_offline.runs.trainer import check_same_run

        check_same_run(load_recipe(directory / "recipe.yaml"), self.recipe, directory)
        done = [step for step, _ in list_checkpoints(directory / "checkpoints")]
        return self.recipe.train.steps in done


class RunPoints(Protocol):
    """What trains the runs of a comparison; those that are complete are left alone."""

    def __call__(self, points: Sequence[Point], out: Path) -> dict[str, str]:
        """Train every point from where it stands; return the errors of those that failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What is trained, and where policies are judged along the way.

    Attributes
    ----------
    recipe
        Resolved; its own strategy is the baseline.
    candidates
        The baseline first.
    seeds
        Of each strategy.
    out
        Folder of the comparison.
    marks
        Steps after which a checkpoint is judged, the last one being the end.
    points
        The runs, seed by seed, so that a comparison that is cut short has whole seeds.
    """

    recipe: Recipe
    candidates: tuple[Candidate, ...]
    seeds: tuple[int, ...]
    out: Path
    marks: tuple[int, ...]
    points: tuple[Point, ...]

    def episodes(self, mark: int) -> int:
        """Return how many episodes of each target are played after step `mark`."""
        whole = self.recipe.evaluate.episodes
        if mark == self.marks[-1]:
            return whole
        return min(whole, max(CURVE_LEAST, whole // CURVE_SHARE))


def make_plan(
    recipe: Recipe, candidates: Sequence[Candidate], *, seeds: int, out: Path
) -> TrainingPlan:
    """Plan the runs of `candidates`, with `seeds` seeds from the recipe's own on.

    Checkpoints, and so the points of the curves, come every ``train.evaluate_every`` steps; with
    null there, ten times.

    Parameters
    ----------
    recipe
        As `gear_offline.runs.preparation.resolve` returns it.

    Raises
    ------
    InputError
        ``STRATEGIES_OPTION`` for an unusable number of points, and for a recipe of
        several tasks, whose policies are judged in several environments.
    """
    if recipe.data.tasks:
        raise InputError(
            "STRATEGIES_OPTION",
            "runs of several tasks are not judged here",
            where="data.tasks",
            remedy="compare what is drawn, without training, or train them with `gear-offline "
            "sweep RECIPE selection.strategy=a,b --seeds 3`",
        )
    if not candidates:
        raise InputError(
            "STRATEGIES_OPTION",
            "none of the strategies can run on these data",
            where="--strategies",
            remedy="the reasons stand above",
        )
    steps = recipe.train.steps
    every = recipe.train.evaluate_every or max(1, steps // 10)
    marks = (*range(every, steps, every), steps)
    if len(marks) > MOST_POINTS:
        raise InputError(
            "STRATEGIES_OPTION",
            f"{len(marks)} checkpoints of each run would be judged",
            where="train.evaluate_every",
            remedy=f"at most {MOST_POINTS}: try train.evaluate_every={-(-steps // 20)}",
        )
    numbers = tuple(recipe.seed + i for i in range(seeds))
    points = [
        _point(recipe, candidate, seed, out, every) for seed in numbers for candidate in candidates
    ]
    return TrainingPlan(
        recipe=recipe,
        candidates=tuple(candidates),
        seeds=numbers,
        out=out,
        marks=marks,
        points=tuple(points),
    )


def _point(recipe: Recipe, candidate: Candidate, seed: int, out: Path, every: int) -> Point:
    side = sampler_class(candidate.strategy).padding or recipe.loader.padding
    changed = recipe.replace(
        name=f"{recipe.name[:20]}-{candidate.slug}"[:100].rstrip(".=-").replace("=", "_"),
        seed=seed,
        selection={"strategy": candidate.strategy, "options": dict(candidate.options)},
        loader__padding=side,  # a part of the laws of some implementations
        train__checkpoint_every=every,
        train__evaluate_every=None,
        train__keep_checkpoints=KEPT,
        # how policies are judged may change without training anew, but for what they are asked
        evaluate={
            **recipe.evaluate.model_dump(
                mode="json", include={"environment", "reference", "targets"}
            ),
            "episodes": 0,
        },
    )
    path = out / "training" / "runs" / f"{candidate.slug}-s{seed}"
    return Point(candidate=candidate, seed=seed, recipe=changed, path=path)


def run_in_turn(points: Sequence[Point], out: Path) -> dict[str, str]:
    """Train the points one after the other, each as ``gear-offline train`` would.

    A strategy that the recipe cannot train with is an error of its runs, as any other failure is;
    bad input that the baseline meets as well is one of the recipe, and ends everything.
    """
    from gear_offline.core.device import resolve_device
    from gear_offline.errors import GearError
    from gear_offline.runs.errors import in_words
    from gear_offline.runs.trainer import TrainingInterrupted, train

    errors: dict[str, str] = {}
    for point in points:
        if point.is_complete():
            continue
        device = resolve_device(point.recipe.train.device)
        try:
            with in_words(point.name, point.path, device):
                train(point.recipe, out=point.path, resume=True, quiet=True)
        except TrainingInterrupted:
            raise
        except GearError as error:
            own = point.candidate is points[0].candidate
            if isinstance(error, InputError) and (own or error.code.startswith(OF_FOLDERS)):
                raise
            errors[point.name] = str(error)
    return errors


def run_together(points: Sequence[Point], out: Path) -> dict[str, str]:
    """Train the points side by side on one GPU, by `gear_offline.sweep.sweep`."""
    from gear_offline.sweep.sweep import run_sweep

    found = run_sweep(
        [point.recipe for point in points],
        out / "training",
        names=[point.name for point in points],
        quiet=True,
        report=False,
        others=True,
    )
    return {result.name: str(result.error) for result in found if result.status == "failed"}
