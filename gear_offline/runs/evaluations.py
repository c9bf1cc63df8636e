"""The evaluations of a run: in the training process or in the background.

In the background, the weights of an evaluation are those of a checkpoint of its step, which stays
until its result is there; a run that was killed meanwhile finds it again and plays it.  Results are
recorded in the order of steps.  An evaluation that fails is recorded as failed, training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import environments_of
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
from gear_offline.progress import Progress
from gear_offline.training.checkpoint_folder import list_checkpoints
from gear_offline.training.metrics import Metrics

if TYPE_CHECKING:
    from gear_offline.runs.loop import LiveRun


def plays(recipe: Recipe) -> bool:
    """Return whether there is an environment to evaluate in, and episodes to play."""
    return recipe.evaluate.episodes > 0 and bool(environments_of(recipe))


def evaluates_at(recipe: Recipe, step: int) -> bool:
    """Whether the policy is played after `step`."""
    every, last = recipe.train.evaluate_every, step == recipe.train.steps
    return plays(recipe) and (last or (every is not None and step % every == 0))


class RunEvaluations:
    """What a run evaluates, by its `plan`, and where it stands: `count` results of this process.

    `concurrent_runs` share the cores that training leaves.
    """

    def __init__(
        self, run: LiveRun, metrics: Metrics, progress: Progress, concurrent_runs: int
    ) -> None:
        self._run, self._metrics, self._progress = run, metrics, progress
        self._learner = learner = run.learner
        tasks = tasks_of(learner.recipe, tasks_of_config(learner.model.config))
        self._tasks = tasks if learner.recipe.evaluate.episodes > 0 else ()
        self.plan = plan_evaluations(
            learner.recipe,
            self._tasks,
            learner.device,
            learner.world,
            parameters=sum(p.numel() for p in learner.model.parameters()),
            concurrent_runs=concurrent_runs,
        )
        workers, threads = self.plan.workers, self.plan.threads
        self._background = BackgroundEvaluations(workers=workers, threads=threads)
        self.count = 0
        self._held_seconds = 0.0

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Steps whose checkpoints must stay, since they are still to be played."""
        return self._background.steps

    def _is_new(self, step: int) -> bool:
        """Whether `step` has neither been evaluated nor is under way."""
        return not self._metrics.evaluated(step) and step not in self.outstanding

    def must_wait(self, step: int) -> bool:
        """Whether an evaluation of `step` could not begin before another is done."""
        return self._background.is_full and self._is_new(step)

    def plays_here(self, step: int) -> bool:
        """Whether `evaluate` will play the learner's own weights."""
        return not self.plan.workers and self._is_new(step)

    def begin(self) -> None:
        """Take up what a killed run left: checkpoints of steps that were due, without a result."""
        for step, _ in list_checkpoints(self._run.path / "checkpoints"):
            if not evaluates_at(self._learner.recipe, step) or self._metrics.evaluated(step):
                continue
            request = self._request(step)
            if self.plan.workers:
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
        if self.plan.workers:
            self._make_room()
            self._background.submit(request)
            return True
        self._learner.check()
        try:
            acting, device = self._learner.acting, self.plan.device
            self._play(step, lambda: play(acting.on(device), request, processes=None))
        finally:
            self._learner.resume_training()
        best = self._metrics.best
        return best is not None and best["step"] == step

    def _make_room(self) -> None:
        began = time.perf_counter()
        while self._background.is_full and self._run.stop.signal_name is None:
            self._background.wait()
            self._run.saver.check()
            self.collect()
        self._held_seconds += time.perf_counter() - began

    def _play(self, step: int, played: Callable[[], Mapping[str, Any]]) -> None:
        """Play in this process; Ctrl-C leaves it to a resumed run."""
        began, random = time.monotonic(), torch.random.fork_rng(devices=[])
        try:
            with self._progress.paused("evaluating"), self._run.stop.abortable(), random:
                document = played()
        except Aborted:
            return
        except Exception as error:
            document = failure(error)
        seconds = time.monotonic() - began
        self._held_seconds += seconds
        self._record(step, document, seconds)

    def _request(self, step: int) -> PlayRequest:
        return PlayRequest(
            checkpoint=str(self._run.saver.path(step).absolute()),
            run=self._run.path.name,
            step=step,
            tasks=self._tasks,
            device=str(self.plan.device),
            threads=self.plan.threads,
        )

    def collect(self) -> bool:
        """Record what has come in; return whether a checkpoint may have become needless.

        A checkpoint that the saver has given up is not played.
        """
        while self._run.saver.given_up:
            step = self._run.saver.given_up.popleft()
            self._background.drop(step)
            saved = list_checkpoints(self._run.path / "checkpoints")
            since = f"step {saved[-1][0]:,}" if saved else "the beginning"
            what = f"the disk of {self._run.path} is full, nothing is saved since {since}"
            self._progress.say(f"step {step:,}: {what}; training goes on")
        done = self._background.poll()
        for step, document, seconds in done:
            self._record(step, document, seconds)
        return bool(done)

    def finish(self) -> None:
        """Wait for what is outstanding; Ctrl-C leaves it to a resumed run."""
        if not self.outstanding:
            return
        self._progress.say(f"waiting for {count_text(len(self.outstanding), 'evaluation')}")
        try:
            with self._run.stop.abortable():
                while self.outstanding:
                    self._background.wait()
                    self.collect()
        except Aborted:
            self.close()

    def close(self) -> None:
        """End the processes."""
        self._background.close()

    def _record(self, step: int, document: Mapping[str, Any], seconds: float) -> None:
        now = self._learner.step
        stale = {"staleness_steps": now - step, "staleness_seconds": round(seconds, 3)}
        self.count += 1
        self._metrics.evaluation(step, {**document, **stale})
        short, whole = summary_text(document)
        late = f" ({seconds:,.0f} s and {now - step:,} steps ago)" if now > step else ""
        self._progress.update(now, last=short)
        self._progress.say(f"step {step:,}{late}: {whole}")
        self._run.callbacks.tell("on_evaluation", step, dict(self._metrics.evaluations[-1]))

    def summary(self) -> dict[str, Any]:
        """Return how evaluations were played, for ``summary.json``; how late, their lines say."""
        return {
            "background": self.plan.workers > 0,
            "workers": self.plan.workers,
            "device": str(self.plan.device),
            "held_seconds": round(self._held_seconds, 3),  # training, by playing or for room
        }
