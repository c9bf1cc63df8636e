"""Where the command line begins: Ctrl-C ends it with one line, also while modules still load."""

from __future__ import annotations

import atexit
import os
import sys

# Until Ctrl-C is handled it ends in a traceback: nothing is loaded before that takes long, as
# typing and enum do, which signal loads for the names of its numbers.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal

INTERRUPTED_BY_USER = 130  # 128 + SIGINT, as shells count
_HERE = os.path.dirname(__file__)
_AGAIN_SECONDS, _MOST_TRIES = 0.05, 100
_tries = 0


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
    _open_closed_streams()
    handle_interrupts()
    _print_any_letter()
    from gear_offline.cli.main import main as run

    code = run()
    return code


def _open_closed_streams() -> None:
    """Let what is closed, as by ``>&-``, lead nowhere.

    Python has no ``sys.stdout`` then, and the next file that is opened gets the number 1: what a
    library prints would go into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _print_any_letter() -> None:
    """Let results be printed whatever letters the terminal has, as the bars of a histogram.

    A letter that the encoding lacks would end the command amid its result, a name of a file that
    is not UTF-8 likewise; the one becomes a question mark, the other the bytes that it has.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and sys.stdout.errors == "strict":
        utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        reconfigure(errors="surrogateescape" if utf8 else "replace")


def handle_interrupts() -> None:
    """From here on Ctrl-C ends this process as a command is ended."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, where it is not lost.

    Libraries make another error of an exception amid their import, or pass over it.  While a
    command loads what it runs nothing is open, and the process ends at once; later, and where
    objects are given back, the exception waits, for 5 seconds at most.
    """
    global _tries
    if _is_loading(frame):
        os.write(2, b"error[INTERRUPTED]: stopped by the user\n")
        os._exit(INTERRUPTED_BY_USER)
    if _would_be_lost(frame) and _tries < _MOST_TRIES:
        _tries += 1
        signal.signal(signal.SIGALRM, _again)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        return
    _tries = 0
    raise KeyboardInterrupt


def _again(number: int, frame: FrameType | None) -> None:
    """Interrupt once more, as is the custom by then: training saves first."""
    signal.raise_signal(signal.SIGINT)


def _would_be_lost(frame: FrameType | None) -> bool:
    """Return whether a module is being imported, or an object given back."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _is_loading(frame: FrameType | None) -> bool:
    """Return whether this module or one of the command line's is importing another."""
    name = ""
    while frame is not None:
        within, name = name, frame.f_code.co_filename
        folder = os.path.dirname(name)
        if folder == _HERE and within.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
