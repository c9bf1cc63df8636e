"""What our worker processes have in common."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, process `parent`, is gone.

    To be called by the worker.  Otherwise the workers of a program that is killed stay: each waits
    for a pipe that the others keep open.  Linux only; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)
