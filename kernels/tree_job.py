"""What launches of the tree's kernels are told: the structures of ``cuda/tree.cuh`` as NumPy rows.

Shape legend: n items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FAN: Final = 16
MAX_LEVELS: Final = 12
STATE_WORDS: Final = 4
UPDATES, REFUSED, WRONG, PAUSED = range(STATE_WORDS)

TREE = np.dtype([("level", np.uint64, (MAX_LEVELS,)), ("levels", np.int64)])
UPDATE = np.dtype(
    [
        ("tree", TREE),
        *((name, np.uint64) for name in ("names", "losses")),
        ("count", np.int64),
        ("offsets", np.uint64),
        ("episodes", np.int64),
        *((name, np.uint64) for name in ("masses", "state")),
    ]
)
IMPORTANCE = np.dtype(
    [
        *((name, np.uint64) for name in ("probability", "weights")),
        *((name, np.int64) for name in ("count", "size")),
        ("counter", np.uint64),
        ("beta", np.float64),
        ("beta_steps", np.int64),
    ]
)
SUMS = np.dtype([("below", np.uint64), ("sums", np.uint64), ("count", np.int64)])


def level_sizes(items: int) -> list[int]:
    """Return the length of each level, items first; all are multiples of `FAN`, the last is `FAN`.

    Together about 1.067 words an item.
    """
    sizes = [-(-items // FAN) * FAN]
    while sizes[-1] > FAN:
        sizes.append(-(-(sizes[-1] // FAN) // FAN) * FAN)
    return sizes


def describe_tree(levels: Sequence[int]) -> Any:
    """Return a `TREE` row of the addresses of the levels."""
    row = np.zeros((), TREE)
    row["level"][: len(levels)] = levels
    row["levels"] = len(levels)
    return row


def job_of(dtype: np.dtype[Any], **values: Any) -> npt.NDArray[Any]:
    """Return one job of shape (1,); unnamed values are zero."""
    job = np.zeros(1, dtype)
    for name, value in values.items():
        job[name] = value
    return job
