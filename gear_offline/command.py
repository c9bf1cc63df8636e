"""Where the command line begins: Ctrl-C ends it with one line, also while modules still load."""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # loading typing takes as long as all that is loaded before Ctrl-C is handled
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

INTERRUPTED_BY_USER = 130  # 128 + SIGINT, as shells count


def main() -> int:
    """Load and run the command line; returns the exit code (`sys.exit` is the caller's)."""
    code = 0

    def end() -> None:
        if code == INTERRUPTED_BY_USER:
            # Python ends by the signal, and by other words, if the interrupt met code that it
            # compiles while it runs, as that of a dataclass
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    atexit.register(end)  # first in, so that it runs after what other modules register
    before = signal.getsignal(signal.SIGINT)
    quiet = before is signal.default_int_handler  # not where the caller ignores it, as nohup does
    if quiet:
        signal.signal(signal.SIGINT, _stop)
    from gear_offline.cli import main as run

    if quiet:
        signal.signal(signal.SIGINT, before)
    code = run()
    return code


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End at once: nothing is open yet, and an exception amid an import tells of that import."""
    os.write(2, b"error[INTERRUPTED]: stopped by the user\n")
    os._exit(INTERRUPTED_BY_USER)
