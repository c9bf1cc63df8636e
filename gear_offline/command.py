"""Where the command line begins: Ctrl-C ends it with one line, also while modules still load."""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # loading typing takes as long as all that is loaded before Ctrl-C is handled
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED_BY_USER = 130  # 128 + SIGINT, as shells count
_HERE = os.path.dirname(__file__)


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
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
        signal.signal(signal.SIGINT, _interrupt)
    from gear_offline.cli import main as run

    code = run()
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, but end at once while a command loads what it runs.

    Nothing is open then, and libraries make another error of an exception amid their import, or
    pass over it.
    """
    if _is_loading(frame):
        os.write(2, b"error[INTERRUPTED]: stopped by the user\n")
        os._exit(INTERRUPTED_BY_USER)
    raise KeyboardInterrupt


def _is_loading(frame: FrameType | None) -> bool:
    """Return whether this module or one of the command line's is importing another."""
    name = ""
    while frame is not None:
        within, name = name, frame.f_code.co_filename
        folder, file = os.path.split(name)
        ours = folder == _HERE and (file == "command.py" or file.startswith("cli"))
        if ours and within.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
