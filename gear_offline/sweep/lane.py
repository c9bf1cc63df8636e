"""One run of those that take turns in a process: it advances a few steps at a time.

Where the host needs the run's numbers it comes back later, when they are there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gear_offline.runs.leading_run import LeadingRun
from gear_offline.sweep.track import Track
from gear_offline.sweep.trials import Trial
from gear_offline.training.seeding import deterministic, torch_threads

CHUNK = 8  # steps of a run that are launched together
DEEP = 4  # chunks of a run on their way, at most


class TurnRun(LeadingRun):
    """A run that advances a few steps at a time, beside others."""

    _open = False

    def begin(self) -> None:
        """Take over the newest checkpoint, open the files, do what a kill left undone."""
        self._restore()
        self._begin()
        self._open = True
        if self.learner.step > 0:
            self._look(self.learner.step)

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.learner.step >= self.settings.steps

    @property
    def steps_to_look(self) -> int:
        """Steps until the host has to look at the run's numbers."""
        step, settings = self.learner.step, self.settings
        nexts = [settings.steps]
        for every in (settings.log_every, settings.checkpoint_every, settings.evaluate_every):
            if every is not None:
                nexts.append(step - step % every + every)
        return min(nexts) - step

    def look(self) -> None:
        """Log, evaluate, save and stop, whatever is due after the step that was done last."""
        self._look(self.learner.step)

    @property
    def must_wait(self) -> bool:
        """Whether an evaluation is due and none can begin before another is done."""
        step = self.learner.step
        return (
            self._evaluation_due(step)
            and self.evaluations.is_full
            and not self.metrics.evaluated(step)
            and step not in self.evaluations.outstanding
        )

    @property
    def is_settled(self) -> bool:
        """Whether no evaluation is under way."""
        return not self.evaluations.outstanding

    def poll(self) -> None:
        """Record the evaluations that have come in."""
        self.saves.check()
        if self.evaluations.collect():
            self.saves.prune(self._what_stays())

    def finish(self) -> None:
        """Close the files of a run that is done, and sum it up."""
        self._finish()
        self.abandon()
        self._sum_up()

    def abandon(self) -> None:
        """Close what is open; can be repeated."""
        if self._open:
            self._open = False
            self._end()
            self.learner.close()


class Lane:
    """Where one run at a time trains; another follows when it has ended.

    Parameters
    ----------
    device
        Where to train.
    """

    def __init__(self, device: torch.device) -> None:
        self.track = Track(device)
        self.point: Trial | None = None
        self._marks: deque[Any] = deque()
        self._looking = False
        self._launched_seconds = 0.0
        self._window_began: float | None = None

    def start(self, point: Trial, run: TurnRun, held: ExitStack) -> None:
        """Take a run that has begun; `held` is closed when it ends."""
        self.point, self.run, self._held = point, run, held
        self._marks.clear()
        self._looking, self._window_began = run.is_done, None

    def release(self) -> None:
        """Let go of the run."""
        self._held.close()
        self.point = None
        del self.run
        self._marks.clear()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let torch work for this run, for anything that it does."""
        settings = self.run.settings
        with (
            self.track.alone(),
            torch_threads(settings.threads),
            deterministic(settings.deterministic),
        ):
            yield

    @property
    def will_capture(self) -> bool:
        """Whether the next step is captured as a CUDA graph before it is replayed."""
        learner = self.run.learner
        return not learner.graph_reason and not learner.is_captured

    @property
    def is_finished(self) -> bool:
        """Whether only the sum is left to do."""
        run = self.run
        return run.is_done and not self._looking and not self._marks and run.is_settled

    def turn(self) -> bool:
        """Launch steps, or look at the numbers if they are there; return whether it did.

        Raises
        ------
        GearError
            Of the run.
        """
        while self._marks and _reached(self._marks[0]):
            self._marks.popleft()
        if self._looking:
            if self._marks:
                return False
            if self.run.must_wait:
                self.run.poll()
                return False
            self.count_time()
            with self.alone():
                self.run.look()
            self._looking = False
            return True
        if self.run.is_done:
            self.run.poll()
            return False
        if len(self._marks) >= DEEP:
            return False
        self._launch()
        return True

    def _launch(self) -> None:
        run, began = self.run, time.perf_counter()
        self.begin_window()
        to_look = run.steps_to_look
        steps = min(CHUNK, to_look)
        simple = run.learner.is_captured
        with self.track.launching() if simple else self.alone():
            for _ in range(steps):
                run.learner.advance()
        mark = self.track.mark()
        if mark is not None:
            self._marks.append(mark)
        self._looking = steps == to_look
        self._launched_seconds += time.perf_counter() - began

    def begin_window(self) -> None:
        """Count the time from now on as that of steps, all of it."""
        if self._window_began is None:
            self._window_began, self._launched_seconds = time.perf_counter(), 0.0

    def count_time(self) -> None:
        """Tell the learner of the time in which its steps ran and it was not asked."""
        if self._window_began is not None and self.track.stream is not None:
            whole = time.perf_counter() - self._window_began
            self.run.learner.count_busy(max(0.0, whole - self._launched_seconds))
        self._window_began = None


def _reached(mark: Any) -> bool:
    return bool(mark.query())
