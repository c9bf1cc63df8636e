"""Samplers: the four ways to draw segments, each a function of (seed, step) without hidden state.

`CumulativeWeights` draws an episode by its weight.  `KeyedPermutation` has a new order of all
starts each epoch.  `Prioritized` draws a start by a mass that follows its losses.  `HostFunction`
is any function of the host.  A GPU draws the first three, too.  Whoever asks, whenever and on any
device, gets the same segments, and resuming is setting the step number.

Weights become integer masses once.  From then on everything is integer arithmetic, so that every
device draws the same episode, and the probability of an episode is its mass over ``2**64``.

Shape legend: E episodes, N steps, T steps of one episode, B slots of a batch, n items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
from pydantic import Field

from gear_offline.batches.sampling.masses import (
    HostPriorities,
    WeightedChoice,
    largest_mass,
    masses_of_codes,
)
from gear_offline.config.sections import NotNegative, Positive, PositiveFloat
from gear_offline.core.parts import Kind, calling_part
from gear_offline.core.types import (
    Array,
    BoolArray,
    Float32Array,
    Float64Array,
    Int64Array,
    UInt64Array,
)
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError, UnavailableError
from gear_offline.kernels.draws import (
    PERMUTATION,
    PRIORITIES,
    WEIGHTS,
    GpuDraw,
    KeyedOrder,
    Segments,
    StepLocator,
    bound_draws,
    check_range,
    places,
    slot_draws,
)

if TYPE_CHECKING:
    import torch

    from gear_offline.kernels.priorities import DevicePriorities

STRATEGIES = Kind(
    noun="selection strategy",
    group="strategies",
    option="selection.strategy",
    code="SELECTION",
    own={},  # what `gear_offline.batches.sampling.registry.strategy` registers
)
GOAL_LAWS = Kind(
    noun="law of goals",
    group="goals",
    option="loader.goals.kind",
    code="LOADER_OPTION",
    own={},
)


class EpisodeData(Protocol):
    """A dataset, several for one table, or `Facts`."""

    @property
    def episodes(self) -> EpisodeIndex: ...
    @property
    def returns(self) -> Float64Array | None: ...
    @property
    def terminated(self) -> BoolArray | None: ...
    @property
    def column(self) -> Callable[[str], Array] | None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """The facts of data and windows that a strategy may use; None: not known."""

    episodes: EpisodeIndex
    returns: Float64Array | None = None  # (E,) undiscounted sum of rewards of each episode
    terminated: BoolArray | None = None  # (E,) True if the environment ended the episode
    column: Callable[[str], Array] | None = None  # reads a column by its name, (N, *shape)
    context_length: int | None = None  # K of the loader
    kept: BoolArray | None = None  # (E,) what a table of limited size has; None: everything

    def need(self, name: Literal["returns", "terminated", "column", "context_length"]) -> Any:
        """Return a fact that the strategy needs."""
        value = getattr(self, name)
        if value is None:
            problem = f"the strategy needs {name.replace('_', ' ')}"
            remedy = "pass a dataset, and context_length=K where the strategy depends on it"
            raise InputError("SELECTION", problem, remedy=remedy)
        return value

    def of_kept(self) -> Facts:
        """Return the facts of the kept episodes alone."""
        mask, column = self.kept, self.column
        assert mask is not None, "the table has everything"
        rows = np.repeat(mask, self.episodes.lengths)
        return Facts(
            episodes=EpisodeIndex(self.episodes.lengths[mask]),
            returns=None if self.returns is None else self.returns[mask],
            terminated=None if self.terminated is None else self.terminated[mask],
            column=None if column is None else lambda name: column(name)[rows],
            context_length=self.context_length,
        )


class SamplerFacts(TypedDict, total=False):
    """Facts of a sampler besides its draws; see the attributes of `Sampler`."""

    name: str
    options: Mapping[str, Any]
    padding: Literal["left", "right"] | None
    context_length: int | None
    cuts_windows: bool
    episode_weight: Float64Array | None
    episode_order: Int64Array | None
    counts_draws: bool
    learner: Prioritized | None


class Sampler(ABC):
    """A function from (seed, step) to segments.

    Row ``i`` of what `sample` returns is that of ``sample(seed, first_step + i, 1, count)``.  Every
    start lies inside its episode.  `probability` is exact, so that importance weights can be
    computed from it.  Episodes in segments are numbers in `index`, that of the table.
    """

    name = ""  # of the strategy; with its options and the data it builds the same sampler again
    options: Mapping[str, Any] = {}  # JSON-able
    padding: Literal["left", "right"] | None = None  # side of windows that is part of the strategy
    context_length: int | None = None  # K, of samplers that depend on it
    cuts_windows = False  # segments have `lengths`
    episode_weight: Float64Array | None = None  # (E,) probability of each episode, where known
    # (E,) the order in which episodes are drawn that are removed once they were; None: by chance
    episode_order: Int64Array | None = None
    mixable = False  # slots and steps are alike, `density` is known
    counts_draws = False  # what it draws depends on how often it was asked
    learner: Prioritized | None = None  # the part of it that learns from losses

    def __init__(self, index: EpisodeIndex) -> None:
        self.index = index

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name or type(self).__name__}({inside})"

    @abstractmethod
    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of consecutive steps, below ``2**63``: arrays (steps, count).

        `seed` is in ``[0, 2**64)``, `count` is B.
        """

    def density(self, segments: Segments) -> Float64Array | None:
        """Return the probability of each segment in one slot; None if slots are not alike."""
        return None

    def with_facts(self, **facts: Unpack[SamplerFacts]) -> Self:
        """Return a copy of which other facts are known."""
        copied = copy(self)
        copied._set_facts(facts)
        return copied

    def _set_facts(self, facts: SamplerFacts) -> None:
        assert facts.keys() <= SamplerFacts.__annotations__.keys(), f"no such fact: {list(facts)}"
        vars(self).update(facts)

    @property
    def identity(self) -> SamplerFacts:
        """Its name, options and windows."""
        return {
            "name": self.name,
            "options": self.options,
            "padding": self.padding,
            "context_length": self.context_length,
            "cuts_windows": self.cuts_windows,
        }

    @property
    def loss_sampler(self) -> Prioritized | None:
        """The sampler that learns from losses: this one, or a part of it."""
        return self.learner

    @property
    def can_prefetch(self) -> bool:
        """True if steps may be drawn before they come."""
        return self.loss_sampler is None and not self.counts_draws

    @property
    def gpu(self) -> GpuDraw | None:
        """The GPU's way to draw the same segments; None: the host draws ahead of use."""
        return None

    @cached_property
    def locate(self) -> StepLocator:
        """Finds the episode and the start of steps of the table."""
        return StepLocator(self.index)


class CumulativeWeights(Sampler):
    """An episode in proportion to its weight, then each of its T starts with 1 / T.

    `weights` (E,) are finite, at least 0, and not all 0; errors name the place `where`.
    """

    mixable = True
    episode_weight: Float64Array

    def __init__(
        self,
        index: EpisodeIndex,
        weights: npt.ArrayLike,
        *,
        where: str = "",
        order: Int64Array | None = None,
    ) -> None:
        super().__init__(index)
        self.weights, self.episode_order = np.asarray(weights, dtype=np.float64), order
        if self.weights.shape != (index.episodes,):
            problem = (
                f"{index.episodes} weights are needed, one an episode, got {self.weights.shape}"
            )
            raise InputError("SELECTION", problem, where)
        choice = WeightedChoice(self.weights, where)
        self.episode_weight, self._search = choice.probability, choice.search

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, second = slot_draws(seed, first_step, steps, count)
        return any_start(self.index, self._search.find(first), second, self.episode_weight)

    def density(self, segments: Segments) -> Float64Array:
        return any_start_density(self.index, segments, self.episode_weight)

    @property
    def gpu(self) -> GpuDraw:
        return GpuDraw(WEIGHTS, self._search, self.index.offsets)


class KeyedPermutation(Sampler):
    """Every start exactly once an epoch, in an order of its own each epoch.

    Slot b of step t takes place ``t * B + b`` of an endless row of epochs.  Each start is equally
    likely in every slot, 1/N; slots of one epoch exclude each other.
    """

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        check_range(seed, first_step, steps, count)
        size = self.index.steps
        first_epoch, epochs, at = places(first_step, steps, count, size=size)
        episodes, starts = self.locate(KeyedOrder(size)(seed, first_epoch, epochs, at))
        chance = np.broadcast_to(np.float64(1.0 / size), starts.shape)
        return Segments(episodes=episodes, starts=starts, probability=chance)

    @property
    def gpu(self) -> GpuDraw:
        return GpuDraw(PERMUTATION, self.locate.search, self.index.offsets)


class HostFunction(Sampler):
    """A function of the host, as `Sampler.sample`, perhaps with its `Sampler.density`.

    Whatever changes belongs to objects whose methods the functions are: a copy takes them along.
    """

    def __init__(
        self,
        index: EpisodeIndex,
        sample: Callable[[int, int, int, int], Segments],
        *,
        density: Callable[[Segments], Float64Array] | None = None,
        **facts: Unpack[SamplerFacts],
    ) -> None:
        super().__init__(index)
        self._sample, self._density, self.mixable = sample, density, density is not None
        self._set_facts(facts)

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        with calling_part(STRATEGIES, "drawing", self.name):
            return self._sample(seed, first_step, steps, count)

    def density(self, segments: Segments) -> Float64Array | None:
        return None if self._density is None else self._density(segments)


class Prioritized(Sampler):
    """Every start with probability mass / sum of masses; updated from the losses of segments.

    Prioritised sampling (Schaul et al. 2016, proportional).  The draws are a function of (seed,
    step) and of the updates so far.  The priority p of a start is its last loss plus `epsilon`.
    Its mass is ``max(1, floor(M * (min(p, largest) / largest) ** alpha))``.  M is the largest power
    of two of which N make less than ``2**63``.
    """

    mixable = True

    def __init__(
        self,
        facts: Facts,
        *,
        alpha: Annotated[float, Field(ge=0.0, le=16.0)] = 0.6,
        beta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.4,
        beta_steps: Positive | None = None,
        epsilon: NotNegative = 1e-6,
        initial: PositiveFloat = 1.0,
        largest: PositiveFloat = 100.0,
    ) -> None:
        super().__init__(facts.episodes)
        self.beta, self.beta_steps = beta, beta_steps
        self.mass_of_code, self.first_mass = masses_of_codes(
            largest_mass(self.index.steps), alpha, epsilon, initial, largest
        )
        self._kept = facts.kept  # starts of other episodes have no mass
        self._on_gpu: DevicePriorities | None = None  # then it has the masses, not the host

    @property
    def loss_sampler(self) -> Prioritized:
        return self

    @cached_property
    def _on_host(self) -> HostPriorities:
        priorities = HostPriorities(self.index.offsets, self.mass_of_code, first=self.first_mass)
        if self._kept is not None:
            priorities.load_state(priorities.state()["masses"] * self._is_kept, 0)
        return priorities

    @cached_property
    def _is_kept(self) -> BoolArray | bool:
        """(N,) bool, True for starts that can be drawn."""
        return True if self._kept is None else np.repeat(self._kept, self.index.lengths)

    @property
    def _priorities(self) -> HostPriorities | DevicePriorities:
        return self._on_gpu or self._on_host

    @property
    def gpu(self) -> GpuDraw:
        return GpuDraw(PRIORITIES, self.locate.search, self.index.offsets, self.on_device)

    def on_device(self, device: torch.device) -> DevicePriorities:
        """Move the masses to a GPU, which draws and updates from then on; return them."""
        from gear_offline.kernels.cuda_module import numbered_device
        from gear_offline.kernels.priorities import DevicePriorities

        device = numbered_device(device)
        if self._on_gpu is None:
            moved = DevicePriorities(
                self.index.offsets, self.mass_of_code, device=device, first=self.first_mass
            )
            if self._kept is not None or "_on_host" in self.__dict__:
                moved.load_state(self._on_host.state()["masses"], self.updates)
                del self._on_host
            self._on_gpu = moved
        if self._on_gpu.device != device:
            problem = f"the priorities are in the memory of {self._on_gpu.device}, not of {device}"
            raise UnavailableError("SELECTION", problem, remedy="make a sampler for each device")
        return self._on_gpu

    @property
    def masses(self) -> UInt64Array:
        """(N,) uint64, a copy of the mass of each start."""
        return np.asarray(self.state()["masses"].view(np.uint64))

    @property
    def updates(self) -> int:
        """The number of updates; waits for a GPU that has the masses."""
        return self._priorities.updates

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, _ = slot_draws(seed, first_step, steps, count)
        priorities, total = self._priorities, self._priorities.total
        rows = priorities.find(bound_draws(first, total).view(np.uint64))
        episodes, starts = self.locate(rows)
        chance = priorities.masses_of(rows) / np.float64(total)
        return Segments(episodes=episodes, starts=starts, probability=chance)

    def density(self, segments: Segments) -> Float64Array:
        rows = self.index.offsets[segments.episodes] + segments.starts
        priorities = self._priorities
        return np.asarray(priorities.masses_of(rows) / np.float64(priorities.total))

    def update(self, segments: Int64Array, losses: Float32Array) -> None:
        """Take the (B,) losses of (B, 2) segments: episode, start.

        The larger loss of a segment that is named twice counts.  What cannot be used is refused
        before anything is changed.
        """
        segments, losses = np.asarray(segments), np.asarray(losses, dtype=np.float32)
        good = segments.ndim == 2 and segments.shape[1] == 2
        if good:
            episodes, starts = segments[:, 0], segments[:, 1]
            good = bool(((episodes >= 0) & (episodes < self.index.episodes) & (starts >= 0)).all())
        if not good or (starts >= self.index.lengths[episodes]).any():
            raise InputError("SELECTION", "priorities are for segments (B, 2) of the table")
        if losses.shape != starts.shape or not (np.isfinite(losses) & (losses >= 0)).all():
            problem = "priorities are one finite loss of at least 0 for each segment"
            raise InputError("SELECTION", problem)
        self._priorities.update_from_host(segments, losses)

    def importance(self, probability: Float64Array, *, step: int) -> Float64Array:
        """Return (B,) weights of the losses that undo the preference, at most 1.

        `probability` is that of the segments in what drew them for `step`, this or a mixture.
        """
        beta, rise = self.beta, self.beta_steps
        if rise is not None:
            beta += (1.0 - beta) * min(step / rise, 1.0)
        weights = (1.0 / (self.index.steps * probability)) ** beta
        return np.asarray(weights / weights.max())

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return masses (N,) int64 and the number of updates (1,) int64."""
        return self._priorities.state()

    def take_over(self, before: Prioritized) -> None:
        """Take over the masses of the first steps of the table, of which `before` had no more."""
        first = before.index.steps
        finer = largest_mass(first) // largest_mass(self.index.steps)
        if before._on_gpu is not None and self._kept is None:  # nothing passes through the host
            self.on_device(before._on_gpu.device).take_over(before._on_gpu, finer)
            return
        state, masses = before.state(), np.full(self.index.steps, self.first_mass, np.int64)
        masses[:first] = np.maximum(state["masses"] // finer, 1)  # as if made anew: powers of two
        self.load_state({"masses": masses * self._is_kept, "updates": state["updates"]})

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore the result of `state`; refuse a misfit before any change."""
        none = np.zeros(0)
        masses, updates = state.get("masses", none), state.get("updates", none)
        if (
            masses.dtype != np.int64
            or updates.dtype != np.int64
            or (masses.shape, updates.shape) != ((self.index.steps,), (1,))
            or ((masses < 1) == self._is_kept).any()
            or masses.min() < 0
            or masses.max() > largest_mass(self.index.steps)
            or updates[0] < 0
        ):
            problem = f"not the state of priorities over {self.index.steps} steps"
            remedy = "load what state() of the same strategy over the same data returned"
            raise InputError("LOADER_STATE", problem, remedy=remedy)
        self._priorities.load_state(masses, int(updates[0]))


@dataclass(frozen=True)
class _Spread:
    """A sampler of the `members` (n,) of a larger table."""

    sampler: Sampler
    members: Int64Array
    index: EpisodeIndex

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        segments = self.sampler.sample(seed, first_step, steps, count)
        return replace(segments, episodes=self.members[segments.episodes])

    def density(self, segments: Segments) -> Float64Array:
        number = np.full(self.index.episodes, -1)
        number[self.members] = np.arange(self.members.size)
        inside = number[segments.episodes] >= 0
        own_segments = replace(
            segments,
            episodes=np.where(inside, number[segments.episodes], 0),
            starts=np.where(inside, segments.starts, 0),
        )
        return np.where(inside, self.sampler.density(own_segments), 0.0)  # type: ignore[arg-type]


def widen_sampler(sampler: Sampler, members: Int64Array, index: EpisodeIndex) -> Sampler:
    """Return a sampler of a larger table that draws its rising `members` as `sampler` does."""

    def widen(values: Float64Array) -> Float64Array:
        wide = np.zeros(index.episodes)
        wide[members] = values
        return wide

    order = None if sampler.episode_order is None else members[sampler.episode_order]
    if isinstance(sampler, CumulativeWeights):
        larger: Sampler = CumulativeWeights(index, widen(sampler.weights), order=order)
    else:
        wide_sampler, weight = _Spread(sampler, members, index), sampler.episode_weight
        larger = HostFunction(
            index,
            wide_sampler.sample,
            density=wide_sampler.density if sampler.mixable else None,
            episode_weight=None if weight is None else widen(weight),
            episode_order=order,
            counts_draws=not sampler.can_prefetch,
        )
    return larger.with_facts(**sampler.identity)


def any_start(
    index: EpisodeIndex, episodes: Int64Array, numbers: UInt64Array, weight: Float64Array
) -> Segments:
    """Return segments of `episodes` from any of their starts; `weight` (E,) drew the episodes."""
    lengths = index.lengths[episodes]
    return Segments(
        episodes=episodes,
        starts=bound_draws(numbers, lengths),
        probability=weight[episodes] / lengths,
    )


def any_start_density(
    index: EpisodeIndex, segments: Segments, weight: Float64Array
) -> Float64Array:
    """Return the probability of segments that `any_start` returns."""
    return np.asarray(weight[segments.episodes] / index.lengths[segments.episodes])


@dataclass(frozen=True, kw_only=True)
class SegmentStream:
    """The segments of every step of a loader, or of one rank's part of it."""

    selection: Sampler
    seed: int
    global_batch: int  # segments that are drawn in each step
    first_slot: int  # of them, this rank's
    rank_batch: int

    def draw(self, first_step: int, steps: int) -> Segments:
        """Return the segments of consecutive steps, of all ranks, (steps, global_batch)."""
        return self.selection.sample(self.seed, first_step, steps, self.global_batch)

    def segments(self, first_step: int, steps: int) -> Segments:
        """Return the segments of consecutive steps, (steps, rank_batch)."""
        if not self.rank_batch:  # of a rank that does not feed a model's input
            none = np.zeros((steps, 0), np.int64)
            return Segments(episodes=none, starts=none, probability=none.astype(np.float64))
        return self.draw(first_step, steps)[:, self.first_slot : self.first_slot + self.rank_batch]
