"""A table in one block of shared memory: built once on a node, attached by its other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gear_offline.errors import GearError
from gear_offline.tables.fields import TableSource
from gear_offline.tables.host_memory import HostBlock, HostHandle, pages
from gear_offline.tables.pinning import format_bytes
from gear_offline.tables.table import GroupPlan, Table, build_table, plan_groups

__all__ = ["host_table"]


def host_table(
    source: TableSource,
    *,
    context_length: int,
    normalize_states: bool = False,
    extra_columns: Sequence[str] = (),
    frame_stack: int = 1,
    share: HostHandle | None = None,
    **options: Any,
) -> tuple[Table, HostBlock]:
    """Build a table in shared memory, or take one that another process of the node has built.

    The first process calls this without `share` and gives ``block.handle()`` to the others, which
    pass it with the same options; they return at once and read the same pages.  The first one
    must have returned before it sends the handle: then every row is there and verified.

    Parameters
    ----------
    source, context_length, normalize_states, extra_columns, frame_stack
        As `gear_offline.tables.table.build_table`.
    share
        Handle of the block that holds the table.
    options
        Further options of `build_table`: ``gamma``, ``returns_scale``, ``verify``, ``threads``.

    Raises
    ------
    GearError
        ``HOST_MEMORY`` before anything is read if the table does not fit; ``HOST_ATTACH``; and
        what `build_table` raises.
    """
    plans = plan_groups(
        source,
        normalize_states=normalize_states,
        extra_columns=extra_columns,
        frame_stack=frame_stack,
    )
    margin = context_length + frame_stack - 1
    nbytes = block_bytes(plans, source.episodes.steps + 2 * margin)
    block = HostBlock.create(nbytes) if share is None else HostBlock.attach(share)
    if block.nbytes != nbytes:
        raise GearError(
            "HOST_ATTACH",
            f"the shared table has {format_bytes(block.nbytes)}, {format_bytes(nbytes)} were "
            "expected",
            remedy="give all processes the same dataset, context_length and columns",
        )
    table = build_table(
        source,
        context_length=context_length,
        normalize_states=normalize_states,
        extra_columns=extra_columns,
        frame_stack=frame_stack,
        allocate=block.allocate,
        fill=share is None,
        **options,
    )
    return table, block


def table_bytes(
    source: TableSource,
    *,
    context_length: int,
    normalize_states: bool,
    extra_columns: Sequence[str],
    frame_stack: int = 1,
) -> int:
    """Return the bytes that `host_table` takes."""
    plans = plan_groups(
        source,
        normalize_states=normalize_states,
        extra_columns=extra_columns,
        frame_stack=frame_stack,
    )
    return block_bytes(plans, source.episodes.steps + 2 * (context_length + frame_stack - 1))


def block_bytes(plans: Sequence[GroupPlan], rows: int) -> int:
    """Return the bytes that groups of `rows` rows take, each at pages of its own."""
    return sum(pages(rows * plan.width * plan.dtype.itemsize) for plan in plans)
