"""A search among ascending numbers that is faster than a binary one where many are looked for.

Shape legend: n ascending numbers.
"""

from __future__ import annotations

import numpy as np

from gear_offline.dataset.schema import Int64Array
from gear_offline.kernels.philox import UInt64Array

GUIDE_BITS = 24  # the guide has at most 2^24 entries


class GuidedSearch:
    """Finds for each value the first number above it.

    A guide says for equal ranges of values where to begin, about four ranges a number.  Most ranges
    hold no number; only values in the others are searched.

    Parameters
    ----------
    table
        (n,) uint64, ascending.
    last
        What is found beyond it is `last`.
    bits
        Of the values: all are below ``2**bits``.
    """

    def __init__(self, table: UInt64Array, *, last: int, bits: int = 64) -> None:
        self._table, self._last = table, last
        wide = min(max(table.size, 2).bit_length() + 1, GUIDE_BITS, bits)
        self._shift = np.uint64(bits - wide)
        # Entry i counts the numbers up to i << shift: what a search for that value finds.
        inside = np.uint64((1 << (bits - wide)) - 1)
        first = (table >> self._shift) + ((table & inside) > 0)
        counts = np.bincount(first.astype(np.int64), minlength=(1 << wide) + 1)
        self._guide = np.minimum(np.cumsum(counts), last)

    def find(self, values: UInt64Array) -> Int64Array:
        """Return the place of the first number above each value, at most `last`; int64."""
        bucket = (values >> self._shift).astype(np.int64)
        found: Int64Array = self._guide[bucket]
        unsure = found != self._guide[bucket + 1]
        searched = np.searchsorted(self._table, values[unsure], side="right")
        found[unsure] = np.minimum(searched, self._last)
        return found
