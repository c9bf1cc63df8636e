"""Files and lines that the first rank writes between the steps of a run."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_offline.artifacts.json_lines import AppendedFile
from gear_offline.artifacts.records import read_summary
from gear_offline.core.files import Closing, write_file
from gear_offline.core.progress import Progress
from gear_offline.core.system import versions
from gear_offline.core.text import count_text, finite, say
from gear_offline.evaluation.choose import choose
from gear_offline.runs.callbacks import Callbacks
from gear_offline.runs.evaluations import RunEvaluations
from gear_offline.runs.run import best_of
from gear_offline.training.learner import Learner
from gear_offline.training.saving import Saver

# of a summary, of the process that did the steps
SPEEDS = ("seconds", "steps_per_second", "data_wait_share", "save_wait_share", "throughput")
JUDGED = "choice"  # key of a summary: what the data say of the policy


class RunWriter(Closing):
    """The files and the display of a run.

    The learner stands where the run goes on after `seconds`; the run's directory has begun.
    Without `reports` those of all runs are written at the end.
    """

    def __init__(
        self,
        learner: Learner,
        saver: Saver,
        callbacks: Callbacks,
        progress: Progress,
        evaluations: RunEvaluations,
        *,
        seconds: float,
        reports: bool,
        quiet: bool,
    ) -> None:
        self._learner, self._saver, self._callbacks = learner, saver, callbacks
        self._recipe, self._path, self._quiet = learner.recipe, callbacks.run.path, quiet
        self._first_step, self._reports, self._evaluations = learner.step, reports, evaluations
        self._parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        self._began = time.monotonic() - seconds
        self._stepped_from = self._stepped_to = self._logged = time.perf_counter()
        self._stalled = 0.0
        self._metrics = AppendedFile(self._path / "metrics.jsonl")
        self._progress, self._played_before = progress, len(evaluations.log.reports)
        self._announce()
        progress.start()

    def _announce(self) -> None:
        learner, spec = self._learner, self._learner.loader.dataset.spec
        ranks = learner.world.size
        shared = f", {ranks} ranks ({learner.parallel.reason})" if ranks > 1 else ""
        count = count_text(torch.get_num_threads(), "thread")
        threads = f", {count} (train.threads)" if learner.device.type == "cpu" else ""
        lines = [
            f"{self._recipe.name}: {count_text(spec.episodes, 'episode')}, "
            f"{count_text(spec.steps, 'step')} of data{_held_out_text(learner)}; "
            f"{count_text(self._parameters, 'parameter')} "
            f"on {learner.device}{threads}{shared}, {learner.precision_reason}{learner.step_kind}; "
            f"run directory {self._path}"
        ]
        if learner.step:
            lines.append(f"resuming after step {learner.step:,}")
        if self._recipe.plays:
            plan = self._evaluations.plan
            count = count_text(plan.workers, "process", "processes")
            count = "a thread" if plan.thread else count
            away = f"in the background ({count} on {plan.device})"
            if not plan.thread and self._recipe.evaluate.background == "auto":
                away += " where that saves time"
            lines.append(f"evaluation: {away if plan.workers else 'in the training process'}")
        say("\n".join(lines), quiet=self._quiet)

    @property
    def seconds(self) -> float:
        """Wall time of the run, in this process and before."""
        return time.monotonic() - self._began

    def step(self, step: int) -> None:
        """Take note of a step that was done."""
        self._progress.update(step)
        if step == self._first_step + 1:  # it is not timed: it prepares kernels
            self._stepped_from = time.perf_counter()
        self.tell_saved()

    def tell_saved(self) -> None:
        """Tell callbacks of the checkpoints that have become whole, as far as they are there."""
        while self._saver.written:
            step = self._saver.written.popleft()
            if self._saver.path(step).is_dir():
                self._callbacks.tell("on_checkpoint", step, self._saver.path(step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write what the last steps reported."""
        now, stalled = time.perf_counter(), self._saver.stalled_seconds
        if "step_seconds" in values:
            share = (stalled - self._stalled) / (now - self._logged)
            values = {**values, "save_wait_share": share}
        self._logged, self._stalled = now, stalled
        self._metrics.append({"step": step, **values})
        self._progress.update(step, loss=f"{values['loss']:.4g}")
        if (validation := values.get("validation/loss")) is not None:
            self._progress.say(f"step {step:,}: validation/loss {validation:.4g}")
            self._evaluations.note_validation(step, validation)
        self._callbacks.tell("on_log", step, dict(values))

    def note_end(self) -> None:
        """Take note that the last step is done."""
        self._stepped_to = time.perf_counter()

    def sync(self) -> None:
        """Make the metrics so far survive a power loss."""
        self._metrics.sync()

    def close(self) -> None:
        """Close the files and the display."""
        self._progress.close()
        self._metrics.close()

    def sum_up(self) -> None:
        """Write ``summary.json``, the plots and the report."""
        from gear_offline.runs.report import write_report  # matplotlib takes half a second

        self.tell_saved()
        learner, before, seconds = self._learner, read_summary(self._path), self.seconds
        text = f"{self._recipe.name}: was complete already, {count_text(learner.step, 'step')}"
        steps = learner.step - self._first_step
        played = len(self._evaluations.log.reports) > self._played_before
        is_new = steps or played or before is None or before.steps != learner.step
        is_new = is_new or (self._recipe.evaluate.offline and not (before and before.choice))
        if is_new:  # else its figures are of the process that did the steps
            summary, file = self._summary(), self._path / "summary.json"
            if not steps and before is not None and before.steps == learner.step:
                earlier = json.loads(file.read_bytes())
                summary |= {n: earlier[n] for n in (*SPEEDS, JUDGED) if n in earlier}
            if self._recipe.evaluate.offline and summary.get(JUDGED) is None:
                summary[JUDGED] = self._judge()
            content = json.dumps(finite(summary), indent=2, allow_nan=False) + "\n"
            write_file(file, content.encode())
            stopped = learner.step < self._recipe.train.steps
            end = f"stopped by a callback at step {learner.step:,}," if stopped else "complete"
            text = f"{self._recipe.name}: {end} after {seconds:,.0f} s of training"
            if steps:
                rate = learner.meter.text()
                text += (f", {rate} while stepping" if rate else "") + (
                    f"; {learner.window.wait_share:.1%} of the steps' time waited for batches, "
                    f"{summary['save_wait_share']:.1%} for checkpoints"
                )
        report = self._path / "report.md"
        if not self._reports:
            if is_new:
                report.unlink(missing_ok=True)
        elif is_new or not report.exists():
            try:
                write_report(self._path)
            except Exception as error:  # the run is complete, whatever becomes of its report
                say(f"{text}; there is no report: {error}", quiet=self._quiet)
                return
        say(f"{text}; report in {report.with_suffix('.html')}", quiet=self._quiet)
        if learner.growing is not None and not learner.growing.admissions:
            say("no episode that actors appended was admitted", quiet=self._quiet)

    def _judge(self) -> dict[str, Any] | None:
        """Return the answer of `choose` about the policy, JSON-able; None if there is none."""
        plot = self._path / "plots" / "choice.png"
        plot.parent.mkdir(exist_ok=True)
        device = str(self._learner.device)
        try:
            choice = choose(self._path, device=device, out=plot, overwrite=True, quiet=self._quiet)
        except Exception as error:  # the run is complete all the same
            say(f"{self._recipe.name}: not judged by its data: {error}")
            return None
        say(f"{self._recipe.name}: judged by its data: {choice.answer}", quiet=self._quiet)
        return choice.to_json() | {"plot": plot.relative_to(self._path).as_posix()}

    def _summary(self) -> dict[str, Any]:
        """Return the summary of a complete run, JSON-able but for NaN and infinities."""
        learner, evaluations = self._learner, self._evaluations.log.reports
        plan, best = self._evaluations.plan, best_of(evaluations)
        dataset = learner.loader.dataset  # as large as it is now
        spec, returns = dataset.spec, dataset.returns
        returns = returns[np.isfinite(returns)]
        # The last step is logged before it is saved: its checkpoint holds up none.
        timed, logged = (end - self._stepped_from for end in (self._stepped_to, self._logged))
        steps = learner.step - self._first_step - 1
        return {
            "recipe": self._recipe.name,
            "seed": self._recipe.seed,
            "steps": learner.step,
            "seconds": round(self.seconds, 3),
            "steps_per_second": steps / timed if steps > 0 else 0.0,
            "data_wait_share": learner.window.wait_share,
            "save_wait_share": self._stalled / logged if logged > 0 else 0.0,
            "throughput": learner.meter.summary(),
            "evaluation": {
                "background": plan.thread or self._evaluations.used_workers,
                "workers": plan.workers,
                "device": str(plan.device),
            },
            "parameters": self._parameters,
            "device": str(learner.device),
            "precision": learner.precision_reason,
            "deterministic": self._recipe.train.deterministic,
            "threads": torch.get_num_threads(),
            "data": {
                "path": self._recipe.data.path,
                "episodes": spec.episodes,
                "steps": spec.steps,
                "return_mean": float(returns.mean()) if returns.size else None,
                "return_max": float(returns.max()) if returns.size else None,
            },
            "evaluation_last": evaluations[-1].to_json() if evaluations else None,
            "evaluation_best": best and best.to_json(),
            "python": platform.python_version(),
            "versions": versions("gear-offline", "torch", "transformers", "numpy"),
        }


def _held_out_text(learner: Learner) -> str:
    """Return the share held out and the part of it that is counted, as a clause."""
    if (validation := learner.validation) is None:
        return ""
    spec, windows = validation.dataset.spec, validation.windows
    some = f", {windows:,} windows for validation/loss" if windows < spec.steps else ""
    episodes, steps = count_text(spec.episodes, "episode"), count_text(spec.steps, "step")
    return f", {episodes} of {steps} held out{some}"
