"""Children that kill themselves inside a chosen call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def kill_in_call(number: int, calls: Mapping[Any, Sequence[str]]) -> None:
    """Make this process kill itself before the `number`-th of `calls`, functions by module."""
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


def begin(work: Callable[[], object]) -> int:
    """Do `work` in a forked child, whose exit status is 0 if it succeeds; return the child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def status_of(child: int) -> int:
    """Wait for a child; return its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
