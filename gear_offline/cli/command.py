"""Where the command line begins: what takes long to load is loaded where Ctrl-C is caught."""

from __future__ import annotations

import os
import sys

INTERRUPTED_BY_USER = 130  # 128 + SIGINT, as shells count


def main() -> int:
    """Run the command line; returns the exit code (`sys.exit` is the caller's)."""
    try:
        _prepare_streams()
        from gear_offline.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_BY_USER


def _prepare_streams() -> None:
    """Give closed streams (``>&-``) a place that leads nowhere; print any letter.

    Else the next file that is opened would be the standard output, and get what is printed there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")  # a histogram's bars, names of files that are not UTF-8
