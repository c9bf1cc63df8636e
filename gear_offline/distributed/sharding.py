"""Which node holds which shards, so that every node is drawn from equally often.

Shape legend: S shards, E episodes, D nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError
from gear_offline.tables.joint import TableData, shards_of

Int64Array = npt.NDArray[np.int64]


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
        raise InputError(
            "LOADER_OPTION",
            f"{len(drawn_from)} shards cannot be shared by {nodes} nodes",
            remedy="convert with a smaller --shard-size, or set loader.sharding=replicate",
        )
    bulk = np.asarray(drawn_from if sizes is None else sizes, dtype=np.float64)
    owners = np.zeros(len(drawn_from), np.int64)
    drawn = np.argsort(-drawn_from, kind="stable")[: int((drawn_from > 0).sum())]
    _give_out(drawn, drawn_from, np.zeros(nodes), owners)
    totals = np.bincount(owners[drawn], weights=bulk[drawn], minlength=nodes).astype(np.float64)
    totals[np.bincount(owners[drawn], minlength=nodes) == 0] = -1.0  # who has nothing comes first
    never = np.flatnonzero(~(drawn_from > 0))
    _give_out(never, bulk, totals, owners)
    return owners


def _give_out(
    shards: Int64Array,
    weights: npt.NDArray[np.float64],
    totals: npt.NDArray[np.float64],
    owners: Int64Array,
) -> None:
    """Give each shard, in their order, to the node that holds least; `totals` is (D,)."""
    lightest = [(total, node) for node, total in enumerate(totals.tolist())]
    heapq.heapify(lightest)
    for shard in shards.tolist():
        total, node = heapq.heappop(lightest)
        owners[shard] = node
        heapq.heappush(lightest, (max(total, 0.0) + max(weights[shard], 1e-12), node))


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeShare:
    """What one node holds of a dataset, and where all its episodes are."""

    shards: Int64Array  # numbers of the node's shards, ascending
    nodes: Int64Array  # (E,) the node of every episode of the whole dataset
    lengths: Int64Array  # (E,) steps of every episode of the whole dataset


def shard_episodes(source: TableData) -> Int64Array:
    """Return (S,) int64, the episodes of each shard."""
    records = (part.dataset.manifest.shards[shard] for part, shard in shards_of(source))
    return np.array([record.episodes for record in records], np.int64)


def shard_weights(
    source: TableData, episode_weight: npt.ArrayLike | None = None
) -> npt.NDArray[np.float64]:
    """Return (S,) sums of episode weights; by default of steps."""
    lengths = source.episodes.lengths
    weights = np.asarray(lengths if episode_weight is None else episode_weight, dtype=np.float64)
    firsts = np.concatenate([[0], np.cumsum(shard_episodes(source))])
    return np.array([weights[a:b].sum() for a, b in pairwise(firsts.tolist())])


def take_share(source: TableData, owners: Int64Array, node: int) -> NodeShare:
    """Return what `node` holds when shards lie as `owners` (S,) says."""
    nodes = np.repeat(owners, shard_episodes(source))
    return NodeShare(
        shards=np.flatnonzero(owners == node),
        nodes=nodes,
        lengths=source.episodes.lengths,
    )
