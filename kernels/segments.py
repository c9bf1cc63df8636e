"""Segments: windows of episodes, named by episode and start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gear_offline.core.types import Float64Array, Int64Array
from gear_offline.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Windows of episodes, named by episode and start.

    Attributes
    ----------
    episodes, starts
        int64, any shape ``S``: episode of each segment, and its first step within the episode.
    probability
        float64, ``S``: with which the sampler draws that segment in one slot.  May be a read-only
        broadcast.
    lengths
        int64, ``S``: steps of the window at most, at least 1, of samplers that cut windows short;
        None for all others.
    times_sampled, table_size
        int64, ``S``: how often the episode was drawn, this time included, and how many episodes
        there were to draw from; where draws are counted, else None.
    """

    episodes: Int64Array
    starts: Int64Array
    probability: Float64Array
    lengths: Int64Array | None = None
    times_sampled: Int64Array | None = None
    table_size: Int64Array | None = None

    def __post_init__(self) -> None:
        shapes = {self.episodes.shape, self.starts.shape, self.probability.shape}
        if self.lengths is not None:
            shapes.add(self.lengths.shape)
        if len(shapes) > 1:
            raise InputError("SELECTION", "episodes, starts and probability differ in shape")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.episodes.shape

    def __getitem__(self, item: Any) -> Segments:
        """Return some of them, as NumPy indexes arrays."""
        parts: dict[str, Any] = {k: v if v is None else v[item] for k, v in vars(self).items()}
        return Segments(**parts)
