"""From the losses of segments back to a selection that learns from them.

Shape legend: B segments of this rank's share of a batch, K steps of a window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.static_batch import StaticBatch
from gear_offline.sampling import Prioritized

if TYPE_CHECKING:
    from gear_offline.loaders.loader import GearLoader

__all__ = ["DeviceFeedback", "LossFeedback", "SegmentFeedback"]

PREFIX = "selection/"  # of the selection's tensors in a checkpoint


class SegmentFeedback(ABC):
    """Weights the losses of a batch's segments, and takes them."""

    @abstractmethod
    def importance(self) -> Tensor:
        """Return (B,) float32 weights for the batch that was handed out last, at most 1."""

    @abstractmethod
    def update(self, batch: Batch, losses: Tensor) -> None:
        """Tell the selection the (B,) losses of a batch's segments."""

    def _tell(self, batch: Batch, losses: Tensor) -> None:
        """`update`, but losses that are not finite are kept from the selection."""
        self.update(batch, losses)

    def loss(
        self, losses: Tensor, batch: Batch, *, valid_steps: Tensor | float | None = None
    ) -> Tensor:
        """Return the scalar loss of (B,) mean losses of segments, weighted, and tell the sampler.

        With weights of 1 it is the mean over real steps, of which `valid_steps` takes the place.
        Losses that are not finite are kept from the sampler: training stops there anyway.
        """
        steps = (batch.attention_mask != 0).sum(1)
        total = (self.importance() * steps * losses).sum()
        self._tell(batch, losses)
        return total / (steps.sum().clamp(min=1) if valid_steps is None else valid_steps)


class LossFeedback(SegmentFeedback):
    """Weights the segments of each batch and tells the loader's selection their losses.

    In a training loop of one's own::

        feedback = LossFeedback(loader)
        for batch in loader:
            losses = ...                               # (B,), one a segment
            (feedback.importance() * losses).mean().backward()
            feedback.update(batch, losses)             # before the next batch is asked for

    Raises
    ------
    InputError
        ``SELECTION`` if the loader's selection does not learn.
    """

    def __init__(self, loader: GearLoader) -> None:
        sampler = loader.loss_sampler
        if sampler is None:
            raise InputError(
                "SELECTION",
                f"strategy {loader.selection.name!r} does not learn from losses",
                remedy="use prioritized",
            )
        self._loader, self._sampler = loader, sampler

    def importance(self) -> Tensor:
        """Return (B,) float32 weights for the batch that was handed out last, at most 1.

        They undo the sampler's preference; call it before `update`.
        """
        loader = self._loader
        step = loader.step - 1
        weights = self._sampler.importance(loader.segments_at(step).probability, step=step)
        return torch.from_numpy(weights[loader.slots_at(step)]).float().to(loader.device)

    def update(self, batch: Batch, losses: Tensor) -> None:
        """Tell the selection the (B,) losses of a batch's segments; waits for a GPU.

        All ranks call it, and every rank's selection hears of all.
        """
        named, values = self._of_all_ranks(batch, losses)
        self._sampler.update(named.numpy(), values.numpy())

    def _of_all_ranks(self, batch: Batch, losses: Tensor) -> tuple[Tensor, Tensor]:
        gather = self._loader.world.gather_tensor
        values = torch.cat(gather(losses.detach().float().reshape(-1)))
        return torch.cat(gather(batch.segments)), values

    def _tell(self, batch: Batch, losses: Tensor) -> None:
        named, values = self._of_all_ranks(batch, losses)
        if bool(torch.isfinite(values).all()):
            self._sampler.update(named.numpy(), values.numpy())


class DeviceFeedback(SegmentFeedback):
    """As `LossFeedback`, of batches that the GPU makes: nothing waits, so that it can be captured.

    One process only.  A batch with a loss that is not finite or negative changes no priority.
    `batches` are of that loader, whose engine draws.

    Raises
    ------
    InputError
        ``SELECTION`` if the strategy has no priorities in GPU memory.
    """

    def __init__(self, loader: GearLoader, batches: StaticBatch) -> None:
        sampler = loader.loss_sampler
        if sampler is None or batches.chances is None:
            raise InputError(
                "SELECTION",
                f"strategy {loader.selection.name!r} has no priorities",
                remedy="use prioritized",
            )
        assert not batches.ahead, "the next batch depends on the losses of this one"
        self._chances, self._counter = batches.chances, batches.counter
        device = self._chances.device
        self._tree, self._options = sampler.on_device(device), sampler.options
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
        values = losses.detach().float().reshape(-1).contiguous()
        self._tree.update(batch.segments, values)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out updates inside, for steps that are run to warm up."""
        with self._tree.paused():
            yield


def selection_tensors(sampler: Prioritized | None) -> dict[str, Tensor]:
    """Return what a checkpoint keeps of a sampler that learns, by name."""
    state = {} if sampler is None else sampler.state()
    return {PREFIX + key: torch.from_numpy(value) for key, value in state.items()}


def load_selection(sampler: Prioritized | None, tensors: Mapping[str, Tensor]) -> None:
    """Give a sampler that learns what `selection_tensors` kept."""
    if sampler is not None:
        kept = {k[len(PREFIX) :]: v for k, v in tensors.items() if k.startswith(PREFIX)}
        sampler.load_state({key: value.cpu().numpy() for key, value in kept.items()})
