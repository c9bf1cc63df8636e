"""Prioritised sampling: segments of large loss more often (Schaul et al. 2016, proportional).

What is drawn is a pure function of (seed, step) and of the updates so far.  A priority is a loss
rounded to 11 significant bits; a table made on the host turns it into an integer mass.  So the
masses, their sums and the draws are the same on every device that was told the same losses.

Shape legend: N steps, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from gear_offline.config.sections import NotNegative, Positive, PositiveFloat
from gear_offline.core.types import BoolArray, Float32Array, Float64Array, Int64Array, UInt64Array
from gear_offline.errors import InputError, UnavailableError
from gear_offline.kernels.draws import PriorityTree, Segments, bounded
from gear_offline.sampling.base import STRICT, Facts, Sampler, register, slot_draws

if TYPE_CHECKING:
    import torch

    from gear_offline.kernels.priorities import DevicePriorities

DROPPED_BITS = 13  # of a float32's mantissa of 23: 10 stay
CODES = 0x7F800000 >> DROPPED_BITS  # of finite, non-negative numbers
MAX_TOTAL = (1 << 63) - 1  # of all masses: sums and draws stay below 2^63
FAN = 8  # of the tree: one cache line
TOP = 1 << 15  # sums whose cumulative sums are computed anew after a change, at most
AT_ONCE = 16384  # draws that go down the tree together


@register("prioritized")
class Prioritized(Sampler):
    """Every start with probability mass / sum of masses; updated from the losses of segments.

    The priority p of a start is its last loss plus `epsilon`.  Its mass is
    ``max(1, floor(M * (min(p, largest) / largest) ** alpha))``.  M is the largest power of two of
    which N make less than ``2**63``.
    """

    knows_kept = True

    @dataclass(frozen=True, config=STRICT)
    class Options:
        alpha: Annotated[float, Field(ge=0.0, le=16.0)] = 0.6
        beta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.4
        beta_steps: Positive | None = None
        epsilon: NotNegative = 1e-6
        initial: PositiveFloat = 1.0
        largest: PositiveFloat = 100.0

        def __post_init__(self) -> None:
            if self.initial > self.largest:
                raise ValueError(f"initial must be at most largest, {self.largest:g}")

    def __init__(self, facts: Facts, options: Any = None) -> None:
        super().__init__(facts, options)
        most = largest_mass(self.index.steps)
        self.mass_of_code, self.first_mass = _masses(self.options, most)
        self._kept = facts.kept  # starts of other episodes have no mass
        self._on_gpu: DevicePriorities | None = None  # then it has the masses, not the host

    @cached_property
    def _on_host(self) -> HostPriorities:
        own = HostPriorities(self.index.offsets, self.mass_of_code, first=self.first_mass)
        if self._kept is not None:
            own.load_state(own.state()["masses"] * self._is_kept, 0)
        return own

    @cached_property
    def _is_kept(self) -> BoolArray | bool:
        """(N,) bool, True for starts that can be drawn."""
        return True if self._kept is None else np.repeat(self._kept, self.index.lengths)

    @property
    def _priorities(self) -> HostPriorities | DevicePriorities:
        return self._on_gpu or self._on_host

    @property
    def loss_sampler(self) -> Prioritized:
        return self

    @property
    def gpu(self) -> PriorityTree:
        return PriorityTree(self.locate.search, self.on_device)

    def on_device(self, device: torch.device) -> DevicePriorities:
        """Move the masses to a GPU, which draws and updates from then on; return them."""
        import torch

        from gear_offline.kernels.priorities import DevicePriorities

        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if self._on_gpu is None:
            moved = DevicePriorities(
                self.index.offsets, self.mass_of_code, device=device, first=self.first_mass
            )
            if self._kept is not None or "_on_host" in self.__dict__:
                moved.load_state(self._on_host.state()["masses"], self.updates)
                del self._on_host
            self._on_gpu = moved
        if self._on_gpu.device != device:
            what = f"the priorities are in the memory of {self._on_gpu.device}, not of {device}"
            raise UnavailableError("SELECTION", what, remedy="make a sampler for each device")
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
        rows = priorities.find(bounded(first, total).view(np.uint64))
        episodes, starts = self.locate(rows)
        chance = priorities.masses_of(rows) / np.float64(total)
        return Segments(episodes=episodes, starts=starts, probability=chance)

    def density(self, segments: Segments) -> Float64Array:
        rows = self.index.offsets[segments.episodes] + segments.starts
        priorities = self._priorities
        return np.asarray(priorities.masses_of(rows) / np.float64(priorities.total))

    def update(self, segments: Int64Array, losses: Float32Array) -> None:
        """Take the (B,) losses of (B, 2) segments: episode, start.

        Of a segment that is named twice the larger loss counts.  What cannot be used is refused
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
            what = "priorities are one finite loss of at least 0 for each segment"
            raise InputError("SELECTION", what)
        self._priorities.update_from_host(segments, losses)

    def importance(self, probability: Float64Array, *, step: int) -> Float64Array:
        """Return (B,) weights of the losses that undo the preference, at most 1.

        `probability` is that of the segments in what drew them for `step`, this or a mixture.
        """
        beta, rise = self.options.beta, self.options.beta_steps
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
            what = f"not the state of priorities over {self.index.steps} steps"
            remedy = "load what state() of the same strategy over the same data returned"
            raise InputError("LOADER_STATE", what, remedy=remedy)
        self._priorities.load_state(masses, int(updates[0]))


class HostPriorities:
    """The masses of N items in host memory; the interface is that of `DevicePriorities`.

    Sums over eights of items, over eights of those, and so on; cumulative sums in the place of the
    upper levels, which would cost most of the time.  The shape of the tree changes nothing but the
    speed.  Memory: 8 bytes an item, and 1.2 for the sums.
    """

    def __init__(self, offsets: Int64Array, mass_of_code: UInt64Array, *, first: int) -> None:
        self._offsets, self._mass_of_code, self.steps = offsets, mass_of_code, int(offsets[-1])
        self.load_state(np.full(self.steps, first, dtype=np.int64), 0)

    def load_state(self, masses: Int64Array, updates: int) -> None:
        """Take over (N,) masses and the number of updates."""
        self.updates = updates
        self._levels = [_padded(masses.view(np.uint64))]
        while self._levels[-1].size > TOP:
            self._levels.append(_padded(self._levels[-1].reshape(-1, FAN).sum(axis=1)))
        self._ends: UInt64Array | None = None  # cumulative sums of the last level, when needed

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return masses (N,) int64 and the number of updates (1,) int64."""
        return {
            "masses": self._levels[0][: self.steps].view(np.int64).copy(),
            "updates": np.array([self.updates], dtype=np.int64),
        }

    @property
    def total(self) -> int:
        """Sum of all masses."""
        return int(self._levels[-1].sum())

    def masses_of(self, rows: Int64Array) -> UInt64Array:
        """Return the masses of rows, of any shape."""
        return self._levels[0][rows]

    def update_from_host(self, segments: Int64Array, losses: Float32Array) -> None:
        """Take the (B,) losses of (B, 2) segments."""
        rows = self._offsets[segments[:, 0]] + segments[:, 1]
        masses = self._mass_of_code[code_of(losses)]
        order = np.lexsort((masses, rows))
        rows, masses = rows[order], masses[order]
        last = np.append(rows[1:] != rows[:-1], True)[: rows.size]
        self.set(rows[last], masses[last])
        self.updates += 1

    def set(self, items: Int64Array, masses: UInt64Array) -> None:
        """Give (m,) ascending items, each named once, new masses."""
        if items.size == 0:
            return
        more = masses - self._levels[0][items]  # modulo 2^64, as all sums are
        for sums in self._levels:
            first = np.flatnonzero(np.append(True, items[1:] != items[:-1]))
            items, more = items[first], np.add.reduceat(more, first)
            sums[items] += more
            items = items // FAN
        self._ends = None

    def find(self, numbers: UInt64Array) -> Int64Array:
        """Return for each number below `total` the item in whose range it lies, int64."""
        if self._ends is None:
            self._ends = np.cumsum(self._levels[-1], dtype=np.uint64)
        flat = numbers.reshape(-1)
        items = np.empty(flat.size, dtype=np.int64)
        for begin in range(0, flat.size, AT_ONCE):
            rest = flat[begin : begin + AT_ONCE]
            at = np.searchsorted(self._ends, rest, side="right")
            rest = rest - (self._ends[at] - self._levels[-1][at])
            for level in reversed(self._levels[:-1]):
                masses = np.take(level.reshape(-1, FAN), at, axis=0)
                passed = rest[:, None] >= np.cumsum(masses, axis=1)
                rest -= (masses * passed).sum(axis=1)
                at = at * FAN + passed.sum(axis=1)
            items[begin : begin + AT_ONCE] = at
        return items.reshape(numbers.shape)


def _padded(masses: UInt64Array) -> UInt64Array:
    """Return the masses with zeros up to a multiple of `FAN`."""
    return np.append(masses, np.zeros(-masses.size % FAN, dtype=np.uint64))


@lru_cache(maxsize=2)  # a table that grows has the same most of the time, and it takes 10 ms
def _masses(options: Prioritized.Options, most: int) -> tuple[UInt64Array, int]:
    """Return (CODES,) the mass of each code of a loss, and of a step that has had none."""
    codes = np.arange(CODES, dtype=np.uint32) << np.uint32(DROPPED_BITS)
    losses = codes.view(np.float32).astype(np.float64)
    priorities = np.append(losses + options.epsilon, options.initial)
    share = (np.minimum(priorities, options.largest) / options.largest) ** options.alpha
    masses = np.maximum(np.floor(most * share), 1).astype(np.uint64)
    return masses[:-1], int(masses[-1])


def code_of(losses: Float32Array) -> Int64Array:
    """Return the losses' codes: float32 bits rounded to the nearest of 10 mantissa bits."""
    bits = losses.view(np.uint32) & np.uint32(0x7FFFFFFF)  # -0 is 0
    codes = (bits.astype(np.int64) + (1 << (DROPPED_BITS - 1))) >> DROPPED_BITS
    return np.asarray(np.minimum(codes, CODES - 1))


def largest_mass(steps: int) -> int:
    """Return M for a table of N steps: a power of two, exact in float64."""
    return 1 << ((MAX_TOTAL // steps).bit_length() - 1)
