"""Loss and gradients of a rank's batch: in one piece or in micro-batches, alone or with others.

Shape legend: W ranks, B segments of a rank's share.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.feedback import SegmentFeedback
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.loss import mean_loss, segment_losses
from gear_offline.training.parallel import ALONE, Parallel

BLOCKWISE_FROM = 6  # blocks: compiled one by one they take seconds, as a whole a minute
# small kernels that do not depend on each other become one: a third fewer launches a step
COMPILE: dict[str, Any] = {"combo_kernels": True}


class GradientPass:
    """The loss of a rank's batch, and its backward pass, which averages over the ranks.

    A sharded `model` is sharded already.  With `compiled` the whole forward and loss of a small
    model is compiled, each block of a deep one.  With `feedback` segments are weighted, and the
    selection hears of their losses.  A rank's share is cut into `accumulate` micro-batches.

    With `fixed_buckets` replicas' gradients are grouped by the order of parameters in every step.
    Otherwise the first step of a process groups them so and later ones by the order in which they
    were ready.  With three ranks or more the place in a group decides the order of the sums.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        world: World,
        *,
        parallel: Parallel = ALONE,
        compiled: bool = False,
        feedback: SegmentFeedback | None = None,
        accumulate: int = 1,
        precision: torch.dtype | None = None,
        fixed_buckets: bool = False,
    ) -> None:
        self._model, self._world, self._parallel = model, world, parallel
        self.feedback, self._accumulate = feedback, accumulate
        self._device = next(model.parameters()).device
        # FSDP casts by itself, and its weights are no longer float32 inside.
        self._precision = None if parallel.sharded else precision
        whole = compiled and not (parallel.sharded or len(model.encoder.h) >= BLOCKWISE_FROM)
        if compiled and not whole:
            compile_parts(model, sharded=parallel.sharded)
        self._wrapped: nn.Module = model
        if parallel.kind == "ddp":
            with world.guard("building the model"):
                self._wrapped = DistributedDataParallel(
                    model,
                    device_ids=[self._device] if self._device.type == "cuda" else None,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=fixed_buckets,  # only so are groups never made anew
                )
        self._forward: Callable[..., Any] = self._wrapped
        if whole:
            self._forward = torch.compile(self._wrapped, dynamic=False)
        self._loss: Callable[..., Tensor] = self._rank_loss
        if parallel.kind == "alone" and feedback is None:
            self._loss = model.loss
            if whole:
                self._loss = torch.compile(model.loss, dynamic=False, options=COMPILE)
        self._without_warnings = parallel.sharded or fixed_buckets

    def __call__(
        self,
        batch: Batch,
        *,
        valid_steps: float | None = None,
        weight: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Add the gradients of a batch to the parameters' and return its loss, detached.

        `valid_steps` divides the loss in place of the real steps of the global batch.  `weight`,
        asked after the forward pass, is a scalar float32 that multiplies loss and gradients.
        """
        valid: Tensor | float | None = valid_steps
        if valid is None and (self._world.size > 1 or self._accumulate > 1):
            # The divisor of a rank's loss: then the mean of the ranks' gradients is that of the
            # global batch's mean, however padding is spread over ranks and micro-batches.
            steps = (batch.attention_mask != 0).sum().float()
            self._world.sum_into(steps)
            valid = steps.clamp(min=1) / self._world.size
        losses = []
        with _without_warnings() if self._without_warnings else nullcontext():
            for number, part in enumerate(micro_batches(batch, self._accumulate), start=1):
                with self._exchange(last=number == self._accumulate):
                    kind = self._precision
                    with torch.autocast(self._device.type, dtype=kind, enabled=kind is not None):
                        loss = self._loss(part, valid_steps=valid)
                    factor = None if weight is None else weight()
                    loss.backward(factor)  # type: ignore[no-untyped-call]
                losses.append(loss.detach() if factor is None else loss.detach() * factor)
        return functools.reduce(torch.add, losses)

    def _exchange(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients of replicas travel once a step; shards add up theirs as they come.

        Shards' weights that stay between the passes also stay from one micro-batch to the next.
        """
        if self._parallel.sharded and not self._parallel.reshard and self._accumulate > 1:
            sharded: Any = self._model
            sharded.set_reshard_after_backward(last)
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        silent: AbstractContextManager[None] = self._wrapped.no_sync()
        return silent

    def _rank_loss(self, batch: Batch, *, valid_steps: Tensor | float | None) -> Tensor:
        output = self._forward(**batch.model_inputs(), padding=batch.padding, only_actions=True)
        losses, mask = self._model.step_losses(output.action_preds, batch), batch.attention_mask
        if self.feedback is None:
            return mean_loss(losses, mask, valid_steps)
        each = segment_losses(losses, mask)
        return self.feedback.loss(each, batch, valid_steps=valid_steps)


def micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield consecutive parts of a batch of equal size; views."""
    size = len(batch.segments) // count
    for first in range(0, len(batch.segments), size):
        yield batch if count == 1 else batch.part(slice(first, first + size))


def check_micro_batches(share: int, accumulate: int, *, whose: str = "a rank's") -> None:
    """Raise `InputError` (``LOADER_OPTION``) unless a share has that many equal parts."""
    if share % accumulate:
        what = f"{whose} {share} segments cannot be cut into {accumulate} equal micro-batches"
        remedy = f"use a divisor of {share}, or another loader.batch_size"
        raise InputError("LOADER_OPTION", what, "train.accumulate", remedy)


def compile_parts(model: DecisionTransformer, *, sharded: bool = False) -> None:
    """Compile each block's forward and the embeddings'; blocks are alike, so one or two do.

    Hooks on the blocks (FSDP's) and recomputing stay outside, and so do parameters' names.  The
    embeddings of a sharded model belong to what is collected around all blocks: they stay eager.
    So does a model that acts, whose shapes change.
    """
    parts: list[Any] = list(model.encoder.h)
    for block in parts:
        block.forward = _in_training(block, block.forward)
    if not sharded:
        whole: Any = model
        whole._embed = _in_training(model, model._embed)


def _in_training(module: nn.Module, eager: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(eager, dynamic=False)

    def call(*arguments: Any, **options: Any) -> Any:
        return (compiled if module.training else eager)(*arguments, **options)

    return call


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out what torch says of things that are meant."""
    with warnings.catch_warnings():
        # A linear head's result is a view; nothing here writes to it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        # `fixed_buckets` asks for unused parameters for the sake of something else.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        yield
