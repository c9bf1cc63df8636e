"""The tasks to play and the options of who asks for them; nothing here loads torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_offline.config.environment_options import typed_options
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import PlaySettings, Target, asked_returns
from gear_offline.core.files import check_new_file
from gear_offline.core.parts import admit, is_same, part_name
from gear_offline.data.dataset.scores import ReferenceScores
from gear_offline.errors import InputError, given_path
from gear_offline.evaluation.environments import (
    Options,
    check_registered,
    say_left_out,
    say_version,
)

if TYPE_CHECKING:
    from gear_offline.models.policy import Policy

Reference = str | ReferenceScores | tuple[float, float]
EPISODES = 10  # where the recipe has 0, which means none while training
CPU_ENVIRONMENTS = 20  # more make no product of matrices faster
GPU_ENVIRONMENTS = 256  # an action for all takes hardly longer than one


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """A task to play."""

    environment: str  # Gymnasium id
    environment_options: Options = field(default_factory=dict)  # it is made with
    targets: tuple[float, ...]  # asked returns, in the environment's units
    name: str = ""  # of the task; empty for a policy of one
    episodes: int = 10  # of each target; episode e is reset with ``seed + e``
    episodes_of_memory: int = 1  # that each of them is the first of, in one environment and memory
    sample: bool = False  # actions are drawn
    context_length: int | None = None  # steps of a window at play; None: as in training
    environments: int = 0  # side by side for each target; 0: as many as suit the device
    seed: int = 0
    # D4RL name, two returns or scores to normalise by; default: those of the environment's family
    reference: Reference | None = None
    # of the worst and the best episode of its data, to normalise by where there is no reference
    data_returns: tuple[float, float] | None = None
    condition: Target = "return"  # what targets are
    goals: bool = False  # targets are numbers of tasks, and returns say if their goals are reached
    batched: bool = False  # its environments step on the policy's device

    @property
    def slots(self) -> int:
        """Environments that a settled task takes at once."""
        return min(self.environments, self.episodes) * len(self.targets)

    @property
    def kind(self) -> str:
        """The same for settled tasks that can be played side by side."""
        return repr((self.environment, self.environment_options, self.goals, self.slots))

    def settle(self, device: str = "cpu") -> EvaluationTask:
        """Return it with a number of environments; refuse to play nothing, ``USAGE``."""
        leasts = {"episodes": 1, "episodes_of_memory": 1, "environments": 0, "seed": 0}
        for name, least in leasts.items():
            value = getattr(self, name)
            if not (isinstance(value, int | np.integer) and least <= value < 1 << 62):
                remedy = f"give a whole number from {least} on, below 2^62"
                raise InputError("USAGE", f"{name} is {value}", f"evaluate.{name}", remedy)
        suiting = CPU_ENVIRONMENTS if device == "cpu" else min(self.episodes, GPU_ENVIRONMENTS)
        return replace(self, environments=self.environments or suiting)


def tasks_of(recipe: Recipe, environment: str | None = None) -> tuple[EvaluationTask, ...]:
    """Return the evaluations of a resolved recipe; none where no environment is known.

    A recipe of one task that names none is played in `environment`.
    """
    shared, default = recipe.evaluate, None if recipe.data.tasks else environment
    sections: Mapping[str, PlaySettings] = recipe.data.tasks or {"": shared}
    return tuple(
        EvaluationTask(
            name=name,
            environment=played,
            environment_options=section.environment_options or {},
            targets=tuple(section.targets or ()),
            reference=section.reference,
            episodes=shared.episodes,
            episodes_of_memory=shared.episodes_of_memory,
            sample=shared.sample,
            environments=0 if shared.environments == "auto" else shared.environments,
            seed=shared.seed,
            condition=recipe.loader.condition,
            goals=recipe.loader.goals is not None,
        )
        for name, section in sections.items()
        if (played := section.environment or default) is not None
    )


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """The options of `evaluate` and `act`, as `read_options` has checked them."""

    run: Path | Policy
    environment: str | None
    environment_options: dict[str, Any] | None
    model: str | None
    targets: tuple[float, ...] | None = None
    episodes: int | None = None
    episodes_of_memory: int | None = None
    sample: bool | None = None
    context_length: int | None = None
    checkpoint: str | int | None = None
    seed: int | None = None
    device: str = "auto"
    out: Path | None = None
    video: Path | None = None
    quiet: bool = False


def read_options(
    run: str | os.PathLike[str] | Policy,
    environment: str | Callable[..., Any] | None,
    environment_options: Mapping[str, Any] | None,
    model: Any,
    *,
    targets: Any = None,
    out: str | os.PathLike[str] | None = None,
    video: str | os.PathLike[str] | None = None,
    **plain: Any,
) -> PlayOptions:
    """Check what a caller types of `PlayOptions`, and admit the model that he names."""
    place: Any = run
    if not hasattr(run, "act"):  # no policy
        place = given_path(place, "RUN_NOT_FOUND", where="run")
    how, model, name = environment_options, part_name(model), part_name(environment)
    if name is not None and not (isinstance(name, str) and name):
        remedy = "give an id like Hopper-v5, or a class"
        raise InputError("ENVIRONMENT", f"{name!r} is no environment", "--environment", remedy)
    admit([model] if model else [])
    options = PlayOptions(
        run=place,
        environment=name,
        environment_options=None if how is None else typed_options(how),
        model=model,
        targets=None if targets is None else asked_returns(targets),
        out=None if out is None else given_path(out, "OUTPUT_WRITE", where="out"),
        video=None if video is None else given_path(video, "OUTPUT_WRITE", where="video"),
        **plain,
    )
    if options.out is not None:
        check_new_file(options.out)
    return options


def choose_tasks(recipe: Recipe, options: PlayOptions) -> list[EvaluationTask]:
    """Choose the tasks of a run that `options` mean; refuse what text tells of them."""
    name, settings = options.environment, recipe.evaluate
    of_run = tasks_of(recipe, name)
    tasks = [task for task in of_run if name in (None, task.name)]
    if name and not tasks:
        matching = [task for task in of_run if is_same(name, task.environment)]
        tasks = [replace(task, environment=name) for task in matching]
    if name and not (tasks or recipe.data.tasks):  # neither options nor scores of another
        another: Any = {"environment": name, "environment_options": {}, "reference": None}
        tasks = [replace(task, **another) for task in of_run]
    places = ", ".join(f"{task.name} ({task.environment})" for task in of_run)
    if not tasks:
        problem = "the run names no environment to play in"
        remedy = "say it: --environment Hopper-v5"
        if name is not None:
            problem, remedy = f"{name} is the environment of no task", f"tasks: {places}"
        raise InputError("USAGE", problem, where="--environment", remedy=remedy)
    changes: dict[str, Any] = {
        "targets": options.targets,
        "environment_options": options.environment_options,
        "seed": options.seed,
        "episodes": options.episodes,
        "episodes_of_memory": options.episodes_of_memory,
        "sample": options.sample,
        "context_length": options.context_length,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    changes.setdefault("episodes", settings.episodes or EPISODES)
    for key in ("targets", "environment_options"):
        if key in changes and len(tasks) > 1:
            where, problem = f"--{key.replace('_', '-')}", "several tasks cannot share them"
            remedy = f"say which task with --environment: {places}"
            raise InputError("USAGE", problem, where=where, remedy=remedy)
    tasks = [replace(task, **changes) for task in tasks]
    if not all(task.targets for task in tasks):
        problem = f"the run names no {recipe.loader.condition}s to ask for"
        remedy = "say them: --targets 3600,1800"
        raise InputError("USAGE", problem, where="--targets", remedy=remedy)
    if tasks[0].episodes_of_memory > 1 and recipe.loader.span != "history":
        problem = "the run's windows end with episodes: it has learnt nothing over their ends"
        remedy = "train with loader.span=history, or leave it out"
        raise InputError("USAGE", problem, "--episodes-of-memory", remedy)
    for task in tasks:
        task.settle()
        if ":" not in task.environment:
            check_registered(task.environment, "--environment")
    return tasks


def say_choice(tasks: list[EvaluationTask], recipe: Recipe, options: PlayOptions) -> None:
    """Say the versions that are taken of environments, and the options that are left out."""
    if options.environment is None or is_same(options.environment, recipe.evaluate.environment):
        say_left_out(options.environment_options, recipe.evaluate.environment_options)
    for task in tasks:
        say_version(task.environment)
