"""From the losses of segments back to priorities in GPU memory, without the host.

Shape legend: B segments of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.device_batches import DeviceBatches
from gear_offline.loaders.feedback import SegmentFeedback

if TYPE_CHECKING:
    from gear_offline.loaders.loader import GearLoader

__all__ = ["DeviceFeedback"]


class DeviceFeedback(SegmentFeedback):
    """As `LossFeedback`, of batches that the GPU makes: nothing waits, so that it can be captured.

    One process only.  A batch with a loss that is not finite or negative changes no priority.

    Parameters
    ----------
    loader
        Its strategy is `prioritized`, and its engine draws.
    batches
        Of that loader, not a step ahead.

    Raises
    ------
    InputError
        ``SELECTION`` if the strategy has no priorities in GPU memory.
    """

    def __init__(self, loader: GearLoader, batches: DeviceBatches) -> None:
        learner = loader.learner
        if learner is None or batches.chances is None:
            raise InputError(
                "SELECTION",
                f"strategy {loader.selection.name!r} has no priorities",
                remedy="use prioritized",
            )
        assert not batches.ahead, "the next batch depends on the losses of this one"
        self._chances, self._counter = batches.chances, batches.counter
        device = self._chances.device
        self._tree, self._options = learner.on_device(device), learner.options
        self._weights = torch.ones(len(self._chances), device=device)

    def importance(self) -> Tensor:
        """Return (B,) float32 weights for the batch that was made last; overwritten each time."""
        self._tree.importance(
            self._chances,
            counter=self._counter,
            beta=self._options.beta,
            beta_steps=self._options.beta_steps,
            out=self._weights,
        )
        return self._weights

    def update(self, batch: Batch, losses: Tensor) -> None:
        """Tell the selection the (B,) losses of a batch's segments."""
        values = losses.detach().float().reshape(-1).contiguous()
        self._tree.update(batch.segments, values)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out updates inside, for steps that are run to warm up."""
        with self._tree.paused():
            yield
