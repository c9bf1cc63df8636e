"""What happens between steps of a run: resume, log, evaluate, save, stop, sum up.

A run that was killed at any instant and resumed ends with the weights of one that was not, on the
same machine with the same number of threads.  With several ranks all of them go through the same
steps; the first one alone writes, speaks and evaluates, and its word decides.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gear_offline.checkpoint import Checkpoint, TrainingState, newest_checkpoint
from gear_offline.checkpoint_folder import (
    checkpoint_name,
    list_checkpoints,
    remove_checkpoint,
    sweep,
)
from gear_offline.checkpoint_writer import CheckpointWriter, Prune
from gear_offline.config_text import config_text
from gear_offline.dataset import Dataset
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation_choice import choose_evaluation
from gear_offline.interruption import StopRequest
from gear_offline.learner import Learner
from gear_offline.metrics import Metrics, finite
from gear_offline.progress import say
from gear_offline.run_directory import RunDirectory
from gear_offline.run_evaluations import RunEvaluations
from gear_offline.run_state import StateToSave, common_mark, restore, state_to_save
from gear_offline.run_summary import summary_of
from gear_offline.task_evaluation import plays
from gear_offline.training_display import TrainingDisplay
from gear_offline.wording import count_text

STOP_EVERY = 10  # steps between two words of several ranks on whether to stop
NOT_SHARED = "collected by the first rank, as not all ranks see one run directory"
LOST = ("RANK_LOST", "RANK_FAILED")


class TrainingInterrupted(GearError):
    """Ctrl-C or SIGTERM stopped the run; a checkpoint was saved."""


class Run:
    """A run as every rank goes through it, from its beginning or its newest checkpoint to its end.

    Parameters
    ----------
    path
        The run directory, for messages.
    learner
        Of this rank.

    Attributes
    ----------
    mark
        Set if checkpoints are written in shards, a file of each rank: tells this start apart.
    """

    saves: CheckpointWriter

    def __init__(self, path: Path, learner: Learner) -> None:
        self.path, self.learner, self.world = path, learner, learner.world
        self.recipe, self.settings = learner.recipe, learner.recipe.train
        self.stop = StopRequest()
        self.mark: str | None = None

    def complete(self) -> None:
        """Do what is left of the run."""
        if self.learner.parallel.sharded:
            self.mark = common_mark(self.world, self.path, self._make_mark)
        self._restore()
        self._begin()
        try:
            self._train()
        finally:
            self._end()
        self.learner.close()
        self._sum_up()

    def _train(self) -> None:
        with self.stop:
            if self.learner.step > 0:
                self._look(self.learner.step)  # the kill may have come before its evaluation
            while self.learner.step < self.settings.steps:
                self.learner.advance()
                self._look(self.learner.step)
            self._finish()

    def _restore(self) -> None:
        """Take over the newest whole checkpoint, if there is one."""
        restore(self.learner, self.path / "checkpoints", self._newest, warn=self._warn)

    def _newest(self, below: int | None) -> Checkpoint | None:
        """Return the checkpoint to go on from; asked on the first rank."""
        return None

    def _make_mark(self) -> str:
        """Write a mark into the run directory; asked on the first rank."""
        raise NotImplementedError

    def _warn(self, message: str) -> None:
        """Say it, on the first rank."""

    def _look(self, step: int) -> None:
        """Log, evaluate, save and stop, whatever is due after `step`."""
        last = step == self.settings.steps
        self.saves.check()
        if self.learner.unreported and (last or step % self.settings.log_every == 0):
            self._log(step, self.learner.report())
        due = self._evaluation_due(step)
        if due:
            self.learner.prepare_policy()
        best = due and self._evaluate(step)
        saving = last or best or step % self.settings.checkpoint_every == 0
        stopped_by = self.stop.signal_name
        if self.world.size > 1:
            if not (last or due or step % self.settings.checkpoint_every == 0) and (
                step % STOP_EVERY
            ):
                return
            words = self.world.gather({"save": saving, "stop": stopped_by})
            saving = bool(words[0]["save"])
            stopped_by = next((word["stop"] for word in words if word["stop"]), None)
        if saving or stopped_by is not None:
            self._save(step, whole=last or due)
        if stopped_by is not None and not last:
            self._settle()
            raise TrainingInterrupted(
                "TRAIN_INTERRUPTED",
                f"stopped by {stopped_by} after step {step:,}, a checkpoint is saved",
                where=str(self.path),
                remedy=f"go on with `gear-offline train {self.path} --resume`",
            )

    def _evaluation_due(self, step: int) -> bool:
        every = self.settings.evaluate_every
        due = step == self.settings.steps or (every is not None and step % every == 0)
        return due and plays(self.recipe)

    def _begin(self) -> None:
        """Open what is written to."""
        self.saves = self._writer(before=lambda: None)

    def _writer(self, *, before: Callable[[], None]) -> CheckpointWriter:
        beside = self.settings.save == "async"
        return CheckpointWriter(self.path / "checkpoints", beside=beside, before=before)

    def _settle(self) -> None:
        """Wait until what was saved is on the disk."""
        self.saves.wait()

    def _finish(self) -> None:
        """Wait for what the last step left under way."""
        self.saves.wait()

    def _end(self) -> None:
        """Close it, whatever happened."""
        error = sys.exc_info()[1]
        if isinstance(error, GearError) and error.code in LOST:
            self.saves.leave_others()
        # a second Ctrl-C waits for nothing
        self.saves.close(finish=not isinstance(error, KeyboardInterrupt))

    def _sum_up(self) -> None:
        """Write what a complete run leaves behind."""

    def _log(self, step: int, values: dict[str, float]) -> None:
        """Write what the last steps reported."""

    def _evaluate(self, step: int) -> bool:
        """Play the policy; return whether it is the best one so far."""
        return False

    def _save(self, step: int, *, whole: bool) -> None:
        """Save a checkpoint; every rank contributes its random numbers, and its shard.

        Of a sharded model its weights are collected too if they are to be there `whole`.
        """
        if self.world.gather(self._is_saved(step))[0]:
            return
        place = None
        if self.mark is not None:
            place = self.path / "checkpoints" / f".partial-{checkpoint_name(step)}-{self.mark}"
        self._write(step, state_to_save(self.learner, place, whole=whole))

    def _is_saved(self, step: int) -> bool:
        return False

    def _write(self, step: int, found: StateToSave) -> None:
        """Write this rank's part of a checkpoint."""
        if found.shard is not None:
            self.saves.save_shard(found.shard)


class LeadingRun(Run):
    """The run as the first rank goes through it: it writes the run directory."""

    def __init__(
        self, directory: RunDirectory, learner: Learner, dataset: Dataset, *, quiet: bool
    ) -> None:
        super().__init__(directory.path, learner)
        self.directory, self.dataset, self.quiet = directory, dataset, quiet
        self.neighbours = 1  # runs of this process, this one included
        self.seconds_before = 0.0
        self.began = time.monotonic()

    @property
    def steps_per_second(self) -> float:
        """Of the steps of this process after the first one, what came between them included."""
        seconds = self._steps_ended - self._steps_began
        return (self.learner.step - self._first_step) / seconds if seconds > 0 else 0.0

    @property
    def save_wait_share(self) -> float:
        """Share of the time between first and last step in which a checkpoint held them up."""
        seconds = self._steps_ended - self._steps_began
        return self.saves.held_seconds / seconds if seconds > 0 else 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the run, in this process and before."""
        return self.seconds_before + time.monotonic() - self.began

    def _make_mark(self) -> str:
        return self.directory.mark()

    def _warn(self, message: str) -> None:
        say(message, quiet=self.quiet)

    def _newest(self, below: int | None) -> Checkpoint | None:
        folder = self.directory.checkpoints_path
        sweep(folder)
        checkpoint = newest_checkpoint(folder, self._warn, below=below, shards=self.mark is None)
        if checkpoint is None:
            return None
        if checkpoint.state.step > self.settings.steps:
            raise InputError(
                "RUN_RECIPE",
                f"train.steps is {self.settings.steps}, but {checkpoint.state.step} steps are done",
                where=str(self.path),
                remedy="resume with at least as many steps",
            )
        self.seconds_before = checkpoint.state.seconds
        return checkpoint

    def _begin(self) -> None:
        self.directory.write_recipe(self.recipe)
        self._announce()
        step = self.learner.step
        for done, path in list_checkpoints(self.directory.checkpoints_path):
            if done > step:  # passed over: it would count as saved, and as the newest to keep
                remove_checkpoint(path)
        self.metrics = Metrics(self.path, step=step, tensorboard=self.settings.tensorboard)
        self.display = TrainingDisplay(
            self.recipe.name, steps=self.settings.steps, done=step, quiet=self.quiet
        )
        self.display.__enter__()

        self.saves = self._writer(before=self.metrics.sync)
        self.evaluations = RunEvaluations(
            self.path,
            self.learner,
            self.choice,
            saves=self.saves,
            metrics=self.metrics,
            display=self.display,
            stop=self.stop,
        )
        self.evaluations.begin(self._due_so_far(step))
        self._logged, self._held, self._stale = time.perf_counter(), 0.0, 0
        self._steps_began = self._steps_ended = self._logged
        # The first step of a process is not counted: it prepares kernels.
        self._first_step, self._timing = step, False

    def _due_so_far(self, step: int) -> list[int]:
        """Return the steps up to `step` after which an evaluation was due."""
        every = self.settings.evaluate_every or self.settings.steps
        candidates = {*range(every, step + 1, every), step}
        return [done for done in sorted(candidates) if self._evaluation_due(done)]

    def _finish(self) -> None:
        self._steps_ended = time.perf_counter()
        self.evaluations.finish()
        self.saves.prune(self._what_stays())
        self.saves.wait()

    def _end(self) -> None:
        self.evaluations.close()
        super()._end()
        self.display.__exit__(None, None, None)
        self.metrics.close()

    def _announce(self) -> None:
        learner, spec = self.learner, self.dataset.spec
        parameters = sum(p.numel() for p in learner.model.parameters())
        self.choice = choose_evaluation(
            self.recipe,
            learner.device,
            self.world,
            parameters=parameters,
            neighbours=self.neighbours,
        )
        ranks = f", {self.world.size} ranks ({learner.parallel.reason})" * (self.world.size > 1)
        say(
            f"{self.recipe.name}: {count_text(spec.episodes, 'episode')}, "
            f"{count_text(spec.steps, 'step')} of data; {count_text(parameters, 'parameter')} "
            f"on {learner.device}{ranks}, {learner.precision_reason}"
            f"{learner.step_kind}; "
            f"run directory {self.path}",
            quiet=self.quiet,
        )
        if self._evaluation_due(self.settings.steps):
            place = "beside training" if self.choice.beside else "in place of training"
            say(f"evaluations: {place}, {self.choice.reason}", quiet=self.quiet)
        if learner.parallel.sharded:
            how = "a shard of each rank" if self.mark else NOT_SHARED
            say(f"checkpoints: {how}", quiet=self.quiet)
        if learner.step:
            say(f"resuming after step {learner.step:,}", quiet=self.quiet)

    def _look(self, step: int) -> None:
        self.display.step(step)
        if not self._timing and step > self._first_step:
            self._timing, self._first_step = True, step
            self._steps_began = time.perf_counter()
        if self.evaluations.collect():
            self.saves.prune(self._what_stays())
        super()._look(step)

    def _log(self, step: int, values: dict[str, float]) -> None:
        now, held = time.perf_counter(), self.saves.held_seconds
        self.evaluations.step_seconds = values["step_seconds"]
        values = {**values, "save_wait_share": (held - self._held) / (now - self._logged)}
        for steps, seconds in self.evaluations.staleness[self._stale :][-1:]:
            values |= {"evaluation_stale_steps": steps, "evaluation_stale_seconds": seconds}
        self._logged, self._held = now, held
        self._stale = len(self.evaluations.staleness)
        self.metrics.log(step, values)
        self.display.log(step, values["loss"])

    def _evaluate(self, step: int) -> bool:
        return self.evaluations.evaluate(step)

    def _save(self, step: int, *, whole: bool) -> None:
        with self.saves.holding():
            super()._save(step, whole=whole)

    def _is_saved(self, step: int) -> bool:
        saved = self.saves.has(step)
        if saved:
            self.saves.prune(self._what_stays())
        return saved

    def _write(self, step: int, found: StateToSave) -> None:
        learner = self.learner
        state = TrainingState(
            step=step,
            recipe=self.recipe,
            tensors=found.tensors,
            loader=learner.loader.state_dict(),
            state_mean=learner.state_mean,
            state_std=learner.state_std,
            seconds=self.seconds,
        )
        config = config_text(learner.model)
        self.saves.save(config, found.weights, state, self._what_stays(), shard=found.shard)

    def _what_stays(self) -> Prune:
        best = self.metrics.best
        return Prune(
            keep=self.settings.keep_checkpoints,
            best=None if best is None else int(best["step"]),
            pinned=self.evaluations.outstanding,
        )

    def _sum_up(self) -> None:
        """Write ``summary.json``, the plots and the report."""
        from gear_offline.report import write_report

        steps, report = self.learner.step, f"report in {self.path / 'report.md'}"
        if not self._timing and not self.evaluations.staleness and self._is_summed_up(steps):
            report = report if (self.path / "report.md").exists() else str(write_report(self.path))
            say(
                f"{self.recipe.name}: was complete already, {count_text(steps, 'step')}; {report}",
                quiet=self.quiet,
            )
            return  # its figures are of the process that did the steps
        summary = summary_of(self)
        self.directory.write_summary(finite(summary))
        write_report(self.path)
        say(
            f"{self.recipe.name}: complete after {self.seconds:,.0f} s, "
            f"{self.learner.meter.text()} while stepping; "
            f"{self.learner.data_wait_share:.1%} of the steps' time waited for batches, "
            f"{summary['save_wait_share']:.1%} for checkpoints; {report}",
            quiet=self.quiet,
        )

    def _is_summed_up(self, steps: int) -> bool:
        """Return whether ``summary.json`` is of these steps."""
        try:
            return bool(json.loads(self.directory.summary_path.read_bytes())["steps"] == steps)
        except (OSError, ValueError, KeyError, TypeError):
            return False
