"""THE training loop: open, resume, advance, log, evaluate, save, stop, sum up.

A run that was killed at any instant and resumed ends with the weights of one that was not, on the
same machine with the same number of threads.  With several ranks all of them go through the same
steps; the first one alone writes and speaks (`gear_offline.runs.writer`), and its word decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from gear_offline.config.files import flat
from gear_offline.config.recipe import Recipe
from gear_offline.core.closing import Closing
from gear_offline.core.device import resolve_device
from gear_offline.core.files import write_error
from gear_offline.core.interruption import StopRequest
from gear_offline.distributed.world import current, open_world, rank_device
from gear_offline.errors import GearError, InputError
from gear_offline.progress import say
from gear_offline.runs.callbacks import Callback, Callbacks
from gear_offline.runs.checks import check_recipe
from gear_offline.runs.directory import RESUMABLE, RunDirectory, default_run_path
from gear_offline.runs.evaluations import plays
from gear_offline.runs.prepare import open_growing, prepare_dataset, resolve
from gear_offline.runs.run import Run
from gear_offline.runs.trackers import trackings
from gear_offline.runs.writer import RunWriter
from gear_offline.tables.shared import SharedTables
from gear_offline.training.checkpoint import SavedState, newest_checkpoint, read_state
from gear_offline.training.checkpoint_folder import Keep, list_checkpoints, remove_leftovers
from gear_offline.training.gradients import check_micro_batches
from gear_offline.training.learner import Learner
from gear_offline.training.saving import Saver, restore
from gear_offline.training.seeding import deterministic, torch_threads

__all__ = ["TrainingInterrupted", "train"]

STOP_EVERY = 10  # steps between two words of several ranks on whether to stop


class TrainingInterrupted(GearError):
    """Ctrl-C or SIGTERM stopped the work; what was done is saved (exit code 130)."""

    exit_code = 130  # 128 + SIGINT, as shells count


def train(
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
    with open_world(device, timeout=recipe.train.timeout) as world, ExitStack() as stack:
        check_micro_batches(world.rank_batch(recipe.loader.batch_size), recipe.train.accumulate)
        world.lead(lambda: check_recipe(recipe, where=f"recipe {recipe.name}"))
        directory = world.lead(lambda: stack.enter_context(RunDirectory(path, resume=resume)))
        stack.enter_context(torch_settings(recipe, device))
        quiet = quiet or not world.is_first
        world.lead(lambda: check_resumed(path, recipe, start, is_resolved=False))
        dataset = prepare_dataset(recipe, world=world, quiet=quiet)
        resolved, sizes = resolve(recipe, dataset, quiet=quiet)
        world.lead(lambda: check_resumed(path, resolved, start))
        growing = open_growing(resolved, sizes, dataset, world=world, quiet=quiet)
        if growing is not None:
            stack.enter_context(growing)
        learner = Learner(
            resolved, sizes, dataset, device, world=world, tables=tables, growing=growing
        )
        stack.callback(learner.release)
        told = [*trackings(resolved.train), *callbacks] if world.is_first else ()
        listeners = stack.enter_context(Callbacks(Run(path), told))
        try:
            if start is not None:
                world.lead(lambda: directory and directory.branch(resolved, start))
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
                remove_leftovers(directory.checkpoints_path)
            raise write_error(error, str(path)) from error
    return path


class LiveRun(Closing):
    """A run as a rank goes through it, opened where its newest checkpoint has left it.

    The first rank holds its `directory` and has a `writer`, which writes, speaks and evaluates;
    both are None on the others.  `is_stopped` once a callback has ended it, on all ranks alike.
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
        folder = self.path / "checkpoints"
        self.writer: RunWriter | None = None
        self.saver = Saver(learner, folder, before=self._sync)
        seconds = restore(learner, folder, partial(say, quiet=quiet))
        if directory is not None:
            directory.begin(learner.recipe, step=learner.step)
            callbacks.tell("on_begin")
            self.writer = RunWriter(self, seconds, concurrent_runs, quiet=quiet)

    def _sync(self) -> None:
        if self.writer is not None:
            self.writer.metrics.sync()

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.learner.step == self._settings.steps

    def note_step(self) -> None:
        """Look after what goes on beside the steps, now that there is one more."""
        self.saver.check()
        if self.writer is not None:
            self.writer.step(self.learner.step)

    def is_due(self) -> bool:
        """Whether there may be something to do after the steps so far, on all ranks alike."""
        step, settings = self.learner.step, self._settings
        several = self._world.size > 1
        periods = [settings.log_every, settings.checkpoint_every, *[STOP_EVERY] * several]
        if self.is_complete or self.evaluates_at(step) or any(step % n == 0 for n in periods):
            return step > 0
        return not several and (self.stop.signal_name is not None or self.callbacks.stop)

    def catch_up(self, *, stops: bool = False) -> None:
        """Log, evaluate, save and stop, each of it if it is due after the steps so far."""
        if stops or self.is_due():
            self._log()
            is_needed = self._evaluate()
            self._save_and_stop(is_needed)

    def _log(self) -> None:
        step = self.learner.step
        if self.learner.window.filled and (
            self.is_complete or step % self._settings.log_every == 0
        ):
            values = self.learner.report()
            if self.writer is not None:
                self.writer.log(step, values)

    def evaluates_at(self, step: int) -> bool:
        """Whether the policy is played after `step`."""
        every, last = self._settings.evaluate_every, step == self._settings.steps
        return plays(self.learner.recipe) and (last or (every is not None and step % every == 0))

    def _evaluate(self) -> bool:
        """Play the policy, or have it played; return whether a checkpoint is needed now."""
        step = self.learner.step
        if not self.evaluates_at(step):
            return False
        evaluations = None if self.writer is None else self.writer.evaluations
        plays_here = evaluations is not None and evaluations.plays_here(step)
        if self._world.gather(plays_here)[0]:  # else the weights of the checkpoint are played
            self.learner.prepare_policy()
        return evaluations is not None and evaluations.evaluate(step)

    def _save_and_stop(self, is_needed: bool) -> None:
        """Save if the first rank needs a checkpoint or if any rank was told to stop; then stop."""
        step = self.learner.step
        saves = is_needed or self.is_complete or step % self._settings.checkpoint_every == 0
        answer = {"saves": saves, "signal": self.stop.signal_name, "stops": self.callbacks.stop}
        answers = self._world.gather(answer)
        signal = next((answer["signal"] for answer in answers if answer["signal"]), None)
        self.is_stopped = answers[0]["stops"]
        if answers[0]["saves"] or signal or self.is_stopped:
            seconds = 0.0 if self.writer is None else self.writer.seconds
            self.saver.save(seconds=seconds, keep=self._keep)
        if signal and not self.is_complete:
            self.saver.wait()
            what = f"stopped by {signal} after step {step:,}, a checkpoint is saved"
            remedy = f"go on with `gear-offline train {self.path} --resume`"
            raise TrainingInterrupted("INTERRUPTED", what, str(self.path), remedy)

    @property
    def _keep(self) -> Keep:
        return Keep(newest=1) if self.writer is None else self.writer.keep

    def finish(self) -> None:
        """Wait for what the last step left under way."""
        if self.writer is not None:
            self.writer.finish()
        self.saver.prune(self._keep)
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


def check_resumed(
    path: Path, recipe: Recipe, start: Path | None = None, *, is_resolved: bool = True
) -> None:
    """Refuse to go on with a run whose recipe would have made another run, or has fewer steps.

    A run without a checkpoint is not refused.  What goes on is `start`, a checkpoint of any run, or
    by default the run at `path`.  A recipe that is not resolved yet leaves options to the data.
    """
    state = None  # without a whole checkpoint nothing is resumed
    for place in (
        [start] if start else [place for _, place in list_checkpoints(path / "checkpoints")]
    ):
        with suppress(InputError):  # a damaged one is passed over
            state = read_state(place)  # of the newest one: recipe.yaml may be edited
    if state is not None:
        check_same_run(state, recipe, path, is_resolved=is_resolved)
    if state is None or state.step <= recipe.train.steps:
        return
    whole = None if start else newest_checkpoint(path / "checkpoints", lambda message: None)
    done = whole.state.step if whole else state.step  # damaged ones after it are passed over
    if done > recipe.train.steps:
        what = f"train.steps is {recipe.train.steps}, but {done} steps are done"
        remedy = "ask for at least as many steps, or train into another directory"
        raise InputError("RUN_MISMATCH", what, where=str(path), remedy=remedy)


def check_same_run(state: SavedState, now: Recipe, path: Path, *, is_resolved: bool = True) -> None:
    """Refuse to resume a run with a recipe that would have made another run."""
    before = Recipe.parse(state.recipe, where=str(path))
    old, new = flat(before.to_dict()), flat(now.to_dict())
    for options, recipe in ((old, before), (new, now)):  # what is skipped later is free
        past = before.train.batch_of(state.step - 1) if state.step else -1
        options["train.skip"] = [list(one) for one in recipe.train.skip if one[0] <= past]
    free = set(RESUMABLE)
    if now.optimizer.schedule != "constant":
        free.remove("train.steps")  # the learning rates of the steps done depend on it
    if not is_resolved:
        free |= {key for key in {*old, *new} if new.get(key) is None} | {"model.action_tanh"}
    for key in sorted({*old, *new} - free):
        if old.get(key) != new.get(key):
            what = f"{key} was {old.get(key)!r} when the run began and is {new.get(key)!r} now"
            remedy = "it may change with optimizer.schedule=constant; " * (key == "train.steps")
            remedy += f"undo that (here, or in {path / 'recipe.yaml'} if it was edited), or train "
            remedy += "into another directory"
            raise InputError("RUN_MISMATCH", what, str(path), remedy)
