"""What our worker processes have in common."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel (Linux) kill this worker when its parent, process `parent`, is gone.

    The workers of a killed program would stay: each waits for a pipe that the others keep open.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)


@contextmanager
def interrupts_kept_from_children() -> Iterator[None]:
    """Block SIGINT in this thread, and so in processes that it starts, from their first moment.

    Ctrl-C goes to them as well, and would end them with a traceback while they import.  In this
    process it waits for the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_interrupts_end_this() -> None:
    """Let Ctrl-C end this process without a word, which was started as above."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
