"""The entry of the command line, which loads slow modules where Ctrl-C is caught."""

from __future__ import annotations

import os
import sys
from importlib import import_module

INTERRUPTED_BY_USER = 130  # 128 + SIGINT, as shells count


def main() -> int:
    """Run the command line; returns the exit code (`sys.exit` is the caller's)."""
    try:
        if reconfigure := getattr(sys.stdout, "reconfigure", None):
            reconfigure(errors="replace")  # a histogram's bars, names of files that are not UTF-8
        status = int(import_module("gear_offline.cli.main").main())
        if sys.stdout is not None and sys.stdout is sys.__stdout__:
            os.dup2(2, 1)  # what libraries print at exit is no result
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_BY_USER


if __name__ == "__main__":
    sys.exit(main())
