"""Gradients with the same bits on any number of ranks: ``train.deterministic: ranks``.

The global batch is cut into pieces, by its size alone.  Whichever rank computes a piece does so
with the same shapes, kernels and random numbers.  Gradients and losses are added up in the order
of a binary tree whose leaves are the pieces.  A rank's pieces are a branch of it, so that only sums
of branches travel.

Shape legend: W ranks, P pieces, N numbers of all gradients and losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gear_offline.config.recipe import Recipe
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.feedback import PieceFeedback, SegmentFeedback
from gear_offline.training.gradients import GradientPass
from gear_offline.training.seeding import seed_all

PIECE = 64  # segments, at most, if halves of the batch allow
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
        remedy = f"use a power of two of ranks, at most {pieces}, or a loader.batch_size of "
        remedy += f"{PIECE} for each rank"
        raise InputError("LOADER_OPTION", problem, "loader.batch_size", remedy)


class PieceGradients:
    """The loss of the global batch and its gradients, from this rank's pieces of it.

    It takes the place of `gradients`, the pass of this rank alone; `parameters` are those that it
    computes with.  Call `seed` before each step.  With `graph_device` the step is captured as a
    CUDA graph there: then half of a rank's pieces run beside the others on a stream of their own,
    and random numbers come from `generators`, one a piece, which the graph must know.
    """

    def __init__(
        self,
        gradients: GradientPass,
        parameters: Sequence[nn.Parameter],
        recipe: Recipe,
        world: World,
        *,
        graph_device: torch.device | None = None,
    ) -> None:
        self._gradients, self._world, self._run_seed = gradients, world, recipe.seed
        self._parameters, loader = parameters, recipe.loader
        pieces = count_pieces(loader.batch_size)
        self._size, self._count = loader.batch_size // pieces, pieces // self._world.size
        self._first, self._pieces = self._world.rank * self._count, pieces
        self._divisor, self._step = float(self._size * loader.context_length), 0
        self.feedback: SegmentFeedback | None = None
        self.parts: Tensor | None = None
        self.generators: list[torch.Generator] = []
        self._stream: Any = None
        self._kept = list[Any]()  # autograd adds up on a stream of its choice: see `RankGradients`
        if graph_device is not None:
            self.generators = [torch.Generator(graph_device) for _ in range(self._count)]
            self._default = torch.cuda.default_generators[graph_device.index or 0]
            if self._count > 1:
                self._stream = torch.cuda.Stream(graph_device)  # type: ignore[no-untyped-call]

    def seed(self, step: int) -> None:
        """Make random numbers those of a step, counted from 0."""
        self._step = step
        for piece, generator in enumerate(self.generators, start=self._first):
            generator.manual_seed(self._seed_of(piece))
        if self.generators:
            self._default.manual_seed(self._seed_of(self._pieces))

    def _seed_of(self, piece: int) -> int:
        """Return the seed of a piece of the batch; after the last one, of `after_step`."""
        words = np.random.SeedSequence((self._run_seed, self._step, piece))
        return int(words.generate_state(1, np.uint64)[0])

    def __call__(self, batch: Batch) -> Tensor:
        """Give the parameters, which have none, their gradients; return the loss, detached."""
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
        sums = self._add_up(batch, 0, self._count)
        if feedback is not None:
            feedback.finish(batch)
        if self._world.size > 1:
            self._exchange(sums, group)
        self._kept.clear()
        if not self.generators:
            seed_all(self._seed_of(self._pieces))
        *gradients, losses = sums
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.parts = losses[1:] if len(losses) > 1 else None
        return losses[0]

    def _add_up(self, batch: Batch, first: int, count: int) -> list[Tensor]:
        """Return the sums of gradients, and of losses, of a branch: so many of a rank's pieces."""
        if count == 1:
            return self._compute(batch, first)
        stream = self._stream if count == self._count else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        sums = self._add_up(batch, first, count // 2)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            others = self._add_up(batch, first + count // 2, count // 2)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        torch._foreach_add_(sums, others)
        self._kept += others if self.generators else []
        return sums

    def _compute(self, batch: Batch, number: int) -> list[Tensor]:
        """Return the float32 gradients of a piece, and its losses."""
        piece = batch.part(slice(number * self._size, (number + 1) * self._size)).map(_align)
        with self._random(number):
            loss = self._gradients(piece, valid_steps=self._divisor, weight=self._weight)
        parts = self._gradients.parts
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        losses = loss[None] if parts is None else torch.cat([loss[None], parts])
        return [tensor.detach().float() for tensor in (*found, losses)]

    @contextmanager
    def _random(self, number: int) -> Iterator[None]:
        """Draw the random numbers of a piece of this rank inside."""
        if not self.generators:
            seed_all(self._seed_of(self._first + number))
            yield
            return
        state = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self.generators[number])
        try:
            yield
        finally:
            self._default.graphsafe_set_state(state)

    def _exchange(self, sums: list[Tensor], group: Any) -> None:
        """Finish the tree: each rank for its share of the numbers, then all have all."""
        counts, size = [tensor.numel() for tensor in sums], self._world.size
        counts.append(-sum(counts) % size)
        row = torch.cat([*(tensor.flatten() for tensor in sums), sums[0].new_zeros(counts[-1])])
        branches = torch.empty_like(row)
        work: Any = dist.all_to_all_single(branches, row, group=group, async_op=True)
        work.wait()  # the stream does, not the host
        branches = branches.view(size, -1)
        while len(branches) > 1:
            branches = branches[0::2] + branches[1::2]
        work = dist.all_gather_into_tensor(row, branches[0], group=group, async_op=True)
        work.wait()
        found: Any = zip(torch.split_with_sizes(row, counts), sums, strict=False)
        torch._foreach_copy_(sums, [numbers.view(tensor.shape) for numbers, tensor in found])


def _align(tensor: Tensor) -> Tensor:
    """Return a tensor that lies in memory as in the batch of any other rank."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
