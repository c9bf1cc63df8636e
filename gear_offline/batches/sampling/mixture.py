"""Mixtures: each slot takes one of several samplers, with weights that may change over steps.

If all parts draw an episode by weight and then any start in it, and the weights do not change,
their mixture is again such a sampler over all episodes.  It is drawn in one go, also by the GPU.

Shape legend: P parts, E episodes, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from gear_offline.batches.sampling.draws import (
    CumulativeWeights,
    Facts,
    HostFunction,
    Sampler,
    widen_sampler,
)
from gear_offline.batches.sampling.masses import WHOLE, integer_masses
from gear_offline.batches.sampling.registry import (
    build_sampler,
    find_strategy,
    resolve_options,
    strategy,
)
from gear_offline.config.sections import Count
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.draws import PART_STREAM, Segments, slot_draws

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
class PartWeights:
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


def check_parts(options: dict[str, Any]) -> None:
    """Refuse parts that cannot be mixed, and weights and a schedule that do not fit them."""
    entries, points = options["parts"], options["schedule"]
    for entry in entries:
        if not find_strategy(name := entry.get("strategy")).mixable:
            raise ValueError(f"{name} cannot be a part: it does not treat slots and steps alike")
        resolve_options(name, _options_of(entry))
        if ("weight" in entry) != (points is None):
            raise ValueError("give each part a weight, or none where there is a schedule")
    if points is None:
        Point(step=0, weights=[entry["weight"] for entry in entries])
        return
    steps = [point["step"] for point in points]
    if steps != sorted(set(steps)):
        raise ValueError(f"the steps of schedule must rise, got {steps}")
    if any(len(point["weights"]) != len(entries) for point in points):
        raise ValueError(f"weights of schedule must be lists of {len(entries)} numbers")


def _options_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("strategy", "weight")}


@strategy("mixture", check=check_parts, mixable=False, handles_subset=True)
def mixture(
    facts: Facts,
    parts: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_PARTS)],
    schedule: Annotated[list[Point], Field(min_length=1)] | None = None,
) -> Sampler:
    """A mixture of strategies with their options, each with a weight unless there is a schedule."""
    samplers = [build_sampler(entry["strategy"], facts, _options_of(entry)) for entry in parts]
    if schedule is None:
        return mix(samplers, PartWeights([0], [[entry["weight"] for entry in parts]]))
    points: Any = schedule  # as `model_dump` gives them
    return mix(samplers, PartWeights([p["step"] for p in points], [p["weights"] for p in points]))


def mix(samplers: Sequence[Sampler], schedule: PartWeights) -> Sampler:
    """Return a sampler each slot of which draws a part by weight, then takes that part's segment.

    The probability of a segment is the weighted mean of what all parts say of it.
    """
    sides = {sampler.name: sampler.padding for sampler in samplers if sampler.padding is not None}
    if len(set(sides.values())) > 1:
        side_text = ", ".join(f"{name} {side}" for name, side in sides.items())
        problem, remedy = f"the parts pad on different sides: {side_text}", "mix those of one side"
        raise InputError("SELECTION", problem, remedy=remedy)
    if wrong := [sampler.name for sampler in samplers if not sampler.mixable]:
        problem = f"{wrong[0]} cannot be a part: the density of its draws is not known"
        raise InputError("SELECTION", problem)
    learning = [sampler.loss_sampler for sampler in samplers if sampler.loss_sampler is not None]
    if len(learning) > 1:
        raise InputError("SELECTION", "a mixture has one prioritized part at most")
    index, by_weight = samplers[0].index, [p for p in samplers if isinstance(p, CumulativeWeights)]
    if len(schedule.steps) == 1 and len(by_weight) == len(samplers):
        weights, shares = np.zeros(index.episodes), np.array(schedule.weights[0], float)
        for sampler, share in zip(by_weight, shares / shares.sum(), strict=True):
            weights += share * sampler.episode_weight
        mixed: Sampler = CumulativeWeights(index, weights)
    else:
        sample = _Mixed(tuple(samplers), schedule).sample
        learner = learning[0] if learning else None
        mixed = HostFunction(index, sample, learner=learner)
    return mixed.with_facts(
        padding=next(iter(sides.values()), None),
        context_length=next((p.context_length for p in samplers if p.context_length), None),
    )


@dataclass(frozen=True)
class _Mixed:
    """A mixture that the host draws."""

    samplers: tuple[Sampler, ...]
    schedule: PartWeights

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, _ = slot_draws(seed, first_step, steps, count, stream=PART_STREAM)
        rows = [self.schedule.cumulative(int(first_step) + row) for row in range(steps)]
        bounds = [np.array([b for b in row[:-1] if b < WHOLE], np.uint64) for row in rows]
        choice = np.stack([b.searchsorted(f, "right") for b, f in zip(bounds, first, strict=True)])
        segments = Segments(
            episodes=np.empty((steps, count), np.int64),
            starts=np.empty((steps, count), np.int64),
            probability=np.zeros((steps, count)),
        )
        for number, sampler in enumerate(self.samplers):
            slots = choice == number
            if slots.any():
                draws = sampler.sample(seed, first_step, steps, count)
                segments.episodes[slots] = draws.episodes[slots]
                segments.starts[slots] = draws.starts[slots]
        shares = np.array([np.diff([0, *row]).astype(object) / WHOLE for row in rows], np.float64)
        for number, sampler in enumerate(self.samplers):
            if shares[:, number].any():
                density = sampler.density(segments)
                assert density is not None
                segments.probability[:] += shares[:, number, None] * density
        return segments


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskPart:
    """One task of a mixture over datasets: a sampler over the task's own episodes."""

    name: str
    sampler: Sampler
    weight: float = 1.0  # at least 0; not looked at where there is a schedule


def mix_tasks(tasks: Sequence[TaskPart], schedule: PartWeights | None = None) -> Sampler:
    """Return the sampler of a joint table of tasks, in their order; of one task that task's own.

    It refuses samplers that do not treat slots and steps alike: slots of other tasks would be
    missing from their order.  It refuses those that learn from losses: their weights would undo
    the tasks'.
    """
    if len(tasks) == 1:
        return tasks[0].sampler
    for task in tasks:
        if task.sampler.loss_sampler is not None or not task.sampler.mixable:
            problem = f"strategy {task.sampler.name!r} cannot be mixed with those of other tasks"
            remedy = "use one that treats slots and steps alike, such as uniform_steps"
            raise InputError("SELECTION", problem, f"data.tasks.{task.name}.selection", remedy)
    samplers = [task.sampler for task in tasks]
    index = EpisodeIndex(np.concatenate([sampler.index.lengths for sampler in samplers]))
    firsts = np.cumsum([0, *(sampler.index.episodes for sampler in samplers)])
    joint = [
        widen_sampler(sampler, np.arange(first, end), index)
        for sampler, (first, end) in zip(samplers, pairwise(firsts), strict=True)
    ]
    mixed = mix(joint, schedule or PartWeights([0], [[task.weight for task in tasks]]))
    descriptions = [
        {"task": task.name, "strategy": sampler.name, "options": sampler.options}
        | ({"weight": task.weight} if schedule is None else {})
        for task, sampler in zip(tasks, samplers, strict=True)
    ]
    options = {"parts": descriptions, "schedule": None if schedule is None else asdict(schedule)}
    return mixed.with_facts(name="tasks", options=options)
