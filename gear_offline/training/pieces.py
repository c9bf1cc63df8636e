"""Gradients with the same bits on any number of ranks: ``train.deterministic: ranks``.

The global batch is cut into pieces, by its size alone.  Whichever rank computes a piece does so
with the same shapes, kernels and random numbers.  Gradients and losses are added up in the order
of a binary tree whose leaves are the pieces.  A rank's pieces are a branch of it, so that only sums
of branches travel.

Shape legend: W ranks, P pieces, N gradients and losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.feedback import PieceFeedback, SegmentFeedback
from gear_offline.training.gradients import GradientPass
from gear_offline.training.seeding import seed_host

if TYPE_CHECKING:
    from gear_offline.training.learner import Learner

PIECE = 64  # segments, at most, if halves of the batch allow
LINE = 64  # elements: gradients begin at cache lines
ALIGNED = 256  # bytes: matrix products choose their algorithm by the place of what they read


def count_pieces(batch_size: int) -> int:
    """Return P, a power of two: 2 at least if the batch can be halved."""
    wanted = 1 << (-(-batch_size // PIECE) - 1).bit_length()
    return math.gcd(max(2, wanted), batch_size)


def check_pieces(batch_size: int, ranks: int) -> None:
    """Raise `InputError` (``LOADER_OPTION``) unless ranks share the pieces of a batch equally."""
    pieces = count_pieces(batch_size)
    if pieces % ranks:
        problem = f"{ranks} ranks cannot share {pieces} pieces of {batch_size // pieces} segments, "
        problem += "whose sums have one order (train.deterministic=ranks)"
        remedy = f"use a power of two of ranks, at most {pieces}; more need a loader.batch_size of "
        remedy += f"{PIECE} a rank"
        raise InputError("LOADER_OPTION", problem, "loader.batch_size", remedy)


class PieceGradients:
    """The loss of the global batch and its gradients, from this rank's pieces of it.

    It takes the place of `gradients`, the pass of this rank alone.  Call `seed` before each step.
    With `captured` the step is captured as a CUDA graph: then half of a rank's pieces run beside
    the others on a stream of their own, and random numbers come from `generators`, one a piece,
    which the graph must know.
    """

    def __init__(self, learner: Learner, gradients: GradientPass, *, captured: bool) -> None:
        self._gradients, self._world = gradients, learner.world
        self._parameters = learner.optimizer.working
        batch_size, self._run_seed = learner.recipe.loader.batch_size, learner.recipe.seed
        pieces = count_pieces(batch_size)
        self._size, self._count = batch_size // pieces, pieces // self._world.size
        self._divisor = float(self._size * learner.recipe.loader.context_length)
        self.feedback: SegmentFeedback | None = None
        self.parts: Tensor | None = None
        self._numbers, self._kept = list[tuple[int, int]](), list[Any]()
        self._is_checked = False  # that passes change no buffer

        lines = [-(-parameter.numel() // LINE) * LINE for parameter in self._parameters]
        *self._places, self._tail = accumulate(lines, initial=0)
        total, unit = self._tail + 1 + len(learner.loss_names), math.lcm(LINE, self._world.size)
        self._sums = torch.zeros(-(-total // unit) * unit, device=learner.device)  # (N,)
        self._results = self._slots(self._sums)
        self._is_half = self._parameters[0].dtype != self._sums.dtype  # all are of one type
        if self._is_half:
            self._results = [torch.zeros_like(parameter) for parameter in self._parameters]

        self._stream: Any = None
        self.generators: list[torch.Generator] = []
        if captured:
            self.generators = [torch.Generator(learner.device) for _ in range(self._count)]
            self._default = torch.cuda.default_generators[learner.device.index or 0]
            if self._count > 1:
                self._stream = torch.cuda.Stream(learner.device)  # type: ignore[no-untyped-call]

    @property
    def buffers(self) -> list[Tensor]:
        """The model's tensors that passes might change besides gradients."""
        return self._gradients.buffers

    def seed(self, step: int) -> None:
        """Make random numbers those of a step, counted from 0."""
        first = self._world.rank * self._count
        self._numbers = [(step, first + number) for number in range(self._count)]
        for generator, number in zip(self.generators, self._numbers, strict=False):
            generator.manual_seed(self._seed_of(*number))

    def _seed_of(self, step: int, piece: int) -> int:
        words = np.random.SeedSequence((self._run_seed, step, piece))
        return int(words.generate_state(1, np.uint64)[0])

    def __call__(self, batch: Batch) -> Tensor:
        """Give the parameters, which have none, their gradients; return the loss, detached."""
        before = [] if self._is_checked else [buffer.clone() for buffer in self.buffers]
        steps = (batch.attention_mask != 0).sum().float()
        group, counted = None if steps.is_cuda else self._world.control, None
        if self._world.size > 1:
            counted = dist.all_reduce(steps, group=group, async_op=True)

        def weight() -> Tensor:
            if counted is not None:
                counted.wait()
            return self._divisor / steps.clamp(min=1.0)

        feedback = None if self.feedback is None else PieceFeedback(self.feedback, self._size)
        self._gradients.feedback, self._weight = feedback, weight
        self._add_up(batch, 0, self._count, self._sums)
        if feedback is not None:
            feedback.finish(batch)
        if self._world.size > 1:
            self._exchange(group)
        self._kept.clear()
        if not self._is_checked:
            self._check_buffers(before)
        if self._is_half:
            torch._foreach_copy_(self._results, self._slots(self._sums))
        for parameter, result in zip(self._parameters, self._results, strict=True):
            parameter.grad = result
        if self.parts is not None:
            self.parts = self._sums[self._tail + 1 :][: len(self.parts)]
        return self._sums[self._tail]

    def _slots(self, sums: Tensor) -> list[Tensor]:
        places = zip(self._parameters, self._places, strict=True)
        return [sums[place : place + p.numel()].view(p.shape) for p, place in places]

    def _add_up(self, batch: Batch, first: int, count: int, sums: Tensor) -> None:
        """Write the sum of a branch, of so many of this rank's pieces, to (N,) `sums`."""
        if count == 1:
            self._compute(batch, first, sums)
            return
        half, others = count // 2, torch.empty_like(sums)
        stream = self._stream if count == self._count else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        self._add_up(batch, first, half, sums)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._add_up(batch, first + half, half, others)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        sums += others

    def _compute(self, batch: Batch, number: int, sums: Tensor) -> None:
        """Write a piece's gradients and losses to (N,) `sums`."""
        piece = batch.part(slice(number * self._size, (number + 1) * self._size)).map(_align)
        with self._random(number):
            loss = self._gradients(piece, valid_steps=self._divisor, weight=self._weight)
        self.parts = self._gradients.parts
        losses = [loss[None]] if self.parts is None else [loss[None], self.parts]
        sources = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        torch._foreach_copy_(self._slots(sums), sources)
        torch.cat(losses, out=sums[self._tail :][: sum(map(len, losses))])
        for parameter in self._parameters:
            parameter.grad = None
        if self.generators:  # autograd adds up on a stream of its choice: see `RankGradients`
            self._kept += sources

    @contextmanager
    def _random(self, number: int) -> Iterator[None]:
        """Draw the random numbers of a piece of this rank inside."""
        if not self.generators:
            step, piece = self._numbers[number]
            seed_host(self._run_seed, step, piece)
            torch.manual_seed(self._seed_of(step, piece))
            yield
            return
        state = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self.generators[number])
        try:
            yield
        finally:
            self._default.graphsafe_set_state(state)

    def _exchange(self, group: Any) -> None:
        """Finish the tree: each rank for its share of the numbers, then all have all."""
        branches = self._sums.new_empty(self._world.size, len(self._sums) // self._world.size)
        work: Any = dist.all_to_all_single(
            branches.view(-1), self._sums, group=group, async_op=True
        )
        work.wait()  # the stream does, not the host
        while len(branches) > 1:
            branches = branches[0::2] + branches[1::2]
        work = dist.all_gather_into_tensor(self._sums, branches[0], group=group, async_op=True)
        work.wait()

    def _check_buffers(self, before: list[Tensor]) -> None:
        """Refuse a model whose passes change buffers: ranks would have others."""
        self._is_checked = True
        if not all(map(torch.equal, before, self.buffers)):
            problem = "its passes change buffers (batch norm does), by pieces on each rank"
            remedy = "change them in after_step(), or use train.deterministic=true"
            raise InputError("MODEL", problem, "train.deterministic", remedy)


def _align(tensor: Tensor) -> Tensor:
    """Return a tensor that lies in memory as in the batch of any other rank."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
