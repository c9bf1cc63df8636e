"""A table whose rows stay on disk: what memory holds, and where each column lies in the shards.

The budget is shared out once, when the loader is made:

- slots, each for one window of K steps of every column in its source dtype;
- the plan: 4 references a slot, and the index of episodes;
- a buffer for each reading thread;
- outputs: the block of batches that is handed out, and those that may be held.

Returns-to-go are derived.  They are computed once, from the rewards as they stream by, into a file
without a name: 4 bytes a step of disk, and in memory no more than an eighth of the budget or the
longest episode's rewards a few times over.

Shape legend: N steps, E episodes, K steps of a window, B windows of a batch, S slots.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np

from gear_offline.dataset import Dataset
from gear_offline.disk_files import UInt8Array, no_scratch, scratch_file, write_all
from gear_offline.errors import InputError
from gear_offline.fields import ACTIONS, REWARDS, STATES, Array
from gear_offline.host_memory import PAGE_BYTES, HostBlock, pages
from gear_offline.pinning import format_bytes
from gear_offline.read_plan import REFERENCE_BYTES, Int64Array
from gear_offline.shards import byte_view
from gear_offline.table import (
    Store,
    StorePlan,
    Table,
    plan_stores,
    private_rows,
    sum_returns,
    whole_episodes,
)
from gear_offline.verification import thread_count

CHUNK_BYTES = 2 << 20  # of all columns together, at most
READ_BYTES = 128 << 10  # a read takes about as long as this many bytes more
RESIDENT_SHARE = 16  # columns take at most the budget over this to be kept in memory whole
HORIZON = 4  # references known for each slot
COVERAGE_SHARE = 0.85  # measured: 0.8 to 0.95 are alike, 1.1 reads twice as much
COPY_BYTES = 512 << 10  # of windows on their way from a thread's buffer to their slots
OUTPUT_BLOCKS = 4  # the one handed out, the next, and two that may be held
OUTPUT_SHARE = 256  # a block of outputs takes at most the budget over this, or one batch
INDEX_BYTES = 284  # an episode: offset, length, return, ends, and the guide of a selection
CONVERSION_FACTOR = 8  # bytes in passing for each byte of float32 that is cast or normalised
RETURNS_BYTES = 32  # in passing for each step whose returns-to-go are computed


@dataclass(frozen=True, kw_only=True)
class DiskSizes:
    """How a budget is shared out.

    Attributes
    ----------
    slots
        Windows that are kept, S.
    chunk_steps
        Steps of a chunk.
    threads
        That read.
    output_bytes
        Of one block of batches.
    depth, horizon
        References that are read ahead for their own sake, and that are kept from a chunk.
    resident
        Which columns are in memory whole.
    """

    slots: int
    chunk_steps: int
    threads: int
    output_bytes: int
    depth: int
    horizon: int
    resident: tuple[bool, ...]

    def block_limits(self, segments: int, nbytes: int) -> tuple[int, int]:
        """Return the most segments and bytes of outputs that are gathered in one pass."""
        return min(segments, self.depth // 2), min(nbytes, self.output_bytes)


@dataclass(frozen=True, kw_only=True)
class DiskColumn:
    """Where the rows of a store lie.

    Attributes
    ----------
    row_bytes
        Of one step.
    offsets
        (shards,) int64, byte of each shard's first row in its file.
    derived
        The file is the scratch file rather than the shard.
    rows
        (K + N + K, row bytes) uint8 if the column is in memory whole, else None.
    """

    row_bytes: int
    offsets: Int64Array
    derived: bool
    rows: UInt8Array | None = None


def buffer_bytes(row_bytes: Sequence[int], span: int, chunk_steps: int) -> int:
    """Return the bytes that a thread reads into: the widest column of a chunk, and margins."""
    return (chunk_steps + 3 * span) * max(row_bytes) + 4 * PAGE_BYTES


def share_out(
    *,
    budget_bytes: int,
    row_bytes: Sequence[int],
    final_bytes: int,
    converted_bytes: int,
    longest: int,
    episodes: int,
    steps: int,
    batch: int,
    span: int,
) -> DiskSizes:
    """Share a budget out.

    Parameters
    ----------
    budget_bytes
        For everything that the disk tier keeps in memory.
    row_bytes
        Of each column.
    final_bytes, converted_bytes
        Bytes of a step in a batch, and of the widest field of those that are converted.
    longest
        Steps of the longest episode.
    episodes, steps, batch, span
        E, N, B, K.

    Raises
    ------
    InputError
        ``HOST_BUDGET`` if it does not hold two batches and what they need.
    """
    batch_bytes = batch * span * final_bytes
    slot_bytes = span * sum(row_bytes) + HORIZON * REFERENCE_BYTES + 8
    index_bytes = INDEX_BYTES * episodes + 8 * min(longest + 2 * span, 1 << 21)
    thrifty = [False] * len(row_bytes)
    comfort = _residents(row_bytes, steps + 2 * span, budget_bytes // RESIDENT_SHARE)
    for output_bytes, resident, threads in (
        *((max(batch_bytes, budget_bytes // OUTPUT_SHARE), comfort, t) for t in (8, 4, 2, 1)),
        (batch_bytes, thrifty, 1),
    ):
        read = [row for row, stays in zip(row_bytes, resident, strict=True) if not stays]
        fixed = index_bytes + OUTPUT_BLOCKS * output_bytes
        fixed += CONVERSION_FACTOR * converted_bytes * output_bytes // final_bytes
        fixed += (sum(row_bytes) - sum(read)) * (steps + 2 * span)
        found = []
        for chunk_steps in _chunk_choices(steps, sum(read)):
            each = buffer_bytes(read, span, chunk_steps) + max(COPY_BYTES, span * max(row_bytes))
            slots = (budget_bytes - fixed - threads * each) // slot_bytes
            if slots >= 2 * batch and (threads == 1 or threads * each <= budget_bytes // 16):
                found.append((_cost(slots, steps, chunk_steps, read, span), chunk_steps, slots))
        if found:
            break
    else:
        least = buffer_bytes(row_bytes, span, 1) + max(COPY_BYTES, span * max(row_bytes))
        needed = fixed + least + 2 * batch * slot_bytes
        raise InputError(
            "HOST_BUDGET",
            f"host_budget={budget_bytes} ({format_bytes(budget_bytes)}) is too small to keep two "
            f"batches of {batch} windows of {span} steps",
            remedy=f"give at least {needed + -needed % PAGE_BYTES} bytes "
            f"({format_bytes(needed)}), or make batch_size or context_length smaller",
        )
    _, chunk_steps, slots = min(found)
    slots = min(slots, max(16 * batch, 2 * -(-steps // span)))  # beyond that nothing is gained
    depth = min(max(4 * batch, slots // 32), slots)
    return DiskSizes(
        slots=slots,
        chunk_steps=chunk_steps,
        threads=threads,
        output_bytes=output_bytes,
        depth=depth,
        horizon=max(min(_coverage(slots, steps / chunk_steps), HORIZON * slots), depth),
        resident=tuple(resident),
    )


def _chunk_choices(steps: int, row_bytes: int) -> list[int]:
    """Return powers of two, from 1 to the whole table or the most bytes that a chunk may take."""
    most = max(min(steps, CHUNK_BYTES // row_bytes), 1)
    return [1 << power for power in range(most.bit_length())]


def _residents(row_bytes: Sequence[int], rows: int, share_bytes: int) -> list[bool]:
    """Return which columns are kept in memory whole: thin ones, as long as they take little.

    Beside a wide column a thin one would cost as many reads and nearly no bytes.
    """
    resident = [False] * len(row_bytes)
    left = share_bytes
    for column in sorted(range(len(row_bytes)), key=lambda c: row_bytes[c])[:-1]:
        left -= row_bytes[column] * rows
        resident[column] = left >= 0
    return resident


def _cost(slots: int, steps: int, chunk_steps: int, read: Sequence[int], span: int) -> float:
    """Return bytes read for each window, a read counting as `READ_BYTES` more."""
    chunks = steps / chunk_steps
    reads = chunks / (_coverage(slots, chunks) + chunks)
    return reads * (READ_BYTES * len(read) + (chunk_steps + span) * sum(read))


def _coverage(slots: int, chunks: float) -> int:
    """Return for how many references ahead the windows of a chunk that is read are kept.

    If each of n chunks is read when its windows run out, and then kept for T references, then
    memory holds ``T**2 / (2 (T + n))`` windows.  That is solved for S, less `COVERAGE_SHARE` for
    chance: with too long a T there is no room for a chunk when it is read.
    """
    return int(COVERAGE_SHARE * (slots + (slots * slots + 2 * slots * chunks) ** 0.5))


def slot_stores(plans: Sequence[StorePlan], *, slots: int, span: int) -> list[Store]:
    """Return a store a plan whose rows are its slots, (S * K, W), all in one block of memory.

    Raises
    ------
    GearError
        ``HOST_MEMORY`` if the machine has less.
    """
    sizes = [slots * span * plan.width * plan.dtype.itemsize for plan in plans]
    block = HostBlock.create(sum(map(pages, sizes)), name="gear-disk")
    stores = [
        Store(
            fields=tuple(plan.fields.values()),
            rows=block.allocate((slots * span, plan.width), plan.dtype),
        )
        for plan in plans
    ]
    block.close()
    return stores


def slot_table(dataset: Dataset, stores: Sequence[Store], span: int) -> Table:
    """Return a table over the slots; its rows are not in the order of the steps."""
    return Table(episodes=dataset.episodes, stores=tuple(stores), margin=span, layout="columns")


def locate(dataset: Dataset, plans: Sequence[StorePlan]) -> list[DiskColumn]:
    """Return where each plan's column lies."""
    shards = dataset.manifest.shards
    tensors = [{t.name: t for t in dataset.manifest.tensors(shard)} for shard in shards]
    columns = []
    for plan in plans:
        (column,) = plan.fields
        row_bytes = plan.width * plan.dtype.itemsize
        if column is None:
            offsets = dataset.first_steps[:-1] * row_bytes
        else:
            begins = [
                shard.header_bytes + found[column].start
                for shard, found in zip(shards, tensors, strict=True)
            ]
            offsets = np.array(begins, np.int64)
        columns.append(DiskColumn(row_bytes=row_bytes, offsets=offsets, derived=column is None))
    return columns


def disk_plans(
    dataset: Dataset, *, normalize_states: bool, extra_columns: Sequence[str]
) -> list[StorePlan]:
    """Return a store a column, in its source dtype, and one of the returns-to-go.

    Raises
    ------
    InputError
        As `gear_offline.table.build_table`.
    """
    found = plan_stores(
        dataset, layout="columns", normalize_states=normalize_states, extra_columns=extra_columns
    )
    fields = {column: field for plan in found for column, field in plan.fields.items()}
    plans = []
    for column in (STATES, ACTIONS, REWARDS, None, *extra_columns):
        spec = None if column is None else dataset.spec[column]
        plans.append(
            StorePlan(
                fields={column: replace(fields[column], offset=0)},
                width=1 if spec is None else prod(spec.shape),
                dtype=np.dtype(np.float32) if spec is None else spec.dtype,
                packed=False,
            )
        )
    return plans


def load_resident(
    dataset: Dataset,
    plans: Sequence[StorePlan],
    columns: Sequence[DiskColumn],
    resident: Sequence[bool],
    *,
    span: int,
    returns: Callable[[Callable[[int, Array], None]], None],
) -> tuple[list[DiskColumn], int | None]:
    """Bring resident columns into memory, and the returns-to-go there or to a file without a name.

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
    for plan, column, stays in zip(plans, columns, resident, strict=True):
        (name,) = plan.fields
        rows = None
        if stays:
            rows = private_rows(
                (dataset.spec.steps + 2 * span, column.row_bytes), np.dtype(np.uint8)
            )
            within = rows[span : span + dataset.spec.steps]
            if name is None:
                returns(partial(_put_rows, within))
            else:
                _load(dataset, name, within)
        elif name is None:
            handle = scratch_file(dataset.path)
            try:
                returns(partial(_put_file, handle))
                os.fdatasync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                os.close(handle)
                raise no_scratch(str(error.strerror)) from error
            except BaseException:
                os.close(handle)
                raise
        found.append(replace(column, rows=rows))
    return found, handle


def _put_rows(rows: UInt8Array, first: int, values: Array) -> None:
    rows[first : first + len(values)] = values.view(np.uint8).reshape(len(values), -1)


def _put_file(handle: int, first: int, values: Array) -> None:
    write_all(handle, byte_view(values), values.itemsize * first)


def _load(dataset: Dataset, column: str, rows: UInt8Array) -> None:
    """Read a whole column, comparing digests if the dataset was opened verified."""
    firsts = dataset.first_steps.tolist()
    for index, (first, last) in enumerate(pairwise(firsts)):
        with dataset.reader(index, [column], check=dataset.verified) as reader:
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
    spec = dataset.spec[REWARDS]
    threads = min(thread_count(None), len(firsts) - 1)
    piece_steps = max(min(budget_bytes // 8, 256 << 20) // (RETURNS_BYTES * threads), 1)

    def work(index: int) -> None:
        first, last = np.searchsorted(offsets, firsts[index : index + 2])
        mine = offsets[first : last + 1].tolist()
        with dataset.reader(index, [REWARDS], check=dataset.verified) as reader:
            for begin, end in whole_episodes(mine, piece_steps):
                rewards = np.empty((mine[end] - mine[begin], *spec.shape), spec.dtype)
                reader.read(REWARDS, rewards)
                found = sum_returns(rewards, mine[begin : end + 1], gamma=gamma, scale=scale)
                put(mine[begin], found)

    with ThreadPoolExecutor(threads, thread_name_prefix="gear-returns") as pool:
        jobs = [pool.submit(work, index) for index in range(len(firsts) - 1)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
