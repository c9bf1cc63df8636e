"""The entry of the command line, which loads slow modules where Ctrl-C is caught."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from io import FileIO, TextIOWrapper
from typing import Any


class Messages(FileIO):
    """Standard error. A full disk under it, or a reader that has gone, ends no work."""

    def write(self, text: Any) -> int:
        try:
            return super().write(text)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for handle in (1, 2) if os.path.sameopenfile(1, 2) else (2,):  # what others print
                os.dup2(nowhere, handle)
            return len(text)


def open_streams() -> None:
    """Open the standard streams that the caller has closed: other files would get their places."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    if sys.stderr is sys.__stderr__:
        messages: Any = Messages(2, "w", closefd=False)
        encoding = getattr(sys.stderr, "encoding", "utf-8")  # as the terminal's locale has it
        sys.stderr = TextIOWrapper(messages, encoding, "backslashreplace", write_through=True)


def main() -> int:
    """Run the command line; returns the exit code (`sys.exit` is the caller's)."""
    open_streams()
    try:
        if reconfigure := getattr(sys.stdout, "reconfigure", None):
            reconfigure(errors="replace")  # a histogram's bars, names of files that are not UTF-8
        status = int(import_module("gear_offline.cli.main").main())
        if sys.stdout is sys.__stdout__:
            os.dup2(2, 1)  # what libraries print at exit is no result
        gc.freeze()  # else Python looks through all of torch at its end, which takes seconds
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells count


if __name__ == "__main__":
    sys.exit(main())
