"""Ids of Gymnasium environments, known or not."""

from __future__ import annotations

import re

from gear_offline.errors import InputError

_ID = re.compile(r"(?:[\w.]+:)?(?:[\w:-]+/)?[\w:.-]+", re.ASCII)  # module:namespace/name-vN
_MAX_CHARS = 200


def check_environment_id(name: str, *, where: str = "") -> None:
    """Refuse a text that cannot be the id of a Gymnasium environment."""
    if len(name) > _MAX_CHARS or not _ID.fullmatch(name):
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise InputError(
            "ENVIRONMENT",
            f"{shown!r} cannot be the id of a Gymnasium environment",
            where=where,
            remedy="ids look like Hopper-v5 or namespace/Name-v0",
        )
