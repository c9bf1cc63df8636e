"""Which segments make up a batch: laws that are pure functions of (seed, step).

A selection has no state.  ``select(seed=s, step=t, count=B)`` names the B segments of step ``t``
whoever asks, whenever, in whatever order, on any device; resuming is setting the step number.
The random numbers come from the counter-based generator of `gear_offline.kernels.philox`: slot
``b`` of step ``t`` uses its own block, so batches of different size agree on their common slots.

Shape legend: E episodes, N steps, T steps of one episode, B slots of a batch.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError
from gear_offline.kernels.philox import bounded, draws
from gear_offline.schema import EpisodeIndex, Int64Array

SELECTION_STREAM = 0  # the generator's stream for selection


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Windows of episodes, named by episode and start.

    Attributes
    ----------
    episodes
        int64, any shape ``S``: episode of each segment.
    starts
        int64, ``S``: first step of the segment within its episode, ``0 <= start < T``.
    probability
        float64, ``S``: the probability with which the law draws that (episode, start) in one slot.
        May be a read-only broadcast.
    """

    episodes: Int64Array
    starts: Int64Array
    probability: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        if not self.episodes.shape == self.starts.shape == self.probability.shape:
            raise InputError("SEGMENTS_SHAPE", "episodes, starts and probability differ in shape")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.episodes.shape

    def __getitem__(self, item: int | slice | tuple[slice, ...]) -> Segments:
        """Return the part that `item` names."""
        return Segments(
            episodes=self.episodes[item],
            starts=self.starts[item],
            probability=self.probability[item],
        )


@runtime_checkable
class Selection(Protocol):
    """A law that turns (seed, step) into segments.

    To add one, write a class with these members and `register` a function that builds it from an
    `EpisodeIndex` and keyword options.  What it must keep:

    - ``select(seed, step, count)`` is a pure function and equals row 0 of
      ``select_many(seed, step, 1, count)``; row ``i`` of ``select_many(seed, first_step, ...)``
      equals ``select(seed, first_step + i, count)`` bit for bit;
    - every start lies inside its episode;
    - `probability` is the exact law, so that importance weights can be computed from it.

    Attributes
    ----------
    name
        Registered name.
    options
        JSON-able keyword arguments that, with the name and the index, build the same law again.
        They are saved in a loader's state and compared when it is loaded.
    """

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    def select(self, *, seed: int, step: int, count: int) -> Segments:
        """Return the segments of one step, arrays of shape (count,)."""
        ...

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count)."""
        ...


class HasEpisodes(Protocol):
    """Anything with an episode index, such as a dataset."""

    @property
    def episodes(self) -> EpisodeIndex: ...


Factory = Callable[..., Selection]
_FACTORIES: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Register a function or class ``(index, **options) -> Selection`` under `name`.

    Raises
    ------
    ValueError
        The name is taken.
    """

    def add(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ValueError(f"selection {name!r} is already registered")
        _FACTORIES[name] = factory
        return factory

    return add


def selection_names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_FACTORIES))


def make_selection(name: str, data: HasEpisodes | EpisodeIndex, **options: Any) -> Selection:
    """Build a selection by name.

    Parameters
    ----------
    name
        One of `selection_names`.
    data
        A dataset or an episode index.
    options
        What the law takes; the uniform laws take none.

    Raises
    ------
    InputError
        ``SELECTION_UNKNOWN``, ``SELECTION_OPTIONS``, or ``SELECTION_EMPTY`` (no episodes).
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        near = difflib.get_close_matches(name, _FACTORIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(
            "SELECTION_UNKNOWN",
            f"no selection strategy {name!r}",
            remedy=f"{hint}strategies: {', '.join(selection_names())}",
        )
    index = data if isinstance(data, EpisodeIndex) else data.episodes
    if index.episodes == 0:
        raise InputError("SELECTION_EMPTY", "the table has no episodes to select from")
    problem, taken = misfit(name, options)
    if problem:
        raise InputError(
            "SELECTION_OPTIONS",
            f"options {sorted(options)} do not fit strategy {name!r}: {problem}",
            remedy=f"it takes {', '.join(taken) or 'none'}; see docs/loader.md",
        )
    return factory(index, **options)


def misfit(name: str, options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return why `options` do not fit the registered strategy `name`, and the options it takes.

    The reason is empty when they fit.
    """
    signature = inspect.signature(_FACTORIES[name])
    taken = list(signature.parameters)[1:]  # the first is the index
    try:
        signature.bind(None, **options)
    except TypeError as error:
        return str(error), taken
    return "", taken


def check_range(*, seed: int, first_step: int, steps: int, count: int) -> None:
    """Raise `InputError` (``SELECTION_RANGE``) unless the arguments fit the generator's counter."""
    for what, value, low, high in (
        ("seed", seed, 0, 1 << 64),
        ("step", first_step, 0, 1 << 63),
        ("last step", first_step + steps, 0, 1 << 63),
        ("steps", steps, 0, 1 << 32),
        ("batch size", count, 1, (1 << 32) + 1),
    ):
        if not (hasattr(value, "__index__") and low <= operator.index(value) < high):
            raise InputError(
                "SELECTION_RANGE",
                f"{what} {value} is out of range",
                remedy=f"use an integer in [{low}, {high})",
            )


class StepLocator:
    """Finds the episode of a step faster than a binary search over all episodes.

    A guide names, for each of about 16 equal ranges of steps per episode, the episode of the
    range's first step.  Most ranges hold no episode boundary; only steps beyond one are searched.
    Costs 128 to 256 bytes an episode.
    """

    def __init__(self, index: EpisodeIndex) -> None:
        self._offsets = index.offsets
        ranges = min(16 * index.episodes, index.steps)
        self._shift = max((index.steps // ranges).bit_length() - 1, 0)
        firsts = np.arange(((index.steps - 1) >> self._shift) + 1, dtype=np.int64) << self._shift
        self._guide = index.episode_of(firsts)

    def __call__(self, steps: Int64Array) -> Int64Array:
        """Return the episode of each global step, same shape, int64."""
        episodes: Int64Array = self._guide[steps >> self._shift]
        beyond = steps >= self._offsets[episodes + 1]
        found = np.searchsorted(self._offsets, steps[beyond], side="right")
        episodes[beyond] = found - 1
        return episodes


@register("uniform_steps")
@dataclass(frozen=True)
class UniformSteps:
    """Every (episode, start) of the table is equally likely: 1/N each.

    The law of the Decision Transformer paper: an episode in proportion to its length, then a start
    uniformly over its steps.  Drawing one of the N steps is that law exactly.
    """

    index: EpisodeIndex
    name = "uniform_steps"

    @cached_property
    def _episode_of(self) -> StepLocator:
        return StepLocator(self.index)

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def select(self, *, seed: int, step: int, count: int) -> Segments:
        """Return the segments of one step, arrays of shape (count,)."""
        return self.select_many(seed=seed, first_step=step, steps=1, count=count)[0]

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count)."""
        check_range(seed=seed, first_step=first_step, steps=steps, count=count)
        first, _ = draws(
            seed=seed, stream=SELECTION_STREAM, first_step=first_step, steps=steps, count=count
        )
        row = bounded(first, self.index.steps)
        episodes = self._episode_of(row)
        return Segments(
            episodes=episodes,
            starts=row - self.index.offsets[episodes],
            probability=np.broadcast_to(np.float64(1.0 / self.index.steps), row.shape),
        )


@register("uniform_episodes")
@dataclass(frozen=True)
class UniformEpisodes:
    """Every episode is equally likely, then every start in it: 1/(E T) each.

    Steps of short episodes are seen more often than under `UniformSteps`.
    """

    index: EpisodeIndex
    name = "uniform_episodes"

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def select(self, *, seed: int, step: int, count: int) -> Segments:
        """Return the segments of one step, arrays of shape (count,)."""
        return self.select_many(seed=seed, first_step=step, steps=1, count=count)[0]

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count)."""
        check_range(seed=seed, first_step=first_step, steps=steps, count=count)
        first, second = draws(
            seed=seed, stream=SELECTION_STREAM, first_step=first_step, steps=steps, count=count
        )
        episodes = bounded(first, self.index.episodes)
        lengths = self.index.lengths[episodes]
        return Segments(
            episodes=episodes,
            starts=bounded(second, lengths),
            probability=1.0 / (np.float64(self.index.episodes) * lengths),
        )
