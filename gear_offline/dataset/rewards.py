"""How the rewards of a dataset follow from those of its environment.

Shape legend: n steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from gear_offline.core.types import Float64Array

Number = Annotated[float, Field(allow_inf_nan=False)]
TOLERANCE = 1e-6  # of the largest reward: float32 rounding


class RewardEdit(BaseModel):
    """A reward of the data is ``clip(scale * r + shift, low, high)`` of the environment's r.

    It need not hold at an episode's last step, after which nothing is asked.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    scale: Number = 1.0
    shift: Number = 0.0
    low: Number | None = None
    high: Number | None = None

    def apply(self, rewards: Float64Array) -> Float64Array:
        """Return what the data would hold for (n,) rewards of the environment."""
        edited = self.scale * rewards + self.shift
        if self.low is not None or self.high is not None:
            edited = np.clip(edited, self.low, self.high)
        return edited

    def explains(self, before: Float64Array, after: Float64Array) -> bool:
        """Return whether it makes (n,) rewards `after` of those `before`."""
        most = float(np.abs(after).max(initial=1e-30))
        return bool(np.allclose(self.apply(before), after, rtol=0.0, atol=TOLERANCE * most))


def candidates(before: Float64Array, after: Float64Array) -> Iterator[RewardEdit]:
    """Yield the edits that may have made (n,) rewards `after` of those `before`."""
    if not after.size:
        yield RewardEdit()
        return
    low, high = float(after.min()), float(after.max())
    lines = [(1.0, 0.0)]
    for chosen in (np.full(after.shape, True), (after > low) & (after < high)):
        x, y = before[chosen], after[chosen]
        if x.size:
            first, last = x.argmin(), x.argmax()
            run = x[last] - x[first]
            scale = float(f"{(y[last] - y[first]) / run if run else 0.0:.6g}")
            lines.append((scale, float(f"{y[last] - scale * x[last]:.6g}")))
    for ends in ((None, None), (low, high)):
        for scale, shift in lines:
            yield RewardEdit(scale=scale, shift=shift, low=ends[0], high=ends[1])


def find_edit(blocks: Iterable[tuple[Float64Array, Float64Array]]) -> RewardEdit | None:
    """Return what made the second rewards of each block of the first; None: nothing of the kind.

    It is guessed from the first block, and has to hold in all.
    """
    possible: list[RewardEdit] | None = None
    for before, after in blocks:
        possible = [*candidates(before, after)] if possible is None else possible
        possible = [edit for edit in possible if edit.explains(before, after)]
    return next(iter(possible or []), None)
