"""From the losses of segments back to priorities in GPU memory, without the host.

Shape legend: B segments of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.device_batches import DeviceBatches
from gear_offline.loaders.feedback import SegmentFeedback
from gear_offline.sampling.mixture import prioritized_parts

if TYPE_CHECKING:
    from gear_offline.loaders.loader import GearLoader

__all__ = ["DeviceFeedback"]


class DeviceFeedback(SegmentFeedback):
    """As `LossFeedback`, of batches that the GPU makes: nothing waits, so that it can be captured.

    One process only.  A batch with a loss that is not finite or negative changes no priority.

    Parameters
    ----------
    loader
        Its selection is `prioritized`, or a mixture that has it as a part.
    batches
        Of that loader, not a step ahead.

    Raises
    ------
    InputError
        ``SELECTION_PRIORITY`` if the selection has no priorities.
    """

    def __init__(self, loader: GearLoader, batches: DeviceBatches) -> None:
        parts = prioritized_parts(loader.selection)
        if not parts or batches.chances is None:
            raise InputError(
                "SELECTION_PRIORITY",
                f"strategy {loader.selection.name!r} has no priorities",
                remedy="use prioritized",
            )
        assert not batches.ahead, "the next batch depends on the losses of this one"
        self._chances, self._counter = batches.chances, batches.counter
        device = self._chances.device
        self._trees = [part.on_device(device) for part in parts]
        self._beta, self._beta_steps = parts[0].beta
        self._weights = torch.ones(len(self._chances), device=device)

    def importance(self) -> Tensor:
        """Return (B,) float32 weights for the batch that was made last; overwritten each time."""
        self._trees[0].importance(
            self._chances,
            counter=self._counter,
            beta=self._beta,
            beta_steps=self._beta_steps,
            out=self._weights,
        )
        return self._weights

    def update(self, batch: Batch, losses: Tensor) -> None:
        """Tell the selection the (B,) losses of a batch's segments."""
        values = losses.detach().float().reshape(-1).contiguous()
        for tree in self._trees:
            tree.update(batch.segments, values)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out updates inside, for steps that are run to warm up."""
        with ExitStack() as stack:
            for tree in self._trees:
                stack.enter_context(tree.paused())
            yield
