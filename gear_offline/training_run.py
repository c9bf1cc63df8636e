"""What happens between steps of a run: resume, log, evaluate, save, stop, sum up.

A run that was killed at any instant and resumed ends with the weights of one that was not, on the
same machine with the same number of threads.  With several ranks all of them go through the same
steps; the first one alone writes, speaks and evaluates, and its word decides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gear_offline.checkpoint import Checkpoint, TrainingState, damaged, newest_checkpoint
from gear_offline.checkpoint_folder import sweep
from gear_offline.checkpoint_writer import CheckpointWriter, Prune
from gear_offline.config_text import config_text
from gear_offline.dataset import Dataset
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation_choice import choose_evaluation
from gear_offline.interruption import StopRequest
from gear_offline.learner import Learner
from gear_offline.metrics import Metrics, finite
from gear_offline.progress import say
from gear_offline.run_directory import RunDirectory, default_run_path
from gear_offline.run_evaluations import RunEvaluations
from gear_offline.run_summary import summary_of
from gear_offline.task_evaluation import plays
from gear_offline.training_display import TrainingDisplay
from gear_offline.wording import count_text

STOP_EVERY = 10  # steps between two words of several ranks on whether to stop
MODEL, TRAINING = "model/", "training/"  # of tensors that are sent to other ranks


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
    """

    def __init__(self, path: Path, learner: Learner) -> None:
        self.path, self.learner, self.world = path, learner, learner.world
        self.recipe, self.settings = learner.recipe, learner.recipe.train
        self.stop = StopRequest()

    def complete(self) -> None:
        """Do what is left of the run."""
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
        checkpoint = self.world.lead(self._newest)
        words = None
        if checkpoint is not None:
            state = checkpoint.state
            words = {"step": state.step, "loader": dict(state.loader)}
        words = self.world.gather(words)[0]
        if words is None:
            return
        tensors = self._state_tensors(checkpoint)
        try:
            self.learner.load(
                step=words["step"],
                model=_part(tensors, MODEL),
                tensors=_part(tensors, TRAINING),
                loader=words["loader"],
            )
        except (KeyError, RuntimeError) as error:
            place = self.path if checkpoint is None else checkpoint.path
            raise damaged(place, f"it does not fit the recipe ({error})") from error

    def _state_tensors(self, checkpoint: Checkpoint | None) -> Mapping[str, Tensor]:
        tensors = None
        if checkpoint is not None:
            tensors = {MODEL + name: t for name, t in checkpoint.model.items()}
            tensors |= {TRAINING + name: t for name, t in checkpoint.state.tensors.items()}
        if self.world.size == 1 and tensors is not None:
            return tensors
        return self.world.send_tensors(tensors)

    def _newest(self) -> Checkpoint | None:
        """Return the checkpoint to go on from; asked on the first rank."""
        return None

    def _look(self, step: int) -> None:
        """Log, evaluate, save and stop, whatever is due after `step`."""
        last = step == self.settings.steps
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
            self._save(step)
        if stopped_by is not None and not last:
            self._settle()
            out = "" if self.path == default_run_path(self.recipe) else f" --out {self.path}"
            raise TrainingInterrupted(
                "TRAIN_INTERRUPTED",
                f"stopped by {stopped_by} after step {step:,}, a checkpoint is saved",
                where=str(self.path),
                remedy=f"go on with `gear-offline train {self.path}/recipe.yaml --resume{out}`",
            )

    def _evaluation_due(self, step: int) -> bool:
        every = self.settings.evaluate_every
        due = step == self.settings.steps or (every is not None and step % every == 0)
        return due and plays(self.recipe)

    def _begin(self) -> None:
        """Open what is written to."""

    def _settle(self) -> None:
        """Wait until what was saved is on the disk."""

    def _finish(self) -> None:
        """Wait for what the last step left under way."""

    def _end(self) -> None:
        """Close it, whatever happened."""

    def _sum_up(self) -> None:
        """Write what a complete run leaves behind."""

    def _log(self, step: int, values: dict[str, float]) -> None:
        """Write what the last steps reported."""

    def _evaluate(self, step: int) -> bool:
        """Play the policy; return whether it is the best one so far."""
        return False

    def _save(self, step: int) -> None:
        """Save a checkpoint; every rank contributes its random numbers."""
        if self.world.gather(self._is_saved(step))[0]:
            return
        tensors, weights = self.learner.tensors(), self.learner.weights()
        self._write(step, tensors, weights)

    def _is_saved(self, step: int) -> bool:
        return False

    def _write(self, step: int, tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        """Write a checkpoint of `tensors`, the model's `weights` and the learner."""


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


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

    def _newest(self) -> Checkpoint | None:
        folder = self.directory.checkpoints_path
        sweep(folder)
        checkpoint = newest_checkpoint(folder, lambda message: say(message, quiet=self.quiet))
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
        self.metrics = Metrics(self.path, step=step, tensorboard=self.settings.tensorboard)
        self.display = TrainingDisplay(
            self.recipe.name, steps=self.settings.steps, done=step, quiet=self.quiet
        )
        self.display.__enter__()

        self.saves = CheckpointWriter(
            self.directory.checkpoints_path,
            beside=self.settings.save == "async",
            before=self.metrics.sync,
        )
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

    def _settle(self) -> None:
        self.saves.wait()

    def _end(self) -> None:
        self.evaluations.close()
        # a second Ctrl-C waits for nothing
        self.saves.close(finish=not isinstance(sys.exc_info()[1], KeyboardInterrupt))
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
        if learner.step:
            say(f"resuming after step {learner.step:,}", quiet=self.quiet)

    def _look(self, step: int) -> None:
        self.display.step(step)
        if not self._timing and step > self._first_step:
            self._timing, self._first_step = True, step
            self._steps_began = time.perf_counter()
        self.saves.check()
        if self.evaluations.collect():
            self.saves.prune(self._what_stays())
        super()._look(step)

    def _log(self, step: int, values: dict[str, float]) -> None:
        now, held = time.perf_counter(), self.saves.held_seconds
        values = {**values, "save_wait_share": (held - self._held) / (now - self._logged)}
        for steps, seconds in self.evaluations.staleness[self._stale :][-1:]:
            values |= {"evaluation_stale_steps": steps, "evaluation_stale_seconds": seconds}
        self._logged, self._held = now, held
        self._stale = len(self.evaluations.staleness)
        self.metrics.log(step, values)
        self.display.log(step, values["loss"])

    def _evaluate(self, step: int) -> bool:
        return self.evaluations.evaluate(step)

    def _save(self, step: int) -> None:
        with self.saves.holding():
            super()._save(step)

    def _is_saved(self, step: int) -> bool:
        saved = self.saves.has(step)
        if saved:
            self.saves.prune(self._what_stays())
        return saved

    def _write(self, step: int, tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
        learner = self.learner
        state = TrainingState(
            step=step,
            recipe=self.recipe,
            tensors=tensors,
            loader=learner.loader.state_dict(),
            state_mean=learner.state_mean,
            state_std=learner.state_std,
            seconds=self.seconds,
        )
        config = config_text(learner.model)
        self.saves.save(config, weights, state, self._what_stays())

    def _what_stays(self) -> Prune:
        best = self.metrics.best
        return Prune(
            keep=self.settings.keep_checkpoints,
            best=None if best is None else int(best["step"]),
            pinned=self.evaluations.outstanding,
        )

    def _sum_up(self) -> None:
        """Write ``summary.json``, the plots and the report."""
        summary = summary_of(self)
        self.directory.write_summary(finite(summary))
        from gear_offline.report import write_report

        write_report(self.directory.path)
        say(
            f"{self.recipe.name}: complete after {self.seconds:,.0f} s, "
            f"{self.learner.data_wait_share:.1%} of the steps' time waited for batches, "
            f"{summary['save_wait_share']:.1%} for checkpoints; {self.learner.meter.text()}",
            quiet=self.quiet,
        )
