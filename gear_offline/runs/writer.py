"""What the first rank does between the steps of a run: it writes, speaks and evaluates."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from gear_offline.core.interruption import StopRequest
from gear_offline.core.text import count_text
from gear_offline.progress import Progress, say
from gear_offline.runs.directory import RunDirectory, read_summary
from gear_offline.runs.evaluations import RunEvaluations, plays
from gear_offline.tables.joint import TableData
from gear_offline.training.checkpoint_folder import (
    Keep,
    list_checkpoints,
    remove_checkpoint,
    remove_leftovers,
)
from gear_offline.training.learner import Learner
from gear_offline.training.metrics import Metrics, check_records, finite
from gear_offline.training.saving import Saver


class NullWriter:
    """What the other ranks do: nothing."""

    @property
    def seconds(self) -> float:
        """Wall time of the run, in this process and before."""
        return 0.0

    @property
    def keep(self) -> Keep:
        """The checkpoints that stay."""
        return Keep(newest=1)

    def sync(self) -> None:
        """Make the metrics so far durable."""

    def step(self, step: int) -> None:
        """Take note of a step that was done, and of evaluations that have come in."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write what the last steps reported."""

    def plays_here(self, step: int) -> bool:
        """Whether `evaluate` will play the learner's own weights."""
        return False

    def evaluate(self, step: int) -> bool:
        """Play the policy, or have it played; return whether a checkpoint is needed now."""
        return False

    def finish(self) -> None:
        """Wait for the evaluations that are under way."""

    def close(self) -> None:
        """Close the files and end what evaluates."""

    def sum_up(self) -> None:
        """Write ``summary.json``, the plots and the report."""


class RunWriter(NullWriter):
    """What the first rank does; making it is the first change of the run directory.

    Parameters
    ----------
    learner, dataset
        Of this rank; the learner stands where the run goes on.
    seconds
        Wall time of the run before.
    """

    def __init__(
        self,
        directory: RunDirectory,
        learner: Learner,
        dataset: TableData,
        *,
        seconds: float,
        quiet: bool,
    ) -> None:
        self._directory, self._learner, self._dataset = directory, learner, dataset
        self._recipe, self._settings, self._quiet = learner.recipe, learner.recipe.train, quiet
        self._first = step = learner.step
        self._began = time.monotonic() - seconds
        if not directory.begins_anew:
            check_records(directory.path, step=step)  # it may refuse the run
        self._announce()
        directory.write_recipe(self._recipe)
        remove_leftovers(directory.checkpoints_path)
        for done, path in list_checkpoints(directory.checkpoints_path):
            if done > step:  # passed over: it would count as saved, and as the newest to keep
                remove_checkpoint(path)
        board = self._settings.tensorboard
        self._metrics = Metrics(directory.path, step=step, tensorboard=board)
        self.progress = Progress(
            self._recipe.name, total=self._settings.steps, done=step, quiet=quiet
        )
        self.progress.__enter__()
        self._evaluations: RunEvaluations | None = None
        self._saver: Saver | None = None
        # The first step of a process is not timed: it prepares kernels.
        self._timed_after: int | None = None
        self._timed_from = self._timed_to = self._logged = time.perf_counter()
        self._stalled_before = self._stalled = 0.0

    def _announce(self) -> None:
        learner, spec = self._learner, self._dataset.spec
        ranks = learner.world.size
        shared = f", {ranks} ranks ({learner.parallel.reason})" if ranks > 1 else ""
        say(
            f"{self._recipe.name}: {count_text(spec.episodes, 'episode')}, "
            f"{count_text(spec.steps, 'step')} of data; "
            f"{count_text(self._parameters, 'parameter')} "
            f"on {learner.device}{shared}, {learner.precision_reason}{learner.step_kind}; "
            f"run directory {self._directory.path}",
            quiet=self._quiet,
        )
        if learner.step:
            say(f"resuming after step {learner.step:,}", quiet=self._quiet)

    @property
    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._learner.model.parameters())

    def begin(
        self, saver: Saver, stop: StopRequest, *, due: list[int], concurrent_runs: int
    ) -> None:
        """Begin to evaluate, with what a killed run left of the steps that were `due`."""
        self._saver = saver
        if saver.remark:
            self.progress.say(f"checkpoints: {saver.remark}")
        self._evaluations = RunEvaluations(
            self._directory.path,
            self._learner,
            saver=saver,
            metrics=self._metrics,
            progress=self.progress,
            stop=stop,
            concurrent_runs=concurrent_runs,
        )
        if plays(self._recipe):
            self.progress.say(f"evaluation: {self._evaluations.plan}")
        self._evaluations.begin(due)

    @property
    def evaluations(self) -> RunEvaluations:
        """Those of the run, once they have begun."""
        assert self._evaluations is not None, "they begin before the first step"
        return self._evaluations

    @property
    def saver(self) -> Saver:
        """What saves the run's checkpoints."""
        assert self._saver is not None, "it comes before the first step"
        return self._saver

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def keep(self) -> Keep:
        best = self._metrics.best
        return Keep(
            newest=self._settings.keep_checkpoints,
            best=None if best is None else int(best["step"]),
            pinned=tuple(self.evaluations.outstanding),
        )

    def sync(self) -> None:
        self._metrics.sync()

    def step(self, step: int) -> None:
        self.progress.update(step)
        if self._timed_after is None:
            self._timed_after, self._timed_from = step, time.perf_counter()
            self._stalled_before = self.saver.stalled_seconds
        self.collect()

    def collect(self) -> None:
        """Record the evaluations that have come in."""
        if self.evaluations.collect():
            self.saver.prune(self.keep)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now, stalled = time.perf_counter(), self.saver.stalled_seconds
        if "step_seconds" in values:
            share = (stalled - self._stalled) / (now - self._logged)
            values = {**values, "save_wait_share": share}
        self._logged, self._stalled = now, stalled
        self._metrics.log(step, values)
        self.progress.update(step, loss=f"{values['loss']:.4g}")

    def must_wait(self, step: int) -> bool:
        """Whether an evaluation after `step` could not begin before another is done."""
        return self.evaluations.is_full and self.evaluations.is_new(step)

    @property
    def is_settled(self) -> bool:
        """Whether no evaluation is under way."""
        return not self.evaluations.outstanding

    def plays_here(self, step: int) -> bool:
        return not self.evaluations.plan.workers and self.evaluations.is_new(step)

    def evaluate(self, step: int) -> bool:
        return self.evaluations.evaluate(step)

    def finish(self) -> None:
        self._timed_to = time.perf_counter()
        self.evaluations.finish()

    def close(self) -> None:
        if self._evaluations is not None:
            self._evaluations.close()
        self.progress.close()
        self._metrics.close()

    def sum_up(self) -> None:
        from gear_offline.runs.report import write_report  # matplotlib takes half a second

        learner, path, name = self._learner, self._directory.path, self._recipe.name
        steps = count_text(learner.step, "step")
        is_new = self._timed_after is not None or bool(self.evaluations.staleness)
        before = read_summary(path)
        is_summed_up = not is_new and before is not None and before.steps == learner.step
        text = f"{name}: was complete already, {steps}"
        if not is_summed_up:  # else its figures are of the process that did the steps
            summary = self._summary()
            self._directory.write_summary(finite(summary))
            text = f"{name}: complete after {self.seconds:,.0f} s"
            if self._timed_after is not None:
                text += (
                    f", {learner.meter.text()} while stepping; {learner.data_wait_share:.1%} of "
                    f"the steps' time waited for batches, {summary['save_wait_share']:.1%} for "
                    "checkpoints"
                )
        report = path / "report.md"
        if not is_summed_up or not report.exists():
            try:
                write_report(path)
            except Exception as error:  # the run is complete, whatever becomes of its report
                say(f"{text}; there is no report: {error}", quiet=self._quiet)
                return
        say(f"{text}; report in {report}", quiet=self._quiet)

    def _summary(self) -> dict[str, Any]:
        """Return what a complete run says of itself, JSON-able but for NaN and infinities."""
        learner, evaluations = self._learner, self._metrics.evaluations
        spec, returns = self._dataset.spec, self._dataset.returns
        returns = returns[np.isfinite(returns)]
        # The last step is logged before it is saved: its checkpoint holds up none.
        timed, logged = self._timed_to - self._timed_from, self._logged - self._timed_from
        steps = learner.step - (self._timed_after or learner.step)
        stalled = self._stalled - self._stalled_before
        return {
            "recipe": self._recipe.name,
            "seed": self._recipe.seed,
            "steps": learner.step,
            "seconds": round(self.seconds, 3),
            "steps_per_second": steps / timed if timed > 0 else 0.0,
            "data_wait_share": learner.data_wait_share,
            "save_wait_share": stalled / logged if logged > 0 else 0.0,
            "throughput": learner.meter.summary(),
            "evaluation": self.evaluations.summary(),
            "parameters": self._parameters,
            "device": str(learner.device),
            "precision": learner.precision_reason,
            "deterministic": self._settings.deterministic,
            "threads": torch.get_num_threads(),
            "data": {
                "path": self._recipe.data.path,
                "episodes": spec.episodes,
                "steps": spec.steps,
                "return_mean": float(returns.mean()) if returns.size else None,
                "return_max": float(returns.max()) if returns.size else None,
            },
            "evaluation_last": evaluations[-1] if evaluations else None,
            "evaluation_best": self._metrics.best,
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        }
