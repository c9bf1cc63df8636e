"""THE training loop: open, resume, advance, log, evaluate, save, stop, sum up.

A run that was killed at any instant and resumed ends with the weights of one that was not, on the
same machine with the same number of threads.  With several ranks all of them go through the same
steps; the first one alone writes and speaks (`gear_offline.runs.writer`), and its word decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.tasks import named_environments
from gear_offline.core.closing import Closing
from gear_offline.core.device import resolve_device
from gear_offline.core.files import write_error
from gear_offline.core.interruption import StopRequest
from gear_offline.distributed.world import current, open_world, rank_device
from gear_offline.errors import GearError, is_out_of_memory
from gear_offline.evaluation.environments import import_module_of
from gear_offline.progress import say
from gear_offline.runs.checks import check_recipe
from gear_offline.runs.directory import RunDirectory, check_resumed, default_run_path
from gear_offline.runs.evaluations import plays
from gear_offline.runs.prepare import prepare_dataset, resolve
from gear_offline.runs.writer import NullWriter, RunWriter
from gear_offline.tables.joint import TableData
from gear_offline.tables.shared import SharedTables
from gear_offline.training.checkpoint_folder import remove_leftovers
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
    recipe: Recipe | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    tables: SharedTables | None = None,
) -> Path:
    """Train, evaluate and write a run directory.

    Under ``torchrun`` every process calls this; together they train on the batches that one
    process would have, and the first one writes the run directory.

    Parameters
    ----------
    recipe
        From `gear_offline.config.recipe.load_recipe`, or what that takes: a name or a file.
    out
        Run directory; default ``runs/NAME-sSEED``.
    resume
        Go on from the newest whole checkpoint; begins the run when there is none.
    quiet
        Print nothing.
    tables
        That several runs of one process share.

    Returns
    -------
    Path
        The run directory.

    Raises
    ------
    InputError
        ``OUTPUT_EXISTS``, ``RUN_LOCKED``, ``RUN_MISMATCH`` (resuming with another recipe),
        ``RUN_DAMAGED``, ``MEMORY``, ``DEVICE``, and those of checking the recipe and preparing the
        data.
    TrainingInterrupted
        ``INTERRUPTED``.
    GearError
        ``LOSS_NONFINITE``; ``RANK_LOST`` and ``RANK_FAILED`` for what happened on other ranks.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> options = {"data.path": "tiny", "train.steps": 4, "train.device": "cpu"}
    >>> options |= {"optimizer.warmup_steps": 2, "evaluate.episodes": 0}
    >>> run = go.train(go.load_recipe("smoke", options), out="runs/tiny", quiet=True)
    >>> sorted(path.name for path in (run / "checkpoints").iterdir())
    ['step-00000004']
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    path = default_run_path(recipe) if out is None else Path(out)
    device = rank_device(resolve_device(recipe.train.device))
    with open_world(device, timeout=recipe.train.timeout) as world, ExitStack() as stack:
        check_micro_batches(world.rank_batch(recipe.loader.batch_size), recipe.train.accumulate)
        world.lead(lambda: check_recipe(recipe, where=f"recipe {recipe.name}"))
        if not resume:  # then the recipe is the user's word, not only a run's
            for name in named_environments(recipe):
                import_module_of(name)
        directory = world.lead(lambda: stack.enter_context(RunDirectory(path, resume=resume)))
        stack.enter_context(torch_settings(recipe, device))
        quiet = quiet or not world.is_first
        dataset = prepare_dataset(recipe, world=world, quiet=quiet)
        resolved, sizes = resolve(recipe, dataset, quiet=quiet)
        world.lead(lambda: check_resumed(path, resolved))
        learner = Learner(resolved, sizes, dataset, device, world=world, tables=tables)
        stack.callback(learner.release)
        try:
            with StopRequest() as stop, Run(path, directory, learner, dataset, stop, quiet) as run:
                for _ in run.steps():
                    pass
                run.finish()
            run.sum_up()
        except OSError as error:  # of the run's own files: the data's errors have codes
            if directory is not None:
                remove_leftovers(directory.checkpoints_path)
            raise write_error(error, str(path)) from error
    return path


class Run(Closing):
    """A run as a rank goes through it, opened where its newest checkpoint has left it.

    Parameters
    ----------
    path, directory
        The run directory, held by the first rank; None on the others.
    learner, dataset
        Of this rank.
    stop
        Says whether to save and stop.
    concurrent_runs
        Runs that share this process.
    """

    def __init__(
        self,
        path: Path,
        directory: RunDirectory | None,
        learner: Learner,
        dataset: TableData,
        stop: StopRequest,
        quiet: bool,
        concurrent_runs: int = 1,
    ) -> None:
        self.path, self.learner, self.stop = path, learner, stop
        self._world, self._settings = learner.world, learner.recipe.train
        folder = path / "checkpoints"
        seconds = restore(learner, folder, partial(say, quiet=quiet))
        writer: RunWriter | None = None
        if directory is not None:
            writer = RunWriter(directory, learner, dataset, seconds=seconds, quiet=quiet)
        self.writer = writer or NullWriter()
        self.saver = Saver(learner, folder, before=self.writer.sync)
        if writer is not None:
            try:
                due = self._evaluated_steps()
                writer.begin(self.saver, stop, due=due, concurrent_runs=concurrent_runs)
            except BaseException:
                self.close()
                raise

    def steps(
        self,
        advance: Callable[[], None] | None = None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> Iterator[bool]:
        """Do what is left of the run, one step at a time.

        Parameters
        ----------
        advance
            Does one step of the learner; several runs may share one.
        is_ready
            Asked before the host needs the numbers of the steps so far; until then False is
            yielded, so that other runs can go on.  True is yielded before each step.
        """
        learner, writer, settings = self.learner, self.writer, self._settings
        advance = advance or learner.advance
        while True:
            step, last = learner.step, learner.step == settings.steps
            if step > 0 and self._is_due(step):  # a resumed run too: it may have been killed here
                while not is_ready():
                    yield False
                if learner.unreported and (last or step % settings.log_every == 0):
                    writer.log(step, learner.report())
                best = self.evaluates_at(step) and self._evaluate(step)
                saves = last or best or step % settings.checkpoint_every == 0
                saves, signal = self._agreed(saves, self.stop.signal_name)
                if saves or signal:
                    self.saver.save(seconds=writer.seconds, keep=writer.keep)
                if signal and not last:
                    self.saver.wait()
                    raise TrainingInterrupted(
                        "INTERRUPTED",
                        f"stopped by {signal} after step {step:,}, a checkpoint is saved",
                        where=str(self.path),
                        remedy=f"go on with `gear-offline train {self.path} --resume`",
                    )
            if last:
                return
            yield True
            advance()
            self.saver.check()
            writer.step(learner.step)

    def evaluates_at(self, step: int) -> bool:
        """Whether the policy is played after `step`."""
        every, last = self._settings.evaluate_every, step == self._settings.steps
        return plays(self.learner.recipe) and (last or (every is not None and step % every == 0))

    def _evaluated_steps(self) -> list[int]:
        """Return the steps so far after which the policy was to be played."""
        done, every = self.learner.step, self._settings.evaluate_every or self._settings.steps
        return [s for s in sorted({*range(every, done + 1, every), done}) if self.evaluates_at(s)]

    def _is_due(self, step: int) -> bool:
        """Whether anything may be due after `step`, on all ranks alike."""
        settings = self._settings
        if step == settings.steps or self.evaluates_at(step):
            return True
        if step % settings.log_every == 0 or step % settings.checkpoint_every == 0:
            return True
        if self._world.size > 1:
            return step % STOP_EVERY == 0
        return self.stop.signal_name is not None

    def _evaluate(self, step: int) -> bool:
        """Play the policy, or have it played; return whether a checkpoint is needed now."""
        # Elsewhere the weights of the checkpoint are played.
        if self._world.gather(self.writer.plays_here(step))[0]:
            self.learner.prepare_policy()
        return self.writer.evaluate(step)

    def _agreed(self, saves: bool, signal: str | None) -> tuple[bool, str | None]:
        """Return whether the first rank saves, and the signal that any rank has got."""
        answers = self._world.gather({"saves": saves, "signal": signal})
        signals = [answer["signal"] for answer in answers if answer["signal"]]
        return bool(answers[0]["saves"]), signals[0] if signals else None

    def finish(self) -> None:
        """Wait for what the last step left under way."""
        self.writer.finish()
        self.saver.prune(self.writer.keep)
        self.saver.wait()

    def close(self) -> None:
        """Close the files and end the threads; a second Ctrl-C waits for nothing."""
        self.writer.close()
        self.saver.close(finish=not isinstance(sys.exc_info()[1], KeyboardInterrupt))

    def sum_up(self) -> None:
        """Give back what the loader holds, and write what a complete run leaves behind."""
        self.learner.close()
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


@contextmanager
def run_errors(name: str, path: Path, device: torch.device) -> Iterator[None]:
    """Turn whatever ends one of several runs into a `GearError`, so that the others can go on.

    ``DEVICE`` says that they cannot: after some errors of CUDA (an illegal address, a failed
    launch) each further call of the process fails too.
    """
    try:
        yield
    except GearError:
        raise
    except OSError as error:
        raise write_error(error, str(path)) from error
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        if _is_lost(device):
            raise GearError(
                "DEVICE",
                f"the GPU does nothing more for this process after {type(error).__name__}: {first}",
                where=name,
                remedy="the same command goes on from the newest checkpoints",
            ) from error
        if any(is_out_of_memory(cause) for cause in _with_contexts(error)):
            remedy = "fewer runs at a time (sweep --parallel), or a smaller model or batch"
            raise GearError("MEMORY", f"out of memory: {first}", name, remedy) from error
        remedy = f"`gear-offline train {path} --resume --debug` repeats it alone and shows where"
        raise GearError("INTERNAL", f"{type(error).__name__}: {first}", name, remedy) from error


def _is_lost(device: torch.device) -> bool:
    """Return whether a GPU does nothing more for this process; asked after an error."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)  # such errors come again with each call, others do not
    except RuntimeError:
        return True
    return False


def _with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that were being handled: a failed capture hides why it failed."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
