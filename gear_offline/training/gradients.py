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
from gear_offline.models.base import Losses, SequenceModel, blocks_of, total_loss
from gear_offline.models.loss import mean_loss, segment_losses
from gear_offline.training.parallel import ALONE, Parallel
from gear_offline.training.row_sums import compile_options

BLOCKWISE_FROM = 6  # blocks: compiled one by one they take seconds, as a whole a minute


class GradientPass:
    """The loss of a rank's batch, and its backward pass, which averages over the ranks.

    `parts` are those of several losses after a pass, (P,) in their order; else None.

    A sharded `model` is sharded already.  With `compiled` the whole forward and loss of a small
    model is compiled, each block of a deep one.  With `feedback` segments are weighted, and the
    selection hears of their losses.  A rank's share is cut into `accumulate` micro-batches.

    With `fixed_buckets` replicas' gradients are grouped by the order of parameters in every step,
    and windows of one rank may give gradients to parameters that those of another do not reach.
    Otherwise the first step of a process groups them so and later ones by the order in which they
    were ready.  With three ranks or more the place in a group decides the order of the sums.
    """

    def __init__(
        self,
        losses: Losses,
        world: World,
        *,
        parallel: Parallel = ALONE,
        compiled: bool = False,
        feedback: SegmentFeedback | None = None,
        accumulate: int = 1,
        precision: torch.dtype | None = None,
        fixed_buckets: bool = False,
    ) -> None:
        self._losses, self._world, self._parallel = losses, world, parallel
        self.parts: Tensor | None = None
        model = losses.model
        self.feedback, self._accumulate = feedback, accumulate
        self._device = next(model.parameters()).device
        self._precision = precision
        whole = compiled and not (parallel.sharded or len(blocks_of(model)) >= BLOCKWISE_FROM)
        if compiled and not whole:
            compile_parts(model, sharded=parallel.sharded)
        self._wrapped: nn.Module = losses
        if parallel.kind == "ddp":
            with world.guard("building the model"):
                self._wrapped = DistributedDataParallel(
                    losses,
                    device_ids=[self._device] if self._device.type == "cuda" else None,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=fixed_buckets,  # only so are groups never made anew
                )
        self._forward: Callable[..., Any] = self._wrapped
        self._loss: Callable[..., tuple[Tensor, Tensor | None]] = self._rank_loss
        options = compile_options() if whole and parallel.kind == "alone" else None
        if options and feedback is None:
            self._loss = torch.compile(self._rank_loss, dynamic=False, options=options)
        elif whole:
            self._forward = torch.compile(self._wrapped, dynamic=False, options=options)
        self._without_warnings = parallel.sharded or fixed_buckets

    @property
    def buffers(self) -> list[Tensor]:
        """The model's tensors that passes change besides gradients."""
        return list(self._losses.buffers())

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
        losses, parts = [], []
        with _without_warnings() if self._without_warnings else nullcontext():
            for number, part in enumerate(micro_batches(batch, self._accumulate), start=1):
                with self._exchange(last=number == self._accumulate):
                    kind = self._precision
                    with torch.autocast(self._device.type, dtype=kind, enabled=kind is not None):
                        loss, several = self._loss(part, valid_steps=valid)
                    factor = None if weight is None else weight()
                    loss.backward(factor)  # type: ignore[no-untyped-call]
                losses.append(loss.detach() if factor is None else loss.detach() * factor)
                if several is not None:
                    parts.append(several if factor is None else several * factor)
        self.parts = functools.reduce(torch.add, parts) if parts else None
        return functools.reduce(torch.add, losses)

    def _exchange(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradients of replicas travel once a step; shards add up theirs as they come.

        Shards' weights that stay between the passes also stay from one micro-batch to the next.
        """
        if self._parallel.sharded and not self._parallel.reshard and self._accumulate > 1:
            sharded: Any = self._losses
            sharded.set_reshard_after_backward(last)
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        silent: AbstractContextManager[None] = self._wrapped.no_sync()
        return silent

    def _rank_loss(
        self, batch: Batch, *, valid_steps: Tensor | float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss and, of several, what each of them is."""
        named, mask, parts = self._forward(batch), batch.attention_mask, None
        losses = total_loss(named)
        if len(named) > 1:
            each = (mean_loss(part.detach(), mask, valid_steps) for part in named.values())
            parts = torch.stack([part.float() for part in each])
        if self.feedback is None:
            return mean_loss(losses, mask, valid_steps), parts
        loss = self.feedback.loss(segment_losses(losses, mask), batch, valid_steps=valid_steps)
        return loss, parts


def micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield consecutive parts of a batch of equal size; views."""
    size = len(batch.segments) // count
    for first in range(0, len(batch.segments), size):
        yield batch if count == 1 else batch.part(slice(first, first + size))


def check_micro_batches(share: int, accumulate: int, *, whose: str = "a rank's") -> None:
    """Raise `InputError` (``LOADER_OPTION``) unless a share has that many equal parts."""
    if share % accumulate:
        problem = f"{whose} {share} segments cannot be cut into {accumulate} equal micro-batches"
        remedy = f"use a divisor of {share}, or another loader.batch_size"
        raise InputError("LOADER_OPTION", problem, "train.accumulate", remedy)


def compile_parts(model: SequenceModel, *, sharded: bool = False) -> None:
    """Compile each block's forward, and what `compiled` names; blocks are alike: one or two do.

    Hooks on the blocks (FSDP's) and recomputing stay outside, and so do parameters' names.  What
    else a sharded model has is collected around all blocks: it stays eager.  So does a model that
    acts, whose shapes change.
    """
    parts: list[Any] = list(blocks_of(model))
    for block in parts:
        block.forward = _in_training(block, block.forward)
    for name in () if sharded else model.compiled:
        setattr(model, name, _in_training(model, getattr(model, name)))


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
