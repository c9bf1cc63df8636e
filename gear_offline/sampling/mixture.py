"""Mixtures: each slot takes one of several samplers, with weights that may change over steps.

If all parts draw an episode by weight and then any start in it, and the weights do not change,
their mixture is again such a sampler over all episodes.  It is drawn in one go, also by the GPU.

Shape legend: P parts, E episodes, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from gear_offline.config.sections import Count
from gear_offline.core.types import Float64Array
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.draws import CumulativeWeights, Draw, Segments
from gear_offline.sampling.base import (
    PART_STREAM,
    STRICT,
    Facts,
    Members,
    Sampler,
    build_sampler,
    has_density,
    parse_options,
    register,
    sampler_class,
    slot_draws,
)
from gear_offline.sampling.episodes import WHOLE, WeightedEpisodes, integer_masses

if TYPE_CHECKING:
    from gear_offline.sampling.prioritized import Prioritized

MAX_PARTS = 64


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Point:
    """Weights of the parts at a step."""

    step: Annotated[Count, Field(strict=True)]
    weights: list[Annotated[float, Field(ge=0.0, strict=True, allow_inf_nan=False)]]

    def __post_init__(self) -> None:
        if not sum(self.weights) > 0:
            raise ValueError("weights must not be all zero")


@dataclass(frozen=True)
class Schedule:
    """Weights of the parts over steps.

    The cumulative masses change linearly between two points, in integers; beyond them they stay.
    """

    steps: Sequence[int]
    weights: Sequence[Sequence[float]]  # of each point, (P,)

    def cumulative(self, step: int) -> list[int]:
        """Return (P,) cumulative masses of the parts at a step; the last one is ``2**64``."""
        after = int(np.searchsorted(self.steps, step, side="right"))
        low, high = max(after - 1, 0), min(after, len(self.steps) - 1)
        begin, span = self.steps[low], max(self.steps[high] - self.steps[low], 1)
        pairs = zip(*(_cumulative(self.weights[at]) for at in (low, high)), strict=True)
        return [first + (last - first) * (step - begin) // span for first, last in pairs]


def _cumulative(weights: Sequence[float]) -> list[int]:
    masses = [int(mass) for mass in integer_masses(np.asarray(weights, dtype=np.float64))]
    if not any(masses):  # one part has everything
        masses[int(np.argmax(weights))] = WHOLE
    return list(accumulate(masses))


@register("mixture")
class Mixture(Sampler):
    """A mixture: each slot draws a part by weight, then takes that part's segment.

    The probability of a segment is the weighted mean of what all parts say of it.
    """

    knows_kept = True

    @pydantic_dataclass(frozen=True, config=STRICT)
    class Options:
        """Strategies with their options, each with a weight unless there is a schedule."""

        parts: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_PARTS)]
        schedule: Annotated[list[Point], Field(min_length=1)] | None = None

        def __post_init__(self) -> None:
            for part in self.parts:
                name = part.get("strategy")
                if not has_density(sampler_class(name)):
                    what = f"{name} cannot be a part: it does not treat slots and steps alike"
                    raise ValueError(what)
                parse_options(name, _options_of(part))
                if ("weight" in part) != (self.schedule is None):
                    raise ValueError("give each part a weight, or none where there is a schedule")
            steps = [point.step for point in self.points]
            if steps != sorted(set(steps)):
                raise ValueError(f"the steps of schedule must rise, got {steps}")
            if any(len(point.weights) != len(self.parts) for point in self.points):
                what = f"weights of schedule must be lists of {len(self.parts)} numbers"
                raise ValueError(what)

        @property
        def points(self) -> list[Point]:
            """The schedule; fixed weights are a schedule of a single point."""
            return self.schedule or [Point(step=0, weights=[part["weight"] for part in self.parts])]

    def __init__(self, facts: Facts, options: Any) -> None:
        super().__init__(facts, options)
        parts = [build_sampler(p["strategy"], facts, _options_of(p)) for p in options.parts]
        points: list[Point] = options.points
        self._mix(parts, Schedule([p.step for p in points], [p.weights for p in points]))

    def _mix(self, parts: Sequence[Sampler], schedule: Schedule) -> None:
        self.parts, self.schedule = tuple(parts), schedule
        spans = [part.context_length for part in parts if part.context_length is not None]
        self.context_length = spans[0] if spans else None
        sides = {part.name: part.padding for part in parts if part.padding is not None}
        if len(set(sides.values())) > 1:
            named = ", ".join(f"{name} {side}" for name, side in sides.items())
            what, remedy = f"the parts pad on different sides: {named}", "mix those of one side"
            raise InputError("SELECTION", what, remedy=remedy)
        self.padding = next(iter(sides.values()), None)
        learning = [part.loss_sampler for part in parts if part.loss_sampler is not None]
        if len(learning) > 1:
            raise InputError("SELECTION", "a mixture has one prioritized part at most")
        self._loss_sampler = learning[0] if learning else None
        self._whole: WeightedEpisodes | None = None
        if len(schedule.steps) == 1 and all(isinstance(p.gpu, CumulativeWeights) for p in parts):
            weights, shares = np.zeros(self.index.episodes), np.array(schedule.weights[0], float)
            for part, share in zip(parts, shares / shares.sum(), strict=True):
                assert part.episode_weight is not None
                weights += share * part.episode_weight
            self._whole = WeightedEpisodes(Facts(episodes=self.index), weights=weights)

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        if self._whole is not None:
            return self._whole.sample(seed, first_step, steps, count)
        first, _ = slot_draws(seed, first_step, steps, count, stream=PART_STREAM)
        rows = [self.schedule.cumulative(int(first_step) + row) for row in range(steps)]
        bounds = [np.array([b for b in row[:-1] if b < WHOLE], np.uint64) for row in rows]
        choice = np.stack([b.searchsorted(f, "right") for b, f in zip(bounds, first, strict=True)])
        drawn = Segments(
            episodes=np.empty((steps, count), np.int64),
            starts=np.empty((steps, count), np.int64),
            probability=np.zeros((steps, count)),
        )
        for number, part in enumerate(self.parts):
            slots = choice == number
            if slots.any():
                own = part.sample(seed, first_step, steps, count)
                drawn.episodes[slots], drawn.starts[slots] = own.episodes[slots], own.starts[slots]
        shares = np.array([np.diff([0, *row]).astype(object) / WHOLE for row in rows], np.float64)
        for number, part in enumerate(self.parts):
            if shares[:, number].any():
                density = part.density(drawn)
                assert density is not None
                drawn.probability[:] += shares[:, number, None] * density
        return drawn

    @property
    def episode_weight(self) -> Float64Array | None:
        return None if self._whole is None else self._whole.episode_weight

    @property
    def loss_sampler(self) -> Prioritized | None:
        return self._loss_sampler

    @property
    def gpu(self) -> Draw | None:
        return None if self._whole is None else self._whole.gpu


def _options_of(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in ("strategy", "weight")}


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskPart:
    """One task of a mixture over datasets: a sampler over the task's own episodes."""

    name: str
    sampler: Sampler
    weight: float = 1.0  # at least 0; not looked at where there is a schedule


def mix_tasks(tasks: Sequence[TaskPart], schedule: Schedule | None = None) -> Sampler:
    """Return the sampler of a joint table of tasks, in their order; of one task that task's own.

    It refuses samplers that do not treat slots and steps alike: slots of other tasks would be
    missing from their order.  It refuses those that learn from losses: their weights would undo
    the tasks'.
    """
    if len(tasks) == 1:
        return tasks[0].sampler
    for task in tasks:
        if task.sampler.loss_sampler is not None or not has_density(type(task.sampler)):
            what = f"strategy {task.sampler.name!r} cannot be mixed with those of other tasks"
            remedy = "use one that treats slots and steps alike, such as uniform_steps"
            raise InputError("SELECTION", what, f"data.tasks.{task.name}.selection", remedy)
    return TaskMixture(tasks, schedule)


class TaskMixture(Mixture):
    """A mixture: each slot draws a task by weight, then takes its sampler's segment."""

    name = "tasks"

    @dataclass(frozen=True)
    class Options:
        """The identity of the mixture in a loader's state."""

        parts: Sequence[Mapping[str, Any]]
        schedule: Schedule | None

    def __init__(self, tasks: Sequence[TaskPart], schedule: Schedule | None) -> None:
        samplers = [task.sampler for task in tasks]
        index = EpisodeIndex(np.concatenate([own.index.lengths for own in samplers]))
        firsts = np.cumsum([0, *(own.index.episodes for own in samplers)])
        parts = [
            {"task": task.name, "strategy": own.name, "options": asdict(own.options)}
            | ({"weight": task.weight} if schedule is None else {})
            for task, own in zip(tasks, samplers, strict=True)
        ]
        Sampler.__init__(self, Facts(episodes=index), self.Options(parts, schedule))
        joint = [
            Members(own, np.arange(first, end), index)
            for own, (first, end) in zip(samplers, pairwise(firsts), strict=True)
        ]
        self._mix(joint, schedule or Schedule([0], [[task.weight for task in tasks]]))
