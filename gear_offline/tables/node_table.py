"""A table that the processes of a node hold once."""

from __future__ import annotations

from typing import Any

from gear_offline.dataset.dataset import Dataset
from gear_offline.distributed.sharding import without_episodes
from gear_offline.distributed.world import World
from gear_offline.tables.anonymous_file import shares_memory
from gear_offline.tables.host_memory import HostHandle
from gear_offline.tables.host_table import host_table
from gear_offline.tables.shared_tables import current_tables
from gear_offline.tables.table import Table, build_table


def shared_table(world: World, dataset: Dataset, **options: Any) -> Table:
    """Build a table in memory of this process, or once a node if the node has several ranks.

    Systems without memory that processes share have one in each.

    Parameters
    ----------
    world
        All its ranks call this together, with the same options.
    dataset, options
        As `gear_offline.tables.table.build_table`.

    Raises
    ------
    GearError
        What `build_table` and `host_table` raise; ``RANK_FAILED`` on ranks that waited.
    """
    if not world.feeds:
        return build_table(without_episodes(dataset), **options)
    tables = current_tables()
    if tables is not None and world.size == 1:
        return tables.table(dataset, **options)
    alone = len(world.nodes) == world.node_count or not shares_memory()
    if alone:
        return build_table(dataset, **options)
    made = world.lead(lambda: host_table(dataset, **options), leader=world.leader)
    handles = world.gather(None if made is None else made[1].handle().to_json())
    if made is None:
        share = HostHandle.from_json(handles[world.leader])
        made = host_table(dataset, share=share, **options)
    world.gather(None)  # the leader's block stays open until everyone has it
    return made[0]
