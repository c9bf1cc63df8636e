"""The laws that public implementations of the Decision Transformer really use, by their names.

docs/strategies.md says where each was read.  `padding` is the side on which the implementation
pads; a loader that pads on the other side is refused.

Shape legend: E episodes, N steps, T steps of one episode, K steps of a window, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_offline.dataset.schema import BoolArray, EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.philox import bounded, draws
from gear_offline.sampling.base import (
    SELECTION_STREAM,
    Segments,
    SlotLaw,
    StepLocator,
    check_range,
    register,
    slot_draws,
)
from gear_offline.sampling.bijection import KeyedOrder
from gear_offline.sampling.ordered import places
from gear_offline.sampling.uniform import UniformSteps


@register("original")
class Original(UniformSteps):
    """The paper's own code: episodes by length, start uniform, padded left.

    Its share of the best episodes (%BC) is `top_percent` of steps.
    """

    name = "original"
    padding = "left"


@register("huggingface")
class HuggingFace(UniformSteps):
    """The Hugging Face example: episodes by length, start uniform, padded left."""

    name = "huggingface"
    padding = "left"


@register("corl")
class Corl(UniformSteps):
    """CORL: episodes by length, start uniform, padded right."""

    name = "corl"
    padding = "right"


@register("min_dt")
class MinDecisionTransformer(SlotLaw):
    """min-decision-transformer: every episode once an epoch, full windows, padded right.

    A window begins uniformly where K steps are left, at 0 in shorter episodes.  An epoch ends
    with its last full batch: ``E % B`` episodes are left out, others each time.
    """

    name = "min_dt"
    padding = "right"

    def __init__(self, index: EpisodeIndex, *, context_length: int) -> None:
        self.index, self.context_length = index, context_length
        self._starts = np.maximum(index.lengths - context_length, 0) + 1  # where windows can begin
        self._order = KeyedOrder(index.episodes)

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count).

        Raises
        ------
        InputError
            ``SELECTION_BATCH`` if a batch has more slots than there are episodes.
        """
        check_range(seed=seed, first_step=first_step, steps=steps, count=count)
        full = self.index.episodes // count
        if full == 0:
            raise InputError(
                "SELECTION_BATCH",
                f"min_dt takes each episode once an epoch and full batches only, and "
                f"{self.index.episodes} episodes make no batch of {count}",
                remedy="lower the batch size, or use uniform_episodes",
            )
        first_epoch, epochs, batches = places(
            first_step=first_step, steps=steps, count=1, size=full
        )
        at = batches * count + np.arange(count, dtype=np.int64)
        episodes = self._order(
            seed=seed,
            first_epoch=first_epoch,
            epochs=np.broadcast_to(epochs, at.shape),
            places=at,
        )
        _, second = draws(
            seed=seed, stream=SELECTION_STREAM, first_step=first_step, steps=steps, count=count
        )
        begin = self._starts[episodes]
        return Segments(
            episodes=episodes,
            starts=bounded(second, begin),
            probability=1.0 / (np.float64(self.index.episodes) * begin),
        )


@register("d3rlpy")
class D3rlpy(SlotLaw):
    """d3rlpy: the last step of a window is uniform over transitions, padded left.

    A window is the up to K steps that end there; none of the episode's later steps is in it.  The
    last step of an episode that the environment did not end is no transition and ends no window.

    Attributes
    ----------
    members, ends
        Episodes that have transitions, and the index of their transitions.
    """

    name = "d3rlpy"
    padding = "left"
    cuts_windows = True  # windows have lengths of their own

    def __init__(self, index: EpisodeIndex, *, terminated: BoolArray, context_length: int) -> None:
        self.index, self.context_length = index, context_length
        ends = index.lengths - ~np.asarray(terminated, dtype=bool)
        self.members = np.flatnonzero(ends)
        if self.members.size == 0:
            raise InputError(
                "SELECTION_EMPTY",
                "no episode has a transition: all have one step and none was terminated",
            )
        self.ends = EpisodeIndex(ends[self.members])
        self._member_of = StepLocator(self.ends)

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count)."""
        first, _ = slot_draws(seed=seed, first_step=first_step, steps=steps, count=count)
        row = bounded(first, self.ends.steps)
        member = self._member_of(row)
        end = row - self.ends.offsets[member]
        starts = np.maximum(end - self.context_length + 1, 0)
        return Segments(
            episodes=self.members[member],
            starts=starts,
            probability=np.broadcast_to(np.float64(1.0 / self.ends.steps), row.shape),
            lengths=end - starts + 1,
        )
