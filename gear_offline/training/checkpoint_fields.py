"""Checks of what a checkpoint's ``state.json`` says, for files with digests that fit and lies.

And the errors of a checkpoint that cannot be used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gear_offline.errors import InputError

Statistics = tuple[npt.NDArray[np.float64] | None, npt.NDArray[np.float64] | None]


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the one spelling of `document` that is valid, its digest in it."""
    plain = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
    digest = xxhash.xxh3_128_hexdigest(plain.encode())
    sealed = {**document, "digest": digest}
    return json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False).encode()


def check_fields(document: Mapping[str, Any], config: Any) -> None:
    """Raise ValueError, KeyError or TypeError unless types and ranges are those of a checkpoint."""
    step, seconds = document["step"], document["seconds"]
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise ValueError(f"step {str(step)[:40]!r}")
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError(f"seconds {str(seconds)[:40]!r}")
    for name in ("loader", "recipe", "files"):
        if not isinstance(document[name], dict):
            raise ValueError(f"{name} is not an object")
    if not isinstance(config, dict):
        raise ValueError("the configuration is not an object")


def read_statistics(value: Any, config: Mapping[str, Any]) -> Statistics:
    """Return mean and standard deviation of the states, (S,) float64, or None for both."""
    if value is None:
        return None, None
    mean, std = (np.array(value[key], dtype=np.float64) for key in ("mean", "std"))
    if mean.shape != std.shape or mean.shape != (config.get("state_dim"),):
        raise ValueError(f"statistics of shape {mean.shape}")
    if not np.isfinite(mean).all() or not np.isfinite(std).all() or (std < 0).any():
        raise ValueError("statistics that are not finite, or a deviation below 0")
    return mean, std


def damaged(path: Path, what: str) -> InputError:
    """Return the error ``CHECKPOINT_DAMAGED`` for the checkpoint at `path`."""
    return InputError(
        "CHECKPOINT_DAMAGED",
        f"the checkpoint is damaged: {what}",
        where=str(path),
        remedy="use another checkpoint of the run",
    )


def not_readable(path: Path, error: OSError) -> InputError:
    """Return the error for a file of a checkpoint that the system refuses to read."""
    return InputError(
        "CHECKPOINT_READ",
        f"the checkpoint cannot be read: {error.strerror or error}",
        where=str(path),
        remedy="check its permissions and the disk; nothing says that it is damaged",
    )
