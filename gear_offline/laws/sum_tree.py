"""Integer masses of many items with exact sums: choose by cumulative mass, change some masses.

The chosen item is the one whose cumulative masses enclose the number that was drawn, in the order
of the items, so that the shape of the tree changes nothing but the speed.  Memory: 8 bytes an
item and a fifteenth of it for the sums.

Shape legend: n items.
"""

from __future__ import annotations

import numpy as np

from gear_offline.kernels.philox import UInt64Array
from gear_offline.schema import Int64Array

FAN_OUT = 16
AT_ONCE = 16384  # draws that go down the tree together: 2 MiB of sums at a time


class SumTree:
    """Masses with sums over sixteens of them, of those sums, and so on.

    Parameters
    ----------
    masses
        (n,) uint64, n at least 1; all together below ``2**64``.  Not copied where n is a multiple
        of 16.
    """

    def __init__(self, masses: UInt64Array) -> None:
        self.size = masses.size
        self._levels = [_padded(masses)]
        while self._levels[-1].size > FAN_OUT:
            self._levels.append(_padded(self._levels[-1].reshape(-1, FAN_OUT).sum(axis=1)))

    @property
    def masses(self) -> UInt64Array:
        """(n,) uint64, the masses as they are; change them with `set`."""
        view = self._levels[0][: self.size].view()
        view.setflags(write=False)
        return view

    @property
    def total(self) -> int:
        """Sum of all masses."""
        return int(self._levels[-1].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of masses and sums."""
        return sum(level.nbytes for level in self._levels)

    def set(self, items: Int64Array, masses: UInt64Array) -> None:
        """Give items, each named once, new masses.

        Parameters
        ----------
        items
            (m,) int64 in ``[0, n)``.
        masses
            (m,) uint64.
        """
        self._levels[0][items] = masses
        for below, sums in zip(self._levels, self._levels[1:], strict=False):
            items = np.unique(items // FAN_OUT)
            sums[items] = below.reshape(-1, FAN_OUT)[items].sum(axis=1)

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
        lane = np.arange(numbers.size)
        for level in reversed(self._levels):
            sums = np.cumsum(level.reshape(-1, FAN_OUT)[at], axis=1)
            place = (rest[:, None] >= sums).sum(axis=1)
            rest -= np.where(place > 0, sums[lane, place - 1], np.uint64(0))
            at = at * FAN_OUT + place
        return at


def _padded(masses: UInt64Array) -> UInt64Array:
    """Return the masses with zeros up to a multiple of the fan-out."""
    missing = -masses.size % FAN_OUT
    if not missing:
        return np.ascontiguousarray(masses, dtype=np.uint64)
    return np.concatenate([masses, np.zeros(missing, dtype=np.uint64)])
