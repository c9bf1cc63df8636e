"""Edits of rewards: what lies between those of a dataset and those of its environment.

Shape legend: n steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import numpy as np
from pydantic import Field

from gear_offline.core.types import Float64Array
from gear_offline.dataset.statistics import Model

Number = Annotated[float, Field(allow_inf_nan=False)]
TOLERANCE = 1e-6  # of the largest reward: float32 rounding


class RewardEdit(Model):
    """A reward of the data is ``clip(scale * r + shift, low, high)`` of the environment's r.

    It need not hold at an episode's last step, after which nothing is asked.
    """

    scale: Number = 1.0
    shift: Number = 0.0
    low: Number | None = None
    high: Number | None = None

    def apply(self, rewards: Float64Array) -> Float64Array:
        """Edit (n,) rewards of the environment."""
        edited = self.scale * rewards + self.shift
        is_clipped = self.low is not None or self.high is not None
        return np.clip(edited, self.low, self.high) if is_clipped else edited

    def explains(self, before: Float64Array, after: Float64Array) -> bool:
        """Compare (n,) rewards `after` with the edited ones `before`."""
        most = float(np.abs(after).max(initial=1e-30))
        return bool(np.allclose(self.apply(before), after, rtol=0.0, atol=TOLERANCE * most))


def candidates(before: Float64Array, after: Float64Array) -> Iterator[RewardEdit]:
    """Yield the edits that may have made (n,) rewards `after` of those `before`."""
    low, high = (float(end(after)) for end in (np.min, np.max)) if after.size else (0.0, 0.0)
    lines = [(1.0, 0.0)]
    for rows in (slice(None), (after > low) & (after < high)):
        x, y = before[rows], after[rows]
        if x.size:
            first, last = x.argmin(), x.argmax()
            run = x[last] - x[first]
            scale = float(f"{(y[last] - y[first]) / run if run else 0.0:.6g}")
            lines.append((scale, float(f"{y[last] - scale * x[last]:.6g}")))
    for ends in ({}, {"low": low, "high": high}):
        yield from (RewardEdit(scale=scale, shift=shift, **ends) for scale, shift in lines)


def find_edit(blocks: Iterable[tuple[Float64Array, Float64Array]]) -> RewardEdit | None:
    """Find the edit of the second rewards of each block; None where no step tells it.

    It is guessed from the first block, and has to hold in all.
    """
    possible: list[RewardEdit] | None = None
    for before, after in blocks:
        guesses = candidates(before, after) if possible is None else possible
        possible = [edit for edit in guesses if edit.explains(before, after)]
    return next(iter(possible or []), None)
