"""The evaluations of a run: in place of training or beside it, recorded in the order of steps.

Beside training, the weights of an evaluation are those of a checkpoint of its step, which stays
until its result is there; a run that was killed meanwhile finds it again and plays it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gear_offline.core.interruption import Aborted, StopRequest
from gear_offline.errors import InputError
from gear_offline.evaluation.beside import EvaluationsBeside
from gear_offline.evaluation.choice import EvaluationChoice
from gear_offline.evaluation.tasks import outcome
from gear_offline.evaluation.worker import PlayRequest, play, play_checkpoint, play_tasks
from gear_offline.models.policy import Policy
from gear_offline.runs.training_display import TrainingDisplay
from gear_offline.training.checkpoint_folder import list_checkpoints
from gear_offline.training.learner import Learner
from gear_offline.training.metrics import Metrics
from gear_offline.training.saving import Saver


class RunEvaluations:
    """What a run evaluates, and where it stands.

    Parameters
    ----------
    folder
        The run directory.
    learner
        Of the first rank.
    choice
        From `gear_offline.evaluation.choice.choose_evaluation`.
    saves, metrics, display, stop
        Of the run.

    Attributes
    ----------
    held_seconds
        How long evaluations have held up training: in place all of their time, beside it the
        waits for room among those outstanding.
    step_seconds
        Of training, as last reported; None before.
    staleness
        (steps, seconds) between weights and result, of each evaluation of this process.
    """

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        choice: EvaluationChoice,
        *,
        saves: Saver,
        metrics: Metrics,
        display: TrainingDisplay,
        stop: StopRequest,
    ) -> None:
        self._folder, self._learner, self._choice = folder, learner, choice
        self._saves, self._metrics, self._display, self._stop = saves, metrics, display, stop
        self._settings = learner.recipe.evaluate
        self._beside: EvaluationsBeside | None = None
        if choice.beside:
            self._beside = EvaluationsBeside(
                workers=choice.workers,
                threads=choice.threads,
                insist=self._settings.background == "on",
                say=display.say,
            )
        self.held_seconds = 0.0
        self.step_seconds: float | None = None
        self.staleness: list[tuple[int, float]] = []

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Steps whose checkpoints must stay, since they are still to be played."""
        return () if self._beside is None else self._beside.steps

    @property
    def is_full(self) -> bool:
        """Whether one more evaluation would hold up training until another is done."""
        return self._beside is not None and self._beside.is_full

    def begin(self, due: list[int]) -> None:
        """Take up what a killed run left: steps of `due` with a checkpoint and without a result."""
        there = {step for step, _ in list_checkpoints(self._folder / "checkpoints")}
        for step in due:
            if step not in there or self._metrics.evaluated(step):
                continue
            if self._beside is not None:
                self._beside.submit(self._request(step))
            elif step < self._learner.step:  # that of this step comes of itself
                self._make_up(step)

    def _make_up(self, step: int) -> None:
        """Play in place what a run with evaluations beside has left."""
        began = time.monotonic()
        try:
            document = play_checkpoint(self._request(step))
        except InputError as error:
            if error.code not in ("RUN_DAMAGED", "RUN_NOT_FOUND"):
                raise
            self._display.say(f"step {step:,} cannot be evaluated: {error.what}")
            return
        self._record(step, document, time.monotonic() - began)

    def evaluate(self, step: int) -> bool:
        """Play the weights of `step`; return whether a checkpoint of them is needed.

        In place: when they are the best so far.  Beside training: always, the result comes later.
        """
        if self._metrics.evaluated(step) or step in self.outstanding:
            return False
        if self.plays_in_place(step):
            return self._in_place(step)
        assert self._beside is not None, "else it is played in place"
        if self._beside.is_full:
            self._make_room()
        self._beside.submit(self._request(step))
        return True

    def plays_in_place(self, step: int) -> bool:
        """Return whether `evaluate` will play the learner's own weights, in this process."""
        if self._metrics.evaluated(step) or step in self.outstanding:
            return False
        if self._choice.otherwise is not None and not self.outstanding:
            self._decide(self._choice.otherwise)
        return self._beside is None

    def _decide(self, otherwise: EvaluationChoice) -> None:
        """At the first evaluation with ``auto``: stay in place where cores could not keep up."""
        choice, every = self._choice, self._learner.recipe.train.evaluate_every
        if self.step_seconds is None or every is None:
            return
        if choice.is_too_slow(self.step_seconds * every):
            self._display.say(
                f"evaluations: in place of training, one may take {choice.most_seconds:,.0f} s on "
                f"{choice.threads} of these cores, {every:,} steps take "
                f"{self.step_seconds * every:,.0f} s; evaluate.background=on insists"
            )
            self._beside, self._choice = None, otherwise
        else:
            self._choice = replace(choice, otherwise=None)

    def _make_room(self) -> None:
        began = time.perf_counter()
        assert self._beside is not None, "only evaluations beside training need room"
        while self._beside.is_full and self._stop.signal_name is None:
            self._beside.wait()
            self._saves.check()
            self.collect()
        self.held_seconds += time.perf_counter() - began

    def _in_place(self, step: int) -> bool:
        learner = self._learner
        learner.check()
        began = time.monotonic()
        self._display.evaluating()
        try:
            with self._stop.abortable(), torch.random.fork_rng(devices=[]):
                document = self._played(self._request(step))
        except Aborted:
            return False  # the resumed run makes up for it
        finally:
            learner.resume_training()
            seconds = time.monotonic() - began
            self.held_seconds += seconds
            self._display.evaluating(seconds)
        self._record(step, document, seconds)
        best = self._metrics.best
        return best is not None and best["step"] == step

    def _played(self, request: PlayRequest) -> dict[str, Any]:
        if not request.environment:
            return play_tasks(self._learner.acting, self._learner.recipe, request)
        return play(self._policy(), request)

    def _policy(self) -> Policy:
        """Return the learner's policy, or a copy of it where it acts on another device."""
        parts, device = self._learner.policy_parts(), self._choice.device
        if same_device(device, self._learner.device):
            return parts.policy(self._learner.device)
        with torch.random.fork_rng(devices=[]):  # weights are drawn before they are set
            model = type(parts.model)(parts.model.config)
        model.attention = parts.model.attention
        model.load_state_dict(parts.model.state_dict())
        return parts._replace(model=model).policy(device)

    def _request(self, step: int) -> PlayRequest:
        settings, choice = self._settings, self._choice
        return PlayRequest(
            checkpoint=str(self._saves.path(step).absolute()),
            run=self._folder.name,
            step=step,
            environment=settings.environment or "",
            targets=tuple(settings.targets or ()),
            episodes=settings.episodes,
            environments=settings.environments,
            seed=settings.seed,
            reference=settings.reference,
            specifications=choice.specifications,
            device=str(choice.device),
            threads=choice.threads,
        )

    def collect(self) -> bool:
        """Record what has come in; return whether a checkpoint may have become needless.

        Raises
        ------
        GearError
            Of an evaluation, or ``EVALUATION_WORKER``.
        """
        done = [] if self._beside is None else self._beside.poll()
        for step, document, seconds in done:
            self._record(step, document, seconds)
        return bool(done)

    def finish(self) -> None:
        """Wait for what is outstanding; Ctrl-C leaves it to a resumed run."""
        if self._beside is None or not self._beside.steps:
            return
        count = len(self._beside.steps)
        self._display.say(f"waiting for {count} evaluation{'s' if count > 1 else ''}")
        try:
            with self._stop.abortable():
                while self._beside.steps:
                    self._beside.wait()
                    self.collect()
        except Aborted:
            self.close()

    def close(self) -> None:
        """End the processes."""
        if self._beside is not None:
            self._beside.close()

    def _record(self, step: int, document: Mapping[str, Any], seconds: float) -> None:
        now = self._learner.step
        stale = {"staleness_steps": now - step, "staleness_seconds": round(seconds, 3)}
        self.staleness.append((now - step, seconds))
        self._metrics.evaluation(step, {**document, **stale})
        text, said = outcome(document)
        late = f" ({seconds:,.0f} s and {now - step:,} steps ago)" if now > step else ""
        self._display.score(text + (f" of step {step:,}" if now > step else ""))
        self._display.say(f"step {step:,}{late}: {said}")

    def summary(self) -> dict[str, Any]:
        """Return how evaluations were played, for ``summary.json``."""
        steps, seconds = ([float(pair[i]) for pair in self.staleness] for i in range(2))
        return {
            "beside": self._beside is not None,
            "device": str(self._choice.device),
            "reason": self._choice.reason,
            "held_seconds": round(self.held_seconds, 3),
            "staleness_steps_mean": sum(steps) / len(steps) if steps else None,
            "staleness_steps_max": max(steps, default=None),
            "staleness_seconds_max": max(seconds, default=None),
        }


def same_device(one: torch.device, other: torch.device) -> bool:
    """Return whether a policy on `other` is where `one` says."""
    return one.type == other.type and one.index in (None, other.index)
