"""Runs of a sweep that advance together as one stack: see `gear_offline.training.stack`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from gear_offline.distributed.world import current
from gear_offline.errors import GearError
from gear_offline.runs.errors import in_words
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sweep.lane import CHUNK, DEEP, Lane
from gear_offline.sweep.trials import Trial
from gear_offline.sweep.turns import PAUSE_SECONDS, Ended, Turns
from gear_offline.training.stack import Stack, stack_key

LARGEST = 16  # runs of one stack: more of them are hardly faster, see docs/sweeps.md


def in_groups(points: Sequence[Trial], most: int) -> Iterator[list[Trial]]:
    """Yield points that can be stacked, in stacks of about the same size; the order stays in them.

    Parameters
    ----------
    most
        Points of a stack.
    """
    kinds: dict[str, list[Trial]] = {}
    for point in points:
        kinds.setdefault(stack_key(point.recipe), []).append(point)
    for alike in kinds.values():
        size = -(-len(alike) // -(-len(alike) // most))
        rest = iter(alike)
        while group := list(islice(rest, size)):
            yield group


class StackTurns(Turns):
    """Runs the points of a sweep in one process, in stacks that take turns.

    The runs of a stack look at their numbers after the same steps; meanwhile the GPU does those of
    other stacks.  Where a run fails it ends alone; its place in the stack stays, and what is
    computed there is not used.
    """

    def complete(self, points: Sequence[Trial], ended: Ended) -> None:
        """As `Turns.complete`."""
        self._ended = ended
        self._lanes = []  # every group brings its own
        groups = deque(in_groups(points, min(self._parallel, LARGEST)))
        turns: list[tuple[int, Iterator[bool]]] = []
        with self._stop, current(self._device), self._many_shapes(points):
            try:
                while groups or turns:
                    while groups and len(groups[0]) <= self._parallel - sum(n for n, _ in turns):
                        group = groups.popleft()
                        turns.append((len(group), self._complete_group(group)))
                    moved = [next(turn, None) for _, turn in turns]
                    turns = [t for t, m in zip(turns, moved, strict=True) if m is not None]
                    self._stop_if_asked()
                    if not any(m is not False for m in moved):
                        time.sleep(PAUSE_SECONDS)
            finally:
                for lane in self._busy():
                    self._abandon(lane)

    def _complete_group(self, points: Sequence[Trial]) -> Iterator[bool]:
        """Run points of one `stack_key` to their end; yield whether anything moved."""
        mine = []
        for point in points:
            lane = Lane(self._device)
            self._lanes.append(lane)
            try:
                with in_words(point.name, self._place(point), self._device):
                    self._open(lane, point)
                mine.append(lane)
            except GearError as error:
                self._ended(point, error)
            yield True
        # a kill may have come when some had saved a step and others had not
        mine.sort(key=lambda lane: lane.run.learner.step)
        for _, lanes in groupby(mine, key=lambda lane: lane.run.learner.step):
            yield from self._complete_stack(list(lanes))
        self._lanes = self._busy()

    def _complete_stack(self, lanes: list[Lane]) -> Iterator[bool]:
        """Do all steps of runs that have done as many."""
        try:
            with in_words(_point(lanes[0]).name, lanes[0].run.path, self._device):
                for lane in lanes:  # all draw from the random numbers of the first one
                    lane.track = lanes[0].track
                with lanes[0].alone():
                    stack = Stack([lane.run.learner for lane in lanes])
                while (there := _there(lanes)) and not there[0].run.is_done:
                    yield from self._advance(stack, lanes, there[0].run.steps_to_look)
                    yield from self._look(stack, lanes)
        except TrainingInterrupted:
            raise
        except GearError as error:  # of all together
            for lane in _there(lanes):
                name = _point(lane).name
                self._fail(lane, GearError(error.code, error.what, where=name, remedy=error.remedy))
        for lane in _there(lanes):
            yield from self._finish(lane)

    def _advance(self, stack: Stack, lanes: list[Lane], steps: int) -> Iterator[bool]:
        """Launch steps, a few at a time, until the GPU has done them."""
        if stack.will_capture:
            self._settle_saves()
            with _there(lanes)[0].alone():
                stack.prepare()
        marks = deque[Any]()
        if stack.is_captured:
            for lane in _there(lanes):
                lane.begin_window()
        for first in range(0, steps, CHUNK):
            there = _there(lanes)
            if not there:
                return
            with there[0].track.launching() if stack.is_captured else there[0].alone():
                for _ in range(min(CHUNK, steps - first)):
                    for number, error in stack.advance().items():
                        self._fail(lanes[number], error)
            marks.append(there[0].track.mark())
            for lane in _there(lanes):
                self._display.step(_point(lane).name, lane.run.learner.step)
            yield True
            while len(marks) > DEEP:
                yield _is_past(marks)
        while marks:
            yield _is_past(marks)

    def _look(self, stack: Stack, lanes: list[Lane]) -> Iterator[bool]:
        """Log, evaluate and save, whatever is due after the step that was done last."""
        for number, lane in enumerate(lanes):
            if lane.point is None:
                continue
            try:
                with in_words(lane.point.name, lane.run.path, self._device):
                    while lane.run.must_wait:
                        lane.run.poll()
                        yield False
                    lane.count_time()
                    with lane.alone():
                        lane.run.look()
            except TrainingInterrupted:  # it has saved; the others follow
                self._abandon(lane)
            except GearError as error:
                stack.leave(number)
                self._fail(lane, error)
            yield True

    def _finish(self, lane: Lane) -> Iterator[bool]:
        point = _point(lane)
        try:
            with in_words(point.name, lane.run.path, self._device):
                while not lane.run.is_settled:
                    lane.run.poll()
                    yield False
                with lane.alone():
                    lane.run.finish()
        except TrainingInterrupted:
            raise
        except GearError as error:
            self._fail(lane, error)
            return
        lane.release()
        self._display.step(point.name, point.recipe.train.steps)
        self._ended(point, None)
        yield True

    def _stop_if_asked(self) -> None:
        if self._stop.signal_name is not None:
            self._interrupt()

    def _fail(self, lane: Lane, error: GearError) -> None:
        point = _point(lane)
        self._abandon(lane)
        self._ended(point, error)


def _there(lanes: Sequence[Lane]) -> list[Lane]:
    """Return those whose runs have not ended."""
    return [lane for lane in lanes if lane.point is not None]


def _point(lane: Lane) -> Trial:
    assert lane.point is not None, "a busy lane"
    return lane.point


def _is_past(marks: deque[Any]) -> bool:
    """Take away the oldest mark if the GPU is past it; return whether it was."""
    past = marks[0] is None or bool(marks[0].query())
    if past:
        marks.popleft()
    return past
