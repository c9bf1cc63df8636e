"""What a killed program may leave on a machine besides files: memory, semaphores, processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def system_objects() -> dict[str, Any]:
    """Return named shared memory and semaphores of this machine."""
    # Folders there are somebody's TMPDIR; shared memory and semaphores are files.
    files = [entry.name for entry in os.scandir("/dev/shm") if entry.is_file()]
    found: dict[str, Any] = {"/dev/shm": sorted(files)}
    for kind in ("shm", "sem", "msg"):
        path = Path("/proc/sysvipc") / kind
        if path.exists():
            found[f"System V {kind}"] = len(path.read_text().splitlines()) - 1
    return found


def new_objects(before: dict[str, Any], *, prefix: str = "gear") -> list[str]:
    """Return what is there now and was not in `before`; other programs' /dev/shm names are not."""
    now = system_objects()
    names = set(now.pop("/dev/shm")) - set(before["/dev/shm"])
    ours = [f"/dev/shm/{name}" for name in sorted(names) if prefix in name]
    return ours + [
        f"{key}: {value - before[key]} more" for key, value in now.items() if value > before[key]
    ]


def session_processes(session: int) -> list[int]:
    """Return the live processes of a session; zombies wait for whoever adopted them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def wait_until_gone(session: int, *, seconds: float = 30.0) -> bool:
    """Return whether all processes of a session end within `seconds`."""
    deadline = time.monotonic() + seconds
    while session_processes(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
