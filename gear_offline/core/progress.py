"""Tables, and one line of progress that is drawn anew on a terminal.

Progress goes to stderr, so that stdout stays free for results and ``--json``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gear_offline.core.files import Closing
from gear_offline.core.text import count_text, printable, say, short, size_text
from gear_offline.errors import for_caller

PLAIN_SECONDS = 10.0  # between two plain lines
DRAWS_PER_SECOND = 5
UNBOUNDED = 10_000  # characters of a line where nobody sees its end
LEAST_BAR = 6  # characters
MOST_NAME = 26  # characters of a name that are not broken on a narrow terminal


class Terminal(Console):
    """A console that shows text as it is; in a file or a pipe its lines are not broken."""

    def __init__(self, *, width: int | None = None, **how: Any) -> None:
        super().__init__(width=width, **how)
        is_seen = self.is_terminal or self.is_jupyter or "COLUMNS" in os.environ
        self.width = self.width if width or is_seen else UNBOUNDED

    def render_str(
        self,
        text: str,
        *,
        style: str | Style = "",
        justify: Any = None,
        overflow: Any = None,
        **_: Any,
    ) -> Text:
        return Text(printable(text), style=style, justify=justify, overflow=overflow)


class Printed:
    """An object that Python shows as its `print` does."""

    def __repr__(self) -> str:
        text = StringIO()  # a notebook would show what is captured, too
        console = Terminal(width=100, color_system=None, file=text, force_jupyter=False)
        self.print(console=console)  # type: ignore[attr-defined]
        return text.getvalue().rstrip()

    __str__ = __repr__


def print_table(
    console: Terminal,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    names: Sequence[str] = (),
) -> None:
    """Print rows whose first column and `names` are text, which is broken where it is narrow."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    cells = [[printable(cell) for cell in row] for row in rows]
    columns = list(zip(headings, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_wide = sum(widths) + 2 * len(widths) > console.width
    for heading in headings:  # numbers stay whole
        text, first = heading.replace(" ", "\n") if is_wide else heading, not table.columns
        name, least = first or heading in names, min(widths[0], MOST_NAME) if first else None
        how: Any = {"justify": "left" if name else "right", "no_wrap": not name}
        table.add_column(Text(text), min_width=least, overflow="fold", **how)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


class Progress(Closing):
    """Shows how far some work is; a context manager.

    On a terminal that is one line, cut where the terminal ends.  Elsewhere a plain line is printed
    every ten seconds at most, and one at the end.  `done` of `total` units (0: nobody knows) were
    done before; a unit is in the plural, ``"bytes"`` are shown as sizes.
    """

    def __init__(
        self,
        description: str,
        *,
        total: int,
        unit: str = "steps",
        done: int = 0,
        quiet: bool = False,
    ) -> None:
        self.total, self._done, self._unit = total, done, unit
        self._description, self._quiet = printable(description), quiet
        self._doing, self._facts = "", dict[str, str]()
        self._before, self._paused_seconds = done, 0.0
        self._began = self._printed = time.monotonic()
        self._first, self._from, self._changed = done, self._began, self._began  # for the rate
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self.start()
        return self

    def start(self) -> None:
        """Show the line; `close` ends it."""
        if not self._quiet and sys.stderr is not None and sys.stderr.isatty():
            console = Terminal(stderr=True)
            self._live = Live(
                self, console=console, refresh_per_second=DRAWS_PER_SECOND, redirect_stdout=False
            )
            self._live.start()

    def update(self, done: int, **facts: str) -> None:
        """Show that `done` units are done, and `facts`, which stay; cheap enough for every step."""
        now = time.monotonic()
        if self._first == self._before != done:
            self._first, self._from, self._paused_seconds = done, now, 0.0
        self._done, self._changed = done, now
        self._facts.update(facts)
        is_due = now - self._printed >= PLAIN_SECONDS and done != self.total
        if self._live is None and is_due and not self._quiet:
            self._printed = now
            say("  ".join([f"{self._description}: {self._amount()}", *self._remarks()]))

    def advance(self, units: int = 1) -> None:
        """Show that so many more units are done."""
        self.update(self._done + units)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._live is not None:
            for text in for_caller(line).split("\n"):
                self._live.console.print(text, soft_wrap=True)
        else:
            say(line, quiet=self._quiet)

    @contextmanager
    def pause(self, doing: str) -> Iterator[None]:
        """Show that something else runs, whose time does not count for the rate."""
        began, self._doing = time.monotonic(), f", {doing}"
        if self._live is None:
            say(f"{self._description}: {self._amount()}{self._doing}", quiet=self._quiet)
        try:
            yield
        finally:
            now, self._doing = time.monotonic(), ""
            self._paused_seconds += now - began
            self._changed = now

    def close(self) -> None:
        """Leave the line as it stands; without a terminal print what was done, if anything."""
        if self._live is not None:
            self._live.stop()
        elif not self._quiet and self._done > self._before:
            seconds = time.monotonic() - self._began
            facts = [f"{name} {value}" for name, value in self._facts.items()]
            amount = self._text(self._done - self._before)
            say("  ".join([f"{self._description}: {amount} in {seconds:.1f} s", *facts]))
        self._live, self._quiet = None, True

    def _text(self, units: int) -> str:
        if self._unit == "bytes":
            return size_text(units)
        return count_text(units, self._unit.removesuffix("s"))

    def _amount(self) -> str:
        if not self.total:
            return self._text(self._done)
        if self._unit == "bytes":
            return f"{size_text(self._done)} of {size_text(self.total)}"
        return f"{self._done:,} of {self.total:,} {self._unit}"

    def _remarks(self) -> list[str]:
        """Return rate, time left and facts, in the order of their weight."""
        seconds = self._changed - self._from - self._paused_seconds
        rate = (self._done - self._first) / seconds if seconds > 0 else 0.0
        remarks = []
        if rate > 0:
            speed = size_text(int(rate)) if self._unit == "bytes" else f"{short(rate)} {self._unit}"
            if self._done < self.total:
                remaining = timedelta(seconds=round((self.total - self._done) / rate))
                remarks.append(f"{remaining} left")
            remarks.append(f"{speed}/s")
        return remarks + [f"{name} {value}" for name, value in self._facts.items()]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, line = options.max_width, Text(self._description + self._doing)
        text = "  ".join(["", self._amount(), *self._remarks()])
        bar = min(width // 5, width - len(line) - 2 - len(text))
        if bar >= LEAST_BAR:
            filled = round(bar * self._done / max(self.total, 1))
            line.append("  ").append("━" * filled, "blue").append("━" * (bar - filled), "dim")
        line.append(text)
        line.truncate(width, overflow="ellipsis")
        yield line
