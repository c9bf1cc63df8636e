"""How far a comparison is, and how long it will take: all runs and all judgements together.

It looks at the runs' own files, so it does not matter who trains them.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gear_offline.analysis.judge import Judges
from gear_offline.analysis.plan import TrainingPlan
from gear_offline.core.closing import Closing
from gear_offline.core.progress import PLAIN_SECONDS, say

LOOK_SECONDS = 1.0
TAIL_BYTES = 4096  # holds the last line of a run's metrics


def last_step(metrics: Path) -> int:
    """Return the step of the last whole line of a run's ``metrics.jsonl``; 0 without one."""
    import json

    try:
        with open(metrics, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


class Outlook(Closing):
    """A line, or a bar on a terminal, of what is done and what is left.

    Parameters
    ----------
    plan
        What is to be done.
    judges
        Who count what they have done.
    beside
        Whether policies are played while runs train.
    quiet
        Show nothing.

    Attributes
    ----------
    found
        Steps and judgements that were there at the beginning.
    """

    def __init__(self, plan: TrainingPlan, judges: Judges, *, beside: bool, quiet: bool) -> None:
        self._plan, self._judges, self._beside, self._quiet = plan, judges, beside, quiet
        self._steps = len(plan.points) * plan.recipe.train.steps
        self._sittings = len(plan.points) * len(plan.marks)
        self._began = self._printed = time.monotonic()
        self._first_steps = self._trained()
        self._trained_at: float | None = None  # when training was over
        self.found = self._first_steps + len(judges.done)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._bar: Progress | None = None
        self._said = ""

    def _trained(self) -> int:
        most = self._plan.recipe.train.steps
        return sum(min(most, last_step(p.path / "metrics.jsonl")) for p in self._plan.points)

    def line(self) -> str:
        """Return where things stand, with the time left where it can be told."""
        steps, sittings = self._trained(), len(self._judges.done)
        now = time.monotonic()
        if steps >= self._steps and self._trained_at is None:
            self._trained_at = now
        busy = (self._trained_at or now) - self._began
        rate = (steps - self._first_steps) / busy if busy > 0 else 0.0
        words = [
            f"{steps:,} of {self._steps:,} steps",
            f"{sittings:,} of {self._sittings:,} policies played",
        ]
        if rate > 0 and steps < self._steps:
            words.insert(1, f"{rate:,.0f} steps/s")
        left = self.seconds_left(rate, steps)
        if left is not None and (steps < self._steps or sittings < self._sittings):
            words.append(f"about {timedelta(seconds=round(left))} left")
        return ", ".join(words)

    def seconds_left(self, rate: float, steps: int) -> float | None:
        """Return the seconds left at `rate` steps a second; None while nothing is known."""
        if steps < self._steps and rate <= 0:
            return None
        training = (self._steps - steps) / rate if steps < self._steps else 0.0
        playing = self._playing_left()
        if playing is None:
            return None
        return max(training, playing) if self._beside else training + playing

    def _playing_left(self) -> float | None:
        """Return the seconds of playing that are left, by the time that an episode took."""
        plan, done = self._plan, dict(self._judges.done)
        whole = len(plan.points) * sum(plan.episodes(mark) for mark in plan.marks)
        played = sum(plan.episodes(step) for _, step in done)
        measured = [(plan.episodes(step), seconds) for (_, step), seconds in done.items()]
        timed = [(episodes, seconds) for episodes, seconds in measured if seconds > 0]
        if played == whole:
            return 0.0
        if not timed:
            return None
        each = sum(s for _, s in timed) / max(1, sum(e for e, _ in timed))
        return (whole - played) * each / max(1, self._judges.jobs)

    def __enter__(self) -> Self:
        if self._quiet:
            return self
        if sys.stderr.isatty():
            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("steps and policies  {task.fields[facts]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            total = self._steps + self._sittings
            self._task = self._bar.add_task("", total=total, facts="")
        self._thread = threading.Thread(target=self._show, name="outlook", daemon=True)
        self._thread.start()
        return self

    def _show(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._draw()

    def _draw(self) -> None:
        if self._bar is not None:
            done = self._trained() + len(self._judges.done)
            self._bar.update(self._task, completed=done, facts=self.line())
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            self._say()

    def _say(self) -> None:
        """Print where things stand, unless that was the last thing said."""
        line = self.line()
        if line != self._said:
            self._said = line
            say(line)

    def close(self) -> None:
        """Show the end, once, if anything was shown."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        if self._bar is not None:
            self._draw()
            self._bar.stop()
        else:
            self._say()
