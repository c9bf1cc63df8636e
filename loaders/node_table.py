"""The table of a loader: its own, or one for all ranks of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gear_offline.distributed.world import World
from gear_offline.tables.joint import Source
from gear_offline.tables.shared import Handle, share_table
from gear_offline.tables.table import Table, build_table


def node_table(
    world: World, source: Source, *, shards: Sequence[int] | None = None, **options: Any
) -> Table:
    """Build a table in memory of this process, or once a node if the node has several ranks.

    Parameters
    ----------
    world
        All its ranks call this together, with the same options.
    source, shards, options
        As `gear_offline.tables.table.build_table`; ranks that do not feed a model hold no rows.

    Raises
    ------
    GearError
        What `build_table` and `share_table` raise; ``RANK_FAILED`` on ranks that waited.
    """
    if not world.feeds:
        return build_table(source, shards=(), **options)
    if len(world.nodes) == world.node_count:
        return build_table(source, shards=shards, **options)
    made = world.lead(lambda: share_table(source, shards=shards, **options), leader=world.leader)
    handles = world.gather(None if made is None else asdict(made[1].handle()))
    if made is None:
        handle = Handle(**handles[world.leader])
        made = share_table(source, handle=handle, shards=shards, **options)
    world.gather(None)  # the leader's memory stays open until everyone has it
    return made[0]
