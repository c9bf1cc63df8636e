"""The run as the first rank goes through it: what it writes, says and evaluates between steps."""

from __future__ import annotations

import json
import time

from gear_offline.core.progress import say
from gear_offline.core.text import count_text
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.evaluations import RunEvaluations
from gear_offline.runs.summary import summary_of
from gear_offline.runs.training_display import TrainingDisplay
from gear_offline.runs.training_run import Run
from gear_offline.tables.joint import TableData
from gear_offline.training.checkpoint_folder import (
    Keep,
    list_checkpoints,
    remove_checkpoint,
    sweep,
)
from gear_offline.training.learner import Learner
from gear_offline.training.metrics import Metrics, check_records, finite


class LeadingRun(Run):
    """The run as the first rank goes through it: it writes the run directory."""

    def __init__(
        self, directory: RunDirectory, learner: Learner, dataset: TableData, *, quiet: bool
    ) -> None:
        super().__init__(directory.path, learner)
        self.directory, self.dataset, self.quiet = directory, dataset, quiet
        self.neighbours = 1  # runs of this process, this one included
        self.began = time.monotonic()

    @property
    def steps_per_second(self) -> float:
        """Of the steps of this process after the first one, what came between them included."""
        seconds = self._steps_ended - self._steps_began
        return (self.learner.step - self._first_step) / seconds if seconds > 0 else 0.0

    @property
    def save_wait_share(self) -> float:
        """Share of the time from the end of the first step of this process to that of the last one
        in which a checkpoint held up steps.  The last step's own holds up none.
        """
        seconds = self._logged - self._steps_began  # the last step is logged before it is saved
        return (self._held - self._held_before) / seconds if seconds > 0 else 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the run, in this process and before."""
        return self.seconds_before + time.monotonic() - self.began

    def _warn(self, message: str) -> None:
        say(message, quiet=self.quiet)

    def _begin(self) -> None:
        step = self.learner.step
        if not self.directory.begins_anew:
            check_records(self.path, step=step)
        self._announce()  # it may refuse the run; from here on the directory is written to
        self.directory.write_recipe(self.recipe)
        sweep(self.directory.checkpoints_path)
        for done, path in list_checkpoints(self.directory.checkpoints_path):
            if done > step:  # passed over: it would count as saved, and as the newest to keep
                remove_checkpoint(path)
        self.metrics = Metrics(self.path, step=step, tensorboard=self.settings.tensorboard)
        self.display = TrainingDisplay(
            self.recipe.name, steps=self.settings.steps, done=step, quiet=self.quiet
        )
        self.display.__enter__()

        self.saves = self._writer(before=self.metrics.sync)
        if self.saves.remark:
            self.display.say(f"checkpoints: {self.saves.remark}")
        self.evaluations = RunEvaluations(
            self.path,
            self.learner,
            saves=self.saves,
            metrics=self.metrics,
            display=self.display,
            stop=self.stop,
            concurrent_runs=self.neighbours,
        )
        if self._evaluation_due(self.settings.steps):
            say(f"evaluation: {self.evaluations.plan}", quiet=self.quiet)
        self.evaluations.begin(self._due_so_far(step))
        self._logged, self._held, self._stale = time.perf_counter(), 0.0, 0
        self._held_before = 0.0
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
        self.display.close()
        self.metrics.close()

    def _announce(self) -> None:
        learner, spec = self.learner, self.dataset.spec
        parameters = sum(p.numel() for p in learner.model.parameters())
        ranks = f", {self.world.size} ranks ({learner.parallel.reason})" * (self.world.size > 1)
        say(
            f"{self.recipe.name}: {count_text(spec.episodes, 'episode')}, "
            f"{count_text(spec.steps, 'step')} of data; {count_text(parameters, 'parameter')} "
            f"on {learner.device}{ranks}, {learner.precision_reason}"
            f"{learner.step_kind}; "
            f"run directory {self.path}",
            quiet=self.quiet,
        )
        if learner.step:
            say(f"resuming after step {learner.step:,}", quiet=self.quiet)

    def _look(self, step: int) -> None:
        self.display.step(step)
        if not self._timing and step > self._first_step:
            self._timing, self._first_step = True, step
            self._steps_began, self._held_before = time.perf_counter(), self.saves.stalled_seconds
        if self.evaluations.collect():
            self.saves.prune(self._what_stays())
        super()._look(step)

    def _log(self, step: int, values: dict[str, float]) -> None:
        now, held = time.perf_counter(), self.saves.stalled_seconds
        if "step_seconds" in values:
            values = {**values, "save_wait_share": (held - self._held) / (now - self._logged)}
        for steps, seconds in self.evaluations.staleness[self._stale :][-1:]:
            values |= {"evaluation_stale_steps": steps, "evaluation_stale_seconds": seconds}
        self._logged, self._held = now, held
        self._stale = len(self.evaluations.staleness)
        self.metrics.log(step, values)
        self.display.log(step, values["loss"])

    def _evaluate(self, step: int) -> bool:
        return self.evaluations.evaluate(step)

    def _plays_here(self, step: int) -> bool:
        return not self.evaluations.plan.workers and self.evaluations.is_new(step)

    def _what_stays(self) -> Keep:
        best = self.metrics.best
        return Keep(
            newest=self.settings.keep_checkpoints,
            best=None if best is None else int(best["step"]),
            pinned=tuple(self.evaluations.outstanding),
        )

    def _sum_up(self) -> None:
        """Write ``summary.json``, the plots and the report."""
        from gear_offline.runs.report import write_report

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
        stepping = (
            f", {self.learner.meter.text()} while stepping; "
            f"{self.learner.data_wait_share:.1%} of the steps' time waited for batches, "
            f"{summary['save_wait_share']:.1%} for checkpoints"
        )
        if not self._timing and steps == self._first_step:  # the last step was done before
            stepping = ""
        complete = f"{self.recipe.name}: complete after {self.seconds:,.0f} s"
        say(f"{complete}{stepping}; {report}", quiet=self.quiet)

    def _is_summed_up(self, steps: int) -> bool:
        """Return whether ``summary.json`` is of these steps."""
        try:
            return bool(json.loads(self.directory.summary_path.read_bytes())["steps"] == steps)
        except (OSError, ValueError, KeyError, TypeError):
            return False
