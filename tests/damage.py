"""Ways to damage a file."""

from __future__ import annotations

import os
from pathlib import Path

DAMAGE = (
    *("first bit", "middle bit", "last bit", "truncated", "half", "empty", "longer", "zeros"),
    *("missing", "a folder", "a pipe", "a link to nothing"),
)


def damage(path: Path, kind: str) -> None:
    """Damage one file in the way of that name."""
    whole = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "a folder":
        path.unlink()
        path.mkdir()
    elif kind == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "a link to nothing":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        changed = bytearray(whole)
        place = {"first bit": 0, "middle bit": len(whole) // 2, "last bit": -1}.get(kind)
        if place is not None:
            changed[place] ^= 1
        cuts = {"truncated": whole[:-7], "half": whole[: len(whole) // 2], "empty": b""}
        longer = b"\0" if kind == "longer" else b""
        content = cuts.get(kind, bytes(changed) + longer)
        path.write_bytes(b"\0" * len(whole) if kind == "zeros" else content)
