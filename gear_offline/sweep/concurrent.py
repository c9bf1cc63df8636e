"""The trials of a sweep in one process: those of equal shapes stacked, the others on streams.

Stacks take turns: each launches a few steps at a time on a stream of its own.  Where the host needs
the numbers of a stack's runs (a log line, a checkpoint, an evaluation) it leaves that stack until
they are there and goes on with the others, so that the GPU always has something to do.  A run that
is like no other is a stack of one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.interruption import StopRequest
from gear_offline.distributed.world import current
from gear_offline.errors import GearError
from gear_offline.loaders.recipes import recipe_sampler
from gear_offline.runs.callbacks import Callbacks
from gear_offline.runs.directory import RunDirectory, check_resumed
from gear_offline.runs.loop import LiveRun, TrainingInterrupted
from gear_offline.runs.prepare import resolve
from gear_offline.runs.run import Run
from gear_offline.runs.trackers import trackings
from gear_offline.sweep.jobs import Job, run_errors
from gear_offline.sweep.trials import Trial
from gear_offline.tables.shared import SharedTables
from gear_offline.training.learner import Learner
from gear_offline.training.seeding import deterministic, torch_threads
from gear_offline.training.stack import Stack, stack_key, why_not_stacked

CHUNK = 8  # steps of a stack that are launched in one turn
DEEP = 4  # turns of a stack on their way, at most
MOST_ON_A_GPU = 16  # by default, and in a stack: more runs need memory and are hardly faster
PAUSE_SECONDS = 0.002  # of the host when every run waits for something
MEMORY_SPARE = 1.25  # a further run begins if so many times what one takes is free


def train_concurrently(job: Job) -> None:
    """Train the trials together in this process; raise ``INTERRUPTED`` after Ctrl-C."""
    scheduler = _Scheduler(job)
    with scheduler.stop, current(job.device), _many_shapes(job.trials, job.device):
        scheduler.train(deque(_alike(job)))


def _alike(job: Job) -> Iterator[list[Trial]]:
    """Yield the trials that make one stack, in stacks of about the same size."""
    most = min(job.parallel, MOST_ON_A_GPU)
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


class _Scheduler:
    """Has groups of runs take turns until all trials have ended."""

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, job.device
        self._tables, self.stop = SharedTables(), StopRequest()
        self._groups: list[_Group] = []

    def train(self, waiting: deque[list[Trial]]) -> None:
        """Train the trials that wait, a list a stack; what an interrupted run has done is saved."""
        try:
            while waiting or self._groups:
                if waiting and self.stop.signal_name is None and self._has_room(len(waiting[0])):
                    self._open_groups(waiting.popleft())
                launched = [group.turn() for group in self._groups]
                self._groups = [group for group in self._groups if group.members]
                if self.stop.signal_name is not None and not self._groups:
                    what = f"stopped by {self.stop.signal_name}"
                    raise TrainingInterrupted("INTERRUPTED", what)
                for member in self._running():
                    self._job.moved(member.trial, member.run.learner.step)
                if not any(launched):
                    time.sleep(PAUSE_SECONDS)
        finally:
            for member in self._running():
                member.close()

    def _running(self) -> list[_Member]:
        return [member for group in self._groups for member in group.members]

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

    def _open_groups(self, trials: list[Trial]) -> None:
        """Open the runs of a stack; a kill may have come when some had saved a step, others not."""
        at_step: dict[int, _Group] = {}
        for trial in trials:
            if self.stop.signal_name is not None:
                return
            try:
                with run_errors(trial.name, self._job.folder / trial.name, self._device):
                    member = self._open(trial)
            except GearError as error:
                self._job.end(trial, error)
                continue
            if (group := at_step.get(member.first_step)) is not None:
                group.members.append(member)
            else:
                group = _Group(member, self._job, self.stop, self._wait_for_savers)
                at_step[member.first_step] = group
                self._groups.append(group)

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

    def _wait_for_savers(self) -> None:
        """Before a capture: no thread that writes a checkpoint may use the GPU meanwhile."""
        for member in self._running():
            with suppress(Exception):  # it is raised again in its own run's turn
                member.run.saver.wait()


@dataclass(eq=False)
class _Member:
    """A run among others, and what it holds."""

    trial: Trial
    run: LiveRun
    held: ExitStack
    rng: RngStream
    first_step: int

    def close(self) -> None:
        """Close the run; the error that came first is told, not one of closing what it left."""
        with suppress(GearError, OSError, RuntimeError), self.held, self.rng.use():
            self.run.close()
            self.run.learner.close()


class _GroupStop(StopRequest):
    """The scheduler's request as a group sees it: all its runs stop after the same step."""

    def __init__(self, whole: StopRequest) -> None:
        super().__init__()
        self.whole = whole

    def look(self) -> None:
        """Take over a request that has come meanwhile."""
        self.signal_name = self.whole.signal_name

    @contextmanager
    def abortable(self) -> Iterator[None]:
        with self.whole.abortable():
            yield


class _Group:
    """Runs that share a stream, its random numbers and, if they are several, one step.

    `members` are those that go on: appended before the first turn, left out when they end.
    """

    def __init__(
        self, first: _Member, job: Job, stop: StopRequest, before_capture: Callable[[], None]
    ) -> None:
        self.members, self._rng = [first], first.rng
        self._job, self._stop, self._before_capture = job, _GroupStop(stop), before_capture
        self._settings = first.run.learner.recipe.train
        self._steps = self._train()
        self._stack: Stack | None = None
        self._stacked: list[_Member] = []
        self._window_began: float | None = None  # since when steps run, ...
        self._counted_seconds = 0.0  # ... and how much of that learners have counted themselves

    def turn(self) -> int:
        """Launch steps up to the first thing to wait for; return how many."""
        launched, threads, kernels = 0, self._settings.threads, self._settings.deterministic
        if self._rng.pending() < DEEP:
            with self._rng.use(), torch_threads(threads), deterministic(kernels):
                while launched < CHUNK and next(self._steps, False):
                    launched += 1
            self._rng.mark()
        return launched

    def _train(self) -> Iterator[bool]:
        """Train the runs to their ends: yield True after each step, False where they wait."""
        for member in self.members:
            member.run.stop = self._stop
        if len(self.members) > 1:
            self._stacked = list(self.members)
            with self._ending(*self._stacked):
                self._stack = Stack([member.run.learner for member in self._stacked])
        while True:
            self._stop.look()
            if any(member.run.due() for member in self.members):
                self._rng.mark()
                while self._rng.pending():
                    yield False
                self._count_window()
            yield from self._each(self._catch_up)
            if all(member.run.is_complete for member in self.members):
                break
            self._advance()
            yield True
        yield from self._each(self._finish)

    def _each(self, act: Callable[[_Member], bool]) -> Iterator[bool]:
        """Have every run do something; while some answer that they cannot yet, yield False."""
        left = list(self.members)
        while left:
            for member in list(left):
                is_done = True  # also if it ends
                with self._ending(member):
                    is_done = act(member)
                if is_done:
                    left.remove(member)
            if left:
                yield False

    def _catch_up(self, member: _Member) -> bool:
        """Log, evaluate, save and stop after the steps so far, once an evaluation can begin."""
        run, step = member.run, member.run.learner.step
        if self._stop.signal_name is not None and step == member.first_step:
            raise TrainingInterrupted("INTERRUPTED", "there is nothing new to save")
        assert run.writer is not None, "a sweep has one rank"
        if run.due().evaluation and run.writer.evaluations.must_wait(step):
            run.writer.evaluations.collect()
            return False
        run.catch_up()
        return True

    def _advance(self) -> None:
        """Launch the next step of all runs."""
        stack, learner, failures = self._stack, self.members[0].run.learner, dict[int, GearError]()
        if (stack or learner).will_capture:
            self._before_capture()
        began = time.perf_counter()
        if self._window_began is None:
            self._window_began, self._counted_seconds = began, 0.0
        with self._ending(*self.members):
            if stack is None:
                learner.advance()
            else:
                failures = stack.advance()
        if stack is None or not stack.is_captured:
            self._counted_seconds += time.perf_counter() - began
        for number, error in failures.items():
            self._end(self._stacked[number], error)
        for member in list(self.members):
            with self._ending(member):
                member.run.note_step()

    def _finish(self, member: _Member) -> bool:
        """Sum up a run whose steps are done, when its evaluations are there."""
        run = member.run
        assert run.writer is not None, "a sweep has one rank"
        run.saver.check()
        run.writer.evaluations.collect()
        if run.writer.evaluations.outstanding:
            if self._stop.whole.signal_name is not None:
                raise TrainingInterrupted("INTERRUPTED", "a resumed run waits for its evaluations")
            return False
        run.finish()
        run.close()
        run.sum_up()
        member.held.close()
        self._end(member)
        return True

    @contextmanager
    def _ending(self, *members: _Member) -> Iterator[None]:
        """Have an error end these runs, and no others."""
        try:
            with run_errors(members[0].trial.name, members[0].run.path, self._job.device):
                yield
        except GearError as error:
            for member in members:
                self._end(member, error)

    def _end(self, member: _Member, error: GearError | None = None) -> None:
        """Go on without a run; its place in a stack stays, what is computed there is not used."""
        self.members.remove(member)
        if self._stack is not None:
            self._stack.leave(self._stacked.index(member))
        member.close()
        if not isinstance(error, TrainingInterrupted):
            self._job.end(member.trial, error)

    def _count_window(self) -> None:
        """Count the time of the steps that the host has not waited for, now that they are done."""
        if self._window_began is not None and self._job.device.type == "cuda":
            whole = time.perf_counter() - self._window_began
            for member in self.members:
                window = member.run.learner.window
                window.busy_seconds += max(0.0, whole - self._counted_seconds)
        self._window_began = None


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
        """Return how many marks the GPU has not come to."""
        while self._marks and self._marks[0].query():
            self._marks.popleft()
        return len(self._marks)
