"""Columns in memory, arranged so that a segment is one contiguous read.

A table holds what batches are cut from: states, actions, rewards, returns-to-go and any further
columns, over all steps of all episodes.  The float32 fields of one step lie side by side in one row
of a group, padded to a multiple of 16 bytes: a segment is one copy, tensors of a batch are strided
views of those rows.  A field that is wide (more than `PACKED_BYTES` a step as float32) or has more
than one dimension a step, such as images, is a group of its own in its source dtype, and so are
discrete actions and extra columns.

Before the first and after the last step lie `margin` rows of zeros, so that a window of that many
steps may begin or end outside the table.

Shape legend: N steps, E episodes, W elements of a row, M margin.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.columns import Array, ColumnGroup, Field
from gear_offline.tables.fields import (
    ACTIONS,
    EXTRA,
    REWARDS,
    STATES,
    TableSource,
    returns_field,
    standard_fields,
)
from gear_offline.tables.returns import sum_returns, whole_episodes

__all__ = ["Table", "build_table"]

PACKED_BYTES = 1024  # fields up to this many bytes a step are stored as float32
RECORD_ALIGNMENT_BYTES = 16
CHUNK_BYTES = 8 << 20  # how much of the rewards is read at a time

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """All groups of a dataset.

    Attributes
    ----------
    episodes
        Episode index over the N steps.
    groups
        Each field is in exactly one.
    margin
        Rows of zeros on either side of each group; windows up to this long can be cut.
    """

    episodes: EpisodeIndex
    groups: tuple[ColumnGroup, ...]
    margin: int

    @property
    def owned_bytes(self) -> int:
        """Bytes of the rows: ``(N + 2 M) * row bytes`` over the groups."""
        return sum(group.rows.nbytes for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """What a group in memory will hold, before there is memory for it.

    Attributes
    ----------
    fields
        By column of the source; ``None`` stands for the returns-to-go.
    width, dtype
        Elements of a row, and their kind.
    packed
        Whether the values become the batch's float32; otherwise the column stays as it is.
    """

    fields: Mapping[str | None, Field]
    width: int
    dtype: np.dtype[Any]
    packed: bool


def private_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros in memory of this process that shares no page with anything else.

    So each can be page-locked by itself.
    """
    nbytes, page = prod(shape) * dtype.itemsize, mmap.PAGESIZE
    spare = np.zeros(nbytes + 2 * page, dtype=np.uint8)
    begin = -spare.ctypes.data % page
    return spare[begin : begin + nbytes].view(dtype).reshape(shape)


def build_table(
    source: TableSource,
    *,
    context_length: int,
    gamma: float = 1.0,
    returns_scale: float = 1.0,
    normalize_states: bool = False,
    extra_columns: Sequence[str] = (),
    frame_stack: int = 1,
    allocate: Allocate = private_rows,
    fill: bool = True,
    verify: bool | None = None,
    threads: int | None = None,
) -> Table:
    """Read the columns of `source` and derive the returns-to-go.

    Memory, exactly: the packed fields cost ``ceil16(4 * (S + A + 2))`` bytes a step; fields that
    stand alone and extra columns keep their source dtype; each group has
    ``2 * (context_length + frame_stack - 1)`` more rows.  While reading, each thread
    has up to nine megabytes more, or some ten times the rewards of the longest episode.

    Parameters
    ----------
    source
        A dataset.
    context_length
        Longest window that will be cut, K.
    gamma, returns_scale
        ``returns_to_go[t] = sum_{k >= t} gamma**(k - t) r_k / returns_scale`` over the rest of the
        episode, summed from its end in float64, rounded once to float32.
    normalize_states
        ``(x - mean) / (std + 1e-6)`` with the source's statistics, in float64, rounded once to
        float32.
    extra_columns
        Further columns, kept in their source dtype bit for bit.
    frame_stack
        Frames that make up a state; the column holds single ones.
    allocate
        Gives zeroed, C-contiguous memory of a shape and dtype for each group, in their order; such
        as `gear_offline.tables.host_memory.HostBlock.allocate`.
    fill
        ``False`` takes the rows as they are: another process has filled the same memory.
    verify
        Compare the digest of every block on the way; ``None`` does unless `source` was
        opened with ``verify=False``.
    threads
        That read at once, by default one per core up to 8.

    Raises
    ------
    InputError
        ``COLUMN``, ``COLUMN_KIND`` (a column that cannot be that field),
        ``EXTRA_COLUMN`` (named twice or a standard field), ``NORMALIZE_IMAGES``, ``FRAME_STACK``
        (of something else than images), ``CAST_OVERFLOW`` (a value too large for float32), and what
        reading raises: ``DATASET_DAMAGED``, ``FILE_*``.
    """
    from gear_offline.tables.table_filling import fill_groups

    plans = plan_groups(
        source,
        normalize_states=normalize_states,
        extra_columns=extra_columns,
        frame_stack=frame_stack,
    )
    margin = context_length + frame_stack - 1
    count = source.episodes.steps + 2 * margin
    groups = [
        ColumnGroup(fields=_placed(plan), rows=allocate((count, plan.width), plan.dtype))
        for plan in plans
    ]
    if fill:
        fill_groups(
            source,
            list(zip(plans, groups, strict=True)),
            margin=margin,
            gamma=gamma,
            returns_scale=returns_scale,
            check=source.checked if verify is None else verify,
            threads=threads,
        )
    return Table(episodes=source.episodes, groups=tuple(groups), margin=margin)


def plan_groups(
    source: TableSource,
    *,
    normalize_states: bool = False,
    extra_columns: Sequence[str] = (),
    frame_stack: int = 1,
) -> list[GroupPlan]:
    """Return the groups of a table in memory, in their order; `build_table` states the errors."""
    fields = standard_fields(source, normalize_states=normalize_states, frame_stack=frame_stack)
    taken = [STATES, ACTIONS, REWARDS, *extra_columns]
    if len(set(taken)) != len(taken):
        raise InputError(
            "EXTRA_COLUMN",
            f"extra columns {list(extra_columns)} repeat a column or a standard field",
            remedy="name each further column once; observations, actions, rewards are always there",
        )
    packed: dict[str | None, Field] = {
        c: f for c, f in fields.items() if _is_packed(source.spec[c], f)
    }
    packed[None] = returns_field()
    plans = [_packed_plan(packed)]
    alone = {column: field for column, field in fields.items() if column not in packed}
    for column in extra_columns:
        spec = source.spec[column]
        alone[column] = Field(name=EXTRA + column, dtype=spec.dtype, shape=spec.shape)
    for column, field in alone.items():
        spec = source.spec[column]
        plans.append(
            GroupPlan(
                fields={column: field}, width=prod(spec.shape), dtype=spec.dtype, packed=False
            )
        )
    return plans


def _packed_plan(group: Mapping[str | None, Field]) -> GroupPlan:
    """Return one float32 group of several fields side by side."""
    placed: dict[str | None, Field] = {}
    width = 0
    for column, field in group.items():
        placed[column] = replace(field, offset=width)
        width += field.width
    if len(group) > 1:
        unit = RECORD_ALIGNMENT_BYTES // 4
        width = -(-width // unit) * unit
    return GroupPlan(fields=placed, width=width, dtype=np.dtype(np.float32), packed=True)


def _placed(plan: GroupPlan) -> tuple[Field, ...]:
    """Return a group's fields: packed rows hold final values, which are not normalised again."""
    if not plan.packed:
        return tuple(plan.fields.values())
    return tuple(replace(field, mean=None, divisor=None) for field in plan.fields.values())


def returns_to_go(source: TableSource, *, gamma: float, scale: float) -> npt.NDArray[np.float32]:
    """Return (N, 1) float32 returns-to-go; `build_table` states the formula."""
    offsets = source.episodes.offsets.tolist()
    out = np.empty((source.episodes.steps, 1), dtype=np.float32)
    itemsize = source.spec[REWARDS].step_bytes
    for first, last in whole_episodes(offsets, max(CHUNK_BYTES // itemsize, 1)):
        base = offsets[first]
        rewards = source.read(REWARDS, base, offsets[last], check=source.checked)
        found = sum_returns(rewards, offsets[first : last + 1], gamma=gamma, scale=scale)
        out[base : offsets[last], 0] = found
    return out


def _is_packed(spec: ColumnSpec, field: Field) -> bool:
    return len(spec.shape) <= 1 and field.dtype == np.float32 and 4 * field.width <= PACKED_BYTES
