"""Several runs in one process that take turns: on a GPU their steps overlap.

Each run has a stream and random numbers of its own and launches a few steps at a time.  Where the
host needs a run's numbers (a log line, a checkpoint, an evaluation) it leaves that run until they
are there and goes on with the others, so that the GPU always has something to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.interruption import StopRequest
from gear_offline.distributed.world import current
from gear_offline.errors import GearError
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.errors import in_words
from gear_offline.runs.preparation import resolve
from gear_offline.runs.trainer import check_resumed
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sweep.lane import Lane, TurnRun
from gear_offline.sweep.trials import Trial
from gear_offline.tables.joint import TableData
from gear_offline.tables.shared import SharedTables
from gear_offline.training.learner import Learner
from gear_offline.training.seeding import deterministic, torch_threads

Ended = Callable[[Trial, GearError | None], None]

PAUSE_SECONDS = 0.002  # of the host when every run waits for something
MEMORY_SPARE = 1.25  # a further run begins if so many times what one takes is free


class Turns:
    """Runs the points of a sweep in one process.

    Parameters
    ----------
    device
        Where to train.
    parallel
        Runs at a time.
    share
        Gives a run's recipe its share of the machine.
    prepare
        Gives the dataset of a recipe, opened and checked.
    place
        Gives the run directory of a point.
    display
        Is told where runs stand.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        parallel: int,
        share: Callable[[Recipe], Recipe] = lambda recipe: recipe,
        prepare: Callable[[Recipe], TableData],
        place: Callable[[Trial], Path],
        display: Any,
    ) -> None:
        self._device, self._prepare, self._place = device, prepare, place
        self._share, self._display = share, display
        self._parallel = parallel
        self._lanes = [Lane(device) for _ in range(parallel)]
        self._tables = SharedTables()
        self._stop = StopRequest()

    def complete(self, points: Sequence[Trial], ended: Ended) -> None:
        """Run all points; `ended` is told of each how it ended.

        Raises
        ------
        TrainingInterrupted
            ``TRAIN_INTERRUPTED`` after Ctrl-C or SIGTERM; what the runs have done is saved.
        Exception
            Of a GPU that does nothing more for this process, see `gear_offline.runs.errors`.
        """
        waiting = deque(points)
        self._ended = ended
        with self._stop, current(self._device), self._many_shapes(points):
            try:
                while waiting or self._busy():
                    self._admit(waiting)
                    moved = [self._turn(lane) for lane in self._busy()]
                    if self._stop.signal_name is not None:
                        self._interrupt()
                    if not any(moved):
                        time.sleep(PAUSE_SECONDS)
            finally:
                for lane in self._busy():
                    self._abandon(lane)

    def _busy(self) -> list[Lane]:
        return [lane for lane in self._lanes if lane.point is not None]

    def _admit(self, waiting: deque[Trial]) -> None:
        """Begin one run, if there is a lane and memory; the one before is captured by then."""
        lane = next((lane for lane in self._lanes if lane.point is None), None)
        if not waiting or lane is None or not self._has_room():
            return
        point = waiting.popleft()
        try:
            with in_words(point.name, self._place(point), self._device):
                self._open(lane, point)
        except GearError as error:
            self._ended(point, error)

    def _has_room(self) -> bool:
        """Return whether the GPU has more memory left than the runs on it take each."""
        running = len(self._busy())
        if self._device.type != "cuda" or not running:
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        return free > MEMORY_SPARE * torch.cuda.memory_reserved(self._device) / running

    def _open(self, lane: Lane, point: Trial) -> None:
        path = self._place(point)
        lane.track.renew()
        with ExitStack() as stack:
            directory = stack.enter_context(RunDirectory(path, resume=path.exists()))
            dataset = self._prepare(point.recipe)
            recipe, sizes = resolve(self._share(point.recipe), dataset, quiet=True)
            check_resumed(path, recipe)
            threads = torch_threads(recipe.train.threads)
            with lane.track.alone(), threads, deterministic(recipe.train.deterministic):
                torch.manual_seed(recipe.seed)
                learner = Learner(recipe, sizes, dataset, self._device, tables=self._tables)
                run = TurnRun(directory, learner, dataset, quiet=True)
                run.stop, run.neighbours = self._stop, self._parallel
                try:
                    run.begin()
                except BaseException:
                    run.abandon()
                    raise
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # a table may be on its way for others
            lane.start(point, run, stack.pop_all())
        self._display.step(point.name, learner.step)

    def _turn(self, lane: Lane) -> bool:
        point = lane.point
        assert point is not None, "a busy lane"
        before = lane.run.learner.step
        try:
            with in_words(point.name, lane.run.path, self._device):
                if lane.will_capture:
                    self._settle_saves()
                moved = lane.turn()
                if lane.is_finished:
                    with lane.alone():
                        lane.run.finish()
                    lane.release()
                    self._display.step(point.name, point.recipe.train.steps)
                    self._ended(point, None)
                    return True
        except TrainingInterrupted:  # it has saved; the others follow
            self._abandon(lane)
            return True
        except GearError as error:
            self._abandon(lane)
            self._ended(point, error)
            return True
        if lane.run.learner.step != before:
            self._display.step(point.name, lane.run.learner.step)
        return moved

    def _settle_saves(self) -> None:
        """Wait for the threads that write checkpoints: none may use the GPU during a capture."""
        for lane in self._busy():
            with suppress(Exception):  # it is raised again in its own run's turn
                lane.run.saves.wait()

    def _interrupt(self) -> None:
        """Save a checkpoint of every run."""
        for lane in self._busy():
            assert lane.point is not None, "a busy lane"
            try:
                with in_words(lane.point.name, lane.run.path, self._device):
                    lane.count_time()
                    if lane.run.learner.step:  # before the first step there is nothing to save
                        with lane.alone():
                            lane.run.look()
            except TrainingInterrupted:
                pass  # as it should be
            except GearError as error:
                self._ended(lane.point, error)
            self._abandon(lane)
        raise TrainingInterrupted("TRAIN_INTERRUPTED", f"stopped by {self._stop.signal_name}")

    def _abandon(self, lane: Lane) -> None:
        """Give up a run; the error that came first is told, not one of closing what it left."""
        try:
            with suppress(GearError, OSError, RuntimeError), lane.alone():
                lane.run.abandon()
        finally:
            lane.release()

    @contextmanager
    def _many_shapes(self, points: Sequence[Trial]) -> Iterator[None]:
        """Let torch.compile keep a version of the step for each shape that there may be."""
        compiled = any(point.recipe.train.compile != "off" for point in points)
        if self._device.type != "cuda" or not compiled:
            yield
            return
        import torch._dynamo.config as dynamo

        patched: Any = dynamo
        with patched.patch(recompile_limit=max(8, 2 * len(points))):
            yield
