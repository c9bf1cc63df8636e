"""Checks of a loader's options, each with the option's name and what is allowed."""

from __future__ import annotations

import math

import torch

from gear_offline.errors import InputError, UnavailableError


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device; ``"auto"`` is CUDA where there is one.

    Raises
    ------
    UnavailableError
        ``DEVICE``
    InputError
        ``LOADER_OPTION`` if torch does not know the name.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise bad_option("device", device, "'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            "DEVICE",
            f"device {str(device)!r} was asked for and no CUDA device is available",
            remedy="use device='auto' or 'cpu', or run gear-offline doctor",
        )
    return found


def check_options(
    *,
    batch_size: int,
    context_length: int,
    padding: str,
    gamma: float,
    returns_scale: float,
    layout: str,
    mode: str,
    engine: str,
) -> None:
    if type(batch_size) is not int or batch_size < 1:
        raise bad_option("batch_size", batch_size, "an integer of at least 1")
    if type(context_length) is not int or context_length < 1:
        raise bad_option("context_length", context_length, "an integer of at least 1")
    if padding not in ("right", "left"):
        raise bad_option("padding", padding, "'right' or 'left'")
    if not 0.0 <= gamma <= 1.0:
        raise bad_option("gamma", gamma, "a number from 0 to 1")
    if not (math.isfinite(returns_scale) and returns_scale > 0.0):
        raise bad_option("returns_scale", returns_scale, "a positive number")
    if layout not in ("auto", "records", "columns"):
        raise bad_option("layout", layout, "'auto', 'records' or 'columns'")
    if mode not in ("read", "mmap"):
        raise bad_option("mode", mode, "'read' or 'mmap'")
    if engine not in ("auto", "on", "off"):
        raise bad_option("engine", engine, "'auto', 'on' or 'off'")


def bad_option(name: str, value: object, allowed: str) -> InputError:
    return InputError("LOADER_OPTION", f"{name}={value!r} is not usable", remedy=f"use {allowed}")
