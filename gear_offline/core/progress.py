"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere.

Everything goes to stderr, so that stdout stays free for results and ``--json``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gear_offline.core.text import count_text, printable, size_text

PLAIN_INTERVAL_SECONDS = 10.0


def say(message: str, *, quiet: bool = False) -> None:
    """Print one line of information to stderr unless `quiet`."""
    if not quiet:
        lines = map(printable, message.split("\n"))  # names of files are others' text
        print("\n".join(lines), file=sys.stderr, flush=True)


@contextmanager
def progress(
    total: int, description: str, *, unit: str = "steps", quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show the progress of `total` units of work; the body calls ``advance(n)``."""
    if quiet:
        yield lambda n: None
    elif sys.stderr.isatty():
        amounts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TextColumn(unit))
        if unit == "bytes":
            amounts = (DownloadColumn(binary_units=True),)
        name = TextColumn("{task.description}", markup=False)  # file names may hold [brackets]
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        columns = (name, BarColumn(), *amounts, *times)
        with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
            task = bar.add_task(printable(description), total=total)
            yield lambda n: bar.update(task, advance=n)
    else:
        yield from _plain_lines(total, description, unit)


def _plain_lines(total: int, description: str, unit: str) -> Iterator[Callable[[int], None]]:
    started = last = time.monotonic()
    done = 0

    def shown(amount: int) -> str:
        return size_text(amount) if unit == "bytes" else count_text(amount, unit[:-1])

    def advance(n: int) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= PLAIN_INTERVAL_SECONDS and done < total:
            last = now
            left = (now - started) / max(done, 1) * (total - done)
            say(f"{description}: {shown(done)} of {shown(total)}, about {left:.0f} s left")

    yield advance
    say(f"{description}: {shown(done)} in {time.monotonic() - started:.1f} s")
