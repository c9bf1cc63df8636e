"""The columns of a table that stays on disk: where their rows lie, and what is derived from them.

Columns that take little of the budget stay in memory whole.  So do the returns-to-go, which are
computed once, as the rewards stream by.

Shape legend: N steps, s shards, K steps of a window, H rows of history in front, m rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from gear_offline.core.types import Array, Int64Array, UInt8Array
from gear_offline.dataset.schema import ColumnSpec
from gear_offline.dataset.shard import byte_view
from gear_offline.kernels.columns import Field, convert
from gear_offline.tables.fields import ACTIONS, REWARDS, STATES, standard_fields
from gear_offline.tables.joint import JointDataset, Part, TableData
from gear_offline.tables.table import TableOptions, plan_groups, shard_returns

Lay = Callable[[UInt8Array], UInt8Array]  # (m, stored bytes) to (m, row bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotColumn:
    """A column of the slots, in its source dtype unless its values are final."""

    name: str | None  # in the datasets; None: the returns-to-go
    width: int
    dtype: np.dtype[Any]
    field: Field
    normalized: bool  # on the way into the slots, by the moments of each task

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def is_converted(self) -> bool:
        """Whether the gather casts or normalises it."""
        return self.field.dtype != self.dtype or self.field.mean is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class DiskColumn:
    """Where the rows of a column lie in the files, and how they become those of its slots."""

    history: int  # rows in front of a window that are wanted too, H or 0
    row_bytes: int  # of a step in a slot
    stored_bytes: Int64Array  # (s,), of a step in each shard
    offsets: Int64Array  # (s,), byte of each shard's first row
    lay: tuple[Lay | None, ...]  # of each dataset: from stored rows to those of slots; None: same
    rows: UInt8Array | None = None  # (margin + N + margin, row bytes) if it is in memory whole
    margin: int = 0  # rows of zeros, at least K + H


def slot_columns(dataset: TableData, options: TableOptions) -> list[SlotColumn]:
    """Return the columns that batches are made of, in their source dtype."""
    joint, plans = isinstance(dataset, JointDataset), plan_groups(dataset, options)
    fields = {column: field for plan in plans for column, field in plan.fields.items()}
    columns = []
    for name in (STATES, ACTIONS, REWARDS, None, *options.extra_columns):
        if name not in fields:  # of data without rewards
            continue
        field = replace(fields[name], offset=0)
        normalized = joint and options.normalize_states and name == STATES
        dtype = field.dtype if normalized or name is None else dataset.spec[name or STATES].dtype
        shape = field.shape if name is None else dataset.spec[name].shape
        column = SlotColumn(
            name=name, width=prod(shape), dtype=dtype, field=field, normalized=normalized
        )
        columns.append(column)
    return columns


def load_columns(
    parts: Sequence[Part],
    sources: Sequence[SlotColumn],
    resident: Sequence[bool],
    first_steps: Int64Array,
    options: TableOptions,
) -> list[DiskColumn]:
    """Find each column's rows; bring those into memory that stay there, and derive the returns."""
    steps, margin, columns = int(first_steps[-1]), options.margin, []
    for source, stays in zip(sources, resident, strict=True):
        column = _located(parts, source, first_steps)
        if stays:
            rows = np.zeros((steps + 2 * margin, source.row_bytes), np.uint8)
            at = margin
            returns = _returns(parts, options)
            for some in _rows(parts, source.name, column.lay) if source.name else returns:
                rows[at : at + len(some)] = some
                at += len(some)
            column = replace(column, rows=rows, margin=margin)
        columns.append(column)
    return columns


def _located(parts: Sequence[Part], source: SlotColumn, first_steps: Int64Array) -> DiskColumn:
    """Return where the rows of a column lie."""
    lay: tuple[Lay | None, ...] = (None,) * len(parts)
    offsets = stored = np.zeros(len(first_steps) - 1, np.int64)  # of what is in no file
    if source.name is not None:
        layouts = [
            (shard.header_bytes + tensor.start, tensor.bytes // shard.steps)
            for part in parts
            for shard in part.dataset.manifest.shards
            for tensor in part.dataset.manifest.tensors(shard)
            if tensor.name == source.name
        ]
        offsets, stored = np.array(layouts, np.int64).T
        own = [
            standard_fields(part.dataset, normalize_states=True)[STATES]
            if source.normalized
            else None
            for part in parts
        ]
        specs = [part.dataset.spec[source.name] for part in parts]
        lay = tuple(_lay_of(source, *both) for both in zip(specs, own, strict=True))
    return DiskColumn(
        history=source.field.history,
        row_bytes=source.row_bytes,
        stored_bytes=stored,
        offsets=offsets,
        lay=lay,
    )


def _lay_of(source: SlotColumn, column: ColumnSpec, single: Field | None) -> Lay | None:
    """Return how the stored rows of a part become those of the table; None: they are the same."""
    if single is None and (column.dtype, prod(column.shape)) == (source.dtype, source.width):
        return None

    def lay(stored: UInt8Array) -> UInt8Array:
        values = stored.view(column.dtype).reshape(len(stored), *column.shape)
        if single is not None:
            values = convert(values.reshape(len(values), *single.shape), single)
        rows = np.zeros((len(stored), source.width), source.dtype)
        flat = values.reshape(len(values), -1)
        rows[:, : flat.shape[1]] = flat
        return rows.view(np.uint8)

    return lay


def _rows(parts: Sequence[Part], name: str, lays: Sequence[Lay | None]) -> Iterator[UInt8Array]:
    """Yield all rows of a column in their order, (n, row bytes), digests compared."""
    for part, lay in zip(parts, lays, strict=True):
        for shard in range(len(part.dataset.manifest.shards)):
            for _, values in part.dataset.stream(shard, name):
                rows = _bytes_of(values)
                yield rows if lay is None else lay(rows)


def _returns(parts: Sequence[Part], options: TableOptions) -> Iterator[UInt8Array]:
    """Yield all returns-to-go in their order, (n, 4) bytes."""
    for part in parts:
        for shard in range(len(part.dataset.manifest.shards)):
            yield _bytes_of(shard_returns(part, shard, options)[1])


def _bytes_of(values: Array) -> UInt8Array:
    return np.frombuffer(byte_view(values), np.uint8).reshape(len(values), -1)
