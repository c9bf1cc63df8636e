"""What a killed program may leave on a machine besides files: shared memory, processes."""

from __future__ import annotations

import time
from pathlib import Path


def shared_memory() -> set[str]:
    """Return the names of our shared memory and semaphores on this machine."""
    return {str(path) for path in Path("/dev/shm").glob("*gear*") if path.is_file()}


def session_processes(session: int) -> list[int]:
    """Return the live processes of a session; zombies wait for whoever adopted them."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            processes.append(int(path.parent.name))
    return processes


def wait_until_gone(session: int, *, seconds: float = 30.0) -> bool:
    """Return whether all processes of a session end within `seconds`."""
    deadline = time.monotonic() + seconds
    while session_processes(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
