"""What to check of data and model once, before a long training finds it out the hard way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gear_offline.errors import InputError

__all__ = [
    "beyond_tanh",
    "check_actions",
    "check_observations",
    "check_rewards",
    "check_timesteps",
    "trainable_parameters",
]

UNUSED = ("predict_state.", "predict_return.", "encoder.wte.")  # no gradient from the action loss
TANH_TOLERANCE = 1e-6  # float32 rounding of actions that were clipped to [-1, 1]


def check_timesteps(timesteps: Tensor | int, max_timestep: int) -> None:
    """Refuse timesteps that the embedding has no row for.

    On a GPU such a timestep would stop the process with a device assertion, so check the data
    once before training: pass the length of the longest episode minus one.

    Parameters
    ----------
    timesteps
        Integer tensor of any shape on the CPU, or the largest timestep of the data.
    max_timestep
        Rows of the timestep embedding.

    Raises
    ------
    InputError
        ``TIMESTEP_RANGE``.
    """
    if isinstance(timesteps, int):
        low, high = min(timesteps, 0), timesteps
    elif timesteps.numel() == 0:
        return
    else:
        low, high = (int(value) for value in torch.aminmax(timesteps))
    if low < 0 or high >= max_timestep:
        raise InputError(
            "TIMESTEP_RANGE",
            f"timestep {low if low < 0 else high} has no embedding among {max_timestep}",
            where="model.max_timestep",
            remedy="set max_timestep to at least the longest episode",
        )


def check_observations(observations: npt.ArrayLike) -> None:
    """Refuse observations that the model's arithmetic would spread over a whole window.

    Parameters
    ----------
    observations
        Numbers of any shape and dtype.

    Raises
    ------
    InputError
        ``POLICY_INPUT`` for NaN, infinities, and what is infinite in float32.
    """
    given = np.asarray(observations)
    if given.dtype.kind in "biu":
        return
    with np.errstate(over="ignore"):
        finite = np.isfinite(given.astype(np.float32))
    if not finite.all():
        row = int(np.argmin(finite.reshape(len(given), -1).all(axis=1))) if given.ndim else 0
        raise InputError(
            "POLICY_INPUT",
            f"observation {row} holds NaN, an infinity or a value too large for float32",
            remedy="look at the environment: its simulation has probably diverged",
        )


def check_rewards(rewards: npt.NDArray[np.float64]) -> None:
    """Refuse rewards, (n,), after which nothing sensible could be asked of an environment.

    Raises
    ------
    InputError
        ``POLICY_INPUT`` for NaN and infinities.
    """
    if not np.isfinite(rewards).all():
        row = int(np.argmin(np.isfinite(rewards)))
        raise InputError(
            "POLICY_INPUT",
            f"reward {row} is {rewards[row]}",
            remedy="look at the environment: its simulation has probably diverged",
        )


def check_actions(actions: Tensor, *, discrete: bool) -> None:
    """Refuse the actions of a batch that a model with discrete actions cannot learn from.

    Raises
    ------
    InputError
        ``MODEL_INPUT``: as targets of its logits they must be integers, one a step.
    """
    if discrete and (actions.is_floating_point() or actions.ndim != 2):
        raise InputError(
            "MODEL_INPUT",
            f"actions are {actions.dtype} {tuple(actions.shape)}, the model's are discrete",
            where="actions",
            remedy="give integers (B, K), or build the model with discrete=False",
        )


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Freeze the parameters that the action loss never reaches, and return the others.

    Frozen they are still saved, so the file stays complete for the released class, and
    DistributedDataParallel does not wait for gradients that never come.
    """
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name.removeprefix("module.").startswith(UNUSED):
            parameter.requires_grad_(False)
        else:
            kept.append(parameter)
    return kept


def beyond_tanh(minimum: npt.ArrayLike, maximum: npt.ArrayLike) -> list[int]:
    """Return the action elements whose data leave [-1, 1], where a tanh output cannot follow.

    Parameters
    ----------
    minimum, maximum
        (A,) extremes of each action element over the data.
    """
    low, high = np.atleast_1d(np.asarray(minimum)), np.atleast_1d(np.asarray(maximum))
    outside = (low < -1.0 - TANH_TOLERANCE) | (high > 1.0 + TANH_TOLERANCE)
    return [int(i) for i in np.flatnonzero(outside)]
