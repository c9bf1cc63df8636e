"""Weighted choice by 64-bit integers: item `i` where ``thresholds[i - 1] <= draw < thresholds[i]``.

Weights become integer masses that sum to exactly ``2**64``, once, on the host.  From then on
everything is integer arithmetic: a draw is compared with cumulative masses, so every device
chooses the same item, and the probability of an item is its mass over ``2**64``, nothing else.

Shape legend: n items.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.schema import Int64Array
from gear_offline.errors import InputError
from gear_offline.kernels.philox import UInt64Array
from gear_offline.sampling.guided import GuidedSearch

Float64Array = npt.NDArray[np.float64]

WHOLE = 1 << 64
SHORTFALL = 1.0 - 2.0**-51  # keeps rounding from giving out more than there is


def masses_of(weights: Float64Array) -> UInt64Array:
    """Return integer masses in proportion to `weights` that sum to ``2**64``.

    A positive weight gets at least 1, a zero weight gets 0.  The ratio of two masses differs from
    that of the weights by a relative error of about ``2**-51``, and each mass by 6 at most besides:
    4 for the scaled weight's fraction, which is cut off, and 2 for those of the two passes.

    Parameters
    ----------
    weights
        (n,) float64, finite, at least 0, not all 0.

    Returns
    -------
    ndarray
        (n,) uint64.  Where one item has everything, its mass is 0, which is ``2**64`` modulo
        ``2**64``: cumulative sums modulo ``2**64`` are right in any case.

    Raises
    ------
    InputError
        ``SELECTION_WEIGHTS``, ``SELECTION_EMPTY``.
    """
    found = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise InputError(
            "SELECTION_WEIGHTS",
            "weights must be finite and not negative",
            remedy="look for NaN or infinite rewards with `gear-offline inspect`",
        )
    positive = np.flatnonzero(found)
    if positive.size == 0:
        raise InputError("SELECTION_EMPTY", "no episode has a positive weight")
    # Scaling by a power of two is exact: the largest becomes 2^62 or more, below 2^63.
    exponent = 62 - (int(np.frexp(found.max())[1]) - 1)
    scaled = np.floor(np.ldexp(found[positive], exponent))  # integers, exact in float64
    total = sum_exactly(scaled.astype(np.uint64))
    masses = np.ones(positive.size, dtype=np.uint64)
    for _ in range(2):  # nearly all, then what rounding left
        rest = WHOLE - sum_exactly(masses)
        masses += np.floor(scaled * (rest / total * SHORTFALL)).astype(np.uint64)
    each, more = divmod(WHOLE - sum_exactly(masses), positive.size)
    if positive.size > 1:
        masses += np.uint64(each)
        masses[:more] += np.uint64(1)
    else:
        masses[:] = 0
    result = np.zeros(found.size, dtype=np.uint64)
    result[positive] = masses
    return result


def sum_exactly(values: UInt64Array) -> int:
    """Return the sum of fewer than 2^32 values, whatever it is."""
    high = int((values >> np.uint64(32)).sum(dtype=np.uint64))
    low = int((values & np.uint64(0xFFFFFFFF)).sum(dtype=np.uint64))
    return (high << 32) + low


class Thresholds:
    """A weighted choice among items.

    Attributes
    ----------
    table
        (n,) uint64, cumulative masses, as the kernel takes them.  From the last item with a mass
        on they would be ``2**64`` and are ``2**64 - 1``; searching ends at that item.
    last
        The last item that has a mass; those behind it have none.
    """

    def __init__(self, weights: Float64Array) -> None:
        masses = masses_of(weights)
        self.last = int(np.flatnonzero(np.asarray(weights))[-1])
        self.table: UInt64Array = np.cumsum(masses, dtype=np.uint64)
        self.table[self.last :] = np.uint64(WHOLE - 1)
        self.table.setflags(write=False)
        self._search = GuidedSearch(self.table, last=self.last)

    def find(self, values: UInt64Array) -> Int64Array:
        """Return the item of each 64-bit draw, same shape, int64."""
        return self._search.find(values)

    def probability(self, items: Int64Array) -> Float64Array:
        """Return the probability of each item, same shape, float64."""
        before = np.where(items > 0, self.table[np.maximum(items, 1) - 1], np.uint64(0))
        mass = (self.table[items] - before).astype(np.float64) + (items == self.last)
        return np.asarray(mass * 2.0**-64)
