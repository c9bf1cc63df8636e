"""What the first rank does between the steps of a run: it writes, speaks and evaluates.

Evaluations are played in the training process or in the background.  There the weights are those of
a checkpoint, which stays until its result is there; a run that was killed meanwhile finds it again
and plays it.  Results are recorded in the order of steps.  An evaluation that fails is recorded as
failed, training goes on.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gear_offline.config.tasks import evaluates_at, plays
from gear_offline.core.closing import Closing
from gear_offline.core.files import write_file
from gear_offline.core.interruption import Aborted
from gear_offline.core.text import count_text
from gear_offline.evaluation.background import (
    BackgroundEvaluations,
    PlayRequest,
    failure,
    plan_evaluations,
    play,
    play_checkpoint,
)
from gear_offline.evaluation.evaluate import tasks_of
from gear_offline.evaluation.results import summary_text
from gear_offline.models.multitask import tasks_of_config
from gear_offline.progress import Progress, say
from gear_offline.training.checkpoint_folder import Keep, list_checkpoints
from gear_offline.training.metrics import Metrics, finite, read_summary

if TYPE_CHECKING:
    from gear_offline.runs.loop import LiveRun


class RunWriter(Closing):
    """The files and the display of a run, and its evaluations.

    The learner stands where the run goes on after `seconds`; the run's directory has begun.
    `concurrent_runs` share the cores that training leaves to evaluations.
    """

    def __init__(self, run: LiveRun, seconds: float, concurrent_runs: int, *, quiet: bool) -> None:
        self._run, self._path, self._saver = run, run.path, run.saver
        self._learner = learner = run.learner
        self._recipe, self._quiet = learner.recipe, quiet
        self._first_step, steps = learner.step, self._recipe.train.steps
        self._parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        self._began = time.monotonic() - seconds
        self._stepped_from = self._stepped_to = self._logged = time.perf_counter()
        self._stalled = 0.0
        self.metrics = Metrics(run.path)
        self.progress = Progress(self._recipe.name, total=steps, done=self._first_step, quiet=quiet)
        tasks = tasks_of(self._recipe, tasks_of_config(learner.model.config))
        self._tasks = tasks if plays(self._recipe) else ()
        self._plan = plan = plan_evaluations(
            self._recipe,
            self._tasks,
            learner.device,
            learner.world,
            parameters=self._parameters,
            concurrent_runs=concurrent_runs,
        )
        self._background = BackgroundEvaluations(workers=plan.workers, threads=plan.threads)
        self._evaluated, self._held_seconds = 0, 0.0  # by this process
        self._announce()
        self.progress.__enter__()
        try:
            self._take_up_evaluations()
        except BaseException:
            self.close()
            raise

    def _announce(self) -> None:
        learner, spec = self._learner, self._learner.loader.dataset.spec
        ranks = learner.world.size
        shared = f", {ranks} ranks ({learner.parallel.reason})" if ranks > 1 else ""
        lines = [
            f"{self._recipe.name}: {count_text(spec.episodes, 'episode')}, "
            f"{count_text(spec.steps, 'step')} of data; "
            f"{count_text(self._parameters, 'parameter')} "
            f"on {learner.device}{shared}, {learner.precision_reason}{learner.step_kind}; "
            f"run directory {self._path}"
        ]
        if learner.step:
            lines.append(f"resuming after step {learner.step:,}")
        if plays(self._recipe):
            plan = self._plan
            count = count_text(plan.workers, "process", "processes")
            away = f"in the background ({count} on {plan.device})"
            lines.append(f"evaluation: {away if plan.workers else 'in the training process'}")
        say("\n".join(lines), quiet=self._quiet)

    @property
    def seconds(self) -> float:
        """Wall time of the run, in this process and before."""
        return time.monotonic() - self._began

    @property
    def keep(self) -> Keep:
        """The checkpoints that stay."""
        best = self.metrics.best
        return Keep(
            newest=self._recipe.train.keep_checkpoints,
            best=None if best is None else int(best["step"]),
            pinned=self.outstanding,
        )

    def step(self, step: int) -> None:
        """Take note of a step that was done, and of evaluations that have come in."""
        self.progress.update(step)
        if step == self._first_step + 1:  # it is not timed: it prepares kernels
            self._stepped_from = time.perf_counter()
        self.collect()
        self.tell_saved()

    def tell_saved(self) -> None:
        """Tell callbacks of the checkpoints that have become whole, as far as they are there."""
        while self._saver.written:
            step = self._saver.written.popleft()
            if self._saver.path(step).is_dir():
                self._run.callbacks.tell("on_checkpoint", step, self._saver.path(step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write what the last steps reported."""
        now, stalled = time.perf_counter(), self._saver.stalled_seconds
        if "step_seconds" in values:
            share = (stalled - self._stalled) / (now - self._logged)
            values = {**values, "save_wait_share": share}
        self._logged, self._stalled = now, stalled
        self.metrics.log(step, values)
        self.progress.update(step, loss=f"{values['loss']:.4g}")
        self._run.callbacks.tell("on_log", step, dict(values))

    # evaluations ------------------------------------------------------------------------------

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Steps that are still to be played in the background; their checkpoints stay."""
        return self._background.steps

    def _is_new(self, step: int) -> bool:
        return not self.metrics.evaluated(step) and step not in self.outstanding

    def must_wait(self, step: int) -> bool:
        """Whether an evaluation of `step` could not begin before another is done."""
        return self._background.is_full and self._is_new(step)

    def plays_here(self, step: int) -> bool:
        """Whether `evaluate` will play the learner's own weights."""
        return not self._plan.workers and self._is_new(step)

    def _take_up_evaluations(self) -> None:
        """Play what a killed run left: checkpoints of steps that were due, without a result."""
        for step, _ in list_checkpoints(self._path / "checkpoints"):
            if not evaluates_at(self._recipe, step) or self.metrics.evaluated(step):
                continue
            request = self._request(step)
            if self._plan.workers:
                self._background.submit(request)
            elif step < self._learner.step:  # that of this step comes of itself
                self._play(step, partial(play_checkpoint, request))

    def evaluate(self, step: int) -> bool:
        """Play the weights of `step`; return whether a checkpoint of them is needed now.

        In the training process: when they are the best so far.  In the background: always.
        """
        if not self._is_new(step):
            return False
        request = self._request(step)
        if self._plan.workers:
            began = time.perf_counter()
            while self._background.is_full and self._run.stop.signal_name is None:
                self._background.wait()
                self._saver.check()
                self.collect()
            self._held_seconds += time.perf_counter() - began
            self._background.submit(request)
            return True
        self._learner.check()
        try:
            acting = self._learner.acting
            self._play(step, lambda: play(acting.on(self._plan.device), request, processes=None))
        finally:
            self._learner.resume_training()
        best = self.metrics.best
        return best is not None and best["step"] == step

    def _request(self, step: int) -> PlayRequest:
        return PlayRequest(
            checkpoint=str(self._saver.path(step).absolute()),
            run=self._path.name,
            step=step,
            tasks=self._tasks,
            device=str(self._plan.device),
            threads=self._plan.threads,
        )

    def _play(self, step: int, played: Callable[[], Mapping[str, Any]]) -> None:
        """Play in this process; Ctrl-C leaves it to a resumed run."""
        began, random = time.monotonic(), torch.random.fork_rng(devices=[])
        try:
            with self.progress.paused("evaluating"), self._run.stop.abortable(), random:
                document = played()
        except Aborted:
            return
        except Exception as error:
            document = failure(error)
        seconds = time.monotonic() - began
        self._held_seconds += seconds
        self._record(step, document, seconds)

    def collect(self) -> None:
        """Record the evaluations that have come in; what the saver has given up is not played."""
        while self._saver.given_up:
            step = self._saver.given_up.popleft()
            self._background.drop(step)
            # its own may be there: what fails last is to make its name durable
            saved = [n for n, _ in list_checkpoints(self._path / "checkpoints") if n < step]
            since = f"step {saved[-1]:,}" if saved else "the beginning"
            what = f"the disk of {self._path} is full, nothing is saved since {since}"
            self.progress.say(f"step {step:,}: {what}; training goes on")
        done = self._background.poll()
        for step, document, seconds in done:
            self._record(step, document, seconds)
        if done:
            self._saver.prune(self.keep)

    def _record(self, step: int, document: Mapping[str, Any], seconds: float) -> None:
        now = self._learner.step
        stale = {"staleness_steps": now - step, "staleness_seconds": round(seconds, 3)}
        self._evaluated += 1
        self.metrics.evaluation(step, {**document, **stale})
        short, whole = summary_text(document)
        late = f" ({seconds:,.0f} s and {now - step:,} steps ago)" if now > step else ""
        self.progress.update(now, last=short)
        self.progress.say(f"step {step:,}{late}: {whole}")
        self._run.callbacks.tell("on_evaluation", step, dict(self.metrics.evaluations[-1]))

    # the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for evaluations that are under way; Ctrl-C leaves them to a resumed run."""
        self._stepped_to = time.perf_counter()
        if self.outstanding:
            self.progress.say(f"waiting for {count_text(len(self.outstanding), 'evaluation')}")
        try:
            with self._run.stop.abortable():
                while self.outstanding:
                    self._background.wait()
                    self.collect()
        except Aborted:
            self._background.close()
        self.metrics.sync()

    def close(self) -> None:
        """Close the files and end what evaluates."""
        self._background.close()
        self.progress.close()
        self.metrics.close()

    def sum_up(self) -> None:
        """Write ``summary.json``, the plots and the report."""
        from gear_offline.runs.report import write_report  # matplotlib takes half a second

        learner, before = self._learner, read_summary(self._path)
        text = f"{self._recipe.name}: was complete already, {count_text(learner.step, 'step')}"
        steps = learner.step - self._first_step
        is_new = steps or self._evaluated or before is None or before.steps != learner.step
        if is_new:  # else its figures are of the process that did the steps
            summary = self._summary()
            content = json.dumps(finite(summary), indent=2, allow_nan=False) + "\n"
            write_file(self._path / "summary.json", content.encode())
            stopped = learner.step < self._recipe.train.steps
            end = f"stopped by a callback at step {learner.step:,}," if stopped else "complete"
            text = f"{self._recipe.name}: {end} after {self.seconds:,.0f} s"
            if steps:
                text += (
                    f", {learner.meter.text()} while stepping; {learner.window.wait_share:.1%} of "
                    f"the steps' time waited for batches, {summary['save_wait_share']:.1%} for "
                    "checkpoints"
                )
        report = self._path / "report.md"
        if is_new or not report.exists():
            try:
                write_report(self._path)
            except Exception as error:  # the run is complete, whatever becomes of its report
                say(f"{text}; there is no report: {error}", quiet=self._quiet)
                return
        say(f"{text}; report in {report}", quiet=self._quiet)

    def _summary(self) -> dict[str, Any]:
        """Return what a complete run says of itself, JSON-able but for NaN and infinities."""
        learner, evaluations = self._learner, self.metrics.evaluations
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
                "background": self._plan.workers > 0,
                "workers": self._plan.workers,
                "device": str(self._plan.device),
                "held_seconds": round(self._held_seconds, 3),  # training, by playing or for room
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
            "evaluation_last": evaluations[-1] if evaluations else None,
            "evaluation_best": self.metrics.best,
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        }
