"""Bring windows from shards into slots: many at a time, each array handled in one go.

All parts of the files that a call needs are read at once into one buffer, column after column.
Windows whose rows lie closer than `gap_steps` in one chunk are read together with what is between
them.  Then each window is copied from the buffer to its slot.

Shape legend: n windows, g ranges of a file, K steps of a window, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError
from gear_offline.tables.disk_files import (
    DIRECT_BYTES,
    DiskFile,
    Ranges,
    RangesRead,
    ShardFiles,
    UInt8Array,
)
from gear_offline.tables.disk_sizes import (
    COPY_BYTES,
    DiskSizes,
    chunk_bytes,
    gap_steps,
    margin_bytes,
)
from gear_offline.tables.disk_table import DiskColumn
from gear_offline.tables.huge_memory import huge_memory
from gear_offline.tables.joint_disk import CopiedShards
from gear_offline.tables.read_plan import Int64Array
from gear_offline.tables.read_queue import ReadQueue, open_queue

SLICE_BYTES = 4 << 10  # windows from this size on are copied one by one

Array = npt.NDArray[Any]


class Places(Protocol):
    """Windows in the order of `low`, (n,) int64 each; such as `gear_offline.tables.read_plan.Job`.

    `low`, `real`, `before`: as `gear_offline.tables.read_plan.Needs`; `slots`: where each goes.
    """

    @property
    def low(self) -> Int64Array: ...
    @property
    def real(self) -> Int64Array: ...
    @property
    def before(self) -> Int64Array: ...
    @property
    def slots(self) -> Int64Array: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """`Places` by themselves."""

    low: Int64Array
    real: Int64Array
    before: Int64Array
    slots: Int64Array


class ReadBuffer:
    """What one call reads into, and its queue; close it in the end.

    Attributes
    ----------
    memory
        Bytes, from an address that is a multiple of a page.
    queue
        ``None`` where reads go one by one.
    """

    def __init__(self, nbytes: int, *, direct: bool) -> None:
        self.memory = huge_memory(nbytes)
        self.queue: ReadQueue | None = open_queue() if direct else None

    def close(self) -> None:
        """Wait for reads that are under way, and give the queue back."""
        if self.queue is not None:
            self.queue.close()
            self.queue = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """Windows on their way into a buffer; from `WindowReader.begin`.

    Attributes
    ----------
    windows, buffer
        Which, and where to.
    starts
        Per column, where in the buffer step 0 of each window's file would be, (n,) int64.
    ranges, calls
        The parts of files, and how many; ``None`` if all columns are in memory.
    files
        What to leave when they are there.
    """

    windows: Places
    buffer: ReadBuffer
    starts: dict[int, Int64Array]
    ranges: RangesRead | None
    calls: int
    files: ExitStack

    def close(self) -> None:
        """Wait for the reads, and leave the files, without a look at either; can be repeated."""
        if self.buffer.queue is not None:
            self.buffer.queue.drop()
        with suppress(InputError):
            self.files.close()


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
    sizes
        Steps of a chunk, and chunks of one call.
    direct
        Whether files are read past the page cache.
    """

    def __init__(
        self,
        files: ShardFiles | CopiedShards,
        scratch: DiskFile | None,
        columns: Sequence[DiskColumn],
        *,
        first_steps: Int64Array,
        span: int,
        left: bool,
        sizes: DiskSizes,
        direct: bool,
    ) -> None:
        self._files, self._scratch, self._columns = files, scratch, tuple(columns)
        self._span, self._left, self._direct = span, left, direct
        self._first_steps = first_steps
        self._chunk_steps, self.chunks = sizes.chunk_steps, sizes.chunks
        spans = [span + column.history for column in columns]
        rows = [column.row_bytes for column in columns]
        self._margin = margin_bytes(rows, spans)
        read = [column for column in columns if column.rows is None]
        each = chunk_bytes(
            [column.row_bytes for column in read],
            [span + column.history for column in read],
            sizes.chunk_steps,
        )
        self._histories = any(column.history for column in read)
        self._gap_steps = gap_steps([column.row_bytes for column in read])
        self._buffer_bytes = 2 * self._margin + sizes.chunks * each
        self._chunk_firsts = np.cumsum([0, *(-(-np.diff(first_steps) // sizes.chunk_steps))])

    def buffer(self) -> ReadBuffer:
        """Return memory for `read`, of one thread."""
        return ReadBuffer(self._buffer_bytes, direct=self._direct)

    def chunk_of(self, low: Int64Array) -> Int64Array:
        """Return the chunk in which each step lies; a chunk lies in one shard."""
        shard = self._first_steps.searchsorted(low, side="right") - 1
        within = (low - self._first_steps[shard]) // self._chunk_steps
        found: Int64Array = self._chunk_firsts[shard] + within
        return found

    def read(
        self, windows: Places, targets: Sequence[Array], buffer: ReadBuffer
    ) -> tuple[int, int]:
        """Read windows into their slots: `begin` and `finish`."""
        return self.finish(self.begin(windows, buffer), targets)

    def begin(self, windows: Places, buffer: ReadBuffer) -> Reading:
        """Begin to read windows that begin in at most `chunks` chunks; returns at once.

        Parameters
        ----------
        buffer
            Used for nothing else until `finish`.

        Raises
        ------
        InputError
            ``DATASET_CHANGED``; what opening a shard raises.
        """
        low, real = windows.low, windows.real
        shard = self._first_steps.searchsorted(low, side="right") - 1
        chunk = (low - self._first_steps[shard]) // self._chunk_steps
        another = shard[1:] != shard[:-1]
        numbers = shard[np.append(0, np.flatnonzero(another) + 1)]
        first = low - windows.before if self._histories else low
        ends = np.maximum.accumulate(low + real)
        # A chunk's share of the buffer has no room for what lies between it and the next one.
        limit = np.where(chunk[1:] != chunk[:-1], 0, self._gap_steps)
        inner = np.flatnonzero(another | (first[1:] - ends[:-1] > limit))
        heads, tails = np.append(0, inner + 1), np.append(inner, len(low) - 1)
        home, counts = shard[heads], tails - heads + 1
        ranges, starts, at = [], dict[int, Int64Array](), self._margin
        for number, column in enumerate(self._columns):
            if column.rows is None:
                origin = (column.offsets - self._first_steps[:-1] * column.row_bytes)[home]
                begin = origin + first[heads] * column.row_bytes
                begin -= begin % DIRECT_BYTES
                end = origin + ends[tails] * column.row_bytes
                room = end - begin + -end % DIRECT_BYTES
                place = at + np.cumsum(room) - room
                at += int(room.sum())
                file = np.searchsorted(numbers, home)
                file = np.full_like(file, len(numbers)) if column.derived else file
                ranges.append(Ranges(file=file, begin=begin, end=end, place=place))
                starts[number] = np.repeat(origin + place - begin, counts)
        assert at + self._margin <= len(buffer.memory), "the parts of so few chunks have room"
        together = None
        with ExitStack() as files:
            opened = files.enter_context(self._files.opened(*numbers.tolist()))
            if self._scratch is not None:
                opened = [*opened, self._scratch]
            if ranges:
                together = RangesRead(opened, _joined(ranges), buffer.memory, buffer.queue)
            return Reading(
                windows=windows,
                buffer=buffer,
                starts=starts,
                ranges=together,
                calls=sum(len(part.file) for part in ranges),
                files=files.pop_all(),
            )

    def finish(self, reading: Reading, targets: Sequence[Array]) -> tuple[int, int]:
        """Wait for what was begun, and copy the windows to their slots.

        Parameters
        ----------
        targets
            Per column (S,) of void, each a slot of K rows and the column's history.

        Returns
        -------
        tuple
            Bytes that were read, and parts of files.

        Raises
        ------
        InputError
            ``DATASET_CHANGED``, ``FILE_SIZE``, ``DATASET_READ``.
        """
        windows, memory = reading.windows, reading.buffer.memory
        with reading.files:  # compares the shards with what they were
            total = 0 if reading.ranges is None else reading.ranges.finish()
        for number, (column, target) in enumerate(zip(self._columns, targets, strict=True)):
            row = windows.low - column.history
            if self._left:  # ends with the last real step
                row = windows.low + windows.real - (self._span + column.history)
            if column.rows is None:
                places = reading.starts[number] + row * column.row_bytes
                _copy(memory, places, windows.slots, target)
            else:
                places = (row + column.margin) * column.row_bytes
                _copy(column.rows.reshape(-1), places, windows.slots, target)
        return total, reading.calls


def _joined(parts: Sequence[Ranges]) -> Ranges:
    def join(name: str) -> Int64Array:
        return np.concatenate([getattr(part, name) for part in parts])

    return Ranges(file=join("file"), begin=join("begin"), end=join("end"), place=join("place"))


def _copy(buffer: UInt8Array, places: Int64Array, slots: Int64Array, target: Array) -> None:
    """Copy windows that begin at bytes `places` of a buffer to their slots.

    NumPy lets other threads run while it copies large slices, or many items.
    """
    window = target.dtype.itemsize
    if window >= SLICE_BYTES:
        flat = target.view(np.uint8).reshape(len(target), window)
        for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
            flat[slot] = buffer[place : place + window]
        return
    # One element for each byte, a window that begins there; the bytes are only moved.
    source: Array = np.ndarray((buffer.size - window + 1,), target.dtype, buffer.data, 0, (1,))
    step = max(COPY_BYTES // window, 1)
    for begin in range(0, len(places), step):
        target[slots[begin : begin + step]] = source[places[begin : begin + step]]
