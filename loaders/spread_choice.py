"""Whether a dataset is spread over the nodes of a run, and what it says about that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from gear_offline.core.progress import say
from gear_offline.core.system import RESERVE_BYTES, available_bytes
from gear_offline.core.text import size_text
from gear_offline.distributed.sharding import NodeShare, shard_weights, share_shards, take_share
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.kernels.gather import Padding
from gear_offline.sampling import Sampler
from gear_offline.sampling.stream import Stream
from gear_offline.tables.joint import Source
from gear_offline.tables.table import Table, table_bytes

if TYPE_CHECKING:
    from gear_offline.loaders.sharded import LocalGather, ShardedBatches

Sharding = Literal["auto", "replicate", "shard"]


def choose_share(
    dataset: Source,
    world: World,
    sharding: Sharding,
    selection: Sampler | None = None,
    **sizes: Any,
) -> NodeShare | None:
    """Return what this rank's node holds, or None if every node holds all.

    Parameters
    ----------
    dataset
        The whole.
    world
        All its ranks call this together.
    sharding
        ``"replicate"``, ``"shard"``, or ``"auto"``: spread over nodes if there are several and one
        of them has too little memory for all.
    sizes
        As `gear_offline.tables.table.table_bytes`.
    selection
        Nodes get equal shares of its probability if it says how often episodes are drawn, else of
        steps.

    Raises
    ------
    InputError
        ``LOADER_OPTION``
    """
    if sharding not in ("auto", "replicate", "shard"):
        raise InputError(
            "LOADER_OPTION",
            f"sharding={sharding!r} is not usable",
            remedy="use 'auto', 'replicate' or 'shard'",
        )
    if world.node_count == 1 or sharding == "replicate":
        return None
    needed = table_bytes(dataset, **sizes)
    if sharding == "auto":
        least = min(world.gather(available_bytes() - RESERVE_BYTES))
        if needed <= least:
            return None
    steps = shard_weights(dataset)
    weight = None if selection is None else selection.episode_weight
    weights = steps if weight is None else shard_weights(dataset, weight)
    owners = share_shards(weights, world.node_count, sizes=steps)
    share = take_share(dataset, owners, world.nodes[world.rank])
    part = steps[share.shards].sum() / steps.sum()
    drawn = weights[owners == world.nodes[world.rank]].sum() / weights.sum()
    say(
        f"sharding {sharding}: {len(share.shards)} of {len(weights)} shards, "
        f"{part:.1%} of {size_text(needed)} and {drawn:.1%} of the draws, on this one of "
        f"{world.node_count} nodes",
        quiet=world.rank != world.leader,
    )
    return share


def open_spread(
    stream: Stream,
    world: World,
    share: NodeShare,
    table: Table,
    *,
    gather: LocalGather,
    exchange: Literal["auto", "on", "off"],
    steps: int,
    context_length: int,
    padding: Padding,
) -> ShardedBatches:
    """Open the exchange between the ranks; return what makes this rank's batches.

    A block has at most `steps` steps.
    """
    from gear_offline.distributed.exchange import open_exchange
    from gear_offline.loaders.sharded import ShardedBatches, held_rows, landing_memory

    segments = steps * world.share(stream.batch_size)
    landing = landing_memory(table, context_length=context_length, segments=segments)
    return ShardedBatches(
        world=world,
        share=share,
        table=table,
        gather=gather,
        exchange=open_exchange(held_rows(table, share), landing, world, mode=exchange),
        landing=landing,
        selection=stream.selection,
        seed=stream.seed,
        batch_size=stream.batch_size,
        context_length=context_length,
        padding=padding,
    )
