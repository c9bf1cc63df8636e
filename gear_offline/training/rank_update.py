"""Updates that the ranks of a captured step share: each of them updates its part of the weights.

Replicas have the same gradients and would all do the same update, which is bound by memory: for a
model of 87 million parameters it takes as long as adding up the gradients does.  Here each rank
gets the sums of one part of the gradients only and updates the weights they belong to.  Then the
ranks give each other what they have updated: as many bytes over the links as before.  This is stage
1 of ZeRO (Rajbhandari et al., 2020), sharding of the optimiser's states, but that every rank has
room for all moments: replicas are for models that fit, shards (FSDP2) for those that do not.

Shape legend: P elements of all parameters and of the gaps between them, W ranks, C pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.distributed.world import World
from gear_offline.kernels.adamw import cut

LINE = 64  # elements: tensors begin at cache lines, for wide loads, in 16 bits too
# Parameters that a rank must leave to others for it to pay.  Updating one moves 28 bytes; against
# that stand exchanges that take about 45 us longer.  Four H200: 0.7 million cost 44 us a step,
# 10.8 million save 30 us.
LEAST_LEFT = 7 << 20
# names of torch 2.13, and those before, which it deprecates
ALL_GATHER = ("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass(frozen=True)
class Layout:
    """Tensors one after another in one run of memory, which is cut into W equal parts.

    Attributes
    ----------
    sizes
        Elements of each tensor.
    begins
        Where each begins.
    part
        Elements of a part.
    ranks
        W.
    """

    sizes: tuple[int, ...]
    begins: tuple[int, ...]
    part: int
    ranks: int

    @classmethod
    def make(cls, sizes: Sequence[int], ranks: int) -> Layout:
        """Lay tensors of these sizes out for so many ranks."""
        begins, end = [], 0
        for size in sizes:
            begins.append(end)
            end += -(-size // LINE) * LINE
        part = -(-end // (LINE * ranks)) * LINE
        return cls(tuple(sizes), tuple(begins), part, ranks)

    def zeros(self, like: Tensor) -> Tensor:
        """Return (P,) zeros of the type and on the device of `like`."""
        return torch.zeros(self.part * self.ranks, dtype=like.dtype, device=like.device)

    def views(self, flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the places in `flat`, (P,), of tensors of these sizes, contiguous."""
        places = zip(self.begins, tensors, strict=True)
        return [flat[begin : begin + t.numel()].view(t.shape) for begin, t in places]

    def within(self, rank: int) -> list[range]:
        """Return the elements of each tensor that lie in a rank's part."""
        first, last = rank * self.part, (rank + 1) * self.part
        found = []
        for begin, size in zip(self.begins, self.sizes, strict=True):
            start = min(max(first - begin, 0), size)
            found.append(range(start, max(start, min(last - begin, size))))
        return found


class RankUpdate:
    """A rank's part of the update, and what the ranks give each other around it.

    The parameters move: afterwards they are views of one run of memory, contiguous.

    Parameters
    ----------
    parameters
        float32, of one device; of them this rank updates its part.
    shadows
        The same in bfloat16 if the model computes with those; ``None``: it computes with the
        parameters.
    world
        The ranks that train together.

    Attributes
    ----------
    layout
        Of the parameters, the gradients and everything that belongs to them.
    cuts, most_pieces
        As `gear_offline.kernels.adamw.Part`.
    """

    def __init__(
        self, parameters: Sequence[Tensor], shadows: Sequence[Tensor] | None, world: World
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.layout = Layout.make(sizes, world.size)
        pieces = [cut(sizes, self.layout.within(rank)) for rank in range(world.size)]
        self.cuts: npt.NDArray[np.int64] = pieces[world.rank]
        if not len(self.cuts):
            self.cuts = np.zeros((1, 3), np.int64)
        self.most_pieces = max(1, *(len(found) for found in pieces))
        self._world = world
        begin = world.rank * self.layout.part
        self._mine = slice(begin, begin + self.layout.part)
        values = self._move(parameters)
        self._computed = values if shadows is None else self._move(shadows)
        # what is up to date in this rank's part alone
        self._weights = [] if shadows is None else [values]
        self._moments: list[Tensor] = []

    def moments(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return zeros for one moment of the parameters, laid out as they are."""
        flat = self.layout.zeros(parameters[0])
        self._moments.append(flat)
        return self.layout.views(flat, parameters)

    def sum_gradients(self, flat: Tensor) -> Any:
        """Begin to add up gradients, (P,), over the ranks: this rank's part, in place.

        Returns
        -------
        Work
            Of ``torch.distributed``.
        """
        return _newest(*REDUCE_SCATTER)(flat[self._mine], flat, async_op=True)

    def sum_partials(self, partials: Tensor) -> None:
        """Add up the ranks' sums of squared gradients, in place."""
        dist.all_reduce(partials)

    def share(self) -> None:
        """Give all ranks the weights that the model computes with, once this part is updated."""
        _newest(*ALL_GATHER)(self._computed, self._computed[self._mine])

    def collect_weights(self) -> None:
        """Give all ranks all of the float32 parameters; they call this together."""
        self._collect(self._weights)

    def collect_moments(self) -> None:
        """Give all ranks all of the moments; they call this together."""
        self._collect(self._moments)

    def _collect(self, tensors: Sequence[Tensor]) -> None:
        with self._world.guard("collecting weights and moments"):
            for flat in tensors:
                _newest(*ALL_GATHER)(flat, flat[self._mine])

    @torch.no_grad()
    def _move(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = self.layout.zeros(tensors[0])
        for tensor, view in zip(tensors, self.layout.views(flat, tensors), strict=True):
            view.copy_(tensor)
            tensor.data = view
        return flat


def _newest(*names: str) -> Any:
    """Return the collective that torch has under the first of these names."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def shares_update(parameters: int, ranks: int, nodes: int) -> bool:
    """Return whether ranks should share the update of so many parameters that learn.

    Those of one node: between nodes gradients travel in buckets beside the backward pass, which
    are not a part a rank.
    """
    return ranks > 1 and nodes == 1 and parameters - parameters // ranks >= LEAST_LEFT
