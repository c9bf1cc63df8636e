"""Checks of options, before any data are read: each returns the value or says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gear_offline.errors import InputError


def plain(value: Any) -> Any:
    """Return a value as JSON gives it back: lists for tuples and arrays, numbers of Python."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def wrong(name: str, must: str, got: object) -> InputError:
    """Return the error for option `name`, which must be something else than `got`."""
    shown = repr(got)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InputError("SELECTION_OPTIONS", f"{name} must be {must}, got {shown}")


def choice(name: str, value: object, allowed: Sequence[str]) -> str:
    """Return the `value` of option `name` if it is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise wrong(name, f"one of {', '.join(allowed)}", value)
    return value


def number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> float:
    """Return the `value` of option `name`, a finite number; true and false are none.

    It must be greater than `above`, at least `least` and at most `most`.
    """
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if known and math.isfinite(found := float(value)) and above < found and least <= found <= most:  # type: ignore[arg-type]
        return found
    bounds = [
        *([f"above {above:g}"] if above > -math.inf else []),
        *([f"at least {least:g}"] if least > -math.inf else []),
        *([f"at most {most:g}"] if most < math.inf else []),
    ]
    raise wrong(name, " ".join(["a number", " and ".join(bounds)]).strip(), value)


def integer(name: str, value: object, *, least: int, most: int = (1 << 62) - 1) -> int:
    """Return the `value` of option `name`, an integer; true and false are none.

    It must be at least `least` and at most `most`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bound = f"from {least} to {most}" if most < (1 << 62) - 1 else f"of at least {least}"
        raise wrong(name, f"an integer {bound}", value)
    return value
