"""The trials of a sweep in one process, in turn; those of equal shapes as one stack."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from gear_offline.artifacts.checkpoint import list_checkpoints
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import Closing
from gear_offline.core.interruption import StopRequest
from gear_offline.core.system import torch_alone
from gear_offline.distributed.world import current
from gear_offline.errors import GearError
from gear_offline.loaders.options import recipe_sampler
from gear_offline.loaders.rows import MemoryRows
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.evaluations import LocalPlayer, Shared
from gear_offline.runs.loop import (
    PAUSE_SECONDS,
    LiveRun,
    RunGroup,
    TrainingInterrupted,
    begin_run,
    run_settings,
)
from gear_offline.runs.resolve import find_start, resolve, settle
from gear_offline.runs.resume import find_past
from gear_offline.runs.run import Run
from gear_offline.sweep.trials import Trial
from gear_offline.sweep.work import Work, run_errors
from gear_offline.training.stack import stack_key, why_not_stacked

MOST_IN_A_STACK = 16  # by default: more runs need memory and are hardly faster
NOTED_EVERY = 8  # steps of a run, for the display


def train_stacks(work: Work) -> None:
    """Train the trials one stack after another; raise ``INTERRUPTED`` after Ctrl-C."""
    alone, shapes = torch_alone("a sweep", quiet=False), _many_shapes(work.trials, work.device)
    waiting, tables = deque(stacks_of(work)), dict[int, Any]()  # which later stacks read too
    with alone, StopRequest() as stop, current(work.device), shapes, LocalPlayer() as player:
        while waiting:
            with _fork_random(work.device), _OpenStack(work, stop) as stack:
                waiting.extendleft(stack.open(waiting.popleft(), player))
                for run in stack.runs:
                    if isinstance(rows := run.learner.loader.rows, MemoryRows):
                        tables[id(rows.memory)] = rows.memory
                stack.train_all()
            if stop.signal_name is not None:
                raise TrainingInterrupted("INTERRUPTED", f"stopped by {stop.signal_name}")


def _fork_random(device: torch.device) -> Any:
    """Put torch's random numbers back at the end."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def stacks_of(work: Work) -> Iterator[list[Trial]]:
    """Yield the trials of each stack: of one shape and step, in stacks of about one size."""
    alike, able = dict[str, list[Trial]](), dict[str, bool]()
    for trial in work.trials:
        key = stack_key(trial.recipe)
        selection = f"{key} {trial.recipe.selection!r}"
        if selection not in able:
            able[selection] = work.parallel > 1 and _can_stack(trial.recipe, work)
        saved = list_checkpoints(work.folder / trial.name / "checkpoints")
        key = f"{key} {saved[-1][0] if saved else 0}" if able[selection] else trial.name
        alike.setdefault(key, []).append(trial)
    for members in alike.values():
        size = -(-len(members) // -(-len(members) // work.parallel))
        for first in range(0, len(members), size):
            yield members[first : first + size]


def _can_stack(recipe: Recipe, work: Work) -> bool:
    dataset = work.datasets[recipe.data_key]
    try:
        resolved, sizes = resolve(recipe, dataset, find_start(recipe), quiet=True)
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


class _OpenStack(RunGroup, Closing):
    """The runs of a stack, often of one, and what each of them holds."""

    def __init__(self, work: Work, stop: StopRequest) -> None:
        super().__init__()
        self._work, self._stop = work, stop
        self._members = dict[LiveRun, tuple[Trial, ExitStack]]()

    def open(self, trials: Sequence[Trial], player: LocalPlayer) -> list[list[Trial]]:
        """Begin or resume the trials; return those that stand at another step than the first."""
        apart, shared = list[Trial](), Shared(stop=self._stop, runs=len(trials), player=player)
        for trial in trials:
            if self._stop.signal_name is not None:
                break
            path = self._work.folder / trial.name
            try:
                with run_errors(trial.name, path, self._work.device):
                    run = self._open(trial, path, shared)
            except GearError as error:
                self._work.end(trial, error)
            else:
                if run.learner.step != self.runs[0].learner.step:
                    self._close(run)
                    apart.append(trial)
        return [apart] if apart else []

    def _open(self, trial: Trial, path: Path, shared: Shared) -> LiveRun:
        device, past = self._work.device, find_past(path)
        recipe = settle(trial.recipe, device, past)
        # a stack draws on with the random numbers of its first run
        forked = _fork_random(device) if self.runs else nullcontext()
        with forked, run_settings(recipe), ExitStack() as held:
            directory = held.enter_context(RunDirectory(path, resume=path.exists()))
            dataset = self._work.datasets[recipe.data_key]
            begun = begin_run(
                Run(path), directory, recipe, dataset, device, past=past, shared=shared, quiet=True
            )
            run = held.enter_context(begun)
            self.runs.append(run)
            self._members[run] = trial, held.pop_all()
        return run

    def train_all(self) -> None:
        """Train the runs to their ends."""
        if not self.runs:
            return
        with run_settings(self.runs[0].learner.recipe):
            for has_stepped in self.train():
                if not has_stepped:
                    time.sleep(PAUSE_SECONDS)

    def advance(self) -> None:
        super().advance()
        for run in self.runs:
            if run.learner.step % NOTED_EVERY == 0:
                self._work.note_steps(self._members[run][0], run.learner.step)

    def catch_up(self) -> Iterator[bool]:
        if not any(run.due() for run in self.runs):
            return
        if self.step is not None:
            self.step.wait()
        yield from self.each(self._stop_run if self._stop.signal_name else LiveRun.catch_up)
        if self._stop.signal_name is not None:  # it may have come between: all stop at one step
            yield from self.each(self._stop_run)

    def _stop_run(self, run: LiveRun) -> Iterator[bool]:
        if not run.learner.step:
            raise TrainingInterrupted("INTERRUPTED", "there is nothing to save yet")
        yield from run.catch_up()

    def finish(self, run: LiveRun) -> Iterator[bool]:
        yield from run.finish()
        self._members[run][1].close()
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
        """Remove a run; its slot in the stack is computed and not used."""
        if self.step is not None:
            self.step.leave(run.learner)
        trial = self._close(run)
        if not isinstance(error, TrainingInterrupted):
            self._work.end(trial, error)

    def _close(self, run: LiveRun) -> Trial:
        """Close a run; the error that came first is told, not one of closing what it left."""
        self.runs.remove(run)
        trial, held = self._members.pop(run)
        with suppress(GearError, OSError, RuntimeError), closing(run.learner):
            held.close()
        return trial

    def close(self) -> None:
        for run in list(self.runs):
            self._close(run)
