"""Learners of one shape that advance together: one forward and one backward pass for all.

Each keeps what is its own: batches, optimiser, learning rate, metrics, checkpoints.  Only products
and random numbers of dropout are shared, see `gear_offline.models.stacked`.

Shape legend: N learners.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import TransformerSettings
from gear_offline.errors import GearError
from gear_offline.kernels.adamw import Update, enqueue_together
from gear_offline.loaders.batch import Batch, join_batches
from gear_offline.loaders.static_batch import side_by_side
from gear_offline.models.base import ModelSizes
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.stacked import MappedModels, StackedModels
from gear_offline.training.cost import is_compiled
from gear_offline.training.graph import RunPart, capture, warm_up
from gear_offline.training.learner import Learner
from gear_offline.training.row_sums import compile_options
from gear_offline.training.step import EagerStep, GraphStep, Step

Losses = list[tuple[Tensor, Tensor | None]]  # of each learner the sum, and each of several


def stack_key(recipe: Recipe) -> str:
    """Return the options that stacked runs share: all but seed, selection and optimiser."""
    own = ("name", "description", "seed", "selection", "optimizer")
    shared = {key: value for key, value in recipe.to_dict().items() if key not in own}
    return json.dumps(shared, sort_keys=True)


def why_not_stacked(recipe: Recipe, sizes: ModelSizes, *, learns: bool) -> str | None:
    """Return the reason not to stack runs of a resolved recipe, as a clause, if there is one.

    A stack is one pass of plain models.  `learns`: the selection does, from losses.
    """
    train, loader, model = recipe.train, recipe.loader, recipe.model
    is_transformer = isinstance(model, TransformerSettings)
    reasons = {
        f"model.kind={model.kind} is trained alone": not model.stacks,
        "batches are computed in micro-batches (train.accumulate)": train.accumulate > 1,
        "blocks are computed twice (train.recompute)": train.recompute,
        "a batch is computed in pieces (train.deterministic)": train.deterministic == "ranks",
        "batches are left out (train.skip)": train.skip,
        "steps run on a bfloat16 copy of the weights (train.weights)": train.weights != "fp32",
        "products are in 8 bits (train.precision)": train.precision == "fp8",
        "windows are padded on the left (loader.padding)": loader.padding != "right",
        "positions are rotary (model.position)": getattr(model, "position", "none") != "none",
        "the policy is stochastic (model.policy)": is_transformer and model.is_stochastic,
        "their selection learns from losses": learns,
        "the model has several tasks": sizes.tasks,
        "actions are discrete": is_transformer and sizes.discrete,
        "observations are several columns": len(sizes.columns) > 1,
        "frames have an encoder": sizes.columns[0].frames
        and getattr(model, "encoder", "") != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def make_step(learners: Sequence[Learner]) -> Step:
    """Return the step of one learner, or of several at once."""
    if len(learners) > 1:
        return Stack(learners)
    return GraphStep(learners[0]) if learners[0].is_captured else EagerStep(learners[0])


class Stack(Step):
    """Learners that advance together: after as many steps each, of recipes with one `stack_key`.

    Build and use it with torch's random numbers set to the group's own.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        first = learners[0]
        self.learners = list(learners)
        self._batches: dict[Learner, Batch] = {}  # of one that has left, its last
        self._left: set[Learner] = set()
        models: list[Any] = [learner.model for learner in learners]
        is_plain = not isinstance(models[0], DecisionTransformer)
        self._models = (MappedModels if is_plain else StackedModels)(
            models, precision=first.precision
        )
        self._losses: Callable[[Batch], Tensor] = self._models.losses
        if is_compiled(first.recipe.train) and first.device.type == "cuda":
            self._losses = torch.compile(
                self._models.losses, dynamic=False, options=compile_options()
            )
        self._is_captured = all(learner.is_captured for learner in learners)
        self._captured: CapturedStack | None = None

    def run(self) -> dict[Learner, GearError]:
        staying = [learner for learner in self.learners if learner not in self._left]
        if not self._is_captured:
            return self._launch(staying)
        if self._captured is None:
            self._captured = CapturedStack(self.learners, self._gradients, self._models.after_step)
        for learner in staying:
            learner.window.start()
        self._captured.replay()
        for learner in staying:
            learner.count_replay()
            learner.window.stop()
        return {}

    def wait(self) -> None:
        if self._captured is not None:
            for learner in self.learners:
                learner.window.start()
            torch.cuda.synchronize()
            for learner in self.learners:
                learner.window.stop()

    def leave(self, learner: Learner) -> None:
        # its place stays, and what is computed there is not used
        self._left.add(learner)

    def _launch(self, staying: Sequence[Learner]) -> dict[Learner, GearError]:
        failed: dict[Learner, GearError] = {}
        self._batches |= {learner: learner.begin_step() for learner in staying}
        losses = self._gradients(join_batches([self._batches[n] for n in self.learners]))
        for learner, (loss, parts) in zip(self.learners, losses, strict=True):
            if learner in staying:
                if parts is not None:
                    learner.window.parts[learner.window.filled] = parts
                try:
                    learner.finish_step(loss)
                except GearError as error:
                    failed[learner] = error
                    self.leave(learner)
        return failed

    def _gradients(self, batch: Batch) -> Losses:
        """Give every parameter its gradient; return each loss and its parts, detached."""
        self._models.zero_gradients()
        losses = self._losses(batch)
        losses.backward(torch.ones_like(losses))  # type: ignore[no-untyped-call]
        self._models.hand_out_gradients()
        losses = losses.detach()
        return [(each, None) if each.ndim == 0 else (each.sum(), each) for each in losses]


class CapturedStack:
    """One step of every learner as one CUDA graph.

    The batches are branches of the graph, each made on a stream of its own, and lie one after
    another in memory.  Those of the following step are made beside the update, which needs none;
    large ones that come from host memory travel beside the whole step.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        gradients: Callable[[Batch], Losses],
        after_step: Callable[[], None],
    ) -> None:
        self._gradients, self._device = gradients, learners[0].device
        self._after_step = after_step
        loader = learners[0].loader
        assert loader.engine is not None, "the GPU makes the batches of captured steps"
        shape = len(learners), loader.padding
        places, self._batch = side_by_side(loader.engine, loader.extra_gathers, *shape)
        self._parts: list[RunPart] = []
        for learner, place in zip(learners, places, strict=True):
            known = self._parts[0].fill_seconds if self._parts else None
            self._parts.append(learner.join(place, fill_seconds=known))
        self._streams: list[Any] = [
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for _ in learners
        ]
        self._is_early = not any(part.batches.ahead for part in self._parts)
        self._make_early()
        warm_up(self._rehearse, self._device)
        self._graph = capture(self._run)
        for part in self._parts:
            part.finish_capture(self._graph)
        self._make_early()

    def replay(self) -> None:
        """Do the next step of each; returns at once."""
        self._prepare()
        self._graph.replay()

    def _run(self) -> None:
        if not self._is_early:
            self._make_batches()
        losses = self._gradients(self._batch)
        updates = [part.update(*loss) for part, loss in zip(self._parts, losses, strict=True)]
        if self._is_early:
            self._make_batches(updates)
        else:
            enqueue_together(updates)
        with torch.no_grad():
            self._after_step()
        for part in self._parts:
            part.batches.end(timed=True)

    def _rehearse(self) -> None:
        if not self._is_early:
            self._make_batches()
        self._gradients(self._batch)
        for part in self._parts:
            part.batches.end(timed=True)

    def _make_early(self) -> None:
        """Make the first step's batches, if those of a step are made in the one before."""
        if self._is_early:
            self._prepare()
            self._make_batches()

    def _prepare(self) -> None:
        for part in self._parts:
            part.batches.prepare()

    def _make_batches(self, updates: Sequence[Update] = ()) -> None:
        """Make the batches of the next step, and do updates meanwhile."""
        main = torch.cuda.current_stream(self._device)
        for part, stream in zip(self._parts, self._streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                part.batches.begin(timed=True)
        if updates:
            enqueue_together(updates)
        for stream in self._streams:
            main.wait_stream(stream)
