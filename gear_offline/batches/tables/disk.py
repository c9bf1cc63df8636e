"""Rows that stay in the shards: batches through a bounded memory that is filled ahead of use.

The memory is slots of one window each, `H + K` rows of every column in its source dtype.  The
gather is that of a table in memory whose rows lie in another order.
`gear_offline.batches.tables.read_ahead` plans the reads, `window_reader` does them.

Shape legend: N steps, E episodes, K steps of a window, H rows of history in front of it, B windows
of a batch, S slots.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gear_offline.batches.sampling.draws import SegmentStream
from gear_offline.batches.tables.decoders import SharedFrames
from gear_offline.batches.tables.joint import (
    TableData,
    data_name,
    is_kept,
    parts_of,
    shards_of,
)
from gear_offline.batches.tables.read_ahead import (
    REFERENCE_BYTES,
    Draw,
    DrawnWindows,
    ReadAhead,
    ReadPlan,
)
from gear_offline.batches.tables.shared import SharedMemory
from gear_offline.batches.tables.table import (
    GroupPlan,
    Table,
    TableOptions,
    build_table,
    plan_groups,
    span_index,
    whole_pages,
)
from gear_offline.batches.tables.window_reader import COPY_BYTES, Places, WindowReader, buffer_bytes
from gear_offline.core.remote import Answer
from gear_offline.core.system import check_available, usable_cores
from gear_offline.core.text import say, size_text
from gear_offline.core.types import Array, Int64Array
from gear_offline.data.dataset.dataset import REFERENCE_BYTES as FRAME_REFERENCE
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.ranges import largest_block
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.data.dataset.videos import KeptFrames
from gear_offline.errors import InputError, UnavailableError
from gear_offline.kernels.columns import ColumnGroup
from gear_offline.kernels.draws import GUIDE_BITS, Segments
from gear_offline.kernels.gather import MAX_THREADS, CpuGather, Padding, Windows, real_steps

CHUNK_BYTES = 8 << 20  # of all columns, at most: windows that begin in a chunk are read together
THREADS = 4  # that read: a disk is fast with several reads under way, more wait for the interpreter
REQUESTS = 16  # threads that read by ranges: a server answers late, and many at a time
BUFFER_SHARE = 8  # its buffers take at most the budget over this
RESIDENT_SHARE = 32  # a column that takes at most the budget over this is kept in memory whole
OUTPUT_SHARE = 128  # a block of batches takes at most the budget over this, or one batch
OUTPUT_BLOCKS = 4  # the one handed out, the next, and two that may be in use
PIECE = 4096  # windows drawn in one go, which takes some hundred bytes each in passing
TAKEN_SHARE, MOST_TAKEN = 16, 16384  # of the slots, and windows, that are handed out at a time
FEW_TAKEN = 4  # batches, of what is read by ranges: each window of the first may need a block
INDEX_BYTES = 64  # an episode: offset, length, return, ends, address, and two of a sampler
GUIDE_BYTES = 64  # an episode, at most: of a sampler, which has at most 2^GUIDE_BITS entries
CONVERSION_FACTOR = 8  # bytes in passing for each byte of float32 that is cast or normalised


@dataclass(frozen=True, kw_only=True)
class DiskSizes:
    """The shares of a budget of host memory."""

    slots: int  # windows that are kept, S
    chunk_steps: int
    threads: int
    output_bytes: int  # of one block of batches
    handout: int  # windows that are handed out at a time
    resident: tuple[bool, ...]  # which columns are in memory whole


def share_out(
    dataset: TableData,
    plans: Sequence[GroupPlan],
    options: TableOptions,
    *,
    batch: int,
    budget_bytes: int,
    kept_bytes: int = 0,
    decoders: int = 1,
) -> DiskSizes:
    """Share a budget out: slots get the rest after everything else, `kept_bytes` of others too.

    Videos are decoded by up to so many `decoders`.
    """
    rows, steps = options.margin, dataset.spec.steps
    row_bytes, fields = [plan.row_bytes for plan in plans], [plan.only[1] for plan in plans]
    window = [rows * field.width * field.dtype.itemsize for field in fields]
    window_bytes = sum(window) + 16 * options.context_length  # as it is handed out
    converted = max(
        nbytes * (field.dtype != plan.dtype or field.mean is not None)  # by the gather
        for nbytes, field, plan in zip(window, fields, plans, strict=True)
    )
    guide = min(int(dataset.episodes.lengths.max()) + 2 * options.context_length, 1 << 21)
    episodes = dataset.episodes.episodes
    fixed_bytes = INDEX_BYTES * episodes + min(GUIDE_BYTES * episodes, 4 << GUIDE_BITS) + 8 * guide
    fixed_bytes += kept_bytes
    slot_bytes = rows * sum(row_bytes) + REFERENCE_BYTES + 8
    column_bytes = [(steps + 2 * rows) * nbytes for nbytes in row_bytes]
    in_no_file = [plan.is_derived for plan in plans]
    widest = max(n for n, nowhere in zip(column_bytes, in_no_file, strict=True) if not nowhere)
    kept = [is_kept(dataset, plan.only[0]) for plan in plans]
    fixed_bytes += FRAME_REFERENCE * (steps + 2 * rows) * sum(kept)
    small = [n <= budget_bytes // RESIDENT_SHARE and n < widest for n in column_bytes]
    small = [few and not in_video for few, in_video in zip(small, kept, strict=True)]
    resident = [nowhere or few for nowhere, few in zip(in_no_file, small, strict=True)]
    output_bytes = max(batch * window_bytes, budget_bytes // OUTPUT_SHARE)
    room, most_threads, most_taken, fetched = budget_bytes // BUFFER_SHARE, THREADS, MOST_TAKEN, 0
    if any(kept):
        most_threads = decoders
    if ranged := _ranged(dataset):
        most_threads, most_taken = REQUESTS, FEW_TAKEN * batch
        fetched = max(largest_block(each.manifest) for each in ranged)
    for least in (False, True):  # in comfort, or what two batches need and no more
        if least:
            resident, output_bytes, room = in_no_file, batch * window_bytes, 0
        read = [n for n, *gone in zip(row_bytes, resident, kept, strict=True) if not any(gone)]
        threads = room // (2 * (buffer_bytes(read, rows, 1) + COPY_BYTES) + fetched)
        threads = min(max(threads, 1), most_threads)
        chunk = min(CHUNK_BYTES, room // threads - buffer_bytes(read, rows, 0) - COPY_BYTES)
        chunk_steps = max(min(chunk // max(sum(read), 1), steps), 1)
        used = sum(n for n, stays in zip(column_bytes, resident, strict=True) if stays)
        used += fixed_bytes + OUTPUT_BLOCKS * output_bytes
        used += CONVERSION_FACTOR * converted * output_bytes // window_bytes
        used += threads * (buffer_bytes(read, rows, chunk_steps) + COPY_BYTES + fetched)
        slots = (budget_bytes - used) // slot_bytes
        if slots >= 2 * batch:
            break
    else:
        least_bytes = used + 2 * batch * slot_bytes
        problem = f"host_budget={budget_bytes} ({size_text(budget_bytes)}) is too small to keep "
        problem += f"two batches of {batch} windows"
        remedy = f"give at least {least_bytes} bytes ({size_text(least_bytes)}), or make "
        remedy += "batch_size or context_length smaller"
        raise InputError("LOADER_OPTION", problem, remedy=remedy)
    slots = min(slots, max(16 * batch, 2 * -(-steps // rows)))  # beyond, nothing is gained
    return DiskSizes(
        slots=slots,
        chunk_steps=chunk_steps,
        threads=threads,
        output_bytes=output_bytes,
        handout=max(batch, min(slots // TAKEN_SHARE, most_taken)),
        resident=tuple(resident),
    )


def _ranged(source: TableData) -> list[Dataset]:
    return [part.dataset for part in parts_of(source) if part.dataset.ranges]


class DiskGather:
    """Fills windows of a `stream` from shards, through a bounded memory that is filled ahead.

    The batches are the same bits as from a table in memory.  `sizes` says how the budget is shared
    out, `table` is over the slots.  `kept_bytes` of the budget are taken by somebody else, the
    cores are shared by `processes` of this node.
    """

    def __init__(
        self,
        dataset: TableData,
        stream: SegmentStream,
        options: TableOptions,
        *,
        host_budget: int,
        padding: Padding,
        pin: bool,
        kept_bytes: int = 0,
        processes: int = 1,
    ) -> None:
        plans, batch = plan_groups(dataset, options, apart=True), stream.rank_batch
        shares: Any = {"budget_bytes": host_budget, "kept_bytes": kept_bytes}
        # A program that launches a GPU's work in Python keeps a core; a job of a sweep has a share.
        cores, share = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
        if share.isdigit() and not pin and processes == 1:  # torchrun says 1, whatever there is
            cores = min(cores, int(share))
        decoders = max(cores // processes - pin, 1)
        shares |= {"batch": batch, "decoders": decoders}
        self.sizes = sizes = share_out(dataset, plans, options, **shares)
        index = span_index(dataset, options)
        if not index.is_side_by_side:
            problem = "rows that stay on disk lie as stored, and histories not side by side"
            remedy = "convert the dataset again, or use placement='host'"
            raise InputError("LOADER_OPTION", problem, data_name(dataset), remedy)
        dataset = dataset.verify()  # on this disk a window is no block that could be compared
        resident_plans = [plan for plan, stays in zip(plans, sizes.resident, strict=True) if stays]
        threads = 1
        if ranged := _ranged(dataset):
            threads = sizes.threads
            source = options.condition_column
            names = sorted({plan.only[0] or source for plan in resident_plans})
            for each in ranged:
                block = size_text(largest_block(each.manifest))
                say(
                    f"{each.ranges}: fetched whole: {', '.join(names) or 'nothing'}; other rows as "
                    f"they are drawn, in blocks of up to {block}"
                )
        table = build_table(dataset, options, plans=resident_plans, threads=threads)
        groups = iter(table.groups)
        resident_rows = [next(groups).rows if stays else None for stays in sizes.resident]
        shards = shards_of(parts_of(dataset))
        self._windows = WindowReader(
            shards, plans, resident_rows, options, chunk_steps=sizes.chunk_steps
        )
        self._memory = partial(_Slots, plans, index, options, padding)
        self._slots = self._memory(sizes.slots, pin=pin, shared=self._windows.videos)
        self.table = Table(episodes=index, groups=self._slots.groups, margin=options.margin)
        decoding: Any = {}
        if self._windows.videos:
            decoding = {"decoders": sizes.threads, "changes": self._windows.changes}
        plan = ReadPlan(
            _draw(index, stream, options),
            batch=stream.rank_batch,
            slots=sizes.slots,
            handout=sizes.handout,
            **decoding,
        )
        self._span = options.context_length
        ahead = partial(ReadAhead, self._windows, plan, self._slots.targets, self._slots.shared)
        self._ahead = ahead(threads=sizes.threads)
        self._gather = partial(_gather_steps, self._ahead, self._slots, index, stream.rank_batch)
        self._next: tuple[tuple[int, int], Answer[Windows]] | None = None  # of steps that follow
        # Also when the interpreter ends: then the threads are waited for.
        weakref.finalize(self, self._ahead.stop)

    def draw_and_gather(self, first_step: int, steps: int) -> Windows:
        """Gather the stream's segments of `steps` steps from `first_step` on, (steps, B).

        The next call is best for as many steps that follow, which a thread gathers meanwhile; any
        other order costs the windows that were read ahead.
        """
        self._ahead.check(ahead=True)
        key = (first_step, steps)
        if self._next is None or self._next[0] != key:
            self._next = key, self._ahead.begin(partial(self._gather, *key))
        coming = self._next[1]
        try:
            windows = coming.wait()
        finally:
            if coming.is_there:  # an error does not come twice
                self._next = None
        key = (first_step + steps, steps)
        self._next = key, self._ahead.begin(partial(self._gather, *key))
        return windows

    def gather(self, segments: Segments) -> Windows:
        """Gather any `segments` now, in memory of their own, without touching the read-ahead."""
        self._ahead.check()
        index, starts = self.table.episodes, segments.starts.reshape(-1)
        real = real_steps(segments, index.lengths, self._span, index.reach)
        low = index.offsets[segments.episodes.reshape(-1)] + starts
        aside = self._memory(len(low))
        order = np.argsort(low, kind="stable")
        places = Places(low=low[order], real=real[order], before=starts[order], slots=order)
        with self._windows.tools(aside.targets) as tools:
            self._windows.read(places, aside.targets, tools)
        return aside.gather(segments, np.arange(len(low)))

    def close(self) -> None:
        """End the reading threads; can be repeated."""
        self._ahead.stop()


def _gather_steps(
    ahead: ReadAhead,
    slots: _Slots,
    index: EpisodeIndex,
    batch: int,
    first_step: int,
    steps: int,
) -> Windows:
    """Gather the windows of steps, (steps, B), when they are there, and let their slots go."""
    places, low = ahead.take(first_step, steps)
    episodes = index.offsets.searchsorted(low, side="right") - 1
    # As they were drawn when the plan was made; no gather asks for the probability.
    segments = Segments(
        episodes=episodes.reshape(steps, batch),
        starts=(low - index.offsets[episodes]).reshape(steps, batch),
        probability=np.broadcast_to(np.float64(0), (steps, batch)),
    )
    windows = slots.gather(segments, places)
    ahead.move(first_step + steps)
    return windows


class _Slots:
    """Memory for windows, which all lie in landing rows: of H rows and K each.

    The plans whose numbers are in `shared` lie in shared memory.
    """

    def __init__(
        self,
        plans: Sequence[GroupPlan],
        episodes: EpisodeIndex,
        options: TableOptions,
        padding: Padding,
        slots: int,
        *,
        pin: bool = False,
        shared: Mapping[int, KeptFrames] = {},
    ) -> None:
        self._rows, self._history = options.margin, options.history
        count = (slots + 2) * self._rows  # with two margins in front
        check_available(sum(count * plan.row_bytes for plan in plans))
        self.shared: SharedFrames | None = None
        if shared:
            nbytes = sum(whole_pages(count * plans[number].row_bytes) for number in shared)
            with suppress(UnavailableError):  # the system has none: threads decode
                self._frames, columns = SharedMemory.create(nbytes), tuple(shared.values())
                where: Any = {"memory": self._frames.handle(), "margin": 2 * self._rows}
                self.shared = SharedFrames(columns=columns, rows=count, **where)
        groups, self.targets = [], list[Array]()
        for number, plan in enumerate(plans):
            # NumPy asks for large pages: windows come from and go to places far apart.
            make = self._frames.allocate if self.shared and number in shared else np.zeros
            rows = make((count, plan.width), plan.dtype)
            groups.append(ColumnGroup(fields=tuple(plan.fields.values()), rows=rows))
            window = np.dtype((np.void, self._rows * plan.row_bytes))
            self.targets.append(rows[2 * self._rows :].reshape(-1).view(np.uint8).view(window))
        self.groups = tuple(groups)
        self._gather = CpuGather(
            groups,
            episodes.lengths,
            np.zeros(episodes.episodes, np.int64),  # all windows lie in slots
            context_length=options.context_length,
            padding=padding,
            pin=pin,
            reach=episodes.reach,
            # Decoders leave no core to others, and frames are copied faster than decoded.
            threads=1 if shared else MAX_THREADS,
        )

    def gather(self, segments: Segments, slots: Int64Array) -> Windows:
        """Gather `segments` from `slots`, (n,) int64."""
        landing = ((slots + 2) * self._rows + self._history).reshape(segments.shape)
        # What a slot holds around the rows of an episode may be any bits, until it is cleared.
        with np.errstate(invalid="ignore"):
            return self._gather.gather(segments, landing)


def _draw(episodes: EpisodeIndex, stream: SegmentStream, options: TableOptions) -> Draw:
    """Return the function that draws the windows of steps; it refers to no gather or loader."""
    span, history, batch = options.context_length, options.history, stream.rank_batch
    most = max(PIECE // batch, 1)

    def draw(first_step: int, steps: int) -> DrawnWindows:
        pieces = []
        for at in range(0, steps, most):
            segments = stream.segments(first_step + at, min(most, steps - at))
            episode, starts = segments.episodes.reshape(-1), segments.starts.reshape(-1)
            real = np.minimum(episodes.reach[episode] - starts, span)
            pieces.append((episodes.offsets[episode] + starts, real, np.minimum(starts, history)))
        columns = map(np.concatenate, zip(*pieces, strict=True))
        return DrawnWindows(first_step * batch, *columns)

    return draw
