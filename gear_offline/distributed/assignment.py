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

NARROW = 1 << 16  # numbers below are sorted in two passes


class Assigner:
    """Assigns global batches of N segments to ranks of `nodes` (W,), B to each.

    No assignment moves fewer segments between nodes.  The ranks of a node take its segments, and
    those that move, in turn.
    """

    def __init__(self, nodes: Sequence[int], global_batch: int) -> None:
        assert global_batch % len(nodes) == 0, "World.rank_batch refuses other batches"
        by_node = np.argsort(nodes, kind="stable")
        ranks = np.bincount(nodes)  # of each node
        self._ranks, self._share = len(nodes), global_batch // len(nodes)
        self._room = ranks * self._share  # (D,) segments of a node
        self._first = np.cumsum(self._room) - self._room
        # Places of a node lie side by side; which of them are a rank's, (W, B).
        turn = np.concatenate([np.arange(count) for count in ranks])
        places = self._first[np.asarray(nodes)[by_node], None] + turn[:, None]
        places = places + np.arange(self._share) * np.repeat(ranks, ranks)[:, None]
        self._places = np.empty_like(places)
        self._places[by_node] = places

    def assign(self, homes: Int64Array) -> tuple[Int64Array, BoolArray]:
        """Return the slots of each rank, and which of them move, (T, W, B).

        `homes`, (T, N), are the nodes that hold the segments.
        """
        steps, count = homes.shape
        step = np.arange(steps)[:, None]
        keys, counts = self._count(homes)
        order = np.argsort(
            keys.astype(np.uint16 if len(counts) <= NARROW else np.int64), kind="stable"
        )
        place = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)
        stays = place < np.repeat(np.tile(self._room, steps), counts)
        place += np.repeat((self._first + count * step).reshape(-1), counts)
        slots = np.full(order.size, -1)
        slots[place[stays]] = order[stays]
        moves = slots < 0
        slots[moves] = order[~stays]  # as many in every step
        shape, places = (steps, self._ranks, self._share), self._places.reshape(-1)
        slots, moves = slots.reshape(homes.shape) - count * step, moves.reshape(homes.shape)
        return slots[:, places].reshape(shape), moves[:, places].reshape(shape)

    def moved(self, homes: Int64Array) -> Int64Array:
        """Return (T,) how many segments of each step leave their node."""
        counts = self._count(homes)[1].reshape(len(homes), -1)
        moved: Int64Array = np.maximum(counts - self._room, 0).sum(1)
        return moved

    def _count(self, homes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return (T N,) which step's node each segment is at, and (T D,) how many are there."""
        nodes = len(self._room)
        keys = (homes + nodes * np.arange(len(homes))[:, None]).reshape(-1)
        return keys, np.bincount(keys, minlength=nodes * len(homes))
