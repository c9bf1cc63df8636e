"""What the programs share: options, children that kill themselves, what a killed one leaves."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

Calls = Mapping[Any, Sequence[str]]  # functions by module
Judged = tuple[dict[str, Any], list[str]]  # figures, broken promises


def program(
    text: str | None, judge: Callable[[argparse.Namespace, Path], Judged], **defaults: Any
) -> NoReturn:
    """Do ``judge(options, folder)``; print what it found as one JSON document, and exit."""
    parser = argparse.ArgumentParser(description=text)
    for name, value in defaults.items():
        kind: dict[str, Any] = {"action": "store_true"} if value is False else {"type": type(value)}
        if isinstance(value, list):
            kind = {"type": int, "nargs": "*"}
        parser.add_argument(f"--{name.replace('_', '-')}", default=value, **kind)
    options, before, began = parser.parse_args(), shared_memory(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gear-trust-") as folder:
        figures, broken = judge(options, Path(folder))
    broken += sorted(shared_memory() - before)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({**figures, "seconds": seconds, "broken": broken}, indent=1))
    sys.exit(1 if broken else 0)


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


def shared_memory() -> set[str]:
    """Return the names of our shared memory and semaphores on this machine."""
    return {str(path) for path in Path("/dev/shm").glob("*gear*") if path.is_file()}


def is_gone(number: int, *, session: bool = False, seconds: float = 30.0) -> bool:
    """Return whether a process, or all of a session, end in time; zombies are gone."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        files = Path("/proc").glob("[0-9]*/stat" if session else f"{number}/stat")
        states = [_after_name(file) for file in files]
        if not any(s and s[0] != "Z" and (not session or int(s[3]) == number) for s in states):
            return True
        time.sleep(0.01)
    return False


def _after_name(file: Path) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, nothing of a process that is gone."""
    try:
        return file.read_text().rpartition(")")[2].split()
    except OSError:
        return []
