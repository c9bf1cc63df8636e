"""Segments, random numbers, the search in tables, and the ways in which a GPU draws.

Random numbers are those of Philox 4x64-10, as `numpy.random.Philox`: a pure function of their
place.  Every use of a seed has a stream of its own: key = (seed, stream).  A step has `count`
slots.  Slot `b` of step `t` has the flat number ``f = t * count + b`` and takes numbers ``2 f`` and
``2 f + 1`` of the stream.  So any device and any chunking gives the same; ``cuda/philox.cuh`` is
this on the GPU.  Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

All samplers search an ascending table, on the CPU and on the GPU, from where a guide says.  The
guide divides the values into equal ranges, 8 to 16 for each number of the table.  Most ranges hold
no number, so most values are located without a search.

Orders without replacement are those of an endless row of epochs: a slot's place there is its flat
number, and each epoch has an order of its own (`KeyedOrder`).

Shape legend: E episodes, N steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from gear_offline.core.types import Float64Array, Int64Array, UInt64Array
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError

if TYPE_CHECKING:
    import torch


# Streams of random numbers of one seed.
SELECTION_STREAM = 0  # the segment of a slot
PART_STREAM = 1  # which part of a mixture a slot takes
ROTATION_STREAM = 2  # which stratum a step begins with
EPOCH_STREAM = 3  # keys of an epoch's order
GOAL_STREAM = 4  # of goals by hindsight
REMOVER_STREAM = 5  # when an episode's turn comes to be removed
ROUNDS = 8
MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)
_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
GUIDE_BITS = 24  # the guide has at most 2^24 ranges
LOOKS = 2  # at the first numbers of a range: few hold more, and a search misses the caches 20 times


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Windows of episodes, named by episode and start; arrays of any shape ``S``."""

    episodes: Int64Array
    starts: Int64Array  # first steps within the episodes
    probability: Float64Array  # of the segment in one slot; may be a read-only broadcast
    lengths: Int64Array | None = None  # most steps, of samplers that cut windows short
    # Where draws are counted: how often the episode was drawn, this time included, of how many.
    times_sampled: Int64Array | None = None
    table_size: Int64Array | None = None

    def __post_init__(self) -> None:
        shapes = {self.episodes.shape, self.starts.shape, self.probability.shape}
        if self.lengths is not None:
            shapes.add(self.lengths.shape)
        if len(shapes) > 1:
            raise InputError("SELECTION", "episodes, starts and probability differ in shape")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.episodes.shape

    def __getitem__(self, item: Any) -> Segments:
        """Return a selection of the segments, as NumPy indexes arrays."""
        return self._map(lambda values: values[item])

    def flat(self) -> Segments:
        """Return the segments in one row."""
        return self._map(lambda values: values.reshape(-1))

    def _map(self, change: Callable[[Any], Any]) -> Segments:
        columns: dict[str, Any] = {k: v if v is None else change(v) for k, v in vars(self).items()}
        return Segments(**columns)


class _Key(ISeedSequence):
    """Hands Philox its key: with ``key=`` it reads the system's entropy, a system call a batch."""

    def __init__(self, key: UInt64Array) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> UInt64Array:
        return self._key


def draws(
    *, seed: int, stream: int, first_step: int, steps: int, count: int
) -> tuple[UInt64Array, UInt64Array]:
    """Return the two numbers of each slot of consecutive steps: (steps, count), all 64 bits."""
    first = int(first_step) * int(count)  # NumPy's integers would overflow
    key = _Key(np.array([seed, stream], dtype=np.uint64))
    # A block of four numbers serves two slots.
    generator = np.random.Philox(key, counter=first // 2)  # type: ignore[arg-type]
    skipped = 2 * (first % 2)
    numbers = generator.random_raw(skipped + 2 * int(steps) * int(count))[skipped:]
    pairs = np.ascontiguousarray(numbers.reshape(-1, 2).T)
    return pairs[0].reshape(steps, count), pairs[1].reshape(steps, count)


def check_range(seed: int, first_step: int, steps: int, count: int) -> None:
    """Refuse a seed, steps or slots that are out of range."""
    numbers = all(hasattr(value, "__index__") for value in (first_step, steps))
    last = operator.index(first_step) + operator.index(steps) if numbers else 0
    for problem, value, low, high in (
        ("seed", seed, 0, 1 << 64),
        ("step", first_step, 0, 1 << 63),
        ("last step", last, 0, 1 << 63),
        ("steps", steps, 0, 1 << 32),
        ("batch size", count, 1, (1 << 32) + 1),
    ):
        if not (hasattr(value, "__index__") and low <= operator.index(value) < high):
            remedy = f"use an integer in [{low}, {high})"
            raise InputError("SELECTION", f"{problem} {value} is out of range", remedy=remedy)


def slot_draws(
    seed: int, first_step: int, steps: int, count: int, *, stream: int = SELECTION_STREAM
) -> tuple[UInt64Array, UInt64Array]:
    """Return the two numbers of each slot, both (steps, count) uint64."""
    check_range(seed, first_step, steps, count)
    return draws(seed=seed, stream=stream, first_step=first_step, steps=steps, count=count)


def bound_draws(draw: UInt64Array, n: int | Int64Array) -> Int64Array:
    """Map uniform 64-bit draws to ``[0, n)``: the high 64 bits of the 128-bit ``draw * n``.

    Each value is the image of ``floor(2**64 / n)`` or ``ceil(2**64 / n)`` draws.  Its probability
    differs from ``1 / n`` by less than ``2**-64``, a relative error below ``n / 2**64`` (6e-8 for
    2**40 steps).  Nothing is rejected: a slot costs the same whatever it draws, on any device.
    `n` is in ``[1, 2**63)``, one for all or an array of the draws' shape.
    """
    size = np.asarray(n, dtype=np.int64).view(np.uint64)
    result, low = draw >> _SHIFT32, draw & _MASK32  # in place from here on: temporaries cost most
    if size.max(initial=0) <= _MASK32:
        # high * n + 2^32 - 1 stays below 2^64, so two multiplications do.
        low *= size
        low >>= _SHIFT32
        result *= size
        result += low
        result >>= _SHIFT32
        return np.asarray(result.view(np.int64))
    size_high, size_low = size >> _SHIFT32, size & _MASK32
    middle = result * size_low + (low * size_low >> _SHIFT32)
    carried = low * size_high + (middle & _MASK32)
    result = result * size_high + (middle >> _SHIFT32) + (carried >> _SHIFT32)
    return np.asarray(result.view(np.int64))


class GuidedSearch:
    """Finds for each value below ``2**bits`` the first number of an ascending table above it.

    Places are at most `last`.  ``guide[i]`` is the place of the value ``i << shift``.
    """

    def __init__(self, table: UInt64Array, *, last: int, bits: int = 64) -> None:
        self.table, self.last = table, last
        wide = min(max(table.size, 2).bit_length() + 3, GUIDE_BITS, bits)
        self.shift = bits - wide
        # Entry i counts the numbers up to i << shift.
        inside = np.uint64((1 << self.shift) - 1)
        first = (table >> np.uint64(self.shift)) + ((table & inside) > 0)
        counts = np.bincount(first.astype(np.int64), minlength=(1 << wide) + 1)
        np.minimum(np.cumsum(counts, out=counts), last, out=counts)
        self.guide = counts.astype(np.int32 if last < 1 << 31 else np.int64)  # it is most of all

    def find(self, values: UInt64Array) -> Int64Array:
        flat = values.reshape(-1)
        ranges = (flat >> np.uint64(self.shift)).astype(np.int64)
        places = self.guide[ranges].astype(np.int64)
        ends = self.guide[ranges + 1].astype(np.int64)
        at = np.flatnonzero(places != ends)
        for _ in range(LOOKS):
            passed = self.table[places[at]] <= flat[at]
            places[at] += passed
            at = at[passed & (places[at] < ends[at])]
        searched = np.searchsorted(self.table, flat[at], side="right")
        places[at] = np.minimum(searched, self.last)
        return places.reshape(values.shape)


class StepLocator:
    """Finds the episode and the start of steps of the table."""

    def __init__(self, index: EpisodeIndex) -> None:
        self._offsets = index.offsets
        self.search = GuidedSearch(
            index.offsets[1:].view(np.uint64),
            last=index.episodes - 1,
            bits=index.steps.bit_length(),
        )

    def __call__(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        episodes = self.search.find(rows.view(np.uint64))
        return episodes, rows - self._offsets[episodes]


def places(
    first_step: int, steps: int, count: int, *, size: int
) -> tuple[int, Int64Array, Int64Array]:
    """Return the first slot's epoch; each slot's epoch above it and place in it, (steps, count)."""
    first_epoch, first_place = divmod(int(first_step) * int(count), int(size))  # NumPy's overflow
    slots = np.arange(steps * count, dtype=np.uint64).reshape(steps, count)
    ahead = slots + np.uint64(first_place)  # place and size may be near 2^63
    epochs, at = np.divmod(ahead, np.uint64(size))
    return first_epoch, epochs.astype(np.int64), at.astype(np.int64)


class KeyedOrder:
    """Orders of ``[0, size)``, one an epoch: a function from places to things, without memory.

    A Feistel network over the smallest power of two that holds `size` is walked along its cycle
    until it lands below `size`.  Black and Rogaway name this cycle walking ("Ciphers with arbitrary
    finite domains", CT-RSA 2002).  Then the place is rotated by a random amount, which makes each
    thing exactly as likely as any other in every place.  The round function of the network is
    MurmurHash3's 64-bit finaliser.  An epoch has one block of numbers: its first key, the odd
    difference from each round's key to the next, and the rotation.  `size` is in ``[1, 2**63)``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        bits = max((size - 1).bit_length(), 2)
        self._right = np.uint64(bits // 2)
        self._masks = (
            np.uint64((1 << (bits - bits // 2)) - 1),  # left half
            np.uint64((1 << (bits // 2)) - 1),  # right half
        )

    def __call__(
        self, seed: int, first_epoch: int, epochs: Int64Array, at: Int64Array
    ) -> Int64Array:
        """Return the things in places `at` of `epochs` from `first_epoch` on, all of one shape."""
        rows = epochs.reshape(-1)
        first, second = draws(
            seed=seed,
            stream=EPOCH_STREAM,
            first_step=first_epoch % (1 << 63),
            steps=int(rows.max(initial=0)) + 1,
            count=2,
        )
        further = second[:, :1] | np.uint64(1)
        rounds = np.arange(ROUNDS, dtype=np.uint64)
        keys = np.asarray(first[:, :1] + further * rounds, dtype=np.uint64)
        size = np.uint64(self.size)
        items = self._network(at.reshape(-1).view(np.uint64), keys, rows)
        walking = np.flatnonzero(items >= size)
        while walking.size:
            items[walking] = self._network(items[walking], keys, rows[walking])
            walking = walking[items[walking] >= size]
        items += bound_draws(first[:, 1], self.size).view(np.uint64)[rows]
        items -= size * (items >= size)
        return items.view(np.int64).reshape(at.shape)

    def _network(self, values: UInt64Array, keys: UInt64Array, rows: Int64Array) -> UInt64Array:
        """Return the image of (n,) values under the keys of their epochs, (epochs, ROUNDS)."""
        halves = [values >> self._right, values & self._masks[1]]
        for number in range(ROUNDS):
            key = keys[0, number] if len(keys) == 1 else keys[rows, number]
            side = number % 2
            halves[side] ^= _mix_bits(halves[1 - side] ^ key) & self._masks[side]
        return np.asarray(halves[0] << self._right | halves[1])


def _mix_bits(values: UInt64Array) -> UInt64Array:
    """Apply the finaliser to the values, in place."""
    for multiplier in MULTIPLIERS:
        values ^= values >> _SHIFT
        values *= multiplier
    values ^= values >> _SHIFT
    return values


HOST_DRAWN, WEIGHTS, PERMUTATION, PRIORITIES = range(4)  # as `Way` of cuda/sample.cuh


@dataclass(frozen=True, eq=False)
class GpuDraw:
    """The way in which a GPU draws segments."""

    way: int
    search: GuidedSearch  # in the (E,) cumulative masses of the episodes, or in their ends
    offsets: Int64Array  # (E + 1,) of the episodes that are drawn from
    tree: Callable[[torch.device], Any] | None = None  # moves PRIORITIES to a GPU, to stay
