"""What learns: model, optimiser, batches and random numbers, one step at a time.

Everything a step depends on is in `Learner.tensors`, the model's parameters and the loader's
state, so that a learner that takes them over goes on bit for bit.

Shape legend: n steps since the last report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gear_offline.captured_step import CapturedStep, start_compilers
from gear_offline.data_parallel import make_loss, random_states, restore_random, seed_rank
from gear_offline.dataset import Dataset
from gear_offline.errors import GearError, UnavailableError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.device_feedback import DeviceFeedback
from gear_offline.loaders.feedback import LossFeedback, load_selection, selection_tensors
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.checks import trainable_parameters
from gear_offline.models.decision_transformer import build_model
from gear_offline.models.policy import Policy
from gear_offline.optimizer import Optimizer
from gear_offline.preparation import ModelSizes
from gear_offline.recipe import Recipe
from gear_offline.statistics import Float64Array
from gear_offline.task_policy import task_policy
from gear_offline.task_recipes import loader_options, recipe_selection
from gear_offline.world import World

COMPILED_FROM = 20_000  # steps: fewer do not earn back half a minute of compiling


def resolve_precision(precision: str, device: torch.device) -> tuple[torch.dtype | None, str]:
    """Return the autocast type (None: float32 throughout) and a line that says why.

    On CPUs ``auto`` is float32: without bfloat16 instructions autocast only adds work, and with
    them a recipe should still give the same weights as on the next machine.
    """
    if precision == "fp32":
        return None, "float32, as the recipe says"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "bfloat16 autocast, float32 weights"
        if precision == "bf16":
            return torch.bfloat16, "bfloat16 autocast as the recipe says, emulated by this GPU"
        return None, "float32: this GPU has no bfloat16"
    native = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
    if precision == "bf16":
        remark = "" if native else "; this CPU has no instructions for it and will be slow"
        return torch.bfloat16, f"bfloat16 autocast as the recipe says{remark}"
    return None, "float32" + ("; train.precision=bf16 may be faster on this CPU" if native else "")


class Learner:
    """A model in training.

    Call it under the torch seed of the run: building the model draws from torch's generator, and
    so does dropout afterwards.

    Parameters
    ----------
    recipe
        Resolved: see `gear_offline.preparation.resolve`.
    sizes
        Of states and actions.
    dataset
        Where batches come from.
    device
        Where to train.
    world
        The ranks that train together; each has a learner, and they call `advance`, `report` and
        `tensors` together.

    Attributes
    ----------
    step
        Optimiser steps done.
    tasks
        What the model knows of its tasks, of a recipe of several.
    """

    def __init__(
        self,
        recipe: Recipe,
        sizes: ModelSizes,
        dataset: Dataset,
        device: torch.device,
        *,
        world: World | None = None,
    ) -> None:
        self.recipe, self.device, self.tasks = recipe, device, sizes.tasks
        self.world = World() if world is None else world
        self.precision, self.precision_reason = resolve_precision(recipe.train.precision, device)
        self.model = build_model(
            state_dim=sizes.state_dim,
            action_dim=sizes.action_dim,
            discrete=sizes.discrete,
            context_length=recipe.loader.context_length,
            frame_shape=sizes.frame_shape,
            frame_stack=recipe.loader.frame_stack,
            tasks=sizes.tasks,
            **recipe.model.model_dump(),
        )
        trainable_parameters(self.model)  # freezes what the loss never reaches
        self.model.to(device)  # type: ignore[arg-type, unused-ignore]
        self.model.train()
        self.loader = GearLoader(
            dataset,
            **loader_options(recipe, dataset),
            selection=recipe_selection(recipe, dataset),
            seed=recipe.seed,
            device=device,
            world=self.world,
        )
        self._batches = iter(self.loader)
        self.graph_reason = self._decide_graph()
        if self._compiled and not self.graph_reason:
            start_compilers()
        self.optimizer = Optimizer(
            self.model,
            recipe.optimizer,
            steps=recipe.train.steps,
            captured=not self.graph_reason,
        )
        self._captured: CapturedStep | None = None  # made by the first step
        compiled = self._compiled and device.type == "cuda"
        feedback = LossFeedback(self.loader) if self.loader.learner is not None else None
        self._loss: Callable[[Batch], Tensor] | None = None
        if self.graph_reason:
            self._loss = make_loss(
                self.model,
                self.world,
                compiled=compiled,
                feedback=feedback,
                fixed_buckets=recipe.train.deterministic,
            )
        seed_rank(recipe.seed, self.world)
        self.state_mean: Float64Array | None = None
        self.state_std: Float64Array | None = None
        if recipe.loader.normalize_states and not sizes.tasks:
            statistics = dataset.statistics["observations"]
            self.state_mean, self.state_std = statistics.mean.ravel(), statistics.std.ravel()
        self.step = 0
        self._window = torch.zeros(recipe.train.log_every, 2, device=device)  # loss, norm
        self._filled = self._timed = 0
        self._rate = self._busy_seconds = self._wait_seconds = 0.0
        self._all_busy_seconds = self._all_wait_seconds = 0.0  # of what was reported

    @property
    def step_kind(self) -> str:
        """How steps are run on a GPU, and why, as a clause to print."""
        if self.device.type != "cuda":
            return ""
        if self.graph_reason:
            return f", steps launched one by one: {self.graph_reason}"
        engine = self.loader.engine
        return f", one CUDA graph a step, {engine.placed.reason if engine else ''}"

    @property
    def data_wait_share(self) -> float:
        """Share of the time of all steps of this process that waited for batches."""
        return self._all_wait_seconds / self._all_busy_seconds if self._all_busy_seconds else 0.0

    @property
    def unreported(self) -> int:
        """Steps since the last report."""
        return self._filled

    def advance(self) -> None:
        """Do one optimiser step.

        Raises
        ------
        GearError
            ``LOSS_NONFINITE``; on the CPU before the weights are touched, on a GPU, which is
            not waited for at each step, at the next `report` or `check`.
        """
        if self._loss is None:
            self._replay()
            return
        began = time.perf_counter()
        batch = next(self._batches)
        waited = time.perf_counter()
        with torch.autocast(
            self.device.type, dtype=self.precision, enabled=self.precision is not None
        ):
            loss = self._loss(batch)
        self.optimizer.zero_gradients()
        with self.world.guard("averaging gradients"):
            loss.backward()  # type: ignore[no-untyped-call]
        norm = self.optimizer.clip()
        row = self._window[self._filled]
        row[0], row[1] = loss.detach(), norm
        self._filled += 1
        if self.device.type == "cpu":
            self._check()
        self._rate = self.optimizer.update(self.step)
        self.step += 1
        self._timed += 1
        self._wait_seconds += waited - began
        self._busy_seconds += time.perf_counter() - began

    def _decide_graph(self) -> str:
        """Return why steps are not captured as a CUDA graph, or nothing if they are.

        Raises
        ------
        UnavailableError
            ``GRAPH_UNAVAILABLE`` if the recipe insists.
        """
        wanted = self.recipe.train.graph
        if wanted == "off":
            return "train.graph=off"
        reason = ""
        if self.device.type != "cuda":
            reason = "CUDA graphs need a GPU"
        elif self.world.size > 1 and wanted == "auto":
            reason = "several processes exchange gradients while they compute them"
        elif self.world.size > 1 and self.loader.learner is not None:
            reason = "the ranks tell each other the losses of segments"
        elif self.loader.spread is not None:
            reason = "rows of other nodes come through the exchange"
        elif self.loader.engine is None:
            reason = "batches are not made by the GPU (loader.engine)"
        if reason and wanted == "on":
            raise UnavailableError(
                "GRAPH_UNAVAILABLE",
                f"train.graph=on is not possible: {reason}",
                remedy="use train.graph=auto, or see gear-offline doctor",
            )
        return reason

    @property
    def _compiled(self) -> bool:
        train = self.recipe.train
        pays = train.steps >= COMPILED_FROM and not train.deterministic  # it times kernels
        return train.compile == "on" or (train.compile == "auto" and pays)

    def _replay(self) -> None:
        began = time.perf_counter()
        if self._captured is None:
            batches = self.loader.device_batches(ahead=True)
            learns = self.loader.learner is not None
            self._captured = CapturedStep(
                self.model,
                self.optimizer,
                batches,
                self._window,
                step=self.step,
                filled=self._filled,
                precision=self.precision,
                compiled=self._compiled,
                feedback=DeviceFeedback(self.loader, batches) if learns else None,
                world=self.world,
            )
            began = time.perf_counter()  # not a part of this step
        self._captured.replay()
        self.loader.skip()
        self._rate = self.optimizer.rate(self.step)
        self.step += 1
        self._filled += 1
        self._timed += 1
        self._busy_seconds += time.perf_counter() - began

    def count_busy(self, seconds: float) -> None:
        """Count time in which the GPU did steps while the host looked after something else."""
        self._busy_seconds += seconds

    @property
    def is_captured(self) -> bool:
        """Whether a step is one replay of a graph that is there."""
        return self._captured is not None

    def check(self) -> None:
        """Raise `GearError` (``LOSS_NONFINITE``) if a loss or gradient since the last report is
        not finite."""
        began = time.perf_counter()
        self._check()
        self._busy_seconds += time.perf_counter() - began  # a GPU's steps are done only now

    def _check(self) -> None:
        rows = self._window[: self._filled]
        if self.device.type == "cpu":
            rows = rows[-1:]  # those before were checked in their own step
        wrong = (~torch.isfinite(rows)).nonzero()
        if wrong.numel() == 0:
            return
        row, column = (int(v) for v in wrong[0])
        # The window ends with the last step; on the CPU that one is not counted in `step` yet.
        last = self.step + 1 if self.device.type == "cpu" else self.step
        step = last - (rows.shape[0] - 1 - row)
        raise GearError(
            "LOSS_NONFINITE",
            f"the {'gradient norm' if column else 'loss'} of step {step} is "
            f"{float(rows[row, column])}",
            where=self.recipe.name,
            remedy="checkpoints before it are kept: lower optimizer.learning_rate, or look for "
            "outliers with `gear-offline inspect`",
        )

    def report(self) -> dict[str, float]:
        """Return means over the steps since the last report, and begin anew."""
        began = time.perf_counter()
        self._check()
        window = self._window[: self._filled].clone()
        self.world.sum_into(window)  # a rank's loss is its part of the global one
        values: Float64Array = window.cpu().double().numpy() / self.world.size  # (n, 2)
        busy = self._busy_seconds + time.perf_counter() - began
        if self._captured is not None and self._timed:
            self._wait_seconds = self._timed * self._captured.wait_seconds()
        steps = max(self._timed, 1)  # fewer than the window has when the run was resumed in it
        loss, norm = (float(v) for v in np.mean(values, axis=0))
        found = {
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": self._rate,
            "step_seconds": busy / steps,
            "data_wait_share": self._wait_seconds / busy,
            "samples_per_second": steps * self.recipe.loader.batch_size / busy,
        }
        self._all_busy_seconds += busy
        self._all_wait_seconds += self._wait_seconds
        self._filled = self._timed = 0
        self._busy_seconds = self._wait_seconds = 0.0
        if self._captured is not None:
            self._captured.begin_window()
        return found

    def policy(self, task: str | None = None) -> Policy:
        """Return the model as it stands, ready to act; call `resume_training` afterwards.

        Of several tasks, `task` names the one to act in.
        """
        if task is not None:
            return task_policy(self.model, task, self.recipe, self.device)
        return Policy(
            self.model,
            state_mean=self.state_mean,
            state_std=self.state_std,
            returns_scale=self.recipe.loader.returns_scale,
            context_length=self.recipe.loader.context_length,
            device=self.device,
        )

    def close(self) -> None:
        """Give back what the loader holds open; all ranks together."""
        self.loader.close()

    def release(self) -> None:
        """Give back what would keep the ranks' connections from being closed; after errors too."""
        if self._captured is not None and self.world.size > 1:
            captured, self._captured = self._captured, None
            captured.close()

    def resume_training(self) -> None:
        """Undo what acting changed: dropout is on again."""
        self.model.train()

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs besides parameters and loader, by name."""
        self.check()
        found = self.optimizer.state()
        found |= random_states(self.world, self.device)
        window = self._window[: self._filled].clone()
        self.world.sum_into(window)
        found["window"] = window / self.world.size
        found |= selection_tensors(self.loader.learner)
        return found

    def load(
        self,
        *,
        step: int,
        model: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        loader: Mapping[str, Any],
    ) -> None:
        """Take over the state of another learner of the same recipe.

        Raises
        ------
        KeyError, RuntimeError
            The tensors are not those of such a learner.
        """
        self.model.load_state_dict(dict(model))
        self.optimizer.load_state(tensors)
        load_selection(self.loader.learner, tensors)
        self.loader.load_state_dict(dict(loader))
        self._batches = iter(self.loader)
        restore_random(tensors, self.world, self.device)
        window = tensors["window"]
        self._filled = window.shape[0]
        self._window[: self._filled] = window
        self.step = step
