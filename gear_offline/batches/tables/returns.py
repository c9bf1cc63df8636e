"""Returns-to-go of whole episodes: sums from each episode's end in float64, rounded once.

Every episode is added in the same order as a loop over its steps, so the bits do not depend on how
many episodes are summed at once.  Episodes of similar length are the rows of one matrix, padded
with -0.0 at their ends (the only number that changes no sum).  Few NumPy calls sum them: these work
without the interpreter's lock, where one call an episode would queue for it.

Shape legend: n steps, E episodes, L steps of the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.batches.tables.fields import to_float32
from gear_offline.core.types import Float32Array, Float64Array, Int64Array
from gear_offline.data.dataset.schema import REWARDS

FEW_EPISODES = 8  # up to here a discounted sum is faster step by step than episodes side by side


def whole_episodes(offsets: Sequence[int] | Int64Array, steps: int) -> Iterator[tuple[int, int]]:
    """Yield runs of episodes ``[first, last)`` of about `steps` steps, at least one episode."""
    begins = np.asarray(offsets, dtype=np.int64)
    first, count = 0, len(begins) - 1
    while first < count:
        last = min(int(np.searchsorted(begins, begins[first] + steps)), count)
        yield first, last
        first = last


def sum_returns(
    rewards: npt.NDArray[Any], offsets: Sequence[int] | Int64Array, *, gamma: float, scale: float
) -> Float32Array:
    """Return (n,) float32 returns-to-go of whole episodes that begin at global steps `offsets`.

    `rewards` are (n,) or (n, 1), the sums ``sum_{k >= t} gamma**(k - t) r_k / scale``.
    """
    flat = rewards.reshape(-1)
    wide = flat.astype(np.float64)
    with np.errstate(over="ignore"):
        _sum_back(wide, np.diff(offsets), gamma)
        if scale != 1.0:
            wide /= scale
        returns = wide.astype(np.float32)
    if np.isfinite(returns).all():
        return returns
    return to_float32(wide, REWARDS, int(offsets[0]), finite=bool(np.isfinite(flat).all()))


def _sum_back(values: Float64Array, lengths: Int64Array, gamma: float) -> None:
    """Replace (n,) values by the discounted sums from each episode's end."""
    longest = int(lengths.max(initial=0))
    if longest * len(lengths) == len(values):
        _scan(values.reshape(len(lengths), longest), gamma)
        return
    # Lengths of one class differ by less than a factor of two: so does the memory.
    classes = np.frexp(lengths)[1]
    for length_class in np.unique(classes).tolist():
        class_lengths = lengths[classes == length_class]
        inside = np.arange(class_lengths.max()) < class_lengths[:, None]  # (E, L)
        matrix = np.full(inside.shape, -0.0)
        steps = np.repeat(classes == length_class, lengths)
        matrix[inside] = values[steps]
        _scan(matrix, gamma)
        values[steps] = matrix[inside]


def _scan(matrix: Float64Array, gamma: float) -> None:
    """Sum each row of (E, L) from its end, in place."""
    back = matrix[:, ::-1]
    if gamma == 1.0:
        np.add.accumulate(back, axis=1, out=back)
    elif len(matrix) <= FEW_EPISODES:
        for row in back:
            row[:] = list(accumulate(row.tolist(), lambda later, r: r + gamma * later))
    else:
        columns = np.ascontiguousarray(matrix.T)  # (L, E): a step of all episodes at once
        later = np.empty(len(matrix))
        for step in range(len(columns) - 2, -1, -1):
            np.multiply(columns[step + 1], gamma, out=later)
            np.add(columns[step], later, out=columns[step])
        matrix[...] = columns.T
