"""Segments: windows of episodes, named by episode and start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Windows of episodes, named by episode and start.

    Attributes
    ----------
    episodes
        int64, any shape ``S``: episode of each segment.
    starts
        int64, ``S``: first step of the segment within its episode, ``0 <= start < T``.
    probability
        float64, ``S``: the probability with which the sampler draws that segment in one slot.
        May be a read-only broadcast.
    lengths
        int64, ``S``: steps of the window at most, at least 1, of samplers that cut windows before
        K steps and the episode's end do; None for all others.
    """

    episodes: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    probability: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        shapes = {self.episodes.shape, self.starts.shape, self.probability.shape}
        if self.lengths is not None:
            shapes.add(self.lengths.shape)
        if len(shapes) > 1:
            raise InputError("SELECTION", "episodes, starts and probability differ in shape")

    @property
    def shape(self) -> tuple[int, ...]:
        """`S`, the shape of the arrays."""
        return self.episodes.shape

    def __getitem__(self, item: int | slice | tuple[slice, ...]) -> Segments:
        """Return the part that `item` names."""
        return Segments(
            episodes=self.episodes[item],
            starts=self.starts[item],
            probability=self.probability[item],
            lengths=None if self.lengths is None else self.lengths[item],
        )
