"""A mixture of laws: each slot takes one of several, with weights that may change over steps.

Shape legend: P parts, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.schema import BoolArray, EpisodeIndex, Int64Array
from gear_offline.errors import InputError
from gear_offline.kernels.philox import UInt64Array, draws
from gear_offline.sampling import base
from gear_offline.sampling.base import (
    PART_STREAM,
    Facts,
    Float64Array,
    HasDensity,
    Segments,
    Selection,
    SlotLaw,
    check_range,
    make_selection,
    misfit,
    register,
    selection_names,
)
from gear_offline.sampling.options import integer, number, plain, wrong
from gear_offline.sampling.prioritized import LearnsFromLosses, Prioritized, learner_of
from gear_offline.sampling.thresholds import WHOLE, masses_of

MAX_PARTS = 64


def _check_mixture(*, parts: Any = None, schedule: Any = None) -> None:
    parts, schedule = plain(parts), plain(schedule)
    if (
        not isinstance(parts, Sequence)
        or isinstance(parts, str)
        or not 1 <= len(parts) <= MAX_PARTS
    ):
        raise wrong("parts", f"a list of 1 to {MAX_PARTS} strategies", parts)
    for place, part in enumerate(parts):
        _check_part(f"parts[{place}]", part, weighted=schedule is None)
    if schedule is None:
        _check_weights("weights of the parts", [part["weight"] for part in parts], len(parts))
        return
    if not isinstance(schedule, Sequence) or isinstance(schedule, str) or not schedule:
        raise wrong("schedule", "a list of {step, weights}", schedule)
    before = -1
    for place, point in enumerate(schedule):
        where = f"schedule[{place}]"
        if not isinstance(point, Mapping) or set(point) != {"step", "weights"}:
            raise wrong(where, "a step and weights", point)
        if integer(f"{where}.step", point["step"], least=0) <= before:
            raise wrong(f"{where}.step", "above the step before it", point["step"])
        before = point["step"]
        _check_weights(f"{where}.weights", point["weights"], len(parts))


def _check_part(where: str, part: object, *, weighted: bool) -> None:
    if not isinstance(part, Mapping) or "strategy" not in part:
        raise wrong(where, "a section with a strategy", part)
    name = part["strategy"]
    if name not in selection_names():
        raise wrong(f"{where}.strategy", f"one of {', '.join(selection_names())}", name)
    factory = base._FACTORIES[name]
    if isinstance(factory, type) and not knows_density(factory):
        raise wrong(f"{where}.strategy", "a law that treats slots and steps alike", name)
    if weighted != ("weight" in part):
        must = "given" if weighted else "left out where there is a schedule"
        raise wrong(f"{where}.weight", must, part.get("weight"))
    problem, _ = misfit(name, _options_of(part))
    if problem:
        raise wrong(f"options of {where}", f"those of {name} ({problem})", dict(_options_of(part)))


def _options_of(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in ("strategy", "weight")}


def _check_weights(where: str, weights: object, count: int) -> None:
    if not isinstance(weights, Sequence) or isinstance(weights, str) or len(weights) != count:
        raise wrong(where, f"a list of {count} numbers", weights)
    if not sum(number(where, weight, least=0.0) for weight in weights) > 0:
        raise wrong(where, "not all zero", weights)


@register("mixture", check=_check_mixture)
class Mixture(SlotLaw):
    """Each slot draws a part by weight, then takes what that part has for the slot.

    The probability of a segment is the weighted mean of what all parts say of it.  Between two
    points of a schedule the cumulative masses of the parts change linearly, in integers.
    """

    name = "mixture"

    def __init__(
        self,
        index: EpisodeIndex,
        *,
        parts: Sequence[Mapping[str, Any]],
        schedule: Sequence[Mapping[str, Any]] | None = None,
        returns: Float64Array | None = None,
        terminated: BoolArray | None = None,
        context_length: int | None = None,
    ) -> None:
        parts, schedule = plain(parts), plain(schedule)
        self._options = {"parts": parts, "schedule": schedule}
        facts = Facts(episodes=index, returns=returns, terminated=terminated)
        self.parts: tuple[Selection, ...] = tuple(
            make_selection(
                part["strategy"], facts, context_length=context_length, **_options_of(part)
            )
            for part in parts
        )
        for part in self.parts:
            if not knows_density(type(part)):
                raise InputError(
                    "SELECTION_OPTIONS", f"{part.name!r} cannot be a part of a mixture"
                )
        points = schedule or [{"step": 0, "weights": [part["weight"] for part in parts]}]
        self._steps = [int(point["step"]) for point in points]
        self._sums = [_cumulative(point["weights"]) for point in points]

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    @property
    def points(self) -> tuple[list[int], list[list[int]]]:
        """Steps of the schedule, and the (P,) cumulative masses of the parts at each."""
        return self._steps, self._sums

    def cumulative(self, step: int) -> list[int]:
        """Return (P,) cumulative masses of the parts at a step; the last one is ``2**64``."""
        after = int(np.searchsorted(self._steps, step, side="right"))
        if after in (0, len(self._steps)):
            return self._sums[min(after, len(self._steps) - 1)]
        begin, end = self._steps[after - 1], self._steps[after]
        return [
            low + (high - low) * (step - begin) // (end - begin)
            for low, high in zip(self._sums[after - 1], self._sums[after], strict=True)
        ]

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count)."""
        check_range(seed=seed, first_step=first_step, steps=steps, count=count)
        first, _ = draws(
            seed=seed, stream=PART_STREAM, first_step=first_step, steps=steps, count=count
        )
        rows = [self.cumulative(int(first_step) + row) for row in range(steps)]
        choice = np.stack([_part(first[row], rows[row]) for row in range(steps)])
        episodes = np.empty((steps, count), dtype=np.int64)
        starts = np.empty_like(episodes)
        for group, part in enumerate(self.parts):
            mine = choice == group
            if mine.any():
                found = part.select_many(seed=seed, first_step=first_step, steps=steps, count=count)
                episodes[mine], starts[mine] = found.episodes[mine], found.starts[mine]
        named = Segments(episodes=episodes, starts=starts, probability=np.zeros((steps, count)))
        return Segments(
            episodes=episodes, starts=starts, probability=self._probability(named, rows)
        )

    def _probability(self, named: Segments, rows: Sequence[Sequence[int]]) -> Float64Array:
        shares = np.array([np.diff([0, *row]).astype(object) / WHOLE for row in rows], np.float64)
        found = np.zeros(named.shape)
        for group, part in enumerate(self.parts):
            if shares[:, group].any():
                density = cast(HasDensity, part).density(named)
                found += shares[:, group, None] * density
        return found

    @property
    def _learners(self) -> list[tuple[int, LearnsFromLosses]]:
        found = ((place, learner_of(part)) for place, part in enumerate(self.parts))
        return [(place, part) for place, part in found if part is not None]

    @property
    def learns(self) -> bool:
        """Whether a part learns from losses; only then the mixture does."""
        return bool(self._learners)

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self._learners[0][1].updates if self.learns else 0

    def update(self, segments: Int64Array, losses: npt.NDArray[np.float32]) -> None:
        """Tell the parts that learn."""
        for _, part in self._learners:
            part.update(segments, losses)

    def importance(self, probability: Float64Array, *, step: int) -> Float64Array:
        """Return (B,) weights of the losses, with the exponent of the first part that learns."""
        return self._learners[0][1].importance(probability, step=step)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the states of the parts that learn, by place and name."""
        return {
            f"{place}/{key}": value
            for place, part in self._learners
            for key, value in part.state().items()
        }

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what `state` returned."""
        for place, part in self._learners:
            begin = f"{place}/"
            part.load_state({k[len(begin) :]: v for k, v in state.items() if k.startswith(begin)})


def knows_density(law: type[Any]) -> bool:
    """Whether laws of a class know the probability of any segment of what they draw.

    One that inherits `density` and draws otherwise does not.
    """
    for kind in law.__mro__:
        if "density" in vars(kind) or "select_many" in vars(kind):
            return "density" in vars(kind)
    return False


def prioritized_parts(selection: Selection) -> tuple[Prioritized, ...]:
    """Return the prioritised laws that a selection is or has as parts of a mixture."""
    parts = selection.parts if isinstance(selection, Mixture) else (selection,)
    return tuple(part for part in parts if isinstance(part, Prioritized))


def _cumulative(weights: Sequence[float]) -> list[int]:
    """Return cumulative integer masses of weights; the last one is ``2**64``."""
    masses = [int(mass) for mass in masses_of(np.asarray(weights, dtype=np.float64))]
    if not any(masses):  # one part has everything
        masses[int(np.argmax(weights))] = WHOLE
    sums, total = [], 0
    for mass in masses:
        total += mass
        sums.append(total)
    return sums


def _part(first: UInt64Array, cumulative: Sequence[int]) -> Int64Array:
    """Return the part of each draw: the first whose cumulative mass is above it."""
    found: npt.NDArray[np.int64] = np.zeros(first.shape, dtype=np.int64)
    for bound in cumulative[:-1]:
        if bound < WHOLE:
            found += first >= np.uint64(bound)
    return found
