"""Integer masses of items: of fixed weights, and of priorities that follow losses.

A priority is a loss rounded to 11 significant bits; a table made on the host turns it into an
integer mass.  So the masses, their sums and the draws are the same on every device that was told
the same losses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.types import Float32Array, Float64Array, Int64Array, UInt64Array
from gear_offline.errors import InputError
from gear_offline.kernels.draws import GuidedSearch

DROPPED_BITS = 13  # of a float32's mantissa of 23: 10 stay
CODES = 0x7F800000 >> DROPPED_BITS  # of finite, non-negative numbers
MAX_TOTAL = (1 << 63) - 1  # of all masses: sums and draws stay below 2^63
FAN = 8  # of the tree: one cache line
TOP = 1 << 15  # sums whose cumulative sums are computed anew after a change, at most
AT_ONCE = 16384  # draws that go down the tree together
WHOLE = 1 << 64
SHORTFALL = 1.0 - 2.0**-51  # keeps rounding from giving out more than there is


class WeightedChoice:
    """A choice among items by (n,) weights; `probability` (n,) is mass / 2**64.

    `search` finds in the cumulative masses.  From the last item with a mass on they would be
    ``2**64`` and are ``2**64 - 1``, and searching ends there.
    """

    def __init__(self, weights: npt.ArrayLike, where: str = "") -> None:
        masses = integer_masses(weights, where)
        last = int(np.flatnonzero(np.asarray(weights))[-1])
        table: UInt64Array = np.cumsum(masses, dtype=np.uint64)
        table[last:] = np.uint64(WHOLE - 1)
        self.search = GuidedSearch(table, last=last)
        exact = masses.astype(np.float64)
        if np.count_nonzero(masses) == 0:  # one item has everything, 2^64
            exact[last] = float(WHOLE)
        self.probability: Float64Array = exact * 2.0**-64


def integer_masses(weights: npt.ArrayLike, where: str = "") -> UInt64Array:
    """Return (n,) integer masses in proportion to `weights` that sum to ``2**64``.

    A positive weight gets at least 1, zero gets 0.  Ratios differ from those of the weights by
    about ``2**-51``.  Each mass differs by 6 more at most: 4 for the scaled weight's fraction, 2
    for those of the two passes.  An item that has everything has 0, ``2**64`` modulo ``2**64``.
    """
    values = np.asarray(weights, dtype=np.float64)
    positive, wrong = np.flatnonzero(values), np.flatnonzero(~((values >= 0) & (values < np.inf)))
    if positive.size == 0 or wrong.size:
        example = f": number {wrong[0]} is {values[wrong[0]]:g}" if wrong.size else ""
        problem = f"weights must be finite, not negative and not all 0{example}"
        raise InputError(
            "SELECTION", problem, where, "look for such values with `gear-offline inspect`"
        )
    result = np.zeros(values.size, dtype=np.uint64)
    if positive.size == 1:
        return result
    # Scaling by a power of two is exact: the largest becomes 2^62 or more, below 2^63.
    exponent = 62 - (int(np.frexp(values.max())[1]) - 1)
    scaled = np.floor(np.ldexp(values[positive], exponent))  # integers, exact in float64
    total = _sum_exactly(scaled.astype(np.uint64))
    masses = np.ones(positive.size, dtype=np.uint64)
    for _ in range(2):  # nearly all, then what rounding left
        remainder = WHOLE - _sum_exactly(masses)
        masses += np.floor(scaled * (remainder / total * SHORTFALL)).astype(np.uint64)
    each, more = divmod(WHOLE - _sum_exactly(masses), positive.size)
    masses += np.uint64(each)
    masses[:more] += np.uint64(1)
    result[positive] = masses
    return result


def _sum_exactly(values: UInt64Array) -> int:
    """Return the sum of fewer than 2^32 values, however large."""
    high = int((values >> np.uint64(32)).sum(dtype=np.uint64))
    low = int((values & np.uint64(0xFFFFFFFF)).sum(dtype=np.uint64))
    return (high << 32) + low


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
        self._levels = [_pad_masses(masses.view(np.uint64))]
        while self._levels[-1].size > TOP:
            self._levels.append(_pad_masses(self._levels[-1].reshape(-1, FAN).sum(axis=1)))
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
        """Find the item whose range holds each number below `total`, int64."""
        if self._ends is None:
            self._ends = np.cumsum(self._levels[-1], dtype=np.uint64)
        flat = numbers.reshape(-1)
        items = np.empty(flat.size, dtype=np.int64)
        for begin in range(0, flat.size, AT_ONCE):
            remainders = flat[begin : begin + AT_ONCE]
            at = np.searchsorted(self._ends, remainders, side="right")
            remainders = remainders - (self._ends[at] - self._levels[-1][at])
            for level in reversed(self._levels[:-1]):
                masses = np.take(level.reshape(-1, FAN), at, axis=0)
                passed = remainders[:, None] >= np.cumsum(masses, axis=1)
                remainders -= (masses * passed).sum(axis=1)
                at = at * FAN + passed.sum(axis=1)
            items[begin : begin + AT_ONCE] = at
        return items.reshape(numbers.shape)


def _pad_masses(masses: UInt64Array) -> UInt64Array:
    """Return the masses with zeros up to a multiple of `FAN`."""
    return np.append(masses, np.zeros(-masses.size % FAN, dtype=np.uint64))


@lru_cache(maxsize=2)  # a table that grows has the same most of the time, and it takes 10 ms
def masses_of_codes(
    most: int, alpha: float, epsilon: float, initial: float, largest: float
) -> tuple[UInt64Array, int]:
    """Return (CODES,) the mass of each code of a loss, and of a step that has had none."""
    codes = np.arange(CODES, dtype=np.uint32) << np.uint32(DROPPED_BITS)
    losses = codes.view(np.float32).astype(np.float64)
    priorities = np.append(losses + epsilon, initial)
    share = (np.minimum(priorities, largest) / largest) ** alpha
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
