"""Runs of a sweep that advance together as one stack: see `gear_offline.stack`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import torch

from gear_offline.errors import GearError
from gear_offline.stack import Stack, stack_key
from gear_offline.sweep_lane import CHUNK, DEEP, Lane
from gear_offline.sweep_points import SweepPoint
from gear_offline.sweep_track import Track
from gear_offline.sweep_turns import PAUSE_SECONDS, Ended, Turns, in_words
from gear_offline.training_run import TrainingInterrupted
from gear_offline.world import current


def in_groups(points: Sequence[SweepPoint], most: int) -> Iterator[list[SweepPoint]]:
    """Yield points that can be stacked, at most so many together; the order stays within them."""
    kinds: dict[str, list[SweepPoint]] = {}
    for point in points:
        kinds.setdefault(stack_key(point.recipe), []).append(point)
    for alike in kinds.values():
        rest = iter(alike)
        while group := list(islice(rest, most)):
            yield group


class StackTurns(Turns):
    """Runs the points of a sweep in one process, as many at a time as one step takes together.

    The runs of a stack look at their numbers after the same steps.  Where one fails it ends alone;
    its place in the stack stays, and what is computed there is not used.
    """

    def complete(self, points: Sequence[SweepPoint], ended: Ended) -> None:
        """As `Turns.complete`."""
        self._ended = ended
        with self._stop, current(self._device), self._many_shapes(points):
            for group in in_groups(points, len(self._lanes)):
                self._complete_group(group)

    def _complete_group(self, points: Sequence[SweepPoint]) -> None:
        """Run points of one `stack_key` to their end."""
        track = Track(self._device)
        for lane in self._lanes:
            lane.track = track
        try:
            for lane, point in zip(self._lanes, points, strict=False):
                try:
                    with in_words(point, self._place(point)):
                        self._open(lane, point)
                except GearError as error:
                    self._ended(point, error)
            self._begin_random(track)
            # a kill may have come when some had saved a step and others had not
            busy = sorted(self._busy(), key=lambda lane: lane.run.learner.step)
            for _, lanes in groupby(busy, key=lambda lane: lane.run.learner.step):
                self._complete_stack(list(lanes))
        finally:
            for lane in self._busy():
                self._abandon(lane)

    def _begin_random(self, track: Track) -> None:
        """Let a group that begins draw from the seed of its first run."""
        learners = [lane.run.learner for lane in self._busy()]
        if learners and all(learner.step == 0 for learner in learners):
            with track.alone():
                torch.manual_seed(learners[0].recipe.seed)

    def _complete_stack(self, lanes: list[Lane]) -> None:
        """Do all steps of runs that have done as many."""
        try:
            with in_words(_point(lanes[0]), lanes[0].run.path):
                with lanes[0].alone():
                    stack = Stack([lane.run.learner for lane in lanes])
                while (there := _there(lanes)) and not there[0].run.is_done:
                    self._advance(stack, lanes, there[0].run.steps_to_look)
                    self._look(stack, lanes)
        except TrainingInterrupted:
            raise
        except GearError as error:  # of all together
            for lane in _there(lanes):
                self._fail(lane, error)
        for lane in _there(lanes):
            self._finish(lane)

    def _advance(self, stack: Stack, lanes: list[Lane], steps: int) -> None:
        """Launch steps, a few at a time, until the GPU has done them."""
        began, marks = time.perf_counter(), deque[Any]()
        for first in range(0, steps, CHUNK):
            there = _there(lanes)
            if not there:
                return
            if stack.will_capture:
                self._settle_saves()
            with there[0].track.launching() if stack.is_captured else there[0].alone():
                for _ in range(min(CHUNK, steps - first)):
                    for number, error in stack.advance().items():
                        self._fail(lanes[number], error)
            marks.append(there[0].track.mark())
            if len(marks) > DEEP:
                _wait(marks.popleft())
            for lane in _there(lanes):
                self._display.step(_point(lane).name, lane.run.learner.step)
            self._stop_if_asked()
        for mark in marks:
            _wait(mark)
        if stack.is_captured:
            for lane in _there(lanes):
                lane.run.learner.count_busy(time.perf_counter() - began)

    def _look(self, stack: Stack, lanes: list[Lane]) -> None:
        """Log, evaluate and save, whatever is due after the step that was done last."""
        for number, lane in enumerate(lanes):
            if lane.point is None:
                continue
            try:
                with in_words(lane.point, lane.run.path):
                    while lane.run.must_wait:
                        self._pause(lane)
                    with lane.alone():
                        lane.run.look()
            except TrainingInterrupted:  # it has saved; the others follow
                self._abandon(lane)
            except GearError as error:
                stack.leave(number)
                self._fail(lane, error)
        self._stop_if_asked()

    def _finish(self, lane: Lane) -> None:
        point = _point(lane)
        try:
            with in_words(point, lane.run.path):
                while not lane.run.is_settled:
                    self._pause(lane)
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

    def _pause(self, lane: Lane) -> None:
        lane.run.poll()
        self._stop_if_asked()
        time.sleep(PAUSE_SECONDS)

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


def _point(lane: Lane) -> SweepPoint:
    assert lane.point is not None, "a busy lane"
    return lane.point


def _wait(mark: Any) -> None:
    if mark is not None:
        mark.synchronize()
