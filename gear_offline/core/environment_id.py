"""Ids of Gymnasium environments, known or not."""

from __future__ import annotations

import re

from gear_offline.errors import InputError

# at most 200 characters of module:namespace/name-vN
_ID = re.compile(r"(?!.{201})(?:[\w.]+:)?(?:[\w:-]+/)?[\w:.-]+", re.ASCII)


def check_environment_id(name: str, *, where: str = "") -> None:
    """Refuse a text that cannot be the id of a Gymnasium environment."""
    if not _ID.fullmatch(name):
        what = f"{name[:60]!r} cannot be the id of a Gymnasium environment"
        raise InputError("ENVIRONMENT", what, where, "ids look like Hopper-v5 or namespace/Name-v0")
