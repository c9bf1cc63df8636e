"""A search in an ascending table that begins where a guide says, on the CPU and on the GPU.

The guide divides the values into equal ranges, 8 to 16 for each number of the table.  Most
ranges hold no number, so that most values are places without a search.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

GUIDE_BITS = 24  # the guide has at most 2^24 ranges


class GuidedSearch:
    """Finds for each value below ``2**bits`` the first number of an ascending table above it.

    Places are at most `last`.  ``guide[i]`` is what is places for the value ``i << shift``.
    """

    def __init__(self, table: UInt64Array, *, last: int, bits: int = 64) -> None:
        self.table, self.last = table, last
        wide = min(max(table.size, 2).bit_length() + 3, GUIDE_BITS, bits)
        self.shift = bits - wide
        # Entry i counts the numbers up to i << shift.
        inside = np.uint64((1 << self.shift) - 1)
        first = (table >> np.uint64(self.shift)) + ((table & inside) > 0)
        counts = np.bincount(first.astype(np.int64), minlength=(1 << wide) + 1)
        self.guide: Int64Array = np.minimum(np.cumsum(counts), last)

    def find(self, values: UInt64Array) -> Int64Array:
        ranges = (values >> np.uint64(self.shift)).astype(np.int64)
        places: Int64Array = self.guide[ranges]
        unsure = places != self.guide[ranges + 1]
        searched = np.searchsorted(self.table, values[unsure], side="right")
        places[unsure] = np.minimum(searched, self.last)
        return places
