"""A table whose rows stay on disk: where each column lies in the shards, and what is derived.

Returns-to-go are derived.  They are computed once, from the rewards as they stream by, into a file
without a name, or into memory where they are kept whole: 4 bytes a step, and in passing no more
than an eighth of the budget, or the longest episode's rewards a few times over.  Of several tasks,
whose rows are padded, all columns are derived in that sense: see `gear_offline.tables.joint_disk`.

Shape legend: N steps, K steps of a window, S slots.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from gear_offline.core.system import drop_pages
from gear_offline.dataset.dataset import Dataset
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.dataset.shards import byte_view
from gear_offline.dataset.verification import thread_count
from gear_offline.kernels.columns import Array, ColumnGroup
from gear_offline.tables.disk_files import UInt8Array, no_scratch, scratch_file, write_all
from gear_offline.tables.fields import ACTIONS, REWARDS, STATES
from gear_offline.tables.host_memory import check_available, pages
from gear_offline.tables.huge_memory import huge_memory
from gear_offline.tables.joint import tasks_of
from gear_offline.tables.joint_disk import copy_column, folder_of, scales_of
from gear_offline.tables.read_plan import Int64Array
from gear_offline.tables.returns import sum_returns, whole_episodes
from gear_offline.tables.table import GroupPlan, Table, plan_groups, private_rows

RETURNS_BYTES = 32  # in passing for each step whose returns-to-go are computed


@dataclass(frozen=True, kw_only=True)
class DiskColumn:
    """Where the rows of a group lie.

    Attributes
    ----------
    row_bytes
        Of one step.
    offsets
        (shards,) int64, byte of each shard's first row in its file.
    derived
        The file is the scratch file rather than the shard.
    history
        Rows in front of each window.
    rows
        (margin + N + margin, row bytes) uint8 if the column is in memory whole, else None.
    margin
        Rows of zeros, at least K and the history.
    """

    row_bytes: int
    offsets: Int64Array
    derived: bool
    history: int = 0
    rows: UInt8Array | None = None
    margin: int = 0


def slot_groups(plans: Sequence[GroupPlan], *, slots: int, span: int) -> list[ColumnGroup]:
    """Return a group a plan whose rows are its slots, in one block of memory.

    A slot has K rows and those of the field's history: (S * (K + history), W).

    Raises
    ------
    GearError
        ``HOST_MEMORY`` if the machine has less.
    """
    rows = [slots * (span + history_of(plan)) for plan in plans]
    sizes = [
        count * plan.width * plan.dtype.itemsize for count, plan in zip(rows, plans, strict=True)
    ]
    begins = [0, *accumulate(map(pages, sizes))]
    check_available(begins[-1])
    # Large pages: windows come from and go to places far apart.
    memory = huge_memory(begins[-1])
    return [
        ColumnGroup(
            fields=tuple(plan.fields.values()),
            rows=memory[begin : begin + size].view(plan.dtype).reshape(count, plan.width),
        )
        for begin, size, count, plan in zip(begins, sizes, rows, plans, strict=False)
    ]


def history_of(plan: GroupPlan) -> int:
    """Return the rows in front of each window of a plan's only field."""
    (field,) = plan.fields.values()
    return field.history


def slot_table(episodes: EpisodeIndex, groups: Sequence[ColumnGroup], span: int) -> Table:
    """Return a table over the slots; its rows are not in the order of the steps."""
    margin = span + max(group.history for group in groups)
    return Table(episodes=episodes, groups=tuple(groups), margin=margin)


def locate(dataset: Dataset, plans: Sequence[GroupPlan]) -> list[DiskColumn]:
    """Return where each plan's column lies."""
    copied = bool(tasks_of(dataset))  # rows of several tasks are put together in the scratch file
    shards, base = dataset.manifest.shards, 0
    tensors = [{t.name: t for t in dataset.manifest.tensors(shard)} for shard in shards]
    columns = []
    for plan in plans:
        (column,) = plan.fields
        row_bytes = plan.width * plan.dtype.itemsize
        if column is None or copied:
            offsets = base + dataset.first_steps[:-1] * row_bytes
            base += dataset.spec.steps * row_bytes
        else:
            begins = [
                shard.header_bytes + found[column].start
                for shard, found in zip(shards, tensors, strict=True)
            ]
            offsets = np.array(begins, np.int64)
        columns.append(
            DiskColumn(
                row_bytes=row_bytes,
                offsets=offsets,
                derived=column is None or copied,
                history=history_of(plan),
            )
        )
    return columns


def disk_plans(
    dataset: Dataset, *, normalize_states: bool, extra_columns: Sequence[str], frame_stack: int
) -> list[GroupPlan]:
    """Return a group a column, in its source dtype, and one of the returns-to-go.

    Raises
    ------
    InputError
        As `gear_offline.tables.table.build_table`.
    """
    found = plan_groups(
        dataset,
        normalize_states=normalize_states,
        extra_columns=extra_columns,
        frame_stack=frame_stack,
    )
    fields = {column: field for plan in found for column, field in plan.fields.items()}
    plans = []
    for column in (STATES, ACTIONS, REWARDS, None, *extra_columns):
        spec = None if column is None else dataset.spec[column]
        plans.append(
            GroupPlan(
                fields={column: replace(fields[column], offset=0)},
                width=1 if spec is None else prod(spec.shape),
                dtype=np.dtype(np.float32) if spec is None else spec.dtype,
                packed=False,
            )
        )
    return plans


def load_resident(
    dataset: Dataset,
    plans: Sequence[GroupPlan],
    columns: Sequence[DiskColumn],
    resident: Sequence[bool],
    *,
    span: int,
    returns: Callable[[Callable[[int, Array], None]], None],
) -> tuple[list[DiskColumn], int | None]:
    """Bring resident columns into memory, and what is derived there or to a file without a name.

    Parameters
    ----------
    returns
        Computes the returns-to-go and hands them out with their first step, in any order.

    Returns
    -------
    tuple
        The columns, and the descriptor of the file if there is one.

    Raises
    ------
    GearError
        ``DISK_SCRATCH``; what reading and computing raise.
    """
    found, handle = [], None
    margin = span + max(column.history for column in columns)
    for plan, column, stays in zip(plans, columns, resident, strict=True):
        (name,) = plan.fields
        rows = None
        if stays:
            rows = private_rows(
                (dataset.spec.steps + 2 * margin, column.row_bytes), np.dtype(np.uint8)
            )
            within = rows[margin : margin + dataset.spec.steps]
            if name is None:
                returns(partial(_put_rows, within))
            elif column.derived:
                copy_column(dataset, name, partial(_put_rows, within))
            else:
                _load(dataset, name, within)
        elif column.derived:
            handle = scratch_file(folder_of(dataset)) if handle is None else handle
            put = partial(_put_file, handle, int(column.offsets[0]))
            try:
                if name is None:
                    returns(put)
                else:
                    copy_column(dataset, name, put)
                os.fdatasync(handle)
                drop_pages(handle)
            except OSError as error:
                os.close(handle)
                raise no_scratch(str(error.strerror)) from error
            except BaseException:
                os.close(handle)
                raise
        found.append(replace(column, rows=rows, margin=margin))
    return found, handle


def _put_rows(rows: UInt8Array, first: int, values: Array) -> None:
    rows[first : first + len(values)] = values.view(np.uint8).reshape(len(values), -1)


def _put_file(handle: int, begin: int, first: int, values: Array) -> None:
    row_bytes = values.nbytes // max(len(values), 1)
    write_all(handle, byte_view(values), begin + row_bytes * first)


def _load(dataset: Dataset, column: str, rows: UInt8Array) -> None:
    """Read a whole column, comparing digests if the dataset was opened verified."""
    firsts = dataset.first_steps.tolist()
    for index, (first, last) in enumerate(pairwise(firsts)):
        with dataset.reader(index, [column], check=dataset.checked) as reader:
            reader.read(column, rows[first:last])


def compute_returns(
    dataset: Dataset,
    put: Callable[[int, Array], None],
    *,
    gamma: float,
    scale: float,
    budget_bytes: int,
) -> None:
    """Compute all returns-to-go, (n,) float32 at a time, and `put` them with their first step.

    Each byte of the rewards is read once, in their order, and compared with its digest if the
    dataset was opened verified.

    Raises
    ------
    GearError
        ``CAST_OVERFLOW``; what reading and `put` raise.
    """
    firsts = dataset.first_steps.tolist()
    offsets = dataset.episodes.offsets
    spec, scales = dataset.spec[REWARDS], scales_of(dataset)
    threads = min(thread_count(None), len(firsts) - 1)
    piece_steps = max(min(budget_bytes // 8, 256 << 20) // (RETURNS_BYTES * threads), 1)

    def work(index: int) -> None:
        first, last = np.searchsorted(offsets, firsts[index : index + 2])
        mine = offsets[first : last + 1].tolist()
        with dataset.reader(index, [REWARDS], check=dataset.checked) as reader:
            for begin, end in whole_episodes(mine, piece_steps):
                rewards = np.empty((mine[end] - mine[begin], *spec.shape), spec.dtype)
                reader.read(REWARDS, rewards)
                found = sum_returns(
                    rewards, mine[begin : end + 1], gamma=gamma, scale=scale * scales[index]
                )
                put(mine[begin], found)

    with ThreadPoolExecutor(threads, thread_name_prefix="gear-returns") as pool:
        jobs = [pool.submit(work, index) for index in range(len(firsts) - 1)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
