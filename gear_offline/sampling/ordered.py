"""Laws without replacement: forwards, backwards, and in a new random order every epoch.

Slot b of step t takes place ``t * B + b`` of an endless row of epochs, so an epoch's last batch
goes on with the next epoch.  Unlike other laws, what a slot takes depends on the batch size.

Shape legend: N steps of the table, T steps of one episode, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from gear_offline.dataset.schema import EpisodeIndex, Int64Array
from gear_offline.sampling.base import Segments, SlotLaw, StepLocator, check_range, register
from gear_offline.sampling.bijection import KeyedOrder


def places(
    *, first_step: int, steps: int, count: int, size: int
) -> tuple[int, Int64Array, Int64Array]:
    """Return the first slot's epoch, and each slot's epoch above it and place in that epoch.

    Both (steps, count) int64.  Exact for any step: the first slot is computed in Python integers.
    """
    first_epoch, place = divmod(int(first_step) * int(count), int(size))  # NumPy's overflow
    slots = np.arange(steps * count, dtype=np.uint64).reshape(steps, count)
    ahead = slots + np.uint64(place)  # place and size may be near 2^63
    epochs, found = np.divmod(ahead, np.uint64(size))
    return first_epoch, epochs.astype(np.int64), found.astype(np.int64)


class _InOrder(SlotLaw):
    """Every step of the table as a start, in an order."""

    name = "in_order"

    def __init__(self, index: EpisodeIndex) -> None:
        self.index = index

    @cached_property
    def _episode_of(self) -> StepLocator:
        return StepLocator(self.index)

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def _rows(self, seed: int, first_epoch: int, epochs: Int64Array, at: Int64Array) -> Int64Array:
        raise NotImplementedError

    def _probability(self) -> float:
        return 1.0

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count)."""
        check_range(seed=seed, first_step=first_step, steps=steps, count=count)
        first_epoch, epochs, at = places(
            first_step=first_step, steps=steps, count=count, size=self.index.steps
        )
        rows = self._rows(seed, first_epoch, epochs, at)
        episodes = self._episode_of(rows)
        return Segments(
            episodes=episodes,
            starts=rows - self.index.offsets[episodes],
            probability=np.broadcast_to(np.float64(self._probability()), rows.shape),
        )


@register("fifo")
class FirstInFirstOut(_InOrder):
    """Starts in the order of the table, oldest first, then again.

    Nothing is random: what a slot takes has probability 1, whatever the seed.
    """

    name = "fifo"

    def _rows(self, seed: int, first_epoch: int, epochs: Int64Array, at: Int64Array) -> Int64Array:
        return at


@register("lifo")
class LastInFirstOut(_InOrder):
    """Starts against the order of the table, newest first, then again."""

    name = "lifo"

    def _rows(self, seed: int, first_epoch: int, epochs: Int64Array, at: Int64Array) -> Int64Array:
        return self.index.steps - 1 - at


@register("shuffled_epochs")
class ShuffledEpochs(_InOrder):
    """Every start exactly once an epoch, in an order of its own each epoch.

    Each start is equally likely in every slot, 1/N; slots of one epoch exclude each other.
    """

    name = "shuffled_epochs"

    @cached_property
    def _order(self) -> KeyedOrder:
        return KeyedOrder(self.index.steps)

    def _rows(self, seed: int, first_epoch: int, epochs: Int64Array, at: Int64Array) -> Int64Array:
        return self._order(seed=seed, first_epoch=first_epoch, epochs=epochs, places=at)

    def _probability(self) -> float:
        return 1.0 / self.index.steps
