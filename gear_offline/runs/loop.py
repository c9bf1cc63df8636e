"""THE training loop: open, resume, advance, log, evaluate, save, stop, sum up.

A run that was killed at any instant and resumed ends with the weights of one that was not, on the
same machine with the same number of threads.  With several ranks all of them go through the same
steps; the first one alone writes and speaks (`gear_offline.runs.writer`), and it decides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from gear_offline.artifacts.checkpoint import Keep, remove_partial
from gear_offline.artifacts.trained import TrainedModel
from gear_offline.batches.tables.joint import TableData
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import Closing, write_error
from gear_offline.core.interruption import Aborted, StopRequest
from gear_offline.core.progress import Progress
from gear_offline.core.system import torch_alone
from gear_offline.core.text import quote, say
from gear_offline.core.torch_state import torch_threads
from gear_offline.distributed.world import World, current, open_world, rank_device, resolve_device
from gear_offline.errors import GearError
from gear_offline.evaluation.choose import check_judged
from gear_offline.runs.acting import RunActors
from gear_offline.runs.callbacks import Callback, Callbacks, recipe_callbacks
from gear_offline.runs.data import open_growing, prepare_dataset
from gear_offline.runs.directory import RunDirectory, default_run_path
from gear_offline.runs.evaluations import RunEvaluations, Shared
from gear_offline.runs.resolve import find_start, resolve, settle
from gear_offline.runs.resume import Past, find_past
from gear_offline.runs.run import Run
from gear_offline.runs.trackers import trackings
from gear_offline.runs.writer import RunWriter
from gear_offline.training.gradients import check_micro_batches
from gear_offline.training.learner import Learner
from gear_offline.training.pieces import check_pieces
from gear_offline.training.saving import Saver, restore
from gear_offline.training.seeding import deterministic, own_random
from gear_offline.training.stack import make_step
from gear_offline.training.step import Step

PAUSE_SECONDS = 0.01  # of a run that waits for its evaluations
STOP_EVERY = 10  # steps between two questions to all ranks whether to stop


class TrainingInterrupted(GearError):
    """Ctrl-C or SIGTERM stopped the work; what was done is saved (exit code 130)."""

    exit_code = 130  # 128 + SIGINT, as shells count


def train_run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    start: Path | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train a run and return its directory; `gear_offline.train` is the public door.

    `start` is a checkpoint of another run, whose branch this is.
    """
    path = default_run_path(recipe) if out is None else Path(out)
    device = rank_device(resolve_device(recipe.train.device, where="train.device"))
    with open_world(device, timeout=recipe.train.timeout) as world, ExitStack() as held:
        quiet = quiet or not world.is_first
        # what can be refused before the data are read, or made
        check_micro_batches(world.rank_batch(recipe.loader.batch_size), recipe.train.accumulate)
        if recipe.train.deterministic == "ranks":
            check_pieces(recipe.loader.batch_size, world.size)
        directory = world.lead(lambda: held.enter_context(RunDirectory(path, resume=resume)))
        past = world.lead(lambda: find_past(path, start))
        settled = world.lead(lambda: settle(recipe, device, past).to_dict())
        recipe = Recipe.read(world.gather(settled)[0])
        held.enter_context(torch_alone(recipe.name, quiet=quiet))

        # what is set and drawn is the caller's again at the end
        held.enter_context(current(device))
        held.enter_context(own_random(device))
        held.enter_context(run_settings(recipe))
        dataset = prepare_dataset(recipe, world=world, quiet=quiet)
        beginning = begin_run(
            Run(path),
            directory,
            recipe,
            dataset,
            device,
            world=world,
            past=past,
            start=start,
            callbacks=callbacks,
            quiet=quiet,
        )
        with beginning as run:
            for has_stepped in RunGroup([run]).train():
                if not has_stepped:
                    time.sleep(PAUSE_SECONDS)
    return path


@contextmanager
def run_settings(recipe: Recipe) -> Iterator[None]:
    """Set torch's CPU threads and kernels to a recipe's while inside."""
    settings = recipe.train
    with torch_threads(settings.threads), deterministic(bool(settings.deterministic)):
        yield


@contextmanager
def begin_run(
    run: Run,
    directory: RunDirectory | None,
    recipe: Recipe,
    dataset: TableData,
    device: torch.device,
    *,
    world: World | None = None,
    past: Past | None = None,
    start: Path | None = None,
    callbacks: Sequence[Callback] = (),
    shared: Shared | None = None,
    quiet: bool = False,
) -> Iterator[LiveRun]:
    """Begin a run, or take it up where its newest checkpoint left it, within its `run_settings`.

    The first rank holds the `directory`, knows the `past` and has the callbacks.
    """
    world, weights = world or World(), find_start(recipe)
    recipe, sizes = resolve(recipe, dataset, weights, quiet=quiet)  # it says all in numbers
    world.lead((lambda: past.check(recipe, dataset)) if past else (lambda: None))
    for name in past.changed_parts(recipe) if past else ():
        say(f"{name} has changed since the run began: results from before are not its", quiet=quiet)
    with ExitStack() as held:
        growing = open_growing(recipe, sizes, dataset, world=world, quiet=quiet)
        if growing is not None:
            held.enter_context(growing)
        torch.manual_seed(recipe.seed)
        learner = Learner(
            recipe, sizes, dataset, device, world=world, growing=growing, start=weights
        )
        held.callback(learner.release)
        if recipe.evaluate.offline:
            trained = TrainedModel(learner.model, recipe, learner.loader.window)
            check_judged(trained, dataset, run.path)
        callbacks = (*trackings(recipe.train), *recipe_callbacks(recipe), *callbacks)
        listeners = held.enter_context(Callbacks(run, callbacks if world.is_first else ()))
        try:
            if start is not None:
                world.lead(lambda: directory and directory.branch(start))
            shared = shared or Shared(stop=held.enter_context(StopRequest()))
            with LiveRun(directory, learner, shared, listeners, quiet=quiet) as live:
                if live.evaluations is not None:
                    live.evaluations.take_up()
                yield live
        except OSError as error:  # of the run's own files: the data's errors have codes
            if directory is not None:
                remove_partial(directory.checkpoints)
            raise write_error(error, str(run.path)) from error


class Due(NamedTuple):
    """Work that is due after a step, on all ranks alike; true if there is any."""

    log: bool = False
    save: bool = False
    validation: bool = False  # its losses stand in the line that is logged
    evaluation: bool = False
    ask_stop: bool = False  # all ranks whether to stop

    def __bool__(self) -> bool:
        return any(self)


class LiveRun(Closing):
    """One rank's part of a run; methods in the order of calls.

    The first rank has `evaluations` and a `writer`; they are None on the others.
    `is_stopped` once a callback has ended the run, on all ranks alike.
    """

    def __init__(
        self,
        directory: RunDirectory | None,
        learner: Learner,
        shared: Shared,
        callbacks: Callbacks,
        *,
        quiet: bool,
    ) -> None:
        self.learner, self.stop, self.callbacks = learner, shared.stop, callbacks
        self.path, self.is_stopped = callbacks.run.path, False
        self._directory, self._is_shared = directory, shared.player is not None
        folder = self.path / "checkpoints"
        self.saver = Saver(learner, folder)
        seconds = restore(learner, folder, partial(say, quiet=quiet))
        self.evaluations: RunEvaluations | None = None
        self.writer: RunWriter | None = None
        self._actors: RunActors | None = None
        if (count := learner.recipe.data.actors) is not None:
            self._actors = RunActors(learner, count, quiet=quiet)
        if directory is not None:
            recipe, step = learner.recipe, learner.step
            directory.begin(recipe, step=step)
            callbacks.tell("on_begin")
            progress = Progress(recipe.name, total=recipe.train.steps, done=step, quiet=quiet)
            tools = (learner, self.saver, callbacks, progress)
            self.evaluations = RunEvaluations(*tools, shared)
            self.writer = RunWriter(
                *tools, self.evaluations, seconds=seconds, reports=not self._is_shared, quiet=quiet
            )
            self.saver.before = self.sync

    @property
    def is_complete(self) -> bool:
        """True if all steps are done."""
        return self.learner.step == self.learner.recipe.train.steps

    def due(self) -> Due:
        """Return the work that may be due after the steps so far."""
        step, recipe, last = self.learner.step, self.learner.recipe, self.is_complete
        ask_stop = self.stop.signal_name is not None or self.callbacks.stop
        if self.learner.world.size > 1:
            ask_stop = step % STOP_EVERY == 0
        if step == 0:
            return Due(ask_stop=ask_stop)
        evaluation = recipe.evaluates_at(step)
        save = last or step % recipe.train.checkpoint_every == 0 or evaluation
        validation = save and self.learner.validation is not None
        return Due(
            log=last or step % recipe.train.log_every == 0 or validation,
            save=save,
            validation=validation,
            evaluation=evaluation,  # of that checkpoint
            ask_stop=ask_stop,
        )

    def admit(self) -> None:
        """Admit appended data before a step; stop where Ctrl-C comes while they are waited for.

        Actors of the run's own play before it.
        """
        if self._actors is not None:
            self._actors.act()
        if not self.learner.admit(lambda: self.stop.signal_name is not None):
            self.stop_if_asked()

    def note_step(self) -> None:
        """Look after what goes on beside the steps, now that there is one more."""
        self.saver.check()
        if self.writer is not None and self.evaluations is not None:
            self.evaluations.collect()
            self.writer.step(self.learner.step)

    def catch_up(self) -> Iterator[bool]:
        """Log, save, evaluate and stop, each of it if it is due after the steps so far.

        Yields False while an evaluation waits for room.
        """
        due, step = self.due(), self.learner.step
        if due.log and self.learner.window.filled:
            self._log(validates=due.validation)
        if due.save:
            self._save()
        if due.evaluation and self.evaluations is not None:
            while self.evaluations.must_wait(step) and self.stop.signal_name is None:
                self.saver.check()
                self.evaluations.collect()
                yield False
            self.evaluations.evaluate(step)
        if due:
            self.stop_if_asked()

    def _log(self, *, validates: bool) -> None:
        values = self.learner.report()  # of all ranks together
        values |= self.learner.validate() if validates else {}
        if self.writer is not None:
            self.writer.log(self.learner.step, values)

    def _save(self) -> None:
        check = self._directory.check_place if self._directory is not None else lambda: None
        self.learner.world.lead(check)
        seconds, keep = 0.0, Keep(newest=1)  # the first rank's count
        if self.writer is not None and self.evaluations is not None:
            seconds, keep = self.writer.seconds, self.evaluations.keep
        self.saver.save(seconds=seconds, keep=keep)

    def stop_if_asked(self) -> None:
        """Save and stop if a callback asks for it, or a signal on any rank."""
        answer = {"signal": self.stop.signal_name, "stops": self.callbacks.stop}
        answers = self.learner.world.gather(answer)
        signal = next((rank["signal"] for rank in answers if rank["signal"]), None)
        self.is_stopped = answers[0]["stops"]  # the first rank has callbacks
        if signal or self.is_stopped:
            self._save()
        if signal and not self.is_complete:
            self.saver.wait()
            problem = f"stopped by {signal} after step {self.learner.step:,}, a checkpoint is saved"
            remedy = f"go on with `gear-offline train {quote(self.path)} --resume`"
            raise TrainingInterrupted("INTERRUPTED", problem, str(self.path), remedy)

    def finish(self) -> Iterator[bool]:
        """Write what a complete run leaves behind; yield False while its evaluations are played."""
        if self.writer is not None and self.evaluations is not None:
            self.writer.note_end()
            yield from self.evaluations.finish()
            self.sync()
            self.saver.prune(self.evaluations.keep)  # none is kept for an evaluation any more
            if self.evaluations.outstanding and self._is_shared:
                raise TrainingInterrupted("INTERRUPTED", "a resumed run plays its evaluations")
        self.saver.wait()
        self.close()
        self.learner.close()
        if self.writer is not None:
            self.writer.sum_up()

    def sync(self) -> None:
        """Make metrics and evaluations so far survive a power loss."""
        if self.writer is not None and self.evaluations is not None:
            self.writer.sync()
            self.evaluations.log.file.sync()

    def close(self) -> None:
        """Close the files and end the threads; a second Ctrl-C waits for nothing."""
        try:  # before the writer: a checkpoint under way makes the metrics durable first
            self.saver.close(finish=not isinstance(sys.exc_info()[1], KeyboardInterrupt))
        finally:
            for files in filter(None, (self.evaluations, self.writer)):
                files.close()


class RunGroup:
    """Runs that take their steps together: one, or several as a stack.

    `runs` are those that go on.
    """

    def __init__(self, runs: Sequence[LiveRun] = ()) -> None:
        self.runs = list(runs)
        self.step: Step | None = None

    def train(self) -> Iterator[bool]:
        """Train the runs to their ends: yield True after each step, False while they wait."""
        if not all(run.is_complete for run in self.runs):
            with self.ending(*self.runs):
                self.step = make_step([run.learner for run in self.runs])
        yield from self.catch_up()  # killed runs may have left something to do
        while not all(run.is_complete or run.is_stopped for run in self.runs):
            self.advance()
            yield True
            yield from self.catch_up()
        yield from self.each(self.finish)

    def advance(self) -> None:
        """Do the next step of all runs."""
        failures: Mapping[Learner, GearError] = {}
        with self.ending(*self.runs):
            for run in self.runs:
                run.admit()
            assert self.step is not None, "made for runs with steps to do"
            try:
                failures = self.step.run()
            except Aborted:  # no rows come for it: the steps so far are saved
                for run in self.runs if self.runs[0].learner.world.size == 1 else ():
                    with self.ending(run):
                        run.stop_if_asked()
                raise
        for run in list(self.runs):
            with self.ending(run):
                if run.learner in failures:
                    raise failures[run.learner]
                run.note_step()

    def catch_up(self) -> Iterator[bool]:
        """Do what is due after the steps so far."""
        if any(run.due() for run in self.runs):
            yield from self.each(LiveRun.catch_up)

    def finish(self, run: LiveRun) -> Iterator[bool]:
        return run.finish()

    def each(self, act: Callable[[LiveRun], Iterator[bool]]) -> Iterator[bool]:
        """Have every run do something; yield False while some wait."""
        acting = {run: act(run) for run in self.runs}
        while acting:
            for run, turns in list(acting.items()):
                is_done = True  # also if it ends
                with self.ending(run):
                    is_done = next(turns, True)
                if is_done:
                    del acting[run]
            if acting:
                yield False

    def ending(self, *runs: LiveRun) -> AbstractContextManager[None]:
        """Have an error end these runs, and no others; of a run alone it is raised."""
        return nullcontext()
