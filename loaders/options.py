"""What the options of a loader may be."""

from __future__ import annotations

import math
from typing import Literal

from gear_offline.errors import InputError

MAX_FRAME_STACK = 64


def check_options(
    *,
    batch_size: int,
    context_length: int,
    frame_stack: int,
    padding: Literal["right", "left"],
    gamma: float,
    returns_scale: float,
    layout: str,
    mode: str,
    engine: str,
) -> None:
    """Refuse what no loader can do.

    Raises
    ------
    InputError
        ``LOADER_OPTION``
    """
    if type(batch_size) is not int or batch_size < 1:
        raise bad_option("batch_size", batch_size, "an integer of at least 1")
    if type(context_length) is not int or context_length < 1:
        raise bad_option("context_length", context_length, "an integer of at least 1")
    if type(frame_stack) is not int or not 1 <= frame_stack <= MAX_FRAME_STACK:
        raise bad_option("frame_stack", frame_stack, f"an integer from 1 to {MAX_FRAME_STACK}")
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
    """Return the error ``LOADER_OPTION`` for an option's value."""
    return InputError("LOADER_OPTION", f"{name}={value!r} is not usable", remedy=f"use {allowed}")
