"""THE training loop: open, resume, advance, log, evaluate, save, stop, sum up.

A run that was killed at any instant and resumed ends with the weights of one that was not, on the
same machine with the same number of threads.  With several ranks all of them go through the same
steps; the first one alone writes and speaks (`gear_offline.runs.writer`), and it decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.closing import Closing
from gear_offline.core.device import resolve_device
from gear_offline.core.files import write_error
from gear_offline.core.interruption import StopRequest
from gear_offline.distributed.world import current, open_world, rank_device
from gear_offline.errors import GearError
from gear_offline.progress import say
from gear_offline.runs.callbacks import Callback, Callbacks
from gear_offline.runs.checks import check_recipe
from gear_offline.runs.directory import RunDirectory, check_resumed, default_run_path
from gear_offline.runs.prepare import open_growing, prepare_dataset, resolve
from gear_offline.runs.run import Run
from gear_offline.runs.trackers import trackings
from gear_offline.runs.writer import RunWriter
from gear_offline.tables.shared import SharedTables
from gear_offline.training.checkpoint import Keep, remove_leftovers
from gear_offline.training.gradients import check_micro_batches
from gear_offline.training.learner import Learner
from gear_offline.training.saving import Saver, restore
from gear_offline.training.seeding import deterministic, torch_threads

__all__ = ["TrainingInterrupted", "train_run"]

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
    tables: SharedTables | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train a run and return its directory; `gear_offline.runs.train.train` is the public door.

    `start` is a checkpoint of another run, whose branch this is; `tables` are those that several
    runs of one process share.
    """
    path = default_run_path(recipe) if out is None else Path(out)
    device = rank_device(resolve_device(recipe.train.device, where="train.device"))
    with open_world(device, timeout=recipe.train.timeout) as world, ExitStack() as held:
        quiet = quiet or not world.is_first

        # what can be refused before the data are read, or made
        check_micro_batches(world.rank_batch(recipe.loader.batch_size), recipe.train.accumulate)
        world.lead(lambda: check_recipe(recipe, where=f"recipe {recipe.name}"))
        directory = world.lead(lambda: held.enter_context(RunDirectory(path, resume=resume)))
        world.lead(lambda: check_resumed(path, recipe, start, is_resolved=False))

        # the data, and a recipe that says everything in numbers
        held.enter_context(torch_settings(recipe, device))
        dataset = prepare_dataset(recipe, world=world, quiet=quiet)
        recipe, sizes = resolve(recipe, dataset, quiet=quiet)
        world.lead(lambda: check_resumed(path, recipe, start))
        growing = open_growing(recipe, sizes, dataset, world=world, quiet=quiet)
        if growing is not None:
            held.enter_context(growing)

        # who learns from them, and who is told
        learner = Learner(
            recipe, sizes, dataset, device, world=world, tables=tables, growing=growing
        )
        held.callback(learner.release)
        told = [*trackings(recipe.train), *callbacks] if world.is_first else ()
        listeners = held.enter_context(Callbacks(Run(path), told))
        try:
            if start is not None:
                world.lead(lambda: directory and directory.branch(recipe, start))
            with (
                StopRequest() as stop,
                LiveRun(directory, learner, stop, listeners, quiet=quiet) as run,
            ):
                run.catch_up()  # a killed run may have left something to do
                while not (run.is_complete or run.is_stopped):
                    is_ready = learner.admit(lambda: stop.signal_name is not None)
                    if is_ready:
                        learner.advance()
                        run.note_step()
                    run.catch_up(stops=not is_ready)
                run.finish()
            run.sum_up()
        except OSError as error:  # of the run's own files: the data's errors have codes
            if directory is not None:
                remove_leftovers(directory.checkpoints)
            raise write_error(error, str(path)) from error
    return path


class Due(NamedTuple):
    """What there is to do after a step, on all ranks alike; true if there is anything."""

    log: bool = False
    evaluation: bool = False
    save: bool = False
    ask_stop: bool = False  # all ranks whether to stop

    def __bool__(self) -> bool:
        return any(self)


class LiveRun(Closing):
    """A run as a rank goes through it, opened where its newest checkpoint has left it.

    The first rank holds its `directory` and has a `writer`, which also holds its evaluations; both
    are None on the others.  `is_stopped` once a callback has ended it, on all ranks alike.
    `concurrent_runs` share the cores that training leaves to evaluations.
    """

    def __init__(
        self,
        directory: RunDirectory | None,
        learner: Learner,
        stop: StopRequest,
        callbacks: Callbacks,
        *,
        quiet: bool,
        concurrent_runs: int = 1,
    ) -> None:
        self.learner, self.stop, self.callbacks = learner, stop, callbacks
        self.path, self.is_stopped = callbacks.run.path, False
        self._world, self._settings = learner.world, learner.recipe.train
        self.concurrent_runs = concurrent_runs
        folder = self.path / "checkpoints"
        self.writer: RunWriter | None = None
        self.saver = Saver(learner, folder)
        seconds = restore(learner, folder, partial(say, quiet=quiet))
        if directory is not None:
            directory.begin(learner.recipe, step=learner.step)
            callbacks.tell("on_begin")
            self.writer = RunWriter(self, seconds, quiet=quiet)
            self.saver.before = self.writer.sync

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.learner.step == self._settings.steps

    def due(self) -> Due:
        """Return what there may be to do after the steps so far."""
        step, settings = self.learner.step, self._settings
        ask_stop = self.stop.signal_name is not None or self.callbacks.stop
        if self._world.size > 1:
            ask_stop = step % STOP_EVERY == 0
        if step == 0:
            return Due(ask_stop=ask_stop)
        return Due(
            log=self.is_complete or step % settings.log_every == 0,
            evaluation=self.learner.recipe.evaluates_at(step),
            save=self.is_complete or step % settings.checkpoint_every == 0,
            ask_stop=ask_stop,
        )

    def note_step(self) -> None:
        """Look after what goes on beside the steps, now that there is one more."""
        self.saver.check()
        if self.writer is not None:
            self.writer.step(self.learner.step)

    def catch_up(self, *, stops: bool = False) -> None:
        """Log, evaluate, save and stop, each of it if it is due after the steps so far."""
        due = self.due()
        if due.log and self.learner.window.filled:
            values = self.learner.report()
            if self.writer is not None:
                self.writer.log(self.learner.step, values)
        is_needed = due.evaluation and self._evaluate()
        if due or stops:
            self._save_and_stop(due.save or is_needed)

    def _evaluate(self) -> bool:
        """Play the policy, or have it played; return whether a checkpoint is needed now."""
        step, first = self.learner.step, self.writer
        plays_here = first is not None and first.evaluations.plays_here(step)
        if self._world.gather(plays_here)[0]:  # else the weights of the checkpoint are played
            self.learner.prepare_policy()
        return first is not None and first.evaluations.evaluate(step)

    def _save_and_stop(self, saves: bool) -> None:
        """Save if the first rank needs a checkpoint or if any rank was told to stop; then stop."""
        answer = {"saves": saves, "signal": self.stop.signal_name, "stops": self.callbacks.stop}
        answers = self._world.gather(answer)
        signal = next((answer["signal"] for answer in answers if answer["signal"]), None)
        self.is_stopped = answers[0]["stops"]
        if answers[0]["saves"] or signal or self.is_stopped:
            seconds, keep = 0.0, Keep(newest=1)  # the first rank's count
            if self.writer is not None:
                seconds, keep = self.writer.seconds, self.writer.evaluations.keep
            self.saver.save(seconds=seconds, keep=keep)
        if signal and not self.is_complete:
            self.saver.wait()
            what = f"stopped by {signal} after step {self.learner.step:,}, a checkpoint is saved"
            remedy = f"go on with `gear-offline train {self.path} --resume`"
            raise TrainingInterrupted("INTERRUPTED", what, str(self.path), remedy)

    def finish(self) -> None:
        """Wait for what the last step left under way."""
        if self.writer is not None:
            self.writer.finish()
        self.saver.wait()
        if self.writer is not None:
            self.writer.tell_saved()

    def close(self) -> None:
        """Close the files and end the threads; a second Ctrl-C waits for nothing."""
        try:  # before the writer: a checkpoint under way makes the metrics durable first
            self.saver.close(finish=not isinstance(sys.exc_info()[1], KeyboardInterrupt))
        finally:
            if self.writer is not None:
                self.writer.close()

    def sum_up(self) -> None:
        """Give back what the loader holds, and write what a complete run leaves behind."""
        self.learner.close()
        if self.writer is not None:
            self.writer.sum_up()


@contextmanager
def torch_settings(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Set torch's GPU, threads and random numbers; give the caller's back at the end."""
    random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    settings = recipe.train
    threads, kernels = torch_threads(settings.threads), deterministic(settings.deterministic)
    with current(device), random, threads, kernels:
        torch.manual_seed(recipe.seed)
        yield
