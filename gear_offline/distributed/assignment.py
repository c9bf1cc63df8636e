"""Which rank trains on which segment of the global batch: where it lies, as far as that is even.

The mean gradient of a global batch does not depend on who works on which segment.  Every rank
draws the same global batches and computes the same assignment, so nothing is communicated: a
segment goes to a rank of the node that holds it, and only what exceeds a node's share moves.

Shape legend: T steps, N segments of a global batch, W ranks, D nodes, B = N / W segments a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gear_offline.core.types import BoolArray, Int64Array

NARROW = 1 << 8  # up to so many nodes their numbers are sorted in one pass


class Assigner:
    """Assigns global batches of N segments to ranks of `nodes` (W,), B to each.

    No assignment moves fewer segments between nodes.  The ranks of a node take its segments, and
    those that move, in turn.
    """

    def __init__(self, nodes: Sequence[int], global_batch: int) -> None:
        assert global_batch % len(nodes) == 0, "World.rank_batch refuses other batches"
        by_node = np.argsort(nodes, kind="stable")
        ranks = np.bincount(nodes)  # of each node
        self._ranks, self._node_count = len(nodes), len(ranks)
        self._share = global_batch // len(nodes)
        self._room = ranks * self._share  # (D,) segments of a node
        first = np.cumsum(self._room) - self._room
        # Places of a node lie side by side; which of them are a rank's, (W, B).
        turn = np.concatenate([np.arange(count) for count in ranks])
        places = first[np.asarray(nodes)[by_node], None] + turn[:, None]
        places = places + np.arange(self._share) * np.repeat(ranks, ranks)[:, None]
        self._places = np.empty_like(places)
        self._places[by_node] = places
        self._first = first

    def assign(self, homes: Int64Array) -> tuple[Int64Array, BoolArray]:
        """Return the slots of each rank, and which of them move, (T, W, B).

        `homes`, (T, N), are the nodes that hold the segments.
        """
        steps, count = homes.shape
        narrow = homes.astype(np.uint8 if self._node_count <= NARROW else np.uint16)
        order = np.argsort(narrow, axis=1, kind="stable")
        node = np.take_along_axis(homes, order, axis=1)
        counts = self._counts(homes)
        begins = np.cumsum(counts, axis=1) - counts
        rows = np.arange(steps)[:, None]
        place = np.arange(count) - begins[rows, node]  # among those of the same node
        stays = place < self._room[node]
        slots = np.full(homes.shape, -1)
        at = (rows * count + self._first[node] + place)[stays]
        slots.reshape(-1)[at] = order[stays]
        moves = slots < 0
        slots[moves] = order[~stays]  # as many in every step
        shape = (steps, self._ranks, self._share)
        flat = self._places.reshape(-1)
        return slots[:, flat].reshape(shape), moves[:, flat].reshape(shape)

    def moved(self, homes: Int64Array) -> Int64Array:
        """Return (T,) how many segments of each step leave their node."""
        moved: Int64Array = np.maximum(self._counts(homes) - self._room, 0).sum(1)
        return moved

    def _counts(self, homes: Int64Array) -> Int64Array:
        steps, nodes = len(homes), self._node_count
        flat = (homes + nodes * np.arange(steps)[:, None]).reshape(-1)
        return np.bincount(flat, minlength=steps * nodes).reshape(steps, nodes)
