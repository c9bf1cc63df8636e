"""The segments of every step of a loader: a sampler, its seed and one rank's share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gear_offline.kernels.segments import Segments
from gear_offline.sampling.base import Sampler


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The segments of every step of a loader, or of one rank's part of it.

    Attributes
    ----------
    selection, seed, batch_size
        The sampler, its seed, and how many it draws in each step.
    first_slot, share
        Which of them are this rank's.
    """

    selection: Sampler
    seed: int
    batch_size: int
    first_slot: int
    share: int

    def segments(self, first_step: int, steps: int) -> Segments:
        """Return the segments of consecutive steps, (steps, share)."""
        if not self.share:  # of a rank that does not feed a model's input
            none = np.zeros((steps, 0), np.int64)
            return Segments(episodes=none, starts=none, probability=none.astype(np.float64))
        drawn = self.selection.sample(self.seed, first_step, steps, self.batch_size)
        return drawn[:, self.first_slot : self.first_slot + self.share]
