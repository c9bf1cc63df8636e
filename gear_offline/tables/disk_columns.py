"""The columns of a table that stays on disk: where their rows lie, and what is derived from them.

Columns that take little of the budget stay in memory whole.  So do the returns-to-go, which are
computed once, as the rewards stream by.

Shape legend: N steps, s shards, K steps of a window, H rows of history in front, m rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from gear_offline.core.types import Array, Int64Array, UInt8Array
from gear_offline.dataset.shard import byte_view
from gear_offline.kernels.columns import convert
from gear_offline.tables.fields import standard_fields
from gear_offline.tables.joint import Part
from gear_offline.tables.table import GroupPlan, TableOptions, shard_returns

Lay = Callable[[UInt8Array], UInt8Array]  # (m, stored bytes) to (m, row bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class DiskColumn:
    """Where the rows of a column lie in the files, and how they become those of its slots."""

    history: int  # rows in front of a window that are wanted too, H or 0
    row_bytes: int  # of a step in a slot
    stored_bytes: Int64Array  # (s,), of a step in each shard
    offsets: Int64Array  # (s,), byte of each shard's first row
    lay: Sequence[Lay | None]  # (s,): from stored rows to those of slots; None: the same
    rows: UInt8Array | None = None  # (margin + N + margin, row bytes) if it is in memory whole
    margin: int = 0  # rows of zeros, at least K + H


def load_columns(
    shards: Sequence[tuple[Part, int]],
    plans: Sequence[GroupPlan],
    resident: Sequence[bool],
    options: TableOptions,
) -> list[DiskColumn]:
    """Find each column's rows; bring those into memory that stay there, and derive the returns."""
    steps = sum(part.dataset.manifest.shards[number].steps for part, number in shards)
    margin, columns = options.margin, []
    for plan, stays in zip(plans, resident, strict=True):
        column = _located(shards, plan)
        if stays:
            rows = np.zeros((steps + 2 * margin, plan.row_bytes), np.uint8)
            at = margin
            for some in _rows(shards, plan, column.lay, options):
                rows[at : at + len(some)] = some
                at += len(some)
            column = replace(column, rows=rows, margin=margin)
        columns.append(column)
    return columns


def _located(shards: Sequence[tuple[Part, int]], plan: GroupPlan) -> DiskColumn:
    """Return where the rows of a column lie."""
    name, field = plan.only
    lay: Sequence[Lay | None] = [None] * len(shards)
    offsets = stored = np.zeros(len(shards), np.int64)  # of what is in no file
    if name is not None:
        layouts = [
            (shard.header_bytes + tensor.start, tensor.bytes // shard.steps)
            for part, number in shards
            for shard in [part.dataset.manifest.shards[number]]
            for tensor in part.dataset.manifest.tensors(shard)
            if tensor.name == name
        ]
        offsets, stored = np.array(layouts, np.int64).T
        lays = {part.name: _lay_of(plan, name, part) for part in {part for part, _ in shards}}
        lay = [lays[part.name] for part, _ in shards]
    return DiskColumn(
        history=field.history,
        row_bytes=plan.row_bytes,
        stored_bytes=stored,
        offsets=offsets,
        lay=lay,
    )


def _lay_of(plan: GroupPlan, name: str, part: Part) -> Lay | None:
    """Return how the stored rows of a part become those of the table; None: they are the same."""
    column, single = part.dataset.spec[name], None
    if plan.final:  # normalised by the moments of each task
        single = standard_fields(part.dataset, normalize_states=True)[name]
    elif (column.dtype, prod(column.shape)) == (plan.dtype, plan.width):
        return None

    def lay(stored: UInt8Array) -> UInt8Array:
        values = stored.view(column.dtype).reshape(len(stored), *column.shape)
        if single is not None:
            values = convert(values.reshape(len(values), *single.shape), single)
        rows = np.zeros((len(stored), plan.width), plan.dtype)
        flat = values.reshape(len(values), -1)
        rows[:, : flat.shape[1]] = flat
        return rows.view(np.uint8)

    return lay


def _rows(
    shards: Sequence[tuple[Part, int]],
    plan: GroupPlan,
    lays: Sequence[Lay | None],
    options: TableOptions,
) -> Iterator[UInt8Array]:
    """Yield all rows of a column in their order, (n, row bytes), digests compared."""
    name, _ = plan.only
    for (part, shard), lay in zip(shards, lays, strict=True):
        if name is None:
            yield _bytes_of(shard_returns(part, shard, options)[1])
        else:
            for _, values in part.dataset.stream(shard, name):
                rows = _bytes_of(values)
                yield rows if lay is None else lay(rows)


def _bytes_of(values: Array) -> UInt8Array:
    return np.frombuffer(byte_view(values), np.uint8).reshape(len(values), -1)
