"""Which task a slot takes, and which of its segments: a mixture over datasets.

Each task has a law of its own over its own episodes, and a weight.  Where all of these laws draw
an episode by its weight and then a start in it uniformly, and the weights do not change, their
mixture is again such a law over all episodes: it is drawn in one go, also by the GPU.

Shape legend: T tasks, E episodes of all, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.sampling.base import Float64Array, HasDensity, Segments, Selection, SlotLaw
from gear_offline.sampling.mixture import Mixture, _cumulative, knows_density
from gear_offline.sampling.prioritized import learner_of
from gear_offline.sampling.uniform import UniformEpisodes, UniformSteps
from gear_offline.sampling.weighted import WeightedEpisodes

NAME = "tasks"
WEIGHTED = (UniformSteps, UniformEpisodes, WeightedEpisodes)  # an episode by weight, any start


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskLaw:
    """One task's part of the mixture.

    Attributes
    ----------
    name
        Of the task.
    index
        Its own episodes.
    selection
        Its law over them.
    weight
        Of the task, at least 0; not looked at where there is a schedule.
    """

    name: str
    index: EpisodeIndex
    selection: Selection
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TaskPoint:
    """Weights of the tasks from a step on; between two points they change linearly."""

    step: int
    weights: Mapping[str, float] = field(default_factory=dict)


class OfTask(SlotLaw):
    """A task's law, its episodes named by their numbers in the joint table.

    Parameters
    ----------
    law
        Over the task's own episodes.
    first, episodes
        The task's first episode in the joint table, and how many it has.
    """

    def __init__(self, law: Selection, *, first: int, episodes: int) -> None:
        self._law, self._first, self._episodes = law, first, episodes

    @property
    def name(self) -> str:
        return self._law.name

    @property
    def options(self) -> Mapping[str, Any]:
        return self._law.options

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count)."""
        found = self._law.select_many(seed=seed, first_step=first_step, steps=steps, count=count)
        return replace(found, episodes=found.episodes + self._first)

    def density(self, segments: Segments) -> Float64Array:
        """Return the probability of each segment in one slot; 0 for those of other tasks."""
        local = segments.episodes - self._first
        mine = (local >= 0) & (local < self._episodes)
        named = replace(
            segments,
            episodes=np.where(mine, local, 0),
            starts=np.where(mine, segments.starts, 0),
        )
        return np.where(mine, cast(HasDensity, self._law).density(named), 0.0)


class TaskMixture(Mixture):
    """Each slot draws a task by weight, then takes what that task's law has for the slot."""

    name = NAME

    def __init__(self, tasks: Sequence[TaskLaw], schedule: Sequence[TaskPoint]) -> None:
        self._options = _options(tasks, schedule)
        self.parts = _parts(tasks)
        points = schedule or [TaskPoint(step=0, weights={t.name: t.weight for t in tasks})]
        self._steps = [point.step for point in points]
        self._sums = [_cumulative([point.weights[t.name] for t in tasks]) for point in points]


class WeightedTasks(WeightedEpisodes):
    """The same law where every task's is one of weighted episodes, drawn in one go."""

    name = NAME

    def __init__(self, tasks: Sequence[TaskLaw]) -> None:
        total = sum(task.weight for task in tasks)
        shares = [task.weight / total * _episode_shares(task) for task in tasks]
        super().__init__(_joint_index(tasks), np.concatenate(shares))
        self._options = _options(tasks, ())

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options


def mix_tasks(tasks: Sequence[TaskLaw], schedule: Sequence[TaskPoint] = ()) -> Selection:
    """Return the law of a joint table.

    With one task it is that task's own law, with the same draws.

    Parameters
    ----------
    tasks
        In the order of the joint table.
    schedule
        Points of falling or rising weights, in the order of their steps; empty: fixed weights.

    Raises
    ------
    InputError
        ``SELECTION_OPTIONS`` for weights that are all zero; ``TASK_STRATEGY`` for laws that do
        not treat slots and steps alike, since a slot that another task takes would be missing from
        their order, and for laws that learn from losses, whose weights would undo the tasks'.
    """
    for weights in [p.weights for p in schedule] or [{t.name: t.weight for t in tasks}]:
        if not sum(weights.values()) > 0:
            raise InputError(
                "SELECTION_OPTIONS",
                "the weights of the tasks are all zero",
                where="data.tasks",
                remedy="give at least one task a positive weight",
            )
    if len(tasks) == 1:
        return tasks[0].selection
    for task in tasks:
        learns = learner_of(task.selection) is not None
        if learns or not knows_density(type(task.selection)):
            raise InputError(
                "TASK_STRATEGY",
                f"strategy {task.selection.name!r} cannot be mixed with those of other tasks",
                where=f"data.tasks.{task.name}.selection",
                remedy="use one that treats slots and steps alike, such as uniform_steps",
            )
    if not schedule and all(_is_weighted(task.selection) for task in tasks):
        return WeightedTasks(tasks)
    return TaskMixture(tasks, schedule)


def _joint_index(tasks: Sequence[TaskLaw]) -> EpisodeIndex:
    return EpisodeIndex(lengths=np.concatenate([task.index.lengths for task in tasks]))


def _parts(tasks: Sequence[TaskLaw]) -> tuple[Selection, ...]:
    """Return each task's law over the joint table: of weighted episodes where that is possible.

    The GPU has a kernel for those, the episodes of other tasks having no weight.
    """
    index = _joint_index(tasks)
    found: list[Selection] = []
    first = 0
    for task in tasks:
        last = first + task.index.episodes
        if _is_weighted(task.selection):
            weights = np.zeros(index.episodes)
            weights[first:last] = _episode_shares(task)
            found.append(WeightedEpisodes(index, weights))
        else:
            found.append(OfTask(task.selection, first=first, episodes=last - first))
        first = last
    return tuple(found)


def _is_weighted(law: Selection) -> bool:
    """Whether a law draws an episode by its weight, then any start: not a law on top of one."""
    draws = type(law).select_many
    return any(isinstance(law, kind) and draws is kind.select_many for kind in WEIGHTED)


def _episode_shares(task: TaskLaw) -> Float64Array:
    """Return (episodes,) probabilities of a task's episodes under its own law."""
    if isinstance(task.selection, UniformSteps):
        return task.index.lengths / task.index.steps
    if isinstance(task.selection, UniformEpisodes):
        return np.full(task.index.episodes, 1.0 / task.index.episodes)
    return cast(WeightedEpisodes, task.selection).episode_weight


def _options(tasks: Sequence[TaskLaw], schedule: Sequence[TaskPoint]) -> dict[str, Any]:
    parts = [
        {
            "task": task.name,
            "strategy": task.selection.name,
            "options": dict(task.selection.options),
            **({} if schedule else {"weight": task.weight}),
        }
        for task in tasks
    ]
    points = [{"step": point.step, "weights": dict(point.weights)} for point in schedule]
    return {"parts": parts, "schedule": points or None}
