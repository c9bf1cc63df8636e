"""The assignment of shards to nodes, and of segments of the global batch to ranks.

Every node is drawn from equally often.  The mean gradient of a global batch does not depend on who
works on which segment.  Every rank draws the same global batches and computes the same assignment,
so nothing is communicated.  A segment goes to a rank of the node that holds it, and only those
beyond a node's share move.

Shape legend: S shards, E episodes, T steps, N segments of a global batch, W ranks, D nodes,
B = N / W segments a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gear_offline.batches.sampling import Sampler
from gear_offline.batches.tables.joint import TableData, parts_of
from gear_offline.batches.tables.table import TableOptions, table_bytes
from gear_offline.config.sections import Sharding
from gear_offline.core.system import RESERVE_BYTES, available_bytes
from gear_offline.core.text import say, size_text
from gear_offline.core.types import BoolArray, Float64Array, Int64Array
from gear_offline.distributed.reads import ranges
from gear_offline.distributed.world import World
from gear_offline.errors import InputError

NARROW = 1 << 16  # numbers below are sorted in two passes


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeShare:
    """The shards of one node, and the nodes of all episodes."""

    shards: Int64Array  # numbers of the node's shards, ascending
    nodes: Int64Array  # (E,) the node of every episode of the whole dataset
    lengths: Int64Array  # (E,) steps of every episode of the whole dataset


def choose_share(
    data: TableData, sampler: Sampler, world: World, options: TableOptions, sharding: Sharding
) -> NodeShare | None:
    """Return the share of this rank's node, or None if every node holds all.

    Nodes get equal shares of the probability where the sampler knows it, else of steps.
    """
    if world.node_count == 1 or sharding == "replicate":
        return None
    row_bytes = table_bytes(data, options)
    if sharding == "auto":
        limits = world.gather(available_bytes() - RESERVE_BYTES)
        if row_bytes <= min(limits):
            return None
    steps, weight = shard_weights(data), sampler.episode_weight
    weights = steps if weight is None else shard_weights(data, weight)
    owners = share_shards(weights, world.node_count, sizes=steps)
    local, nodes = owners == world.node, np.repeat(owners, shard_episodes(data))
    share = NodeShare(shards=np.flatnonzero(local), nodes=nodes, lengths=data.episodes.lengths)
    say(
        f"sharding {sharding}: {len(share.shards)} of {len(weights)} shards, "
        f"{steps[local].sum() / steps.sum():.1%} of {size_text(row_bytes)} and "
        f"{weights[local].sum() / weights.sum():.1%} of the draws, on this one of "
        f"{world.node_count} nodes",
        quiet=world.rank != world.leader,
    )
    return share


def share_shards(
    weights: npt.ArrayLike, nodes: int, *, sizes: npt.ArrayLike | None = None
) -> Int64Array:
    """Return (S,) int64 the node of each shard: equal sums of weight, as far as shards allow.

    The heaviest shard goes to the lightest node, again and again (Graham 1969); no node gets more
    than 4/3 of the best possible largest sum.  Deterministic: equals go by number.  Shards that are
    never drawn from (weight 0) go where the `sizes` (S,), in bytes or steps, are least.
    """
    drawn_from = np.asarray(weights, dtype=np.float64)
    if len(drawn_from) < nodes:
        problem = f"{len(drawn_from)} shards cannot be shared by {nodes} nodes"
        remedy = "convert with a smaller --shard-size, or set loader.sharding=replicate"
        raise InputError("LOADER_OPTION", problem, remedy=remedy)
    bulk = np.asarray(drawn_from if sizes is None else sizes, dtype=np.float64)
    owners, drawable = np.zeros(len(drawn_from), np.int64), np.flatnonzero(drawn_from > 0)
    heaviest = drawable[np.argsort(-drawn_from[drawable], kind="stable")]
    _give_out(heaviest, drawn_from, np.zeros(nodes), owners)
    held = np.bincount(owners[drawable], weights=bulk[drawable], minlength=nodes).astype(np.float64)
    held[np.bincount(owners[drawable], minlength=nodes) == 0] = -1.0  # who has nothing comes first
    _give_out(np.flatnonzero(~(drawn_from > 0)), bulk, held, owners)
    return owners


def _give_out(
    shards: Int64Array, weights: Float64Array, totals: Float64Array, owners: Int64Array
) -> None:
    """Give each shard, in their order, to the node of the least total, (D,)."""
    for shard in shards.tolist():
        node = owners[shard] = np.argmin(totals)
        totals[node] = max(totals[node], 0.0) + max(weights[shard], 1e-12)


def shard_episodes(source: TableData) -> Int64Array:
    """Return (S,) int64, the episodes of each shard."""
    datasets = [part.dataset for part in parts_of(source)]
    return np.concatenate(
        [np.diff(d.episodes.offsets.searchsorted(d.first_steps)) for d in datasets]
    )


def shard_weights(source: TableData, episode_weight: npt.ArrayLike | None = None) -> Float64Array:
    """Return (S,) sums of episode weights; by default of steps."""
    lengths, episodes = source.episodes.lengths, shard_episodes(source)
    weights = np.asarray(lengths if episode_weight is None else episode_weight, dtype=np.float64)
    firsts = np.cumsum(episodes) - episodes
    return np.array([weights[a : a + n].sum() for a, n in zip(firsts, episodes, strict=True)])


class Assigner:
    """Assigns global batches of N segments to ranks of `nodes` (W,), B to each.

    No assignment moves fewer segments between nodes.  The ranks of a node take its segments, and
    those that move, in turn.

    Attributes
    ----------
    places
        (W, B), which of a step's N places are a rank's.
    """

    def __init__(self, nodes: Sequence[int], global_batch: int) -> None:
        assert global_batch % len(nodes) == 0, "World.rank_batch refuses other batches"
        by_node = np.argsort(nodes, kind="stable")
        ranks = np.bincount(nodes)  # of each node
        share = global_batch // len(nodes)
        self._room = ranks * share  # (D,) segments of a node
        self._first = np.cumsum(self._room) - self._room
        self._node = np.repeat(np.arange(len(ranks)), self._room)  # (N,) of each place
        self._turn = np.arange(global_batch) - self._first[self._node]
        # Places of a node lie side by side.
        turn = np.concatenate([np.arange(count) for count in ranks])
        places = self._first[np.asarray(nodes)[by_node], None] + turn[:, None]
        places = places + np.arange(share) * np.repeat(ranks, ranks)[:, None]
        self.places: Int64Array = np.empty_like(places)
        self.places[by_node] = places

    def assign(self, homes: Int64Array) -> tuple[Int64Array, BoolArray]:
        """Return the slot at each place, and which of them move, (T, N).

        `homes`, (T, N), are the nodes that hold the segments.
        """
        (steps, count), nodes = homes.shape, len(self._room)
        step = np.arange(steps)[:, None]
        keys = (homes + nodes * step).reshape(-1)  # a step's node
        counts = np.bincount(keys, minlength=nodes * steps).reshape(steps, nodes)
        narrow = np.uint16 if counts.size <= NARROW else np.int64
        order = np.argsort(keys.astype(narrow), kind="stable")
        # Each node's segments lie side by side there: the first ones take its places.
        begins = (np.cumsum(counts) - counts.reshape(-1)).reshape(steps, nodes)
        at = (begins - self._first).take(self._node, axis=1) + np.arange(count)
        moves = counts.take(self._node, axis=1) <= self._turn
        over = np.maximum(counts - self._room, 0)
        at[moves] = ranges((begins + self._room).reshape(-1), over.reshape(-1))  # as many in a step
        return order[at] - count * step, moves
