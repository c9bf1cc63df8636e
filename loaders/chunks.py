"""Chunks of actions: those of the next steps, as ACT and diffusion policies predict them.

The action at the last real step `t` of a window and those of the steps after it, `t` to `t + C - 1`
of the same episode.  Behind the episode's end its last action is repeated, as LeRobot's
``delta_timestamps`` do; the mask is 0 there, where LeRobot's ``action_is_pad`` is true.  Where a
window reaches over the ends of episodes (``span=history``) the episode is that of its last step.

Shape legend: T steps of a block, B segments of a rank, C steps of a chunk, A shape of an action.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.kernels.draws import Segments
from gear_offline.kernels.gather import Windows, real_steps

CHUNK_ACTIONS, CHUNK_MASK = "chunk_actions", "chunk_mask"


class ExtraGather(Protocol):
    """Windows beside those of a batch's segments, which become extras: of goals, or of chunks."""

    field: str  # of the batch, whose column is gathered
    steps: int  # of a window
    repeat: bool  # behind an episode the last row is repeated; else zeros
    behind: int  # steps of the windows at whose last real one these begin, so a GPU can draw; or 0

    def draw(self, first_step: int, segments: Segments) -> Segments:
        """Return the windows that belong to (T, B) segments."""

    def tensors(self, windows: Windows) -> dict[str, Tensor]:
        """Return views of the gathered windows by the name of the extra."""


class Chunks:
    """Chunks of `steps` actions behind windows of `span` steps of the episodes of `index`."""

    field, repeat = "actions", True

    def __init__(self, index: EpisodeIndex, span: int, steps: int) -> None:
        self._index, self._span, self.steps = index, span, steps
        self.behind = span if index.histories is None else 0  # else that is another episode's

    def draw(self, first_step: int, segments: Segments) -> Segments:
        """Return the last real step of (T, B) segments, of its own episode."""
        index, episodes = self._index, segments.episodes
        real = real_steps(segments, index.lengths, self._span, index.reach)
        last = segments.starts + real.reshape(segments.shape) - 1
        if index.histories is not None:
            rows, firsts = index.rows[episodes] + last, index.side_by_side.offsets
            places = firsts.searchsorted(rows, side="right") - 1
            episodes, last = index.order[places], rows - firsts[places]
        chance = np.broadcast_to(np.float64(1), segments.shape)
        return Segments(episodes=episodes, starts=last, probability=chance)

    def tensors(self, windows: Windows) -> dict[str, Tensor]:
        """Return the actions (T, B, C, *A) and the mask (T, B, C) int64, 1 on real steps."""
        return {
            CHUNK_ACTIONS: windows.tensors()["actions"],
            CHUNK_MASK: windows.attention_mask,
        }
