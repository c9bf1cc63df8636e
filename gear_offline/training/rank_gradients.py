"""Gradients of several ranks, added up inside a captured step while the backward pass goes on.

DistributedDataParallel keeps bookkeeping on the host between its buckets, which a CUDA graph would
not repeat.  Here gradients lie in one run of memory in the order in which the backward pass has
them, cut into buckets where several nodes exchange them.  The last gradient of a bucket launches
its all-reduce, which NCCL runs beside the rest of the pass.  Nothing is scaled afterwards: the real
steps of the global batch are added up during the forward pass, and the backward pass starts with
their inverse.

Shape legend: P elements of all parameters and of the gaps between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.distributed.world import World
from gear_offline.errors import GearError

if TYPE_CHECKING:
    from gear_offline.loaders.batch import Batch

LINE = 64  # elements: gradients begin at cache lines, for wide loads, in 16 bits too
BUCKET_BYTES = 25 << 20  # as DDP: smaller ones leave links idle, larger ones begin late
# Within a node one bucket after the pass: products of matrices are cut into as many parts as a GPU
# has multiprocessors, and those whose place NCCL has come last, twice as late.  Two H200, 87 M
# parameters: 35.30 ms a step, 35.37 with buckets of 50 MiB, 35.76 of 25 MiB, 36.30 of 8 MiB.
NODE_BYTES = 1 << 62
LAST_BYTES = 2 << 20  # nothing is left to be computed beside the last one


@dataclass
class _Bucket:
    """Gradients that travel together.

    Attributes
    ----------
    numbers
        Of the parameters, in the order of `flat`.
    flat
        All of them, and the zeros between them.
    slots
        Views of `flat`, one a parameter.
    waits_for
        Gradients that this pass has not computed yet.
    """

    numbers: list[int]
    flat: Tensor
    slots: list[Tensor]
    waits_for: int = 0


def cut(sizes: Sequence[int], *, limit: int, last: int) -> list[range]:
    """Return consecutive runs of gradients that travel together.

    All of them in one run if they are no more than `limit`.  Otherwise runs are filled from the
    end, so that it is the first one that may be small, and the last one is.

    Parameters
    ----------
    sizes
        Bytes of each gradient, in the order in which they are ready.
    limit
        Bytes that a run has at least, but for the first and the last one.
    last
        Bytes that the last run has at least.
    """
    if sum(sizes) <= limit:
        return [range(len(sizes))]
    runs, end, filled, least = [], len(sizes), 0, last
    for begin in reversed(range(len(sizes))):
        filled += sizes[begin]
        if filled >= least or begin == 0:
            runs.append(range(begin, end))
            end, filled, least = begin, 0, limit
    return runs[::-1]


class RankGradients:
    """Turns gradients of a rank's share into those of the global batch; without the host.

    The first pass, which must not be captured, finds out in which order gradients are ready; rank
    0's order is everyone's.  Whatever the order is later, ranks launch the same buckets one after
    another, so none waits for another one's bucket.

    Parameters
    ----------
    parameters
        Those that gradients belong to, of one type, on one device.
    world
        The ranks that train together.
    divisor
        Of a rank's loss while it is computed; any positive number, the same on every rank.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        world: World,
        divisor: float,
    ) -> None:
        self._parameters: list[Any] = list(parameters)
        self._world, self._divisor = world, divisor
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._ready: list[int] = []  # numbers of this pass's gradients, in their order
        self._works: list[Any] = []  # of the buckets that were launched
        self._sources: list[Tensor] = []  # what was copied to them

    def exchange(self, gradients: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Give every parameter the gradient of the global batch, and return this rank's loss.

        The mean of the ranks' losses is that of the global batch.

        Parameters
        ----------
        gradients
            `GradientPass` of this rank alone, of parameters without gradients.
        batch
            This rank's share.

        Raises
        ------
        GearError
            ``GRADIENT_LAYOUT`` if a gradient is missing, or comes twice.
        """
        steps = (batch.attention_mask != 0).sum().float()
        counted: Any = dist.all_reduce(steps, async_op=True)

        def weight() -> Tensor:
            counted.wait()
            return self._divisor / steps.clamp(min=1.0)

        self._ready, self._works, self._sources = [], [], []
        for bucket in self._buckets:
            bucket.waits_for = len(bucket.numbers)
        # Only while they are needed: whoever else computes with these parameters goes unheard.
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, number))
            for number, parameter in enumerate(self._parameters)
        ]
        try:
            loss = gradients(batch, valid_steps=self._divisor, weight=weight)
        finally:
            for handle in handles:
                handle.remove()
        missing = set(range(len(self._parameters))) - set(self._ready)
        if missing:
            raise self._error(min(missing), "has no gradient")
        if not self._buckets:
            self._plan(self._world.gather(self._ready)[0])
            for bucket in self._buckets:
                self._launch(bucket)
        for work in self._works:
            work.wait()  # the stream does, not the host
        self._sources = []
        return loss * self._world.size

    def _arrive(self, number: int, _: Tensor) -> None:
        """Take note of a gradient, and launch what it completes; on autograd's thread."""
        if number in self._ready:
            raise self._error(number, "gets its gradient in two parts")
        self._ready.append(number)
        if not self._buckets:
            return
        self._bucket_of[number].waits_for -= 1
        while len(self._works) < len(self._buckets):
            bucket = self._buckets[len(self._works)]
            if bucket.waits_for:
                return
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        parameters = [self._parameters[number] for number in bucket.numbers]
        sources = [parameter.grad for parameter in parameters]
        torch._foreach_copy_(bucket.slots, sources)
        self._works.append(dist.all_reduce(bucket.flat, async_op=True))
        for parameter, slot in zip(parameters, bucket.slots, strict=True):
            parameter.grad = slot
        # Kept until the end of the pass: autograd sums up a gradient on a stream of its choice,
        # and memory that is free again is for the stream that computed it.
        self._sources += sources

    def _plan(self, order: Sequence[int]) -> None:
        """Lay out all gradients in the order in which they are ready."""
        parameters = [self._parameters[number] for number in order]
        lines = [-(-parameter.numel() // LINE) * LINE for parameter in parameters]
        places = [0, *accumulate(lines)]
        flat = parameters[0].new_zeros(places[-1])
        slots = [
            flat[begin : begin + parameter.numel()].view(parameter.shape)
            for begin, parameter in zip(places, parameters, strict=False)
        ]
        sizes = [(end - begin) * flat.element_size() for begin, end in pairwise(places)]
        limit = NODE_BYTES if self._world.node_count == 1 else BUCKET_BYTES
        for run in cut(sizes, limit=limit, last=LAST_BYTES):
            mine = slice(run.start, run.stop)
            part = flat[places[run.start] : places[run.stop]]
            self._add(_Bucket(list(order[mine]), part, slots[mine]))

    def _add(self, bucket: _Bucket) -> None:
        self._buckets.append(bucket)
        self._bucket_of |= dict.fromkeys(bucket.numbers, bucket)

    def _error(self, number: int, what: str) -> GearError:
        shape = tuple(self._parameters[number].shape)
        return GearError(
            "GRADIENT_LAYOUT",
            f"parameter {number} of shape {shape} {what}",
            remedy="use train.graph=off",
        )
