"""The training loss: the error of the predicted actions at real steps.

Shape legend: B windows, K steps, A action elements or discrete actions.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Padding = Literal["any", "left", "right"]


class TrainingBatch(Protocol):
    """The inputs of `SequenceModel.loss`; `gear_offline.loaders.batch.Batch` fits.

    Actions are (B, K, A) floating or (B, K) integer; the mask, (B, K), is non-zero at real steps;
    the inputs are the keyword arguments of the model's forward.
    """

    @property
    def actions(self) -> Tensor: ...

    @property
    def attention_mask(self) -> Tensor: ...

    @property
    def padding(self) -> Padding: ...

    def model_inputs(self) -> dict[str, Tensor]: ...


def mean_loss(
    losses: Tensor, attention_mask: Tensor | None, valid_steps: Tensor | float | None = None
) -> Tensor:
    """Return the scalar mean of (B, K) losses over real steps; 0 if none is real.

    Padded steps neither count nor dilute.  `attention_mask`, (B, K), is non-zero at real steps;
    None: all are real.  `valid_steps` divides in place of their number.  With several ranks it is
    the global number divided by the ranks: the mean of the ranks' gradients is then exactly the
    gradient of the global batch's loss.  The host does not wait for a GPU.
    """
    if attention_mask is None:
        return losses.mean() if valid_steps is None else losses.sum() / valid_steps
    real = attention_mask != 0
    # where, not a product: a padded prediction of Inf or NaN must not reach the sum.
    total = losses.where(real, 0.0).sum()
    return total / (real.sum().clamp(min=1) if valid_steps is None else valid_steps)


def segment_losses(losses: Tensor, attention_mask: Tensor) -> Tensor:
    """Return (B,) float32, the mean of (B, K) losses over the real steps of each window."""
    real = attention_mask != 0
    return losses.where(real, 0.0).sum(1) / real.sum(1).clamp(min=1)


def step_losses(
    predictions: Tensor, actions: Tensor, valid_actions: Tensor | None = None
) -> Tensor:
    """Return (B, K) float32, the loss of each step; of padded ones too.

    Continuous actions have the squared error, mean over the elements, as in the authors' code of
    the Decision Transformer; discrete ones the cross-entropy of their logits.  `valid_actions`,
    (B, A) bool, are the elements, or discrete actions, that the window's task has, the first one
    always; None: all.  The others neither count nor get a gradient, and the mean is over those
    that are there, so a step weighs the same in every task.
    """
    predictions = predictions.float()
    if actions.is_floating_point():
        error = F.mse_loss(predictions, actions.float(), reduction="none")
        if valid_actions is None:
            return error.mean(-1)
        return error.where(valid_actions[:, None], 0.0).sum(-1) / valid_actions.sum(-1)[:, None]
    if valid_actions is not None:
        predictions = predictions.where(valid_actions[:, None], -torch.inf)
    return F.cross_entropy(predictions.transpose(1, 2), actions.long(), reduction="none")
