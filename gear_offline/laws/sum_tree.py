"""Integer masses of many items with exact sums: choose by cumulative mass, change some masses.

The chosen item is the one whose cumulative masses enclose the number that was drawn, in the order
of the items, so that the shape of the tree changes nothing but the speed.  Memory: 8 bytes an
item, and 2 for the sums.

Shape legend: n items.
"""

from __future__ import annotations

import numpy as np

from gear_offline.kernels.philox import UInt64Array
from gear_offline.schema import Int64Array

GROUP = 8  # items under a leaf of the binary tree: one cache line
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
        self._levels = [_padded(self._masses.reshape(-1, GROUP).sum(axis=1), 2)]
        while self._levels[-1].size > 2:
            self._levels.append(_padded(self._levels[-1].reshape(-1, 2).sum(axis=1), 2))

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
        self._masses[items] = masses
        below, width = self._masses, GROUP
        for sums in self._levels:
            items = _distinct(items // width)
            sums[items] = below.reshape(-1, width)[items].sum(axis=1)
            below, width = sums, 2

    def find(self, numbers: UInt64Array) -> Int64Array:
        """Return for each number below `total` the item in whose range it lies, int64."""
        flat = numbers.reshape(-1)
        found = np.empty(flat.size, dtype=np.int64)
        for begin in range(0, flat.size, AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            found[part] = self._descend(flat[part])
        return found.reshape(numbers.shape)

    def _descend(self, numbers: UInt64Array) -> Int64Array:
        rest, at = numbers.copy(), np.zeros(numbers.size, dtype=np.int64)
        for level in reversed(self._levels):
            at *= 2
            left = level[at]
            right = rest >= left
            rest -= left * right
            at += right
        sums = np.cumsum(self._masses.reshape(-1, GROUP)[at], axis=1)
        place = (rest[:, None] >= sums).sum(axis=1)
        return np.asarray(at * GROUP + place, dtype=np.int64)


def _distinct(ascending: Int64Array) -> Int64Array:
    """Return ascending numbers without repetition."""
    if ascending.size == 0:
        return ascending
    found: Int64Array = ascending[np.append(True, ascending[1:] != ascending[:-1])]
    return found


def _padded(masses: UInt64Array, multiple: int) -> UInt64Array:
    """Return the masses with zeros up to a multiple of a number."""
    missing = -masses.size % multiple
    if not missing:
        return np.ascontiguousarray(masses, dtype=np.uint64)
    return np.concatenate([masses, np.zeros(missing, dtype=np.uint64)])
