"""Which rank trains on which segment of the global batch: where it lies, as far as that is even.

The mean gradient of a global batch does not depend on who works on which segment.  Every rank
draws the same global batch and computes the same assignment, so nothing is communicated: a segment
goes to a rank that holds it, and only what exceeds an equal share moves.

Shape legend: n segments of a global batch, W ranks, D nodes, B = n / W segments a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ANYWHERE = -1  # a home: every rank (or every node) has a copy


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """Who trains on what; the same on every rank."""

    ranks: Tensor  # (n,) int64: the rank of each slot
    slots: Tensor  # (W, B) int64: the slots of each rank, ascending


class Assigner:
    """Assigns global batches to ranks of `nodes` (W,); on a GPU without host synchronisation.

    Every rank gets exactly B segments.  No assignment moves fewer segments between nodes, and none
    of those moves fewer between ranks of a node.  In the order of slots, a rank keeps up to B
    segments that are at home with it; then segments that are equally near to all ranks of a node
    fill its free places, and after them what exceeded the share of its ranks; what is left, and
    what every node has, fills the remaining places.
    """

    def __init__(self, nodes: Tensor, *, device: torch.device | str = "cpu") -> None:
        nodes = torch.as_tensor(nodes, dtype=torch.int64)
        assert nodes.ndim == 1 and len(nodes) and int(nodes.min()) >= 0, "a node for each rank"
        self.ranks, self.node_count = len(nodes), int(nodes.max()) + 1
        self.nodes = nodes.to(device)
        # Ranks in the order of their nodes: the free places of a node are one run.
        self._by_node = torch.argsort(nodes, stable=True).to(device)

    def assign(self, rank_homes: Tensor, node_homes: Tensor) -> Assignment:
        """Assign one global batch whose segments lie at ranks (n,) and nodes (n,), both int64.

        A rank's home is `ANYWHERE` if the segment is equally near to all ranks of its node (or of
        all nodes), a node's if every node has it.
        """
        n, ranks, nodes = len(rank_homes), self.ranks, self.node_count
        assert n % ranks == 0, "World.share refuses other batches"
        share = n // ranks
        # 1. At home, up to a share.
        home = rank_homes.masked_fill(rank_homes < 0, ranks)
        place, counts = _places(home, ranks + 1)
        kept = (home < ranks) & (place < share)
        free = share - counts[:ranks].clamp(max=share)
        # 2. In the node, as far as it has free places.
        node = node_homes.masked_fill(kept | (node_homes < 0), nodes)
        surplus = rank_homes >= 0  # behind those that are equally near to all ranks
        place, counts = _places(2 * node + surplus, 2 * (nodes + 1))
        counts = counts.view(-1, 2)
        place += counts[:, 0][node] * surplus
        counts = counts.sum(1)
        free_by_node = torch.zeros_like(counts).index_add_(0, self.nodes, free)
        free_by_node[nodes:].zero_()
        near = place < free_by_node[node]
        ends = free[self._by_node].cumsum(0)  # of each rank's places, nodes side by side
        begins = free_by_node.cumsum(0) - free_by_node
        place_of = torch.searchsorted(ends, begins[node] + place, right=True)
        near_rank = self._by_node[place_of.clamp(max=ranks - 1)]
        filled = torch.minimum(counts, free_by_node)[self.nodes]
        before = torch.empty_like(free)
        before[self._by_node] = ends - free[self._by_node]
        before -= begins[self.nodes]  # places of the node before this rank's
        free = free - torch.minimum((filled - before).clamp(min=0), free)
        # 3. Anywhere.
        rest = ~(kept | near)
        place = rest.cumsum(0) - 1
        far_rank = torch.searchsorted(free.cumsum(0), place.clamp(min=0), right=True)
        far_rank = far_rank.clamp(max=ranks - 1)
        assigned = torch.where(kept, home, torch.where(near, near_rank, far_rank))
        slots = _order(assigned, ranks)
        return Assignment(ranks=assigned, slots=slots.view(ranks, share))

    def assign_steps(self, node_homes: Tensor) -> Tensor:
        """Return (T, W, B) the slots of each rank in T global batches, from (T, n) nodes.

        One `assign` does it: the ranks and nodes of a step are ranks and nodes of their own, and a
        step has as many places as segments, so that none fills another's.
        """
        steps, n = node_homes.shape
        number = torch.arange(steps, device=self.nodes.device)[:, None]
        nodes = (self.nodes + number * self.node_count).flatten()
        homes = torch.where(node_homes < 0, node_homes, node_homes + number * self.node_count)
        anywhere = torch.full((steps * n,), ANYWHERE, device=nodes.device)
        every = Assigner(nodes, device=nodes.device).assign(anywhere, homes.flatten())
        return every.slots.view(steps, self.ranks, -1) - n * number[:, None]

    def moved(self, assignment: Assignment, rank_homes: Tensor, node_homes: Tensor) -> Tensor:
        """Return (2,) int64: segments that leave their node, and those that leave only their rank.

        A segment that is equally near to all ranks of its node does not leave a rank.
        """
        far = (node_homes >= 0) & (self.nodes[assignment.ranks] != node_homes)
        near = ~far & (rank_homes >= 0) & (assignment.ranks != rank_homes)
        return torch.stack([far.sum(), near.sum()])


def _order(keys: Tensor, groups: int) -> Tensor:
    """Return a stable order of keys, sorted in the narrowest type: a pass a byte."""
    narrow = keys.to(torch.int16 if groups < 1 << 15 else torch.int32)
    if narrow.is_cuda:
        return torch.argsort(narrow, stable=True)
    return torch.from_numpy(np.argsort(narrow.numpy(), kind="stable"))  # torch's compares


def _places(keys: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return (n,) each key's place among equal ones, and (groups,) how many there are of each."""
    order = _order(keys, groups)
    numbers = torch.arange(len(keys), device=keys.device)
    counts = torch.zeros(groups, dtype=torch.int64, device=keys.device)
    counts.index_add_(0, keys, torch.ones_like(keys))
    begins = counts.cumsum(0) - counts
    places = torch.empty_like(keys)
    places[order] = numbers - begins[keys[order]]
    return places, counts
