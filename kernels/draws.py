"""What the GPU is told of a sampler: one of three ways to draw a segment, or none.

All search an ascending table, on the CPU and on the GPU, from where a guide says: it divides the
values into equal ranges, 8 to 16 for each number of the table.  Most ranges hold no number, so that
most values are places without a search.

Shape legend: E episodes, N steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gear_offline.core.types import Int64Array, UInt64Array

if TYPE_CHECKING:
    import torch

    from gear_offline.kernels.cuda_module import DeviceArrays
    from gear_offline.kernels.priorities import DevicePriorities


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


@dataclass(frozen=True, eq=False)
class CumulativeWeights:
    """An episode by its weight, then any start in it."""

    search: GuidedSearch  # in the (E,) cumulative masses of the episodes, which end at 2^64


@dataclass(frozen=True, eq=False)
class KeyedPermutation:
    """Every start once an epoch, in an order of the epoch's own."""

    search: GuidedSearch  # in the (E,) ends of the episodes


@dataclass(frozen=True, eq=False)
class PriorityTree:
    """A start by its mass."""

    search: GuidedSearch  # in the (E,) ends of the episodes
    on_device: Callable[[torch.device], DevicePriorities]  # moves the masses to a GPU, to stay


Draw = CumulativeWeights | KeyedPermutation | PriorityTree

# `Tree` and `Sampling` of cuda/tree.cuh and cuda/sample.cuh.
MAX_LEVELS: Final = 12
TREE = np.dtype([("level", np.uint64, (MAX_LEVELS,)), ("levels", np.int64)])
SAMPLING = np.dtype(
    [
        ("way", np.int64),
        *((name, np.uint64) for name in ("table", "guide", "shift", "offsets")),
        *((name, np.int64) for name in ("size", "bits")),
        ("tree", TREE),
    ]
)
HOST_DRAWN, WEIGHTS, PERMUTATION, PRIORITIES = range(4)
_WAYS: Final[dict[type, int]] = {
    CumulativeWeights: WEIGHTS,
    KeyedPermutation: PERMUTATION,
    PriorityTree: PRIORITIES,
}


def describe_sampling(draw: Draw, offsets: Int64Array, *, arrays: DeviceArrays) -> Any:
    """Return the `SAMPLING` row of a way to draw from episodes at (E + 1,) `offsets`."""
    row, steps = np.zeros((), SAMPLING), int(offsets[-1])
    row["way"], row["size"] = _WAYS[type(draw)], steps
    row["bits"] = max((steps - 1).bit_length(), 2)
    row["table"], row["guide"] = arrays.keep(draw.search.table), arrays.keep(draw.search.guide)
    row["shift"], row["offsets"] = draw.search.shift, arrays.keep(offsets)
    if isinstance(draw, PriorityTree):
        row["tree"] = draw.on_device(arrays.device).tree
    return row
