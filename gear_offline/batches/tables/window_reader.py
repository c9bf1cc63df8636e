"""Windows of steps out of shards: the parts of files they need, and the slots of their rows.

One call brings many windows into their slots.  Parts of a file that lie less than `GAP_BYTES`
apart are read together, in whole pages, past the page cache where the file system allows that.  So
reads cost no memory but the buffer.  From there each window is copied to its slot.

A read says nothing about digests, which cover blocks of 16 MiB.  So datasets are verified before.
After each read, before its use, device, inode, size and times of the files must still be those from
before the verification.  What a server has is compared as it is fetched, block by block.

Columns that take little of the budget are in memory whole; their windows are copied from there.
Frames that stay in videos are decoded into their slots, each once for all windows of a call.

Shape legend: N steps, n windows, s shards, K steps of a window, H rows of history in front, S
slots, m rows.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from gear_offline.batches.tables.decoders import Decoder, DecoderProcess, SharedFrames
from gear_offline.batches.tables.fields import standard_fields
from gear_offline.batches.tables.joint import Part
from gear_offline.batches.tables.table import GroupPlan, TableOptions, private_rows, whole_pages
from gear_offline.core.files import Closing, file_identity
from gear_offline.core.types import Array, Int64Array, UInt8Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.ranges import RangedFile
from gear_offline.data.dataset.shard import byte_view, damage_error, read_exactly
from gear_offline.data.dataset.videos import KeptFile, KeptFrames
from gear_offline.errors import InputError
from gear_offline.kernels.columns import final_values

PAGE_BYTES = mmap.PAGESIZE  # offsets, sizes and addresses of direct reads are multiples of this
GAP_BYTES = 64 << 10  # a read takes about as long as this many bytes more
SLICE_BYTES = 4 << 10  # windows from this size on are copied one by one
COPY_BYTES = 256 << 10  # of smaller ones, copied together

Lay = Callable[[UInt8Array], UInt8Array]  # (m, stored bytes) to (m, bytes of a row in a slot)


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Windows sorted by first step, with the slot of each; all fields are (n,) int64."""

    low: Int64Array  # the window's first step, counted in the table
    real: Int64Array  # its steps, without padding
    before: Int64Array  # steps of its episode before it, which stacks of frames need
    slots: Int64Array

    def take(self, which: Any) -> Places:
        """Return some windows, as NumPy indexes arrays."""
        return Places(**{name: values[which] for name, values in vars(self).items()})


class Tools(Closing):
    """What a thread reads with, and nobody else meanwhile."""

    def __init__(self, buffer: UInt8Array, decoder: Decoder) -> None:
        self.buffer, self.decoder = buffer, decoder

    def close(self) -> None:
        self.decoder.close()


def _read_directly(handle: int) -> None:
    """Read past the page cache from here on, where system and file system can."""
    with suppress(OSError):
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))


def read_pages(handle: int, memory: UInt8Array, begin: int, least: int, where: str) -> None:
    """Fill `memory` from byte `begin` on, up to the end of the file.

    A read may return fewer bytes than it asks for, as on network file systems.  Direct reads begin
    at whole pages, so the next one begins at the last whole page, until `least` bytes are read.
    """
    got = 0
    while got < least:
        at = got - got % PAGE_BYTES
        try:
            count = os.preadv(handle, [memory.data[at:]], begin + at)
        except OSError as error:
            raise damage_error(f"cannot read: {error.strerror}", where) from error
        if not count or (at + count <= got and begin + got >= os.fstat(handle).st_size):
            raise damage_error(f"the file ends at byte {begin + got}, more were expected", where)
        got = max(got, at + count)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stored:
    """A column in the shards' files: where its rows are, and how they become rows of slots."""

    name: str  # of the column
    number: int
    history: int  # rows before a window that stacks need, H or 0
    row_bytes: Int64Array  # (s,), of a step in each shard
    offsets: Int64Array  # (s,), byte of each shard's first row
    lay: Sequence[Lay | None]  # (s,): makes a slot's row of a stored one; None: equal


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kept:
    """A column of frames that stay in videos."""

    number: int
    history: int  # rows before a window that stacks need, H or 0
    frames: KeptFrames
    references: Int64Array  # (N, 3)


class WindowReader:
    """Copies windows to slots, from files or from columns that are in memory whole.

    `whole` has an array (margin + N + margin, width) for each column in memory, None for each in
    files.  Windows that begin in the same chunk of `chunk_steps` are read together.
    """

    def __init__(
        self,
        shards: Sequence[tuple[Part, int]],
        plans: Sequence[GroupPlan],
        resident: Sequence[Array | None],
        options: TableOptions,
        *,
        chunk_steps: int,
    ) -> None:
        self._shards, self._chunk_steps = shards, chunk_steps
        self._history, self._rows = options.history, options.margin
        self._spans_episodes = options.span == "history"
        steps = [task.dataset.manifest.shards[number].steps for task, number in shards]
        self._first_steps = np.cumsum([0, *steps])
        datasets = [task.dataset for task in dict.fromkeys(task for task, _ in shards)]
        lengths = [dataset.episodes.lengths for dataset in datasets]
        self._datasets = datasets  # the first step of each in the table:
        self._bases = np.cumsum([0, *(dataset.episodes.steps for dataset in datasets)])
        self._offsets = np.cumsum([0, *np.concatenate(lengths)])[:-1]
        self._moved: Int64Array | None = None  # of a view, (E,): from the table to the files
        if any(dataset.whole is not None for dataset in datasets):
            bases = np.cumsum([0, *(dataset.manifest.steps for dataset in datasets)])
            firsts = [b + dataset.file_steps for b, dataset in zip(bases, datasets, strict=False)]
            self._moved = np.concatenate(firsts) - self._offsets
        self._resident, self._stored = list[tuple[int, UInt8Array]](), list[_Stored]()
        self._kept = list[_Kept]()
        widest = []
        for number, (plan, rows) in enumerate(zip(plans, resident, strict=True)):
            if rows is not None:
                self._resident.append((number, rows.view(np.uint8)))
            elif any(plan.only[0] in dataset.videos for dataset in datasets):
                self._kept.append(_keep(number, plan, datasets))
            else:
                self._stored.append(_find(number, plan, shards))
                widest.append(max(plan.row_bytes, int(self._stored[-1].row_bytes.max())))
        self._margin = _margin_bytes(widest, self._rows)
        self._buffer_bytes = buffer_bytes(widest, self._rows, chunk_steps)

    @property
    def videos(self) -> dict[int, KeptFrames]:
        """The columns of frames that stay in videos, by their numbers."""
        return {column.number: column.frames for column in self._kept}

    def changes(self, low: Int64Array) -> Int64Array:
        """Return where (n,) rising first steps go on in another group of pictures."""
        groups = self._kept[0].references[low, :2]
        return np.flatnonzero((groups[1:] != groups[:-1]).any(1)) + 1

    def tools(self, targets: Sequence[Array], shared: SharedFrames | None = None) -> Tools:
        """Return what one thread needs for `read` into `targets`.

        With `shared`, those of `videos` there, a process decodes.
        """
        # NumPy asks for large pages from 4 MiB on; a disk reads into those with fewer commands.
        buffer = private_rows((self._buffer_bytes,), np.dtype(np.uint8))  # begins at a page
        if shared is not None:
            return Tools(buffer, DecoderProcess(shared))
        frames = [
            targets[number].view(column.spec.dtype).reshape(-1, *column.spec.shape)
            for number, column in self.videos.items()
        ]
        return Tools(buffer, Decoder([*self.videos.values()], frames))

    def read(self, places: Places, targets: Sequence[Array], tools: Tools) -> None:
        """Read windows into their slots.

        Windows come in the order of their first steps.  A target has (S,) slots of H + K rows, as
        void, of each column.  Row H is a window's first step.  Rows around the window, and around
        its history where the column has one, are any.
        """
        row = places.low - self._history
        for number, rows in self._resident:
            begins = (row + self._rows) * rows.shape[1]  # behind the margin
            _copy(rows.reshape(-1), begins, places.slots, targets[number])
        for number, column in enumerate(self._kept):
            tools.decoder.decode(number, *self._frames(column, places))
        if not self._stored:
            return
        low, shard = self._find(places.low)
        if self._spans_episodes:
            last, last_shard = self._find(places.low + places.real - 1)
            is_run = (shard == last_shard) & (last - low == places.real - 1)
            self._read_apart(places.take(~is_run), targets)
            places, low, shard = places.take(is_run), low[is_run], shard[is_run]
        chunk = (low - self._first_steps[shard]) // self._chunk_steps
        cuts = np.flatnonzero((np.diff(shard) != 0) | (np.diff(chunk) != 0)) + 1
        for begin, end in pairwise([0, *cuts.tolist(), len(shard)] if len(shard) else []):
            part = places.take(slice(begin, end))
            self._read_chunk(int(shard[begin]), low[begin:end], part, targets, tools.buffer)

    def _frames(self, column: _Kept, places: Places) -> tuple[Int64Array, Int64Array]:
        """Return the references of the frames of windows, and their rows in the slots."""
        before = np.minimum(places.before, column.history)
        counts, begins = before + places.real, places.low - before
        rows = places.slots * self._rows + self._history - before
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        steps, rows = (np.repeat(first, counts) + offsets for first in (begins, rows))
        return column.references[steps], rows

    def _find(self, steps: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return where steps of the table are in the files, and in which shard."""
        if self._moved is not None:
            steps = steps + self._moved[self._offsets.searchsorted(steps, side="right") - 1]
        return steps, self._first_steps.searchsorted(steps, side="right") - 1

    def _read_apart(self, places: Places, targets: Sequence[Array]) -> None:
        """Read windows of several shards, or over episodes that a view has not, one by one."""
        for low, real, slot in zip(places.low, places.real, places.slots, strict=True):
            number = int(self._bases.searchsorted(low, side="right")) - 1
            dataset, begin = self._datasets[number], int(low - self._bases[number])
            shard = int(self._find(low)[1])
            for column in self._stored:
                rows = dataset.read(column.name, begin, begin + int(real))
                stored, lay = byte_view(rows), column.lay[shard]
                values = np.frombuffer(stored, np.uint8).reshape(len(rows), -1)
                values = values if lay is None else lay(values)
                target = targets[column.number][slot : slot + 1].view(np.uint8)
                target[: values.size] = values.reshape(-1)

    def _read_chunk(
        self,
        shard: int,
        low: Int64Array,
        places: Places,
        targets: Sequence[Array],
        buffer: UInt8Array,
    ) -> None:
        """Read the windows that begin in one chunk, near parts at once."""
        ends = np.maximum.accumulate(low + places.real)
        page = PAGE_BYTES if self._shards[shard][0].dataset.ranges is None else 1
        reads: list[tuple[int, int, int]] = []  # begin and end in the file, place in the buffer
        starts: list[Int64Array] = []  # where in the buffer step 0 of the table would be
        at = self._margin
        for column in self._stored:
            row_bytes = int(column.row_bytes[shard])
            origin = int(column.offsets[shard] - self._first_steps[shard] * row_bytes)
            first = low - np.minimum(places.before, column.history)
            apart = np.flatnonzero((first[1:] - ends[:-1]) * row_bytes > GAP_BYTES)
            heads, tails = np.append(0, apart + 1), np.append(apart, len(low) - 1)
            begin, end = origin + first[heads] * row_bytes, origin + ends[tails] * row_bytes
            begin -= begin % page
            room = end - begin + -end % page
            positions = at + np.cumsum(room) - room
            at += int(room.sum())
            reads += zip(begin.tolist(), end.tolist(), positions.tolist(), strict=True)
            starts.append(np.repeat(origin + positions - begin, tails - heads + 1))
        assert at + self._margin <= len(buffer), "the parts of a chunk have room"
        self._fill(shard, reads, buffer)
        row = low - self._history
        for column, start in zip(self._stored, starts, strict=True):
            begins = start + row * column.row_bytes[shard]
            self._lay(column, shard, buffer, begins, places.slots, targets[column.number])

    def _fill(self, shard: int, reads: Sequence[tuple[int, int, int]], buffer: UInt8Array) -> None:
        """Read parts of a shard into the buffer, again if the file was touched meanwhile."""
        task, number = self._shards[shard]
        dataset, is_same = task.dataset, False
        path = dataset.path / dataset.manifest.shards[number].name
        while not is_same:
            with dataset.open_shard(number) as file:
                if isinstance(file, RangedFile):
                    for begin, end, position in reads:
                        memory = buffer[position : position + end - begin]
                        read_exactly(file, memory.data, begin, where=path)
                    return
                _read_directly(file.fileno())
                for begin, end, position in reads:
                    memory = buffer[position : position + whole_pages(end - begin)]
                    read_pages(file.fileno(), memory, begin, end - begin, str(path))
                is_same = file_identity(file.fileno()) == dataset.identities[number]

    def _lay(
        self,
        column: _Stored,
        shard: int,
        buffer: UInt8Array,
        begins: Int64Array,
        slots: Int64Array,
        target: Array,
    ) -> None:
        """Copy windows that begin at bytes `begins` of the buffer to their slots."""
        lay = column.lay[shard]
        if lay is None:
            _copy(buffer, begins, slots, target)
            return
        stored = self._rows * int(column.row_bytes[shard])
        windows, step = _windows(buffer, stored), max(COPY_BYTES // max(stored, target.itemsize), 1)
        for at in range(0, len(begins), step):
            chunk = slice(at, at + step)
            rows = windows[begins[chunk]].view(np.uint8).reshape(-1, stored // self._rows)
            # What lies around the rows of a window's episode may be any bits.
            with np.errstate(invalid="ignore", over="ignore"):
                target[slots[chunk]] = lay(rows).reshape(-1).view(target.dtype)


def _find(number: int, plan: GroupPlan, shards: Sequence[tuple[Part, int]]) -> _Stored:
    """Locate the rows of a column in the files."""
    name, field = plan.only
    assert name is not None, "what is in no file is in memory"
    layouts = [
        (shard.header_bytes + tensor.start, tensor.bytes // shard.steps)
        for task, number in shards
        for shard in [task.dataset.manifest.shards[number]]
        for tensor in task.dataset.manifest.tensors(shard)
        if tensor.name == name
    ]
    offsets, row_bytes = np.array(layouts, np.int64).T
    lays = {task.name: _lay_of(plan, name, task) for task in {task for task, _ in shards}}
    return _Stored(
        name=name,
        number=number,
        history=field.history,
        row_bytes=row_bytes,
        offsets=offsets,
        lay=[lays[task.name] for task, _ in shards],
    )


def _keep(number: int, plan: GroupPlan, datasets: Sequence[Dataset]) -> _Kept:
    """Return a column of frames in videos; those of several datasets one after the other."""
    name, field = plan.only
    files, references = list[KeptFile](), list[Int64Array]()
    for dataset in datasets:
        if name is None or name not in dataset.videos:
            problem = f"frames of {name} stay in videos in some of the datasets"
            remedy = "convert all with --video keep, or all without"
            raise InputError("LOADER_OPTION", problem, dataset.name, remedy)
        references.append(dataset.references(name) + np.array([len(files), 0, 0]))
        files += dataset.videos[name].files
    kept = [dataset.videos[name or ""] for dataset in datasets]
    frames = KeptFrames(kept[0].spec, tuple(files), any(each.resized for each in kept))
    return _Kept(
        number=number,
        history=field.history,
        frames=frames,
        references=np.concatenate(references),
    )


def _lay_of(plan: GroupPlan, name: str, task: Part) -> Lay | None:
    """Return the conversion of a part's stored rows to the table's; None: they are the same."""
    column, single = task.dataset.spec[name], None
    if plan.final:  # normalised by the moments of each task
        single = standard_fields(task.dataset, normalize_states=True)[name]
    elif (column.dtype, prod(column.shape)) == (plan.dtype, plan.width):
        return None

    def lay(stored: UInt8Array) -> UInt8Array:
        values = stored.view(column.dtype).reshape(len(stored), *column.shape)
        if single is not None:
            values = final_values(values.reshape(len(values), *single.shape), single)
        rows = np.zeros((len(stored), plan.width), plan.dtype)
        flat = values.reshape(len(values), -1)
        rows[:, : flat.shape[1]] = flat
        return rows.view(np.uint8)

    return lay


def buffer_bytes(row_bytes: Sequence[int], rows: int, chunk_steps: int) -> int:
    """Return the bytes of a buffer: a chunk's steps, `rows` around, whole pages, two margins."""
    chunk = sum(whole_pages((chunk_steps + rows) * n) + 2 * PAGE_BYTES for n in row_bytes)
    return chunk + 2 * _margin_bytes(row_bytes, rows)


def _margin_bytes(row_bytes: Sequence[int], rows: int) -> int:
    """Return the bytes in front of and behind a buffer, into which windows may reach."""
    return whole_pages(rows * max(row_bytes, default=0))


def _windows(buffer: UInt8Array, window: int) -> Array:
    """Return one element for each byte of a buffer: the `window` bytes that begin there."""
    dtype = np.dtype((np.void, window))
    return np.ndarray((buffer.size - window + 1,), dtype, buffer.data, 0, (1,))


def _copy(buffer: UInt8Array, begins: Int64Array, slots: Int64Array, target: Array) -> None:
    """Copy windows that begin at bytes `begins` of a buffer to their slots.

    NumPy lets other threads run while it copies large slices, or many items.
    """
    window = target.dtype.itemsize
    if window >= SLICE_BYTES:
        flat = target.view(np.uint8).reshape(len(target), window)
        for begin, slot in zip(begins.tolist(), slots.tolist(), strict=True):
            flat[slot] = buffer[begin : begin + window]
        return
    source = _windows(buffer, window)
    step = max(COPY_BYTES // window, 1)
    for at in range(0, len(begins), step):
        target[slots[at : at + step]] = source[begins[at : at + step]]
