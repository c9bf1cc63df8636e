"""Which node holds which shards, so that every node is drawn from equally often.

Shape legend: S shards, E episodes, D nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.dataset import Dataset
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError

Int64Array = npt.NDArray[np.int64]


def share_shards(
    weights: npt.ArrayLike, nodes: int, *, sizes: npt.ArrayLike | None = None
) -> Int64Array:
    """Return (S,) int64 the node of each shard: equal sums of weight, as far as shards allow.

    The heaviest shard goes to the lightest node, again and again (Graham 1969); no node gets more
    than 4/3 of the best possible largest sum.  Deterministic: equals go by number.

    Parameters
    ----------
    weights
        (S,), how often each shard is drawn from; its steps if all steps are drawn alike.
    nodes
        D.
    sizes
        (S,), bytes or steps: shards that are never drawn from (weight 0) go where these are least.
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
    held = np.bincount(owners[drawn], weights=bulk[drawn], minlength=nodes).astype(np.float64)
    held[np.bincount(owners[drawn], minlength=nodes) == 0] = -1.0  # who has nothing comes first
    never = np.flatnonzero(~(drawn_from > 0))
    _give_out(never, bulk, held, owners)
    return owners


def _give_out(
    shards: Int64Array,
    weights: npt.NDArray[np.float64],
    held: npt.NDArray[np.float64],
    owners: Int64Array,
) -> None:
    """Give each shard, in their order, to the node that holds least; `held` is (D,)."""
    lightest = [(total, node) for node, total in enumerate(held.tolist())]
    heapq.heapify(lightest)
    for shard in shards.tolist():
        total, node = heapq.heappop(lightest)
        owners[shard] = node
        heapq.heappush(lightest, (max(total, 0.0) + max(weights[shard], 1e-12), node))


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeShare:
    """What one node holds of a dataset.

    Attributes
    ----------
    dataset
        Its shards only; statistics are those of the whole.
    nodes
        (E,) int64: the node of every episode of the whole dataset.
    lengths
        (E,) int64: steps of every episode of the whole dataset.
    local
        (E,) int64: the number of an episode among those of its node.
    """

    dataset: Dataset
    nodes: Int64Array
    lengths: Int64Array
    local: Int64Array


def shard_weights(
    dataset: Dataset, episode_weight: npt.ArrayLike | None = None
) -> npt.NDArray[np.float64]:
    """Return (S,) sums of episode weights; by default of steps."""
    lengths = dataset.episodes.lengths
    weights = np.asarray(lengths if episode_weight is None else episode_weight, dtype=np.float64)
    firsts = np.cumsum([0, *(shard.episodes for shard in dataset.manifest.shards)])
    return np.array([weights[a:b].sum() for a, b in pairwise(firsts.tolist())])


def without_episodes(dataset: Dataset) -> Dataset:
    """Return a dataset of the same columns and statistics that holds nothing."""
    return take_share(dataset, np.zeros(len(dataset.manifest.shards), np.int64), 1).dataset


def take_share(dataset: Dataset, owners: Int64Array, node: int) -> NodeShare:
    """Return what `node` holds when shards lie as `owners` (S,) says."""
    manifest = dataset.manifest
    counts = np.array([shard.episodes for shard in manifest.shards])
    nodes = np.repeat(owners, counts)
    lengths = dataset.episodes.lengths
    local = np.zeros_like(nodes)
    for other in range(int(owners.max()) + 1):
        there = nodes == other
        local[there] = np.arange(int(there.sum()))
    held = nodes == node
    shards = tuple(s for s, owner in zip(manifest.shards, owners, strict=True) if owner == node)
    index = EpisodeIndex(lengths=lengths[held])
    part = replace(
        dataset,
        manifest=replace(
            manifest,
            shards=shards,
            spec=replace(manifest.spec, steps=index.steps, episodes=index.episodes),
        ),
        episodes=index,
        terminated=dataset.terminated[held],
        truncated=dataset.truncated[held],
        returns=dataset.returns[held],
    )
    return NodeShare(dataset=part, nodes=nodes, lengths=lengths, local=local)
