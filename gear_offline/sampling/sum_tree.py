"""Integer masses of many items with exact sums: choose by cumulative mass, change some masses.

The chosen item is the one whose cumulative masses enclose the number that was drawn, in the order
of the items, so that the shape of the tree changes nothing but the speed.  Sums over eights of
items, a binary tree over those, and cumulative sums in the place of its upper levels, which would
cost most of the time.  Memory: 8 bytes an item, and 2 for the sums.

Shape legend: n items.
"""

from __future__ import annotations

import numpy as np

from gear_offline.dataset.schema import Int64Array
from gear_offline.kernels.philox import UInt64Array
from gear_offline.kernels.search import GuidedSearch

GROUP = 8  # items under a leaf of the binary tree: one cache line
TOP = 1 << 15  # sums whose cumulative sums are computed anew after a change, at most
MANY = 8192  # draws that pay for a guide to the cumulative sums
AT_ONCE = 16384  # draws that go down the tree together


class SumTree:
    """Masses, sums over eights of them, and a binary tree over those.

    Parameters
    ----------
    masses
        (n,) uint64, n at least 1; all together below ``2**64``.  Not copied where n is a multiple
        of 8.
    """

    def __init__(self, masses: UInt64Array) -> None:
        self.size = masses.size
        self._masses = _padded(masses, GROUP)
        self._levels: list[UInt64Array] = [self._masses.reshape(-1, GROUP).sum(axis=1)]
        while self._levels[-1].size > TOP:
            self._levels[-1] = _padded(self._levels[-1], 2)
            self._levels.append(self._levels[-1].reshape(-1, 2).sum(axis=1))
        self._forget()

    @property
    def masses(self) -> UInt64Array:
        """(n,) uint64, the masses as they are; change them with `set`."""
        view = self._masses[: self.size].view()
        view.setflags(write=False)
        return view

    @property
    def total(self) -> int:
        """Sum of all masses."""
        return int(self._levels[-1].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of masses and sums."""
        return self._masses.nbytes + sum(level.nbytes for level in self._levels)

    def set(self, items: Int64Array, masses: UInt64Array) -> None:
        """Give items new masses.

        Parameters
        ----------
        items
            (m,) int64 in ``[0, n)``, ascending, each named once.
        masses
            (m,) uint64.
        """
        if items.size == 0:
            return
        more = masses - self._masses[items]  # modulo 2^64, as all sums are
        self._masses[items] = masses
        shift = GROUP.bit_length() - 1
        for sums in self._levels:
            items = items >> shift
            first = np.flatnonzero(np.append(True, items[1:] != items[:-1]))
            items, more = items[first], np.add.reduceat(more, first)
            sums[items] += more
            shift = 1
        self._forget()

    def _forget(self) -> None:
        """What is computed from the last level when it is needed."""
        self._ends: UInt64Array | None = None
        self._search: GuidedSearch | None = None

    def find(self, numbers: UInt64Array) -> Int64Array:
        """Return for each number below `total` the item in whose range it lies, int64."""
        if self._ends is None:
            self._ends = np.cumsum(self._levels[-1], dtype=np.uint64)
        flat = numbers.reshape(-1)
        if self._search is None and flat.size >= MANY:
            bits = self.total.bit_length()
            self._search = GuidedSearch(self._ends, last=self._ends.size - 1, bits=bits)
        found = np.empty(flat.size, dtype=np.int64)
        for begin in range(0, flat.size, AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            found[part] = self._descend(flat[part], self._ends)
        return found.reshape(numbers.shape)

    def _descend(self, numbers: UInt64Array, ends: UInt64Array) -> Int64Array:
        if self._search is not None:
            at = self._search.find(numbers)
        else:
            at = np.searchsorted(ends, numbers, side="right").astype(np.int64)
        rest = numbers - (ends[at] - self._levels[-1][at])
        for level in reversed(self._levels[:-1]):
            at *= 2
            left = level[at]
            right = rest >= left
            rest -= left * right
            at += right
        rows = np.take(self._masses.reshape(-1, GROUP), at, axis=0)
        sums = rows[:, 0].copy()
        place = (rest >= sums).view(np.uint8)
        for column in range(1, GROUP - 1):
            sums += rows[:, column]
            place += (rest >= sums).view(np.uint8)
        found: Int64Array = at * GROUP + place
        return found


def _padded(masses: UInt64Array, multiple: int) -> UInt64Array:
    """Return the masses with zeros up to a multiple of a number."""
    missing = -masses.size % multiple
    if not missing:
        return np.ascontiguousarray(masses, dtype=np.uint64)
    return np.concatenate([masses, np.zeros(missing, dtype=np.uint64)])
