"""What a person sees while a run trains: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Column

from gear_offline.core.progress import PLAIN_SECONDS, say
from gear_offline.runs.progress_bar import BarDisplay, flexible_bar

REDRAW_SECONDS = 0.1


class TrainingDisplay(BarDisplay):
    """Step, loss, speed, time left and last score of a run, on stderr.

    Parameters
    ----------
    name
        What is trained.
    steps, done
        Optimiser steps of the run, and those done before.
    quiet
        Show nothing.
    """

    def __init__(self, name: str, *, steps: int, done: int, quiet: bool) -> None:
        text = TextColumn("{task.description}")
        facts = TextColumn("{task.fields[facts]}", table_column=Column())  # these give way
        steps_done = MofNCompleteColumn(table_column=Column(no_wrap=True))
        columns = (text, flexible_bar(), steps_done, facts)
        super().__init__(name, *columns, total=steps, done=done, quiet=quiet)
        self._steps, self._first = steps, done
        self._started = self._drawn = self._printed = time.monotonic()
        self._busy_seconds = 0.0  # when it was last drawn: evaluations apart
        self._done = done
        self._loss: float | None = None
        self._score: str | None = None
        self._paused_seconds = 0.0

    def step(self, done: int) -> None:
        """Move the bar; cheap enough for every step."""
        if self._bar is None:
            return
        now = time.monotonic()
        if now - self._drawn >= REDRAW_SECONDS:
            self._mark(done, now)
            self._bar.update(self._task, completed=done, facts=self._facts())

    def log(self, done: int, loss: float) -> None:
        """Take the mean loss of the last steps; print a plain line when it is time."""
        self._loss = loss
        now = time.monotonic()
        last = done >= self._steps
        self._mark(done, now)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, facts=self._facts())
        elif last or now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            say(f"step {done:,} of {self._steps:,}  {self._facts()}", quiet=self._quiet)

    def evaluating(self, seconds: float | None = None) -> None:
        """Note that an evaluation begins, or that it took `seconds`."""
        if seconds is not None:
            self._paused_seconds += seconds
        if self._bar is not None:
            text = self._name if seconds is not None else f"{self._name}: evaluating"
            self._bar.update(self._task, description=text)

    def score(self, text: str) -> None:
        """Show the last evaluation."""
        self._score = text
        if self._bar is not None:  # no step may follow
            self._bar.update(self._task, facts=self._facts())

    def _mark(self, done: int, now: float) -> None:
        self._drawn, self._done = now, done
        self._busy_seconds = now - self._started - self._paused_seconds

    def _facts(self) -> str:
        done, busy = self._done, self._busy_seconds
        rate = (done - self._first) / busy if busy > 0 else 0.0
        facts = [f"{rate:,.1f} steps/s"] if done > self._first else []
        if self._loss is not None:
            facts.insert(0, f"loss {self._loss:.4g}")
        if rate > 0 and done < self._steps:
            facts.append(f"left {timedelta(seconds=round((self._steps - done) / rate))}")
        if self._score is not None:
            facts.append(self._score)
        return "  ".join(facts)
