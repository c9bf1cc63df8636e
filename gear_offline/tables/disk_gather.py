"""Cut segments out of a dataset that stays on disk: gathers over slots instead of steps.

The slots are filled by `tables.disk_reader`; each holds one window as it is needed, so the
gather is that of a table in memory whose rows lie in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.dataset.dataset import Dataset
from gear_offline.kernels.columns import ColumnGroup
from gear_offline.kernels.gather import CpuGather, Padding, Windows, convert_rows, real_steps
from gear_offline.sampling import Segments
from gear_offline.sampling.stream import Stream
from gear_offline.tables.disk_files import DiskFile
from gear_offline.tables.disk_reader import DiskCounts, DiskReader
from gear_offline.tables.disk_sizes import share_out
from gear_offline.tables.disk_table import (
    compute_returns,
    disk_plans,
    history_of,
    load_resident,
    locate,
    slot_groups,
    slot_table,
)
from gear_offline.tables.gather_ahead import GatherAhead
from gear_offline.tables.joint import tasks_of
from gear_offline.tables.joint_disk import open_shards
from gear_offline.tables.read_plan import Int64Array, Needs, ReadPlan
from gear_offline.tables.table import GroupPlan, Table
from gear_offline.tables.window_reader import Chosen, WindowReader

Array = npt.NDArray[Any]


class SlotGather(CpuGather):
    """A `CpuGather` whose windows lie in slots; `at` says where.

    Attributes
    ----------
    at
        (n,) int64, slot of each window that `fill` is given next.
    """

    at: Int64Array

    def __init__(self, table: Table, **options: Any) -> None:
        super().__init__(table.groups, table.episodes.offsets, margin=table.margin, **options)

    def _copy(self, group: ColumnGroup, view: Tensor, rows: Int64Array, out: Tensor) -> None:
        """Copy windows from their slots, whatever their steps.

        In one call without the interpreter's lock.  Threads that share the work, each asking for
        the lock between its runs, would wait for the reading threads longer than this takes.
        """
        slots = _slots(group, self.context_length)
        if group.is_final:
            into = out.flatten(1).view(torch.uint8).numpy().view(slots.dtype).reshape(-1)
            slots.take(self.at, out=into, mode="clip")  # "raise" would copy once more
            return
        values = slots.take(self.at, mode="clip").view(group.dtype)
        # What a slot holds besides its window may be any bits, until it is overwritten with zeros.
        with np.errstate(invalid="ignore"):
            convert_rows(group, values.reshape(*out.shape[:2], group.width), out)


class DiskGather:
    """Fills windows from shards, through a bounded memory that is filled ahead of use.

    The other parameters are those of `gear_offline.loaders.loader.GearLoader`; the batches are the
    same bits as from a table in memory, except that values too large for float32 become infinite.

    Parameters
    ----------
    stream
        What will be asked for.
    host_budget
        Bytes for everything that is kept in memory.
    direct
        Ask for ``O_DIRECT``.

    Attributes
    ----------
    sizes
        How the budget is shared out.
    table
        Over the slots; the episode index is the dataset's.

    Raises
    ------
    InputError
        ``HOST_BUDGET``; what `gear_offline.tables.table.build_table` says of columns and options.
    GearError
        ``HOST_MEMORY``, ``DISK_SCRATCH``; what reading raises.
    """

    def __init__(
        self,
        dataset: Dataset,
        stream: Stream,
        *,
        host_budget: int,
        context_length: int,
        padding: Padding = "right",
        gamma: float = 1.0,
        returns_scale: float = 1.0,
        normalize_states: bool = False,
        extra_columns: Sequence[str] = (),
        frame_stack: int = 1,
        pin: bool = False,
        direct: bool = True,
    ) -> None:
        if dataset.on_use and not tasks_of(dataset):  # whose columns are copied, and compared then
            dataset = dataset.verify()  # a window is not a block that could be compared
        plans = disk_plans(
            dataset,
            normalize_states=normalize_states,
            extra_columns=extra_columns,
            frame_stack=frame_stack,
        )
        columns = locate(dataset, plans)
        window = [_final_bytes(plan) * (context_length + history_of(plan)) for plan in plans]
        converted = [each * _is_converted(plan) for each, plan in zip(window, plans, strict=True)]
        window_bytes = sum(window) + 16 * context_length
        self.sizes = share_out(
            budget_bytes=host_budget,
            row_bytes=[column.row_bytes for column in columns],
            histories=[column.history for column in columns],
            batch_bytes=stream.share * window_bytes,
            converted_share=max(converted) / window_bytes,
            longest=int(dataset.episodes.lengths.max()),
            episodes=dataset.episodes.episodes,
            steps=dataset.spec.steps,
            batch=stream.share,
            span=context_length,
        )
        columns, handle = load_resident(
            dataset,
            plans,
            columns,
            self.sizes.resident,
            span=context_length,
            returns=partial(
                compute_returns,
                dataset,
                gamma=gamma,
                scale=returns_scale,
                budget_bytes=host_budget,
            ),
        )
        scratch = None
        if handle is not None:
            scratch = DiskFile(handle, "the file of the returns-to-go", direct=direct)
        files = open_shards(dataset, scratch, direct=direct)
        self._row_bytes = sum(column.row_bytes for column in columns)
        self._context_length, self._padding = context_length, padding
        self._windows_given = self._bytes_given = 0
        self._windows = WindowReader(
            files,
            scratch,
            columns,
            first_steps=dataset.first_steps,
            span=context_length,
            left=padding == "left",
            sizes=self.sizes,
            direct=direct,
        )

        def release() -> None:
            files.close()
            if scratch is not None:
                scratch.close()

        try:
            groups = slot_groups(plans, slots=self.sizes.slots, span=context_length)
        except BaseException:
            release()
            raise
        self.table = slot_table(dataset.episodes, groups, context_length)
        self._gather = SlotGather(
            self.table, context_length=context_length, padding=padding, pin=pin
        )
        plan = ReadPlan(
            _needs(dataset, stream, self._windows, context_length, frame_stack - 1),
            batch=stream.share,
            slots=self.sizes.slots,
            depth=self.sizes.depth,
            horizon=self.sizes.horizon,
        )
        self._reader = DiskReader(
            self._windows,
            plan,
            [_slots(group, context_length) for group in groups],
            threads=self.sizes.threads,
            buffers=self.sizes.buffers,
            release=release,
        )
        self._ahead = GatherAhead(partial(_gathered, stream.share, self._gather, self._reader))
        # Also when the interpreter ends: then the threads are waited for.
        self._close = weakref.finalize(self, _stop, self._reader, self._ahead)

    def fill_steps(self, *, first_step: int, steps: int) -> Windows:
        """Gather what the stream draws in `steps` steps from `first_step` on, (steps, B).

        The next call is best for as many steps that follow; any other order costs the windows that
        were read ahead.

        Raises
        ------
        GearError
            ``LOADER_CLOSED``; ``DATASET_CHANGED``, ``FILE_SIZE``, ``DATASET_READ``.
        """
        self._reader.check(ahead=True)
        found = self._ahead.take(first_step, steps)
        self._windows_given += found.segments[..., 0].numel()
        # Not torch's sum: its threads would wait for the next one, turning.
        self._bytes_given += int(found.attention_mask.numpy().sum()) * self._row_bytes
        return found

    def fill(self, segments: Segments) -> Windows:
        """Gather any `segments` now, in memory of their own, without touching the read-ahead.

        Raises
        ------
        InputError
            ``SELECTION``; what `fill_steps` raises.
        """
        self._reader.check()
        index, span = self.table.episodes, self._context_length
        episodes, starts = segments.episodes.reshape(-1), segments.starts.reshape(-1)
        real = real_steps(segments, index.lengths, span)
        low = index.offsets[episodes] + starts
        groups = [
            ColumnGroup(
                fields=s.fields,
                rows=np.zeros((len(low) * (span + s.history), s.width), s.dtype),
            )
            for s in self.table.groups
        ]
        aside = SlotGather(
            slot_table(index, groups, span), context_length=span, padding=self._padding
        )
        aside.at = np.arange(len(low), dtype=np.int64)
        targets = [_slots(group, span) for group in groups]
        before = np.minimum(starts, max(group.history for group in groups))
        order = np.argsort(low, kind="stable")
        chunks = np.cumsum(np.diff(self._windows.chunk_of(low[order]), prepend=-1) != 0) - 1
        parts = np.flatnonzero(np.diff(chunks // self._windows.chunks)) + 1
        buffer = self._windows.buffer()
        try:
            for mine in np.split(order, parts):
                chosen = Chosen(low=low[mine], real=real[mine], before=before[mine], slots=mine)
                self._windows.read(chosen, targets, buffer)
        finally:
            buffer.close()
        return aside.fill(segments)

    def counts(self) -> DiskCounts:
        """Return what was read and what `fill_steps` gave until now."""
        read_bytes, reads, evicted = self._reader.counts()
        return DiskCounts(
            read_bytes=read_bytes,
            reads=reads,
            window_bytes=self._bytes_given,
            windows=self._windows_given,
            evicted=evicted,
        )

    def close(self) -> None:
        """End the reading threads and close all files; can be repeated."""
        self._close()


def _gathered(
    share: int, gather: SlotGather, reader: DiskReader, first_step: int, steps: int
) -> Windows:
    """Gather steps from their slots, and let go of these."""
    held = reader.take(first_step, steps)
    gather.at = held.slots
    shape = steps, share
    # As they were drawn when the plan was made; no gather asks for the probability.
    segments = Segments(
        episodes=held.episode.reshape(shape),
        starts=(held.low - gather.offsets[held.episode]).reshape(shape),
        probability=np.broadcast_to(np.float64(0), shape),
    )
    found = gather.fill(segments)
    reader.move(first_step + steps)
    return found


def _stop(reader: DiskReader, ahead: GatherAhead) -> None:
    reader.stop()
    ahead.close()


def _needs(
    dataset: Dataset, stream: Stream, windows: WindowReader, span: int, history: int
) -> Callable[[int, int], Needs]:
    """Return the function that names the windows of steps; it refers to no gather or loader."""
    offsets, lengths = dataset.episodes.offsets, dataset.episodes.lengths

    def needs(first_step: int, steps: int) -> Needs:
        drawn = stream.segments(first_step, steps)
        episodes, starts = drawn.episodes.reshape(-1), drawn.starts.reshape(-1)
        low = offsets[episodes] + starts
        real = np.minimum(lengths[episodes] - starts, span)
        before = np.minimum(starts, history)
        chunk = windows.chunk_of(low)
        return Needs(episode=episodes, low=low, real=real, chunk=chunk, before=before)

    return needs


def _slots(group: ColumnGroup, span: int) -> Array:
    """Return (S,) of void over the rows of a group, K and its history for each slot."""
    assert group.rows is not None, "slots are in memory"
    kind = np.dtype((np.void, (span + group.history) * group.rows.strides[0]))
    return group.rows.reshape(-1).view(np.uint8).view(kind)


def _final_bytes(plan: GroupPlan) -> int:
    return sum(field.width * field.dtype.itemsize for field in plan.fields.values())


def _is_converted(plan: GroupPlan) -> bool:
    return any(f.dtype != plan.dtype or f.mean is not None for f in plan.fields.values())
