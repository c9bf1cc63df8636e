"""From the losses of segments back to the sampler that learns from them.

Shape legend: B segments of this rank's batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gear_offline.batches.sampling import Prioritized
from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.static_batch import StaticBatch

if TYPE_CHECKING:
    from gear_offline.loaders.loader import GearLoader


CHECK_EVERY = 64  # updates: a wait for the GPU costs more than an update there


class SegmentFeedback(ABC):
    """The weights of the losses of a batch's segments, and the losses' road to the sampler.

    A batch with a loss that is not finite changes no priority: training stops there anyway.
    """

    @abstractmethod
    def importance(self) -> Tensor:
        """Return (B,) float32 weights for the batch that was handed out last, at most 1.

        They undo the sampler's preference; call it before `update`.
        """

    @abstractmethod
    def update(self, batch: Batch, losses: Tensor) -> None:
        """Give the sampler the (B,) losses of a batch's segments."""

    def loss(
        self, losses: Tensor, batch: Batch, *, valid_steps: Tensor | float | None = None
    ) -> Tensor:
        """Weight (B,) mean losses of segments, give them to the sampler; return the scalar loss.

        With weights of 1 it is the mean over real steps, of which `valid_steps` takes the place.
        """
        steps = (batch.attention_mask != 0).sum(1)
        total = (self.importance() * steps * losses).sum()
        self.update(batch, losses)
        return total / (steps.sum().clamp(min=1) if valid_steps is None else valid_steps)


class LossFeedback(SegmentFeedback):
    """Feedback of a loader's batches; all ranks call it, every rank's sampler hears of all losses.

    Where the GPU of one process draws, nothing waits for it but the first update and each 64th.
    These go through the host, which refuses losses that are negative; in between such a batch
    changes no priority.  Its weights differ from the host's in their last bit.  With `exact` the
    host weighs, as it does for several processes: the same bits on any number of GPUs.

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

    def __init__(self, loader: GearLoader, *, exact: bool = False) -> None:
        self._loader, self._sampler, self._updates = loader, _learning(loader), 0
        self._on_device: DeviceFeedback | None = None
        engine = loader.engine
        if engine is not None and engine.draws and loader.world.size == 1 and not exact:
            draws = engine.without_rows()
            self._draws = StaticBatch(draws, padding=loader.padding, step=0, learns=True)
            self._on_device = DeviceFeedback(loader, self._draws)

    def importance(self) -> Tensor:
        loader = self._loader
        step = loader.step - 1
        if self._on_device is not None:
            self._draws.set_step(step)
            self._draws.enqueue()
            return self._on_device.importance().clone()
        weights = self._sampler.importance(loader.segments_at(step).probability, step=step)
        return torch.from_numpy(weights[loader.slots_at(step)]).float().to(loader.device)

    def update(self, batch: Batch, losses: Tensor) -> None:
        self._updates += 1
        if self._on_device is not None and self._updates % CHECK_EVERY != 1:
            self._on_device.update(batch, losses)
            return
        gather = self._loader.world.gather_tensor
        values = torch.cat(gather(losses.detach().float().reshape(-1)))
        segments = torch.cat(gather(batch.segments))
        if bool(torch.isfinite(values).all()):
            self._sampler.update(segments.numpy(), values.numpy())


class DeviceFeedback(SegmentFeedback):
    """Feedback of batches that the GPU draws: nothing waits, so that it can be captured.

    One process only.  A batch with a negative loss changes no priority either.
    """

    def __init__(self, loader: GearLoader, batches: StaticBatch) -> None:
        sampler = _learning(loader)
        assert batches.chances is not None, "the loader makes them for a sampler that learns"
        assert not batches.ahead, "the next batch depends on the losses of this one"
        self._chances, self._counter = batches.chances, batches.counter
        device = self._chances.device
        self._tree, self._sampler = sampler.on_device(device), sampler
        self._weights = torch.ones(len(self._chances), device=device)

    def importance(self) -> Tensor:
        """Return (B,) float32 weights for the batch that was made last; overwritten each time."""
        # (1 / (N p)) ** beta over the largest, within a unit in the last place: N cancels out.
        exponent: float | Tensor = -self._sampler.beta
        if self._sampler.beta_steps is not None:
            step = self._counter.double() - 1.0  # that was drawn
            share = (step / self._sampler.beta_steps).clamp(max=1.0)
            exponent = exponent * (1.0 - share) - share
        ratio = self._chances / self._chances.min()
        torch.pow(ratio, exponent, out=self._weights)
        return self._weights

    def update(self, batch: Batch, losses: Tensor) -> None:
        values = losses.detach().float().reshape(-1).contiguous()
        self._tree.update(batch.segments, values)

    @contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Leave out updates inside, for steps that are run to warm up."""
        with self._tree.pause_updates():
            yield


class PieceFeedback(SegmentFeedback):
    """Feedback of a batch that comes in pieces of `size` segments, in their order."""

    def __init__(self, whole: SegmentFeedback, size: int) -> None:
        self._whole, self._losses = whole, list[Tensor]()
        self._weights = iter(whole.importance().view(-1, size).unbind())

    def importance(self) -> Tensor:
        return next(self._weights)

    def update(self, batch: Batch, losses: Tensor) -> None:
        self._losses.append(losses.detach())

    def finish(self, batch: Batch) -> None:
        """Give the sampler the losses of the whole batch."""
        self._whole.update(batch, torch.cat(self._losses))


def _learning(loader: GearLoader) -> Prioritized:
    """Return the loader's sampler that learns, or refuse it."""
    if loader.loss_sampler is None:
        problem = f"strategy {loader.selection.name!r} does not learn from losses"
        raise InputError("SELECTION", problem, remedy="use prioritized")
    return loader.loss_sampler
