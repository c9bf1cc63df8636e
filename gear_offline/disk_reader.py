"""Threads that read windows from shards into slots, ahead of their use.

A thread takes a job from the plan, reads the parts of the chunk that its windows need, column by
column, into a buffer of its own, and copies each window into its slot.  Windows whose rows lie
closer than `GAP_BYTES` are read together with what is between them.

The threads know nothing of the loader: it can be dropped while they wait.  Their first error ends
them all and is raised where batches are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.disk_files import DiskFile, ShardFiles, UInt8Array, aligned_buffer
from gear_offline.disk_sizes import COPY_BYTES, buffer_bytes
from gear_offline.disk_table import DiskColumn
from gear_offline.errors import GearError
from gear_offline.host_memory import pages
from gear_offline.read_plan import Int64Array, Job, ReadPlan, Stretch

GAP_BYTES = 64 << 10  # reading this much more costs less than reading once more
SINGLE_BYTES = 16 << 10  # windows from this size on are copied one by one

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class DiskCounts:
    """What was done since the loader was made.

    Attributes
    ----------
    read_bytes, reads
        From disk: whole pages, and calls.
    window_bytes, windows
        Of the windows handed out: their real steps over all columns.
    evicted
        Windows that were let go of before their use, since others were needed sooner.
    """

    read_bytes: int
    reads: int
    window_bytes: int
    windows: int
    evicted: int


class WindowReader:
    """Copies windows from files to slots.

    Parameters
    ----------
    files, scratch
        The shards, and the file of derived columns.
    columns
        Where each column lies.
    first_steps
        (shards + 1,) int64.
    span
        K.
    left
        Real steps lie at the end of their slot rather than at its beginning.
    chunk_steps
        Steps in which the windows of one call begin, at most.
    """

    def __init__(
        self,
        files: ShardFiles,
        scratch: DiskFile | None,
        columns: Sequence[DiskColumn],
        *,
        first_steps: Int64Array,
        span: int,
        left: bool,
        chunk_steps: int,
    ) -> None:
        self._files, self._scratch, self._columns = files, scratch, tuple(columns)
        self._span, self._left = span, left
        self._first_steps = first_steps
        self._chunk_steps = chunk_steps
        read = [column.row_bytes for column in columns if column.rows is None]
        self._buffer_bytes = buffer_bytes(read, span, chunk_steps)
        self._chunk_firsts = np.cumsum([0, *(-(-np.diff(first_steps) // chunk_steps))])

    def buffer(self) -> UInt8Array:
        """Return memory for `read`, of one thread."""
        return aligned_buffer(self._buffer_bytes)

    def chunk_of(self, low: Int64Array) -> Int64Array:
        """Return the chunk in which each step lies; a chunk lies in one shard."""
        shard = self._first_steps.searchsorted(low, side="right") - 1
        within = (low - self._first_steps[shard]) // self._chunk_steps
        found: Int64Array = self._chunk_firsts[shard] + within
        return found

    def read(
        self,
        chunk: int,
        low: Int64Array,
        real: Int64Array,
        slots: Int64Array,
        targets: Sequence[Array],
        buffer: UInt8Array,
    ) -> tuple[int, int]:
        """Read windows that begin in one chunk, in the order of `low`, into their slots.

        Parameters
        ----------
        targets
            Per column (S,) of void, each a slot of K rows.

        Returns
        -------
        tuple
            Bytes that were read, and calls.

        Raises
        ------
        InputError
            ``DATASET_CHANGED``, ``FILE_SIZE``, ``DATASET_READ``.
        """
        shard = int(self._chunk_firsts.searchsorted(chunk, side="right")) - 1
        low = low - self._first_steps[shard]
        ends = np.maximum.accumulate(low + real)
        total = calls = 0
        with self._files.opened(shard) as file:
            for column, target in zip(self._columns, targets, strict=True):
                row_bytes = column.row_bytes
                if column.rows is not None:
                    rows = low + int(self._first_steps[shard]) + self._span
                    rows += real - self._span if self._left else 0
                    self._copy(column.rows.reshape(-1), 0, row_bytes, rows, slots, target)
                    continue
                source = self._scratch if column.derived else file
                assert source is not None, "what is derived is in memory or in the scratch file"
                origin, before = int(column.offsets[shard]), self._margin(row_bytes)
                cuts = np.flatnonzero(low[1:] - ends[:-1] > GAP_BYTES // row_bytes) + 1
                for begin, end in pairwise([0, *cuts.tolist(), len(low)]):
                    first, last = int(low[begin]), int(ends[end - 1])
                    at, count = source.read(
                        origin + first * row_bytes, (last - first) * row_bytes, buffer[before:]
                    )
                    rows = low[begin:end] - first
                    if self._left:
                        rows = rows + real[begin:end]  # the window ends with its last real step
                        at -= self._span * row_bytes
                    self._copy(buffer, before + at, row_bytes, rows, slots[begin:end], target)
                    total, calls = total + count, calls + 1
        return total, calls

    def _margin(self, row_bytes: int) -> int:
        """Return where reads begin in a buffer: windows may begin before them."""
        return pages(self._span * row_bytes) if self._left else 0

    def _copy(
        self,
        buffer: UInt8Array,
        origin: int,
        row_bytes: int,
        rows: Int64Array,
        slots: Int64Array,
        target: Array,
    ) -> None:
        """Copy windows of K rows, the rows beginning at byte `origin`, to their slots."""
        window = self._span * row_bytes
        if window >= SINGLE_BYTES:
            flat = target.view(np.uint8).reshape(len(target), window)
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
                begin = origin + row * row_bytes
                flat[slot] = buffer[begin : begin + window]
            return
        # One element a window, which overlap; the bytes are only moved.
        count = (buffer.size - origin - window) // row_bytes + 1
        source = np.ndarray((count,), target.dtype, buffer.data, origin, (row_bytes,))
        step = max(COPY_BYTES // window, 1)
        for begin in range(0, len(rows), step):
            target[slots[begin : begin + step]] = source[rows[begin : begin + step]]


class DiskReader:
    """Reads ahead.

    Parameters
    ----------
    windows
        Reads the windows of a job.
    plan
        What to read; from here on used under this object's lock only.
    targets
        As `WindowReader.read`.
    threads
        That read.
    release
        Called once when all threads have ended.
    """

    def __init__(
        self,
        windows: WindowReader,
        plan: ReadPlan,
        targets: Sequence[Array],
        *,
        threads: int,
        release: Callable[[], None],
    ) -> None:
        self._windows, self._plan, self._targets = windows, plan, tuple(targets)
        self._release = release
        # One lock.  A thread that has read looks for more itself; the others are woken when the
        # plan has moved on, and not for each job.
        lock = threading.RLock()
        self._changed, self._arrived = threading.Condition(lock), threading.Condition(lock)
        self._error: BaseException | None = None
        self._stopped = False
        self._read_bytes = self._reads = 0
        # Daemons: the interpreter waits for other threads before it runs what stops these.
        self._threads = [
            threading.Thread(target=self._work, name=f"gear-disk-{number}", daemon=True)
            for number in range(threads)
        ]
        self._started = False

    def take(self, first_step: int, steps: int) -> Int64Array:
        """Wait until the windows of these steps are here; return their slots, (steps * B,).

        They stay until `move`.

        Raises
        ------
        GearError
            What a thread met, or ``LOADER_CLOSED``.
        """
        with self._changed:
            self._raise()
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            if self._plan.base_step != first_step:
                self._plan.move(first_step)
                self._changed.notify_all()
            while (slots := self._plan.slots_of(first_step, steps)) is None:
                self._arrived.wait()
                self._raise()
            return slots

    def move(self, step: int) -> None:
        """Say that what lies before `step` was used."""
        with self._changed:
            self._plan.move(step)
            self._changed.notify_all()

    def counts(self) -> tuple[int, int, int]:
        """Return bytes read, calls, and windows that were let go of."""
        with self._changed:
            return self._read_bytes, self._reads, self._plan.evicted

    def stop(self) -> None:
        """End the threads and wait for them; can be repeated."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._release()

    def check(self) -> None:
        """Raise as `take` does if there is no going on."""
        with self._changed:
            self._raise()

    def _raise(self) -> None:
        if self._stopped:
            raise GearError(
                "LOADER_CLOSED", "the loader was closed", remedy="make another one to go on"
            )
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            buffer = self._windows.buffer()
            while (task := self._next()) is not None:
                if isinstance(task, Job):
                    self._read(task, buffer)
                else:
                    generation, first_step, steps = task
                    stretch = self._plan.select(first_step, steps)
                    self._extend(generation, stretch)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
                self._arrived.notify_all()

    def _next(self) -> Job | tuple[int, int, int] | None:
        """Wait for something to do; None at the end."""
        with self._changed:
            while not self._stopped and self._error is None:
                task = self._plan.wanted() or self._plan.next_job()
                if task is not None:
                    return task
                self._changed.wait()
            return None

    def _extend(self, generation: int, stretch: Stretch) -> None:
        with self._changed:
            self._plan.extend(generation, stretch)
            self._changed.notify_all()

    def _read(self, job: Job, buffer: UInt8Array) -> None:
        count, calls = self._windows.read(
            job.chunk, job.low, job.real, job.slots, self._targets, buffer
        )
        with self._changed:
            self._plan.finish(job)
            self._read_bytes += count
            self._reads += calls
            self._arrived.notify_all()
