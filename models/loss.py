"""What training minimises: the error of the predicted actions at real steps.

Shape legend: B windows, K steps, A action elements or discrete actions.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Padding = Literal["any", "left", "right"]


class TrainingBatch(Protocol):
    """What `DecisionTransformer.loss` reads of a batch; `gear_offline.loaders.batch.Batch` fits.

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


def action_loss(
    predictions: Tensor,
    actions: Tensor,
    attention_mask: Tensor | None,
    *,
    valid_steps: Tensor | float | None = None,
) -> Tensor:
    """Mean loss over the actions of real steps; padded steps neither count nor dilute.

    Squared error for continuous actions (mean over steps and elements, as in the authors' code
    of the Decision Transformer), cross-entropy for discrete ones.  Needs no host
    synchronisation: padded positions are replaced by zero, not indexed away.

    Parameters
    ----------
    predictions
        (B, K, A) floating: actions, or logits when `actions` are integers.
    actions
        (B, K, A) floating, or (B, K) integer for discrete actions.
    attention_mask
        (B, K), non-zero at real steps; None means that all are real.
    valid_steps
        Divisor in place of the number of real steps of this batch.  With several ranks pass the
        global number divided by the ranks; then the mean of the ranks' gradients is exactly the
        gradient of the global batch's loss.

    Returns
    -------
    Tensor
        Scalar float32; 0 if no step is real.
    """
    return mean_loss(step_losses(predictions, actions), attention_mask, valid_steps)


def mean_loss(
    losses: Tensor, attention_mask: Tensor | None, valid_steps: Tensor | float | None = None
) -> Tensor:
    """Return the scalar mean of (B, K) losses over real steps; `valid_steps` as `action_loss`."""
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

    `valid_actions`, (B, A) bool, are the action elements, or discrete actions, that the window's
    task has, the first one always; None: all.  The others neither count nor get a gradient, and
    the mean is over those that are there, so a step weighs the same in every task.
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
