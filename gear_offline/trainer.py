"""Train from a recipe to a run directory: resume, look now and then, save, evaluate, sum up.

What one step does is in `gear_offline.learner`.  A run that was killed at any instant and resumed
ends with the weights of one that was not, on the same machine with the same number of threads.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gear_offline.checkpoint import TrainingState, damaged, newest_checkpoint, save_checkpoint
from gear_offline.checkpoint_folder import list_checkpoints, prune, sweep
from gear_offline.dataset import Dataset
from gear_offline.errors import GearError, InputError
from gear_offline.interruption import Aborted, StopRequest
from gear_offline.learner import Learner
from gear_offline.loaders.loader import resolve_device
from gear_offline.metrics import Metrics, finite
from gear_offline.preparation import prepare_dataset, resolve
from gear_offline.progress import say
from gear_offline.recipe import Recipe, load_recipe
from gear_offline.run_directory import RunDirectory, default_run_path
from gear_offline.training_display import TrainingDisplay

RESUMABLE = (  # what may differ when a run is resumed: none of it changes a step that was done
    "description",
    "train.steps",
    "train.device",
    "train.threads",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.tensorboard",
)


class TrainingInterrupted(GearError):
    """Ctrl-C or SIGTERM stopped the run; a checkpoint was saved."""


def train(
    recipe: Recipe, *, out: Path | None = None, resume: bool = False, quiet: bool = False
) -> Path:
    """Train, evaluate and write a run directory.

    Parameters
    ----------
    recipe
        From `gear_offline.recipe.load_recipe`.
    out
        Run directory; default ``runs/NAME-sSEED``.
    resume
        Go on from the newest whole checkpoint; begins the run when there is none.
    quiet
        Print nothing.

    Returns
    -------
    Path
        The run directory.

    Raises
    ------
    InputError
        ``RUN_EXISTS``, ``RUN_LOCKED``, ``RUN_DIRECTORY``, ``RUN_RECIPE`` (resuming with another
        recipe), ``CHECKPOINT_DAMAGED``, and those of preparing the data.
    TrainingInterrupted
        ``TRAIN_INTERRUPTED``.
    GearError
        ``LOSS_NONFINITE``.
    """
    device = resolve_device(recipe.train.device)
    path = default_run_path(recipe) if out is None else Path(out)
    with RunDirectory(path, resume=resume) as directory, _torch_settings(recipe, device):
        dataset = prepare_dataset(recipe, quiet=quiet)
        resolved, sizes = resolve(recipe, dataset, quiet=quiet)
        if directory.recipe_path.exists() and list_checkpoints(directory.checkpoints_path):
            _check_same(load_recipe(directory.recipe_path), resolved, path)
        learner = Learner(resolved, sizes, dataset, device)
        _Run(directory, learner, dataset, quiet=quiet).complete()
    return path


def _check_same(before: Recipe, now: Recipe, path: Path) -> None:
    """Refuse to resume a run with a recipe that would have made another run."""
    old, new = _leaves(before.to_dict()), _leaves(now.to_dict())
    free = set(RESUMABLE)
    if now.optimizer.schedule != "constant":
        free.remove("train.steps")  # the learning rates of the steps done depend on it
    for key in sorted({*old, *new} - free):
        if old.get(key) != new.get(key):
            raise InputError(
                "RUN_RECIPE",
                f"{key} was {old.get(key)!r} when the run began and is {new.get(key)!r} now",
                where=str(path),
                remedy="resume with the same recipe, or train into another directory",
            )


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found.update(_leaves(item, f"{prefix}.{key}" if prefix else key))
    return found


@contextmanager
def _torch_settings(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Set torch's threads and random numbers; give the caller's back at the end."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        if recipe.train.threads is not None:
            torch.set_num_threads(recipe.train.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class _Run:
    """One training run, from its beginning or its newest checkpoint to its end."""

    def __init__(
        self, directory: RunDirectory, learner: Learner, dataset: Dataset, *, quiet: bool
    ) -> None:
        self.directory, self.learner, self.dataset = directory, learner, dataset
        self.recipe, self.quiet = learner.recipe, quiet
        self.settings = self.recipe.train
        self.seconds_before = 0.0
        self.began = time.monotonic()
        self.stop = StopRequest()

    @property
    def seconds(self) -> float:
        """Wall time of the run, in this process and before."""
        return self.seconds_before + time.monotonic() - self.began

    def complete(self) -> None:
        """Do what is left of the run."""
        self._restore()
        self.directory.write_recipe(self.recipe)
        self._announce()
        step = self.learner.step
        self.metrics = Metrics(
            self.directory.path, step=step, tensorboard=self.settings.tensorboard
        )
        self.display = TrainingDisplay(
            self.recipe.name, steps=self.settings.steps, done=step, quiet=self.quiet
        )
        try:
            with self.display, self.stop:
                if step > 0:
                    self._look(step)  # the kill may have come before this step's evaluation
                while self.learner.step < self.settings.steps:
                    self.learner.advance()
                    self._look(self.learner.step)
        finally:
            self.metrics.close()
        self._sum_up()

    def _restore(self) -> None:
        """Take over the newest whole checkpoint, if there is one."""
        folder = self.directory.checkpoints_path
        sweep(folder)
        checkpoint = newest_checkpoint(folder, lambda message: say(message, quiet=self.quiet))
        if checkpoint is None:
            return
        state = checkpoint.state
        if state.step > self.settings.steps:
            raise InputError(
                "RUN_RECIPE",
                f"train.steps is {self.settings.steps}, but {state.step} steps are done",
                where=str(self.directory.path),
                remedy="resume with at least as many steps",
            )
        try:
            self.learner.load(
                step=state.step, model=checkpoint.model, tensors=state.tensors, loader=state.loader
            )
        except (KeyError, RuntimeError) as error:
            raise damaged(checkpoint.path, f"it does not fit the recipe ({error})") from error
        self.seconds_before = state.seconds

    def _announce(self) -> None:
        learner, spec = self.learner, self.dataset.spec
        parameters = sum(p.numel() for p in learner.model.parameters())
        say(
            f"{self.recipe.name}: {spec.episodes:,} episodes, {spec.steps:,} steps of data; "
            f"{parameters:,} parameters on {learner.device}, {learner.precision_reason}"
            f"{learner.step_kind}; "
            f"run directory {self.directory.path}",
            quiet=self.quiet,
        )
        if learner.step:
            say(f"resuming after step {learner.step:,}", quiet=self.quiet)

    def _look(self, step: int) -> None:
        """Log, evaluate, save and stop, whatever is due after `step`."""
        last = step == self.settings.steps
        if self.learner.unreported and (last or step % self.settings.log_every == 0):
            values = self.learner.report()
            self.metrics.log(step, values)
            self.display.log(step, values["loss"])
        self.display.step(step)
        try:
            evaluated = self._evaluate_if_due(step)
        except Aborted:
            evaluated = False  # the resumed run makes up for it
        best = self.metrics.best
        if (
            last
            or step % self.settings.checkpoint_every == 0
            or self.stop.signal_name is not None
            or (evaluated and best is not None and best["step"] == step)
        ):
            self._save(step)
        if self.stop.signal_name is not None and not last:
            path = self.directory.path
            out = "" if path == default_run_path(self.recipe) else f" --out {path}"
            raise TrainingInterrupted(
                "TRAIN_INTERRUPTED",
                f"stopped by {self.stop.signal_name} after step {step:,}, a checkpoint is saved",
                where=str(path),
                remedy=f"go on with `gear-offline train {path}/recipe.yaml --resume{out}`",
            )

    def _save(self, step: int) -> None:
        folder = self.directory.checkpoints_path
        if step not in (found for found, _ in list_checkpoints(folder)):
            learner = self.learner
            state = TrainingState(
                step=step,
                recipe=self.recipe,
                tensors=learner.tensors(),
                loader=learner.loader.state_dict(),
                state_mean=learner.state_mean,
                state_std=learner.state_std,
                seconds=self.seconds,
            )
            self.metrics.sync()
            save_checkpoint(folder, learner.model, state)
        best = self.metrics.best
        prune(
            folder,
            keep=self.settings.keep_checkpoints,
            best=None if best is None else int(best["step"]),
        )

    def _evaluate_if_due(self, step: int) -> bool:
        """Play the policy if this step is one for it; return whether it was played."""
        settings, every = self.recipe.evaluate, self.settings.evaluate_every
        due = step == self.settings.steps or (every is not None and step % every == 0)
        if not due or settings.environment is None or settings.episodes == 0:
            return False
        if self.metrics.evaluated(step):
            return False
        from gear_offline.evaluate import evaluate_policy

        self.learner.check()
        began = time.monotonic()
        self.display.evaluating()
        with self.stop.abortable(), torch.random.fork_rng(devices=[]):
            try:
                report = evaluate_policy(
                    self.learner.policy(),
                    environment_id=settings.environment,
                    targets=settings.targets or (),
                    episodes=settings.episodes,
                    environments=min(settings.environments, settings.episodes),
                    seed=settings.seed,
                    reference=settings.reference,
                    quiet=True,
                )
            finally:
                self.learner.resume_training()
                self.display.evaluating(time.monotonic() - began)
        report = replace(
            report, run=self.directory.path.name, step=step, device=str(self.learner.device)
        )
        document = {"score": report.best.mean, **finite(report.to_json())}
        self.metrics.evaluation(step, document)
        score = report.normalized(report.best)
        text = f"return {report.best.mean:,.4g}" + ("" if score is None else f", score {score:.1f}")
        self.display.score(text)
        pairs = (f"asked {r.target:,.4g}, got {r.mean:,.4g}" for r in report.results)
        self.display.say(f"step {step:,}: {'; '.join(pairs)}; best {text}")
        return True

    def _sum_up(self) -> None:
        """Write ``summary.json``, the plots and the report."""
        evaluations = self.metrics.evaluations
        best = self.metrics.best
        spec, returns = self.dataset.spec, self.dataset.manifest.returns
        summary = {
            "recipe": self.recipe.name,
            "seed": self.recipe.seed,
            "steps": self.learner.step,
            "seconds": round(self.seconds, 3),
            "data_wait_share": self.learner.data_wait_share,
            "parameters": sum(p.numel() for p in self.learner.model.parameters()),
            "device": str(self.learner.device),
            "precision": self.learner.precision_reason,
            "threads": torch.get_num_threads(),
            "data": {
                "path": self.recipe.data.path,
                "episodes": spec.episodes,
                "steps": spec.steps,
                "return_mean": returns.mean,
                "return_max": returns.max,
            },
            "evaluation_last": evaluations[-1] if evaluations else None,
            "evaluation_best": best,
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        }
        self.directory.write_summary(finite(summary))
        from gear_offline.report import write_report

        write_report(self.directory.path)
        say(
            f"{self.recipe.name}: complete after {self.seconds:,.0f} s, "
            f"{self.learner.data_wait_share:.1%} of the steps' time waited for batches",
            quiet=self.quiet,
        )
