"""What happens between steps of a run: resume, log, evaluate, save, stop, sum up.

A run that was killed at any instant and resumed ends with the weights of one that was not, on the
same machine with the same number of threads.  With several ranks all of them go through the same
steps; the first one alone writes, speaks and evaluates, and its word decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from gear_offline.config.tasks import environments_of
from gear_offline.core.interruption import StopRequest
from gear_offline.errors import GearError
from gear_offline.training.checkpoint_folder import Keep
from gear_offline.training.learner import Learner
from gear_offline.training.saving import Saver, restore

STOP_EVERY = 10  # steps between two words of several ranks on whether to stop


class TrainingInterrupted(GearError):
    """Ctrl-C or SIGTERM stopped the work; what was done is saved (exit code 130)."""

    exit_code = 130  # 128 + SIGINT, as shells count


class Run:
    """A run as every rank goes through it, from its beginning or its newest checkpoint to its end.

    Parameters
    ----------
    path
        The run directory, for messages.
    learner
        Of this rank.
    """

    saves: Saver

    def __init__(self, path: Path, learner: Learner) -> None:
        self.path, self.learner, self.world = path, learner, learner.world
        self.recipe, self.settings = learner.recipe, learner.recipe.train
        self.stop = StopRequest()
        self.seconds_before = 0.0

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
        folder = self.path / "checkpoints"
        self.seconds_before = restore(self.learner, folder, self._warn)

    def _warn(self, message: str) -> None:
        """Say it, on the first rank."""

    def _look(self, step: int) -> None:
        """Log, evaluate, save and stop, whatever is due after `step`."""
        last = step == self.settings.steps
        self.saves.check()
        if self.learner.unreported and (last or step % self.settings.log_every == 0):
            self._log(step, self.learner.report())
        due = self._evaluation_due(step)
        # beside training the checkpoint's weights are played, which are collected when it is saved
        if due and self.world.gather(self._plays_here(step))[0]:
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
            self._save()
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
        return due and self.recipe.evaluate.episodes > 0 and bool(environments_of(self.recipe))

    def _begin(self) -> None:
        """Open what is written to."""
        self.saves = self._writer(before=lambda: None)

    def _writer(self, *, before: Callable[[], None]) -> Saver:
        return Saver(self.learner, self.path / "checkpoints", before=before)

    def _settle(self) -> None:
        """Wait until what was saved is on the disk."""
        self.saves.wait()

    def _finish(self) -> None:
        """Wait for what the last step left under way."""
        self.saves.wait()

    def _end(self) -> None:
        """Close it, whatever happened."""
        error = sys.exc_info()[1]
        # a second Ctrl-C waits for nothing
        self.saves.close(finish=not isinstance(error, KeyboardInterrupt))

    def _sum_up(self) -> None:
        """Write what a complete run leaves behind."""

    def _log(self, step: int, values: dict[str, float]) -> None:
        """Write what the last steps reported."""

    def _evaluate(self, step: int) -> bool:
        """Play the policy; return whether it is the best one so far."""
        return False

    def _plays_here(self, step: int) -> bool:
        """Return whether `_evaluate` plays the learner's own weights; asked on the first rank."""
        return False

    def _save(self) -> None:
        """Save a checkpoint; every rank contributes its random numbers, and its shard."""
        self.saves.save(seconds=self.seconds, keep=self._what_stays())

    @property
    def seconds(self) -> float:
        """Wall time of the run; the first rank's counts."""
        return self.seconds_before

    def _what_stays(self) -> Keep:
        """Return which checkpoints stay; the first rank's word counts."""
        return Keep(newest=1)
