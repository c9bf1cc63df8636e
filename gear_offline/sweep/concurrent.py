"""The trials of a sweep in one process: those of equal shapes stacked, the others on streams.

A group of runs, often of one, goes through the loop of `gear_offline.runs.loop`.  Groups take
turns: each launches a few steps at a time on a stream of its own.  A log line, a checkpoint or an
evaluation needs numbers of a group's runs on the host.  Until they are there, the host goes on with
the other groups, so that the GPU always has something to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.interruption import StopRequest
from gear_offline.core.system import torch_alone
from gear_offline.distributed.world import current
from gear_offline.errors import GearError
from gear_offline.loaders.options import recipe_sampler
from gear_offline.loaders.rows import MemoryRows
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.evaluations import Evaluator, Shared
from gear_offline.runs.loop import LiveRun, RunGroup, TrainingInterrupted, begin_run, run_settings
from gear_offline.runs.prepare import resolve, settle
from gear_offline.runs.run import Run
from gear_offline.sweep.jobs import Work, run_errors
from gear_offline.sweep.trials import Trial
from gear_offline.training.checkpoint import list_checkpoints
from gear_offline.training.stack import stack_key, why_not_stacked

CHUNK = 8  # steps of a stack that are launched in one turn
DEEP = 4  # turns of a stack on their way, at most
MOST_ON_A_GPU = 16  # by default: more runs need memory and are hardly faster
PAUSE_SECONDS = 0.002  # of the host when every run waits for something
MEMORY_SPARE = 1.25  # a further run begins if so many times what one takes is free


def train_concurrently(work: Work) -> None:
    """Train the trials together in this process; raise ``INTERRUPTED`` after Ctrl-C."""
    alone, shapes = torch_alone("a sweep", quiet=False), _many_shapes(work.trials, work.device)
    with alone, StopRequest() as stop, current(work.device), shapes:
        _Scheduler(work, stop).train(deque(stacks_of(work)))


def stacks_of(work: Work) -> Iterator[list[Trial]]:
    """Yield the trials of each stack: of one shape and step, in stacks of about one size."""
    alike, able = dict[str, list[Trial]](), dict[str, bool]()
    for trial in work.trials:
        key = stack_key(trial.recipe)
        known = f"{key} {trial.recipe.selection!r}"
        if known not in able:
            able[known] = work.parallel > 1 and not work.exact and _can_stack(trial.recipe, work)
        saved = list_checkpoints(work.folder / trial.name / "checkpoints")
        key = f"{key} {saved[-1][0] if saved else 0}" if able[known] else trial.name
        alike.setdefault(key, []).append(trial)
    for members in alike.values():
        size = -(-len(members) // -(-len(members) // work.parallel))
        for first in range(0, len(members), size):
            yield members[first : first + size]


def _can_stack(recipe: Recipe, work: Work) -> bool:
    dataset = work.datasets[recipe.data_key]
    try:
        resolved, sizes = resolve(recipe, dataset, quiet=True)
        learns = recipe_sampler(resolved, dataset).loss_sampler is not None
    except GearError:  # its own run tells of what is wrong
        return False
    return why_not_stacked(resolved, sizes, learns=learns) is None


@contextmanager
def _many_shapes(trials: Sequence[Trial], device: torch.device) -> Iterator[None]:
    """Let torch.compile keep a version of the step for each shape that there may be."""
    if device.type != "cuda" or all(trial.recipe.train.compile == "off" for trial in trials):
        yield
        return
    import torch._dynamo.config as dynamo

    patched: Any = dynamo
    with patched.patch(recompile_limit=max(8, 2 * len(trials))):
        yield


class _Scheduler:
    """Has groups of runs take turns until all trials have ended."""

    def __init__(self, work: Work, stop: StopRequest) -> None:
        self._work, self._stop = work, stop
        self._player = Evaluator()
        self._shared = Shared(stop=stop, runs=work.parallel, player=self._player)
        self._groups: list[_Group] = []
        self._kept = dict[int, Any]()  # tables that all trials read, also those to come

    def train(self, waiting: deque[list[Trial]]) -> None:
        """Train the trials that wait, a list a stack; what an interrupted run has done is saved."""
        try:
            while waiting or self._groups:
                if waiting and self._stop.signal_name is None and self._has_room(len(waiting[0])):
                    self._open(waiting.popleft())
                launched = [group.turn() for group in self._groups]
                self._groups = [group for group in self._groups if group.members]
                if self._stop.signal_name is not None and not self._groups:
                    what = f"stopped by {self._stop.signal_name}"
                    raise TrainingInterrupted("INTERRUPTED", what)
                for member in self._running():
                    self._work.moved(member.trial, member.run.learner.step)
                if not any(launched):
                    time.sleep(PAUSE_SECONDS)
        finally:
            for member in self._running():
                member.close()
            self._player.close()

    def _running(self) -> list[_OpenRun]:
        return [member for group in self._groups for member in group.members.values()]

    def _has_room(self, runs: int) -> bool:
        """Return true if so many runs more may begin, and the GPU has memory for them.

        Meanwhile up to as many may wait for their last evaluations.
        """
        members, device, most = self._running(), self._work.device, self._work.parallel
        running, training = len(members), sum(not member.run.is_complete for member in members)
        if (training and training + runs > most) or (running and running + runs > 2 * most):
            return False
        if device.type != "cuda" or not running:
            return True
        free, _ = torch.cuda.mem_get_info(device)
        return free > MEMORY_SPARE * runs * torch.cuda.memory_reserved(device) / running

    def _open(self, trials: list[Trial]) -> None:
        """Open the runs of a stack; a kill may have come when some had saved a step, others not."""
        at_step: dict[int, _Group] = {}
        for trial in trials:
            if self._stop.signal_name is not None:
                break
            try:
                with run_errors(trial.name, self._work.folder / trial.name, self._work.device):
                    member = _OpenRun.open(trial, self._work, self._shared)
            except GearError as error:
                self._work.end(trial, error)
            else:
                rows = member.run.learner.loader.rows
                if isinstance(rows, MemoryRows):
                    self._kept[id(rows.memory)] = rows.memory
                if (step := member.run.learner.step) not in at_step:
                    wait = self._wait_for_savers
                    at_step[step] = _Group(self._work, self._stop, wait, member.rng)
                    self._groups.append(at_step[step])
                at_step[step].add(member)

    def _wait_for_savers(self) -> None:
        """Before a capture: no thread that writes a checkpoint may use the GPU meanwhile."""
        for member in self._running():
            with suppress(Exception):  # it is raised again in its own run's turn
                member.run.saver.wait()


@dataclass(eq=False)
class _OpenRun:
    """A run among others, and what it holds."""

    trial: Trial
    run: LiveRun
    held: ExitStack
    rng: RngStream

    @classmethod
    def open(cls, trial: Trial, work: Work, shared: Shared) -> _OpenRun:
        """Open the run of a trial, or resume it."""
        path, rng = work.folder / trial.name, RngStream(work.device)
        recipe = settle(trial.recipe, path, work.device)
        with ExitStack() as held, rng.use(), run_settings(recipe):
            directory = held.enter_context(RunDirectory(path, resume=path.exists()))
            dataset = work.datasets[recipe.data_key]
            begun = begin_run(
                Run(path), directory, recipe, dataset, work.device, shared=shared, quiet=True
            )
            run = held.enter_context(begun)
            if work.device.type == "cuda":
                torch.cuda.synchronize(work.device)  # a table may be on its way for others
            return cls(trial, run, held.pop_all(), rng)

    def close(self) -> None:
        """Close the run; the error that came first is told, not one of closing what it left."""
        with suppress(GearError, OSError, RuntimeError), self.rng.use(), closing(self.run.learner):
            self.held.close()


class _Group(RunGroup):
    """Runs that share a stream and its random numbers; they are added before the first turn."""

    def __init__(
        self, work: Work, stop: StopRequest, before_capture: Callable[[], None], rng: RngStream
    ) -> None:
        super().__init__()
        self.members: dict[LiveRun, _OpenRun] = {}  # of `runs`
        self._work, self._stop, self._before_capture, self._rng = work, stop, before_capture, rng
        self._steps = self.train()

    def add(self, member: _OpenRun) -> None:
        self.members[member.run] = member
        self.runs.append(member.run)

    def turn(self) -> int:
        """Launch steps up to the first thing to wait for; return how many."""
        launched, recipe = 0, self.runs[0].learner.recipe
        if self._rng.pending() < DEEP:
            with self._rng.use(), run_settings(recipe):
                while launched < CHUNK and next(self._steps, False):
                    launched += 1
            self._rng.mark()
        return launched

    def advance(self) -> None:
        if (self.stack or self.runs[0].learner).will_capture:
            self._before_capture()
        elif self._work.device.type == "cuda":
            for run in self.runs:
                run.learner.window.launch()
        super().advance()

    def catch_up(self) -> Iterator[bool]:
        """Do what is due after the steps so far, when the GPU has done them."""
        if not any(run.due() for run in self.runs):
            return
        self._rng.mark()
        while self._rng.pending():
            yield False
        for run in self.runs:
            run.learner.window.landed()
        yield from self.each(self._stop_run if self._stop.signal_name else LiveRun.catch_up)
        if self._stop.signal_name is not None:  # it may have come between: all stop at one step
            yield from self.each(self._stop_run)

    def _stop_run(self, run: LiveRun) -> Iterator[bool]:
        if not run.learner.step:
            raise TrainingInterrupted("INTERRUPTED", "there is nothing to save yet")
        yield from run.catch_up()

    def finish(self, run: LiveRun) -> Iterator[bool]:
        yield from run.finish()
        self.members[run].held.close()
        self._end(run)

    @contextmanager
    def ending(self, *runs: LiveRun) -> Iterator[None]:
        try:
            with run_errors(runs[0].path.name, runs[0].path, self._work.device):
                yield
        except GearError as error:
            for run in runs:
                self._end(run, error)

    def _end(self, run: LiveRun, error: GearError | None = None) -> None:
        """Go on without a run; its place in a stack stays, what is computed there is not used."""
        self.runs.remove(run)
        member = self.members.pop(run)
        if self.stack is not None:
            self.stack.leave(run.learner)
        member.close()
        if not isinstance(error, TrainingInterrupted):
            self._work.end(member.trial, error)


class RngStream:
    """A CUDA stream and random numbers of its own: what a run among others works with.

    PyTorch has one default generator a device, which dropout draws from, and a captured CUDA graph
    reads the state that this generator had when it was captured.  So each run brings a state of its
    own, and draws what it would have drawn alone.  On a CPU there is no stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, torch.get_rng_state()
        self._stream: Any = None
        self._random: Any = None
        self._marks: deque[Any] = deque()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._random = torch.Generator(device)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let torch work on this stream with these random numbers."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._host)
        try:
            with self._on_device() if self._stream is not None else nullcontext():
                yield
        finally:
            self._host = torch.get_rng_state()
            torch.set_rng_state(before)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        default: Any = torch.cuda.default_generators[index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self._random)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            default.graphsafe_set_state(before)

    def mark(self) -> None:
        """Remember the end of what was launched so far."""
        if self._stream is not None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._marks.append(event)

    def pending(self) -> int:
        """Count the marks that the GPU has not reached."""
        while self._marks and self._marks[0].query():
            self._marks.popleft()
        return len(self._marks)
