"""What the kernels are told of a sampler: `Rule` of ``cuda/rule.cuh`` as a NumPy row.

Shape legend: E episodes, N steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gear_offline.kernels.arrays import DeviceArrays
from gear_offline.kernels.draws import CumulativeWeights, Draw, KeyedPermutation, PriorityTree
from gear_offline.kernels.tree_job import TREE

MakeTree = Callable[[PriorityTree], Any]  # returns a `TREE` row of the masses

RULE = np.dtype(
    [
        *((name, np.int64) for name in ("law", "size", "bits")),
        ("value", np.float64),
        *((name, np.uint64) for name in ("lengths", "offsets", "guide", "shift", "thresholds")),
        *((name, np.uint64) for name in ("members", "chances", "groups", "begins", "counts")),
        ("tree", TREE),
        *((name, np.uint64) for name in ("parts", "part_count", "points", "point_count", "sums")),
    ]
)
UNIFORM_STEPS, UNIFORM_EPISODES, CHOSEN, WEIGHTED_EPISODES, STRATIFIED = range(5)
FIFO, LIFO, SHUFFLED, MIN_DT, D3RLPY, PRIORITIZED, MIXTURE = range(5, 12)
PLAIN: Final = (WEIGHTED_EPISODES,)  # fill.cu has it


def law_number(draw: Draw) -> int:
    """Return the kernels' number of a way to draw."""
    numbers = {
        CumulativeWeights: WEIGHTED_EPISODES,
        KeyedPermutation: SHUFFLED,
        PriorityTree: PRIORITIZED,
    }
    return numbers[type(draw)]


def describe_rule(
    draw: Draw, offsets: npt.NDArray[np.int64], *, arrays: DeviceArrays, make_tree: MakeTree
) -> Any:
    """Return the `RULE` row of a way to draw from episodes at (E + 1,) `offsets`."""
    rule, steps = np.zeros((), RULE), int(offsets[-1])
    rule["law"], rule["size"] = law_number(draw), steps
    rule["lengths"] = rule["offsets"] = arrays.keep(offsets)
    if isinstance(draw, CumulativeWeights):
        rule["thresholds"] = arrays.keep(draw.search.table)
        rule["size"] = draw.search.last + 1  # those behind it are never drawn
        return rule
    if isinstance(draw, PriorityTree):
        rule["tree"] = make_tree(draw)
    rule["bits"] = max((steps - 1).bit_length(), 2)
    rule["value"] = 1.0 / steps
    rule["guide"], rule["shift"] = arrays.guide(offsets)
    return rule
