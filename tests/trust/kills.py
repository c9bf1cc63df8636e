"""Children that kill themselves inside a chosen call, and what a killed program leaves behind."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Calls = Mapping[Any, Sequence[str]]  # functions by module


def kill_in_call(number: int, calls: Calls) -> None:
    """Make this process kill itself before the `number`-th of `calls`."""
    count = 0

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    for module, names in calls.items():
        for name in names:
            setattr(module, name, deadly(getattr(module, name)))


def begin(work: Callable[[], object], calls: Calls, *, kill_at: int = 0) -> int:
    """Do `work` in a forked child, whose exit status is 0 if it succeeds; return the child.

    It kills itself before the `kill_at`-th of `calls`; 0: it does not.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if kill_at:
                kill_in_call(kill_at, calls)
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def status_of(child: int) -> int:
    """Wait for a child; return its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish(began: float, broken: Sequence[str], **figures: Any) -> int:
    """Print the document of a program that began then; return its exit status."""
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({**figures, "seconds": seconds, "broken": list(broken)}, indent=1))
    return 1 if broken else 0


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


def is_gone(pid: int, *, seconds: float = 30.0) -> bool:
    """Return whether a process ends within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def wait_until_gone(session: int, *, seconds: float = 30.0) -> bool:
    """Return whether all processes of a session end within `seconds`."""
    deadline = time.monotonic() + seconds
    while session_processes(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
