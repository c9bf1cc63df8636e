"""The torch device that a user named."""

from __future__ import annotations

import torch

from gear_offline.errors import InputError, UnavailableError


def resolve_device(device: str | torch.device, *, where: str = "") -> torch.device:
    """Return the torch device; ``"auto"`` is CUDA where there is one; `where` the user said it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        if resolved.type not in ("cpu", "cuda", "mps"):
            raise TypeError("batches are made by a CPU or a GPU")
    except (RuntimeError, TypeError) as error:
        remedy = "use one that torch has here, such as 'auto', 'cpu', 'cuda' or 'cuda:0'"
        raise InputError("LOADER_OPTION", f"{device=} is not usable", remedy=remedy) from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        what = f"device {str(device)!r} was asked for and no CUDA device is available"
        remedy = f"use {where or 'device'}=auto or cpu, or run gear-offline doctor"
        raise UnavailableError("DEVICE", what, where, remedy)
    return resolved
