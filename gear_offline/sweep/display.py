"""What a person sees while a sweep runs: one bar for all runs, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import timedelta

from rich.progress import TextColumn

from gear_offline.core.progress import PLAIN_SECONDS, say
from gear_offline.runs.progress_bar import BarDisplay, flexible_bar

REDRAW_SECONDS = 0.2


class SweepDisplay(BarDisplay):
    """Runs done, optimiser steps of all runs, their rate and the time left, on stderr.

    Parameters
    ----------
    name
        Of the sweep.
    runs
        Steps of each run, by name.
    quiet
        Show nothing.
    bar
        Show a bar on a terminal; not where each run shows its own.
    """

    def __init__(self, name: str, runs: dict[str, int], *, quiet: bool, bar: bool = True) -> None:
        total = sum(runs.values())
        columns = (
            TextColumn("{task.description}"),
            flexible_bar(),
            TextColumn("{task.fields[facts]}"),
        )
        super().__init__(name, *columns, total=total, bar=bar, quiet=quiet)
        self._wanted = dict(runs)
        self._done = dict.fromkeys(runs, 0)
        self._ended: set[str] = set()
        self._first: int | None = None
        self._began = self._drawn = self._printed = time.monotonic()

    def begin(self, done: dict[str, int], *, complete: Collection[str] = ()) -> None:
        """Begin to measure; runs that went on from before have `done` steps."""
        self._done.update(done)
        self._ended.update(complete)
        self._first = sum(self._done.values())
        self._began = time.monotonic()
        self._draw()

    def step(self, name: str, done: int) -> None:
        """Note where a run stands; cheap enough for every few steps."""
        self._done[name] = min(done, self._wanted[name])
        now = time.monotonic()
        if self._bar is not None:
            if now - self._drawn >= REDRAW_SECONDS:
                self._draw()
        elif now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            say(f"{self._name}: {self.facts()}", quiet=self._quiet)

    def end(self, name: str, text: str) -> None:
        """Note that a run has ended, and say how."""
        self._ended.add(name)
        self._wanted[name] = self._done[name]  # one that failed does no more
        self.say(f"{name}: {text} ({len(self._ended)} of {len(self._wanted)} runs)")
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._bar is not None:
            self._bar.update(
                self._task,
                total=sum(self._wanted.values()),
                completed=sum(self._done.values()),
                facts=self.facts(),
            )

    def facts(self) -> str:
        """Return runs and steps done, rate and time left, as text."""
        done, wanted = sum(self._done.values()), sum(self._wanted.values())
        parts = [
            f"{len(self._ended)} of {len(self._wanted)} runs",
            f"{done:,} of {wanted:,} steps",
        ]
        seconds = time.monotonic() - self._began
        new = done - (self._first or 0)
        if new > 0 and seconds > 0:
            parts.append(f"{new / seconds:,.0f} steps/s")
            if done < wanted:
                left = timedelta(seconds=round((wanted - done) * seconds / new))
                parts.append(f"left {left}")
        return "  ".join(parts)
