"""The trials of a sweep in one process: those of equal shapes stacked, the others on streams.

Runs take turns: each launches a few steps at a time on a stream of its own.  Where the host needs a
run's numbers (a log line, a checkpoint, an evaluation) it leaves that run until they are there and
goes on with the others, so that the GPU always has something to do.  Runs of a stack share one
step, and one stream; a stream is a stack of one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.interruption import StopRequest
from gear_offline.distributed.world import current
from gear_offline.errors import GearError
from gear_offline.loaders.recipes import recipe_sampler
from gear_offline.runs.callbacks import Callbacks
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.loop import LiveRun, TrainingInterrupted, check_resumed
from gear_offline.runs.prepare import resolve
from gear_offline.runs.run import Run
from gear_offline.runs.trackers import trackings
from gear_offline.runs.writer import RunWriter
from gear_offline.sweep.jobs import Job, run_errors
from gear_offline.sweep.trials import Trial
from gear_offline.tables.shared import SharedTables
from gear_offline.training.learner import Learner
from gear_offline.training.seeding import deterministic, torch_threads
from gear_offline.training.stack import Stack, stack_key, why_not_stacked

CHUNK = 8  # steps of a run that are launched in one turn
DEEP = 4  # turns of a run on their way, at most
LARGEST_STACK = 16  # more runs need memory and are hardly faster
PAUSE_SECONDS = 0.002  # of the host when every run waits for something
MEMORY_SPARE = 1.25  # a further run begins if so many times what one takes is free


def train_concurrently(job: Job) -> None:
    """Train the trials together in this process; raise ``INTERRUPTED`` after Ctrl-C."""
    waiting, scheduler = deque(_groups(job)), _Scheduler(job)
    with scheduler.stop, current(job.device), _many_shapes(job.trials, job.device):
        scheduler.complete(waiting)


def _groups(job: Job) -> Iterator[list[Trial]]:
    """Yield the trials that make one stack, in stacks of about the same size."""
    most = min(job.parallel, LARGEST_STACK)
    alike: dict[str, list[Trial]] = {}
    for trial in job.trials:
        alike.setdefault(stack_key(trial.recipe), []).append(trial)
    for members in alike.values():
        size = 1
        if not job.exact and len(members) > 1 and _can_stack(members[0].recipe, job):
            size = -(-len(members) // -(-len(members) // most))
        for first in range(0, len(members), size):
            yield members[first : first + size]


def _can_stack(recipe: Recipe, job: Job) -> bool:
    if why_not_stacked(recipe, learns=False):
        return False
    try:
        dataset = job.dataset(recipe)
        resolved, sizes = resolve(recipe, dataset, quiet=True)
        learns = recipe_sampler(resolved, dataset).loss_sampler is not None
    except GearError:  # its own run tells of what is wrong
        return False
    return not why_not_stacked(resolved, sizes, learns=learns)


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

    def event(self) -> Any:
        """Return an event behind everything launched so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


@dataclass(eq=False)
class _Member:
    """A run among others, and what it holds."""

    trial: Trial
    run: LiveRun
    held: ExitStack
    rng: RngStream
    first_step: int
    # from `_Group`: True before each step, False where the run has to wait
    steps: Iterator[bool] = field(default_factory=lambda: iter(()))
    is_at_step: bool = False  # it has done all that the steps so far ask for
    taken: int = 0  # steps, of those that its stack has done
    window_began: float | None = None  # since when its steps run, ...
    launched_seconds: float = 0.0  # ... and how much of that its learner has counted itself

    @property
    def writer(self) -> RunWriter:
        assert self.run.writer is not None, "a sweep has one rank"
        return self.run.writer


class _GroupStop(StopRequest):
    """The scheduler's request as a group sees it: all its runs stop after the same step."""

    def __init__(self, whole: StopRequest) -> None:
        super().__init__()
        self._whole = whole

    def look(self) -> None:
        """Take over a request that has come meanwhile."""
        self.signal_name = self._whole.signal_name

    @contextmanager
    def abortable(self) -> Iterator[None]:
        with self._whole.abortable():
            yield


class _Group:
    """Runs that share a stream, its random numbers and, if they are several, one step."""

    def __init__(self, members: list[_Member], stop: _GroupStop) -> None:
        self.members, self.stop = members, stop
        self.done: list[_Member] = []  # their evaluations may be under way
        self._rng, self._learners = members[0].rng, [member.run.learner for member in members]
        self._settings = members[0].run.learner.recipe.train
        self._events: deque[Any] = deque()
        self._is_marked, self._stack = True, self._stacked()
        self._launched, self._failures = 0, dict[int, GearError]()
        for member in members:
            member.run.stop = stop
            member.steps = self._steps(member)

    def _stacked(self) -> Stack | None:
        if len(self._learners) == 1:
            return None
        with self.work():
            return Stack(self._learners)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Let torch work for these runs."""
        threads, kernels = self._settings.threads, self._settings.deterministic
        with self._rng.use(), torch_threads(threads), deterministic(kernels):
            yield

    @property
    def will_capture(self) -> bool:
        """Whether the next step is captured as a CUDA graph before it is replayed."""
        if self._stack is not None:
            return self._stack.will_capture
        return self._learners[0].will_capture

    def leave(self, member: _Member) -> None:
        """Go on without a run; its place in a stack stays, what is computed there is not used."""
        self.members.remove(member)
        if self._stack is not None:
            self._stack.leave(self._learners.index(member.run.learner))

    def turn(self) -> list[tuple[_Member, GearError]]:
        """Launch steps and look at numbers that are there; return the runs that failed.

        Ends at the first thing that is to be waited for, and before a capture.
        """
        failed: list[tuple[_Member, GearError]] = []
        self._drop_passed()
        if len(self._events) >= DEEP:
            return failed
        self.stop.look()
        with self.work():
            for _ in range(CHUNK):
                for member in [member for member in self.members if not member.is_at_step]:
                    try:
                        with _errors_of(member):
                            answer = next(member.steps, None)
                    except GearError as error:
                        self.leave(member)
                        failed.append((member, error))
                        continue
                    if answer is None:
                        self.members.remove(member)
                        self.done.append(member)
                    member.is_at_step = bool(answer)
                if not all(member.is_at_step for member in self.members):
                    break
                for member in self.members:
                    member.is_at_step = False
                if self.will_capture:  # when no checkpoint is being written
                    break
        self._mark()
        return failed

    def _steps(self, member: _Member) -> Iterator[bool]:
        """Do what is left of a run; yield True before each step, False while it has to wait."""
        run = member.run
        while True:
            while run.due() and not self._is_ready(member):
                yield False
            run.catch_up()
            if run.is_complete:
                return
            yield True
            self._advance(member)
            run.note_step()

    def _advance(self, member: _Member) -> None:
        """Do a step of one run: the first one that asks launches it for all."""
        learner, began = member.run.learner, time.perf_counter()
        if member.window_began is None:
            member.window_began, member.launched_seconds = began, 0.0
        self._is_marked = False
        if self._stack is None:
            learner.advance()
        else:
            if member.taken == self._launched:
                self._failures = self._stack.advance()
                self._launched += 1
            member.taken += 1
            if (error := self._failures.get(self._learners.index(learner))) is not None:
                raise error
            if self._stack.is_captured:
                return
        member.launched_seconds += time.perf_counter() - began

    def _is_ready(self, member: _Member) -> bool:
        """Whether the GPU has done the steps so far, and an evaluation that is due can begin."""
        self._mark()
        self._drop_passed()
        step = member.run.learner.step
        if member.run.due().evaluation and member.writer.evaluations.must_wait(step):
            member.writer.evaluations.collect()
            return False
        if self._events:
            return False
        if member.window_began is not None and member.run.learner.device.type == "cuda":
            whole = time.perf_counter() - member.window_began
            window = member.run.learner.window
            window.busy_seconds += max(0.0, whole - member.launched_seconds)
        member.window_began = None
        return True

    def _mark(self) -> None:
        """Remember the end of what was launched."""
        if not self._is_marked and (event := self._rng.event()) is not None:
            self._events.append(event)
        self._is_marked = True

    def _drop_passed(self) -> None:
        while self._events and self._events[0].query():
            self._events.popleft()


def _errors_of(member: _Member) -> AbstractContextManager[None]:
    run = member.run
    return run_errors(member.trial.name, run.path, run.learner.device)


class _Scheduler:
    """Has groups take turns until all trials have ended."""

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, job.device
        self._tables, self.stop = SharedTables(), StopRequest()
        self._groups: list[_Group] = []

    def complete(self, waiting: deque[list[Trial]]) -> None:
        """Run all trials; ``INTERRUPTED`` after Ctrl-C, what the runs have done is saved."""
        try:
            while waiting or self._groups:
                if waiting and self.stop.signal_name is None and self._has_room(len(waiting[0])):
                    self._open_group(waiting.popleft())
                before = [(member, member.run.learner.step) for member in self._running()]
                for group in list(self._groups):
                    self._turn(group)
                if self.stop.signal_name is not None:
                    self._abandon_idle()
                    if not self._groups:
                        what = f"stopped by {self.stop.signal_name}"
                        raise TrainingInterrupted("INTERRUPTED", what)
                after = [(member, member.run.learner.step) for member in self._running()]
                for member, step in after:
                    self._job.moved(member.trial, step)
                if before == after:
                    time.sleep(PAUSE_SECONDS)
        finally:
            for member in self._running():
                self._release(member)

    def _running(self) -> list[_Member]:
        return [m for group in self._groups for m in (*group.members, *group.done)]

    def _has_room(self, runs: int) -> bool:
        """Return whether so many runs more may begin, and the GPU has memory for them."""
        running = len(self._running())
        if running and running + runs > self._job.parallel:
            return False
        if self._device.type != "cuda" or not running:
            return True
        free, _ = torch.cuda.mem_get_info(self._device)
        each = torch.cuda.memory_reserved(self._device) / running
        return free > MEMORY_SPARE * runs * each

    def _open_group(self, trials: list[Trial]) -> None:
        """Open the runs of a stack, and begin with those that stand at the same step."""
        opened: list[_Member] = []
        try:
            for trial in trials:
                if self.stop.signal_name is not None:  # they have nothing to save
                    return
                try:
                    with run_errors(trial.name, self._job.folder / trial.name, self._device):
                        opened.append(self._open(trial))
                except GearError as error:
                    self._job.end(trial, error)
            opened.sort(key=lambda member: member.first_step)
            # a kill may have come when some had saved a step and others had not
            for _, members in groupby(list(opened), key=lambda member: member.first_step):
                together = list(members)
                opened = opened[len(together) :]
                self._begin(together)
        finally:
            for member in opened:
                self._release(member)

    def _begin(self, members: list[_Member]) -> None:
        try:
            with _errors_of(members[0]):
                self._groups.append(_Group(members, _GroupStop(self.stop)))
        except GearError as error:
            for member in members:
                self._release(member)
            for member in members:
                self._job.end(member.trial, error)

    def _open(self, trial: Trial) -> _Member:
        path, rng = self._job.folder / trial.name, RngStream(self._device)
        with ExitStack() as stack:
            directory = stack.enter_context(RunDirectory(path, resume=path.exists()))
            dataset = self._job.dataset(trial.recipe)
            recipe, sizes = resolve(trial.recipe, dataset, quiet=True)
            check_resumed(path, recipe)
            threads, kernels = recipe.train.threads, recipe.train.deterministic
            with rng.use(), torch_threads(threads), deterministic(kernels):
                torch.manual_seed(recipe.seed)
                learner = Learner(recipe, sizes, dataset, self._device, tables=self._tables)
                told = stack.enter_context(Callbacks(Run(path), trackings(recipe.train)))
                runs = self._job.parallel
                run = LiveRun(directory, learner, self.stop, told, quiet=True, concurrent_runs=runs)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # a table may be on its way for others
            return _Member(trial, run, stack.pop_all(), rng, first_step=learner.step)

    def _turn(self, group: _Group) -> None:
        if group.will_capture:  # no thread that writes a checkpoint may use the GPU meanwhile
            for member in self._running():
                with suppress(Exception):  # it is raised again in its own run's turn
                    member.run.saver.wait()
        failed = group.turn()
        for member, _ in failed:
            self._release(member)
        for member, error in failed:
            if not isinstance(error, TrainingInterrupted):
                self._job.end(member.trial, error)
        for member in list(group.done):
            self._finish(group, member)
        if not group.members and not group.done:
            self._groups.remove(group)

    def _finish(self, group: _Group, member: _Member) -> None:
        """Sum up a run whose steps are done, when its evaluations are there."""
        error = None
        try:
            with _errors_of(member):
                member.run.saver.check()
                member.writer.evaluations.collect()
                if member.writer.evaluations.outstanding:
                    return
                with group.work():
                    member.run.finish()
                    member.run.close()
                    member.run.sum_up()
        except GearError as caught:
            error = caught
        group.done.remove(member)
        self._release(member)
        if not isinstance(error, TrainingInterrupted):
            self._job.moved(member.trial, member.run.learner.step)
            self._job.end(member.trial, error)

    def _abandon_idle(self) -> None:
        """After a request to stop: give up runs that have nothing new to save."""
        for group in list(self._groups):
            for member in list(group.members):
                if member.run.learner.step == member.first_step:
                    group.leave(member)
                    self._release(member)
            for member in group.done:
                self._release(member)
            group.done.clear()
            if not group.members:
                self._groups.remove(group)

    def _release(self, member: _Member) -> None:
        """Close a run; the error that came first is told, not one of closing what it left."""
        try:
            with suppress(GearError, OSError, RuntimeError), member.rng.use():
                member.run.close()
                member.run.learner.close()
        finally:
            member.held.close()
