"""From the losses of segments back to a selection that learns from them.

Shape legend: B segments of this rank's share of a batch, K steps of a window, A of an action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.models.loss import segment_losses
from gear_offline.sampling import Prioritized

if TYPE_CHECKING:
    from gear_offline.loaders.loader import GearLoader

__all__ = ["LossFeedback", "SegmentFeedback"]

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
        self, predictions: Tensor, batch: Batch, *, valid_steps: Tensor | float | None = None
    ) -> Tensor:
        """Return the scalar loss, segments weighted, and tell the selection.

        With weights of 1 it is that of `gear_offline.models.loss.action_loss`.  Losses that are
        not finite are kept from the selection: training stops there anyway.

        Parameters
        ----------
        predictions
            (B, K, A), the model's predictions of the actions of `batch`.
        valid_steps
            As `gear_offline.models.loss.action_loss`.
        """
        each = segment_losses(predictions, batch.actions, batch.attention_mask)
        steps = (batch.attention_mask != 0).sum(1)
        total = (self.importance() * steps * each).sum()
        self._tell(batch, each)
        return total / (steps.sum().clamp(min=1) if valid_steps is None else valid_steps)


class LossFeedback(SegmentFeedback):
    """Weights the segments of each batch and tells the loader's selection their losses.

    In a training loop of one's own::

        feedback = LossFeedback(loader)
        for batch in loader:
            losses = ...                               # (B,), one a segment
            (feedback.importance() * losses).mean().backward()
            feedback.update(batch, losses)             # before the next batch is asked for

    Parameters
    ----------
    loader
        Its selection learns from losses.

    Raises
    ------
    InputError
        ``SELECTION`` if the selection does not learn.
    """

    def __init__(self, loader: GearLoader) -> None:
        learner = loader.learner
        if learner is None:
            raise InputError(
                "SELECTION",
                f"strategy {loader.selection.name!r} does not learn from losses",
                remedy="use prioritized",
            )
        self._loader, self._learner = loader, learner

    def importance(self) -> Tensor:
        """Return (B,) float32 weights for the batch that was handed out last, at most 1.

        They undo the law's preference; call it before `update`.
        """
        loader = self._loader
        step = loader.step - 1
        weights = self._learner.importance(loader.segments_at(step).probability, step=step)
        return torch.from_numpy(weights[loader.slots_at(step)]).float().to(loader.device)

    def update(self, batch: Batch, losses: Tensor) -> None:
        """Tell the selection the (B,) losses of a batch's segments; waits for a GPU.

        All ranks call it, and every rank's selection hears of all.
        """
        named, values = self._of_all_ranks(batch, losses)
        self._learner.update(named.numpy(), values.numpy())

    def _of_all_ranks(self, batch: Batch, losses: Tensor) -> tuple[Tensor, Tensor]:
        gather = self._loader.world.gather_tensor
        values = torch.cat(gather(losses.detach().float().reshape(-1)))
        return torch.cat(gather(batch.segments)), values

    def _tell(self, batch: Batch, losses: Tensor) -> None:
        named, values = self._of_all_ranks(batch, losses)
        if bool(torch.isfinite(values).all()):
            self._learner.update(named.numpy(), values.numpy())


def update_count(learner: Prioritized | None) -> dict[str, Any]:
    """Return what a loader's state says of a selection that learns."""
    return {} if learner is None else {"selection_updates": learner.updates}


def check_updates(learner: Prioritized | None, state: Mapping[str, Any]) -> None:
    """Raise `InputError` (``LOADER_STATE``) unless the selection is where the state left it."""
    if learner is not None and state.get("selection_updates") != learner.updates:
        raise InputError(
            "LOADER_STATE",
            f"the selection has heard of {learner.updates} updates, the state of "
            f"{state.get('selection_updates')}",
            remedy="load the selection's own state first: loader.learner.load_state(...)",
        )


def selection_tensors(learner: Prioritized | None) -> dict[str, Tensor]:
    """Return what a checkpoint keeps of a selection that learns, by name."""
    state = {} if learner is None else learner.state()
    return {PREFIX + key: torch.from_numpy(value) for key, value in state.items()}


def load_selection(learner: Prioritized | None, tensors: Mapping[str, Tensor]) -> None:
    """Give a selection that learns what `selection_tensors` kept."""
    if learner is not None:
        found = {k[len(PREFIX) :]: v for k, v in tensors.items() if k.startswith(PREFIX)}
        learner.load_state({key: value.cpu().numpy() for key, value in found.items()})
