"""Fill the groups of a table from the shards, in several threads.

A thread takes a shard at a time and reads its columns side by side, in pieces that stay in the
core's cache: read, digest, cast, and lay into the rows.  Python has little to do for a piece, and
the calls that do the work leave the interpreter's lock to other threads.

The rows' pages are touched by the threads that fill them, a piece ahead.  In shared memory pages
are made of finished records instead (`tables.page_filling`).  Where the system does not allow
that, records are written to the file behind the memory, by one thread at a time; a thread that
finds one writing and one waiting touches the pages of its piece and copies it.

Columns that stay as they are, such as images, are read into their rows directly, or pages are made
of them.  Where there are few shards, each of these is work of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import gcd, lcm, prod
from typing import Protocol, runtime_checkable

import numpy as np

from gear_offline.core.system import usable_cores
from gear_offline.core.types import Int64Array
from gear_offline.kernels.columns import Array, ColumnGroup
from gear_offline.tables.column_lane import Lane, Reader, Rows, Scratch
from gear_offline.tables.fields import REWARDS, TableSource
from gear_offline.tables.host_memory import PAGE_BYTES, block_of
from gear_offline.tables.page_filling import PageFiller, fill_pages
from gear_offline.tables.returns import sum_returns, whole_episodes
from gear_offline.tables.table import GroupPlan

PIECE_BYTES = 8 << 20  # of packed columns and their rows; smaller ones wait for the lock more
LAID_BYTES = 1 << 20  # of rows, which every field is laid into while they are in a core's own cache
RUN_BYTES = 512 << 10  # of rewards as float64, in whole episodes
MOST_QUEUE = 4  # threads that queue for the lock: they get so many times as much from each call
DIRECT_BYTES = 8 << 20  # of columns that are read into their rows
PAGED_BYTES = 4 << 20  # of such columns, where pages are made of them
MAX_THREADS = 8  # more are slower: the kernel makes pages for one mapping no faster
_Task = tuple[int, list[str]]  # number of a part, columns
SWITCH_SECONDS = 2e-4  # after which a thread gives up the lock, while tables are filled


@runtime_checkable
class PartedSource(Protocol):
    """A source in parts (shards) of whole episodes that can be read at once."""

    @property
    def first_steps(self) -> Int64Array:
        """(parts + 1,) int64, first step of each part, and N."""
        ...

    def reader(
        self, index: int, columns: Iterable[str], *, check: bool
    ) -> AbstractContextManager[Reader]: ...


class _WholeReader:
    """Reads a source that has no parts."""

    def __init__(self, source: TableSource, *, check: bool) -> None:
        self._source = source
        self._check = check
        self._at: dict[str, int] = {}

    def read(self, column: str, out: Array) -> None:
        at = self._at.get(column, 0)
        self._at[column] = at + len(out)
        out[...] = self._source.read(column, at, at + len(out), check=self._check)


def fill_groups(
    source: TableSource,
    groups: Sequence[tuple[GroupPlan, ColumnGroup]],
    *,
    margin: int,
    gamma: float,
    returns_scale: float,
    check: bool,
    threads: int | None = None,
) -> None:
    """Fill the rows of `groups`; `gear_offline.tables.table.build_table` states the rest."""
    parted = source if isinstance(source, PartedSource) else None
    bounds = [0, source.episodes.steps] if parted is None else parted.first_steps.tolist()
    threads = max(1, threads or min(MAX_THREADS, usable_cores()))
    with fill_pages([group.rows for _, group in groups if group.rows is not None]) as filler:
        job = _Filling(source, tuple(groups), margin, gamma, filler, min(threads, MOST_QUEUE))
        together = parted is None or threads == 1 or len(bounds) > 2 * threads
        sets = [job.columns()] if together else job.column_sets()
        tasks = [(index, group) for index in range(len(bounds) - 1) for group in sets]
        # Of a joint table each part has a scale of its own, besides that of all.
        scales = getattr(source, "returns_scales", None) or [1.0] * (len(bounds) - 1)

        def work(task: tuple[int, list[str]]) -> None:
            index, columns = task
            offsets = source.episodes.offsets
            first, last = np.searchsorted(offsets, bounds[index : index + 2])
            reader: AbstractContextManager[Reader] = (
                nullcontext(_WholeReader(source, check=check))
                if parted is None
                else parted.reader(index, columns, check=check)
            )
            with reader as opened:
                scale = returns_scale * scales[index]
                job.fill(opened, columns, offsets[first : last + 1], scale=scale)

        _for_each(work, tasks, threads)


def _for_each(work: Callable[[_Task], None], tasks: Sequence[_Task], threads: int) -> None:
    """Do all tasks, in several threads; the first error ends it."""
    if threads == 1 or len(tasks) < 2:
        for task in tasks:
            work(task)
        return
    with (
        _quick_switches(),
        ThreadPoolExecutor(min(threads, len(tasks)), thread_name_prefix="gear-load") as pool,
    ):
        jobs = [pool.submit(work, task) for task in tasks]
        try:
            for each in jobs:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def cut_pieces(
    low: int, high: int, count: int, *, margin: int, row_bytes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Cut steps into pieces of up to `count`, at ends of pages: a part of one is a call more.

    Parameters
    ----------
    margin
        Rows in front of that of step 0; the first of them begins a page.
    row_bytes
        Of each group that takes the pieces.
    """
    unit = lcm(*(PAGE_BYTES // gcd(PAGE_BYTES, size) for size in row_bytes))
    unit = unit if count >= 2 * unit else 1
    while low < high:
        stop = low + count
        stop = min(stop - (margin + stop) % unit, high)
        yield low, stop
        low = stop


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Let threads that return from their work take the interpreter's lock soon.

    They need it for a moment, after calls that do without, and would wait five milliseconds for
    it: 16 threads loaded 1.6 times as fast on an H200's host.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@dataclass(frozen=True)
class _Filling:
    """What all threads share; they write to different bytes."""

    source: TableSource
    groups: tuple[tuple[GroupPlan, ColumnGroup], ...]
    margin: int
    gamma: float
    filler: PageFiller | None
    queue: int  # of threads
    # Scratch that no thread uses now: fresh memory would cost page faults, shard after shard.
    spare: list[Scratch] = field(default_factory=list)

    def columns(self) -> list[str]:
        return [c for plan, _ in self.groups for c in plan.fields if c is not None]

    def column_sets(self) -> list[list[str]]:
        """Columns that can be filled independently: rows are put together in one go."""
        direct = [c for c in self.columns() if self._is_direct(c)]
        packed = [c for c in self.columns() if c not in direct]
        return [packed, *([c] for c in direct)]

    def fill(
        self, reader: Reader, columns: list[str], offsets: Int64Array, *, scale: float
    ) -> None:
        """Fill `columns` over whole episodes at global steps `offsets`."""
        direct = [c for c in columns if self._is_direct(c)]
        packed = [c for c in columns if c not in direct]
        try:
            scratch = self.spare.pop()
        except IndexError:
            scratch = Scratch()
        if packed:
            self._packed(reader, packed, offsets, scratch, scale=scale)
        for column in direct:
            self._read_rows(reader, column, int(offsets[0]), int(offsets[-1]), scratch)
        self.spare.append(scratch)

    def _is_direct(self, column: str) -> bool:
        """Whether a row of the group is the column's bytes as they are."""
        plan, _ = self._of(column)
        if not plan.packed:
            return True
        same = plan.dtype == self.source.spec[column].dtype and len(plan.fields) == 1
        return column != REWARDS and same and plan.fields[column].mean is None

    def _of(self, column: str | None) -> tuple[GroupPlan, ColumnGroup]:
        return next((p, s) for p, s in self.groups if column in p.fields)

    def _packed(
        self,
        reader: Reader,
        columns: list[str],
        offsets: Int64Array,
        scratch: Scratch,
        *,
        scale: float,
    ) -> None:
        """Fill columns that become float32: a run of episodes at a time, in pieces of rows."""
        wanted: list[str | None] = [*columns, None] if REWARDS in columns else [*columns]
        lanes, targets, piece = self._lanes(wanted, scratch)
        widths = [target.row_bytes for target in targets]
        some = max(self.queue * LAID_BYTES // sum(widths), 1)
        # Returns-to-go are summed from the ends of episodes, so rewards go ahead of the rest.
        for first, last in whole_episodes(offsets, max(self.queue * RUN_BYTES // 8, 1)):
            low, high = int(offsets[first]), int(offsets[last])
            ahead: dict[str | None, Array] = {}
            if REWARDS in columns:
                rewards = lanes[REWARDS][0].read(reader, high - low)
                ahead[None] = sum_returns(
                    rewards,
                    offsets[first : last + 1],
                    gamma=self.gamma,
                    scale=scale,
                    work=scratch.take(".sums", high - low, np.float64),
                    out=scratch.take(".returns", high - low, np.float32),
                )
                ahead[REWARDS] = lanes[REWARDS][0].final(rewards, low)
            for start, stop in cut_pieces(low, high, piece, margin=self.margin, row_bytes=widths):
                values = {
                    column: lane.items(
                        ahead[column][start - low : stop - low]
                        if column in ahead
                        else lane.final(lane.read(reader, stop - start), start)
                    )
                    for column, (lane, _) in lanes.items()
                }
                places = [target.begin(start, stop) for target in targets]
                for at in range(0, stop - start, some):
                    for column, (lane, index) in lanes.items():
                        lane.lay(values[column][at : at + some], places[index] + at)
                for target in targets:
                    target.end(start, stop)

    def _lanes(
        self, columns: list[str | None], scratch: Scratch
    ) -> tuple[dict[str | None, tuple[Lane, int]], list[Rows], int]:
        """Return each column's lane and the index of its rows, the rows, and how many a piece."""
        used = [(p, s) for p, s in self.groups if any(c in p.fields for c in columns)]
        specs = {c: None if c is None else self.source.spec[c] for c in columns}
        wide = sum(spec.step_bytes for spec in specs.values() if spec is not None)
        wide += sum(plan.width * plan.dtype.itemsize for plan, _ in used)
        piece = max(PIECE_BYTES // wide, 1)
        targets, lanes = [], {}
        for index, (plan, group) in enumerate(used):
            rows = group.rows[self.margin :]
            block = block_of(rows)
            use = f".rows {index}"
            target = Rows(rows, piece, scratch=scratch, use=use, block=block, filler=self.filler)
            targets.append(target)
            for column in plan.fields:
                if column in specs:
                    lane = Lane(specs[column], plan, target.array, scratch=scratch)
                    lanes[column] = lane, index
        return lanes, targets, piece

    def _read_rows(
        self, reader: Reader, column: str, low: int, high: int, scratch: Scratch
    ) -> None:
        """Read a column that stays as it is into its rows."""
        _, group = self._of(column)
        spec = self.source.spec[column]
        most = DIRECT_BYTES if self.filler is None else PAGED_BYTES
        rows = max(most // spec.step_bytes, 1)
        for start in range(low, high, rows):
            stop = min(start + rows, high)
            target = group.rows[self.margin + start : self.margin + stop]
            if self.filler is None:
                reader.read(column, target.reshape(len(target), *spec.shape))
                continue
            values = scratch.take(".page", len(target) * prod(spec.shape), spec.dtype)
            values = values.reshape(len(target), *spec.shape)
            reader.read(column, values)
            self.filler.fill(target, values)
