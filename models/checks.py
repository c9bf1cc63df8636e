"""What to check of data and model once, before a long training finds it out the hard way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gear_offline.errors import InputError

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
