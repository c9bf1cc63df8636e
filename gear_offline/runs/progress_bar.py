"""A bar of a person's own terminal, with lines above it; plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn
from rich.table import Column

from gear_offline.core.closing import Closing
from gear_offline.core.progress import say

ROOM_FOR_BAR = 80  # columns of a terminal; on a narrower one the numbers need all of them


def flexible_bar() -> BarColumn:
    """Return a bar that gives way to the columns beside it, so that their line is not broken."""
    return BarColumn(bar_width=None, table_column=Column(ratio=1))


class BarDisplay(Closing):
    """Shows one bar on stderr if that is a terminal; a context manager.

    Parameters
    ----------
    name
        Stands before the bar.
    columns
        Of the bar, which takes the room that the others leave.
    total, done
        Where it ends and begins.
    bar
        Whether there is to be one.
    quiet
        Say nothing at all.
    """

    def __init__(
        self,
        name: str,
        *columns: ProgressColumn,
        total: int,
        done: int = 0,
        bar: bool = True,
        quiet: bool,
    ) -> None:
        self._name, self._quiet = name, quiet
        self._bar: Progress | None = None
        if bar and not quiet and sys.stderr.isatty():
            console = Console(stderr=True)
            wide = console.width >= ROOM_FOR_BAR
            shown = [c for c in columns if wide or not isinstance(c, BarColumn)]
            self._bar = Progress(*shown, console=console, expand=wide)
            self._task = self._bar.add_task(name, total=total, completed=done, facts="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def close(self) -> None:
        """Leave the bar as it stands; may be called again."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            say(message, quiet=self._quiet)
