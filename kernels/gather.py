"""Cut segments out of rows in host memory: the vectorised reference of the GPU's gather.

A window of K steps is K consecutive rows, hence one run of memory.  Every segment is copied as
one run.  Zeros then overwrite the padding of segments that reach beyond their episode, so nothing
of a neighbour or of the future stays.  Rows are copied as whole words, never computed with, except
where a column is cast or normalised.

A group of frames may have `history` rows in front of each window: the frames before its first step,
zeros before the episode's first.  So a frame is read once, and the stacks of a batch are views.

Rows that came from elsewhere lie in landing rows of the same array.  Their segment begins at its
landing row instead of its episode's, and is read like any other.

Shape legend: E episodes, n segments, K steps of a window, W elements of a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gear_offline.core.types import Int64Array, UInt8Array
from gear_offline.errors import InputError
from gear_offline.kernels.columns import ColumnGroup, Field, final_values
from gear_offline.kernels.draws import Segments

UNSPLIT_ELEMENTS = 32768  # at::internal::GRAIN_SIZE: torch uses threads above it
SPLIT_BYTES = 1 << 20  # smaller copies are not worth a thread
MAX_THREADS = 4  # that copy together; torch's own number if that is smaller
ALIGNMENT_BYTES = 64
SPARE_BLOCKS = 4  # free output blocks kept at most

Padding = Literal["right", "left"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Gathered segments, of any leading shape ``S``; `timesteps` and mask are 0 on padding."""

    buffers: tuple[Tensor, ...]  # (*S, K + history, W), one per group
    fields: tuple[tuple[Field, ...], ...]  # views of each buffer
    timesteps: Tensor  # (*S, K) int64, step within the episode
    attention_mask: Tensor  # (*S, K) int64, 1 on real steps
    segments: Tensor  # (*S, 2) int64: episode, start

    def tensors(self) -> dict[str, Tensor]:
        """Return each field, ``(*S, K, *shape)``, by name; views of the buffers.

        A field with a history is ``(*S, K, history + 1, *shape)``: a step's own frame is the last
        one of its stack, and stacks share memory.
        """
        tensors: dict[str, Tensor] = {}
        for buffer, fields in zip(self.buffers, self.fields, strict=True):
            for field in fields:
                view = buffer[..., field.offset : field.offset + field.width]
                view = view.view(*view.shape[:-1], *field.shape)
                if field.history:
                    steps = view.dim() - len(field.shape) - 1
                    view = view.unfold(steps, field.history + 1, 1).movedim(-1, steps + 1)
                tensors[field.name] = view
        return tensors

    def with_field(self, name: str, values: Tensor, shape: tuple[int, ...] = ()) -> Windows:
        """Return the windows with one more field: contiguous `values` that end with its `shape`."""
        dtype = torch.empty(0, dtype=values.dtype).numpy().dtype
        field = Field(name=name, dtype=dtype, shape=shape)
        buffer = values.reshape(*values.shape[: values.dim() - len(shape)], field.width)
        return replace(self, buffers=(*self.buffers, buffer), fields=(*self.fields, (field,)))

    def map(self, change: Callable[[Tensor], Tensor]) -> Windows:
        """Return the windows with `change` applied to every tensor."""
        return Windows(
            buffers=tuple(change(buffer) for buffer in self.buffers),
            fields=self.fields,
            timesteps=change(self.timesteps),
            attention_mask=change(self.attention_mask),
            segments=change(self.segments),
        )


class CpuGather:
    """Copies windows out of rows in host memory.

    Rows are of whole episodes, with margins of zeros that a window fits into.  `lengths` (E,) are
    the steps of every episode of the dataset, `first_rows` (E,) the row of each one's first step
    (any number where the rows are elsewhere).  Windows end with episodes, or `reach` (E,) steps
    behind an episode's first, where its history does.  `padding` is the side of the zeros, which
    with `repeat`, on the right, are the last real row instead; with `pin` outputs are page-locked,
    for asynchronous copies.  Up to so many `threads` copy together.
    """

    def __init__(
        self,
        groups: Sequence[ColumnGroup],
        lengths: Int64Array,
        first_rows: Int64Array,
        *,
        context_length: int,
        padding: Padding = "right",
        pin: bool = False,
        reach: Int64Array | None = None,
        repeat: bool = False,
        threads: int = MAX_THREADS,
    ) -> None:
        self.groups, self.context_length, self.padding = tuple(groups), context_length, padding
        self._repeat, self._threads = repeat, threads
        history = max((group.history for group in groups), default=0)
        self.lengths, self._first_rows, self._reach = lengths, first_rows, reach
        self._arena = Arena(pin=pin)
        self._shapes = [
            ((context_length + group.history, group.width), torch_dtype(group.final_dtype))
            for group in groups
        ]
        self._places = np.arange(context_length + history, dtype=np.int64)
        self._views = [_windows(group, context_length + group.history) for group in groups]

    def gather(self, segments: Segments, landing: Int64Array | None = None) -> Windows:
        """Gather `segments`, of any shape ``S``; others are refused (``SELECTION``).

        `landing`, int64, ``S``: the row where the first step of a segment that came from elsewhere
        lies, behind those of its history; -1 for the episode's own.
        """
        shape, span = segments.shape, self.context_length
        episodes, starts = segments.episodes.reshape(-1), segments.starts.reshape(-1)
        real = real_steps(segments, self.lengths, span, self._reach)
        low = self._first_rows[episodes] + starts  # row of the first real step
        if landing is not None:
            low = np.where(landing.reshape(-1) < 0, low, landing.reshape(-1))
        shift = 0 if self.padding == "right" else real - span
        padded = self._find_padding(starts, real, 0)
        window_shape, long = (real.size, span), torch.int64
        layouts: list[Any] = [((real.size, *rows), dtype) for rows, dtype in self._shapes]
        layouts += [(window_shape, long), (window_shape, long), ((real.size, 2), long)]
        *buffers, timesteps, mask, names = carve(self._arena, layouts)
        for group, view, buffer in zip(self.groups, self._views, buffers, strict=True):
            history = group.history
            self._copy(group, view, low + shift - history if history else low + shift, buffer)
            if self._repeat:
                last = padded - padded % span + real[padded // span] - 1
                _fill(buffer, padded, last)
            else:
                _fill(buffer, self._find_padding(starts, real, history) if history else padded)
        first = (starts + shift)[:, None]
        np.add(first, self._places[:span], out=timesteps.numpy())
        mask.numpy().fill(1)  # torch would share it with its threads, and wait for them
        for steps in (timesteps, mask):
            steps.numpy().reshape(-1)[padded] = 0
        names.numpy()[:, 0], names.numpy()[:, 1] = episodes, starts
        return Windows(
            buffers=tuple(buffer.view(*shape, *buffer.shape[1:]) for buffer in buffers),
            fields=tuple(group.fields for group in self.groups),
            timesteps=timesteps.view(*shape, span),
            attention_mask=mask.view(*shape, span),
            segments=names.view(*shape, 2),
        )

    def _copy(self, group: ColumnGroup, view: Tensor, rows: Int64Array, out: Tensor) -> None:
        """Copy the windows that begin at `rows` into `out`, (n, K + history, W)."""
        if group.is_final:
            _select(view, torch.from_numpy(rows), out.flatten(1).view(view.dtype), self._threads)
            return
        words = view.new_empty(len(rows), view.shape[1])
        _select(view, torch.from_numpy(rows), words, self._threads)
        field, values = group.fields[0], words.view(torch_dtype(group.dtype)).numpy()
        final = final_values(values.reshape(*out.shape[:2], *field.shape), field)
        out.numpy()[...] = final.reshape(out.shape)

    def _find_padding(self, starts: Int64Array, real: Int64Array, history: int) -> Int64Array:
        """Return the flat positions, in (n, K + history), that hold no row of the episode."""
        padded = np.flatnonzero((real < self.context_length) | (starts < history))[:, None]
        span, places = self.context_length, self._places[: self.context_length + history]
        first, last = locate_rows(
            starts[padded], real[padded], span=span, history=history, padding=self.padding
        )
        outside = (places < first) | (places >= last)
        positions: Int64Array = (padded * len(places) + places)[outside]
        return positions


def real_steps(
    segments: Segments, lengths: Int64Array, span: int, reach: Int64Array | None = None
) -> Int64Array:
    """Return (n,) int64, the steps of each window that exist, at least 1; refuse the unknown."""
    episodes, starts = segments.episodes.reshape(-1), segments.starts.reshape(-1)
    inside = episodes.min(initial=0) >= 0 and episodes.max(initial=0) < len(lengths)
    remaining = lengths[episodes] - starts if inside else episodes - episodes
    if remaining.min(initial=1) < 1 or starts.min(initial=0) < 0:
        problem = "a segment begins outside the dataset"
        remedy = f"use episodes below {len(lengths)} and starts below their lengths"
        raise InputError("SELECTION", problem, remedy=remedy)
    if reach is not None:
        remaining = reach[episodes] - starts
    real: Int64Array = np.minimum(remaining, span)
    if segments.lengths is not None:
        real = np.minimum(real, np.maximum(segments.lengths.reshape(-1), 1))
    return real


def locate_rows(
    starts: Int64Array, real: Int64Array, *, span: int, history: int, padding: Padding
) -> tuple[Int64Array, Int64Array]:
    """Return begin and end of the episode's rows among a window's ``span + history`` rows."""
    ahead = np.minimum(starts, history)  # rows that the history finds in the episode
    first = history - ahead if padding == "right" else span - real + history - ahead
    return first, first + ahead + real


def _select(view: Tensor, rows: Tensor, out: Tensor, threads: int) -> None:
    """Copy rows of (R, D) `view` to (n, D) `out`, in runs that threads take from a common list.

    Windows lie anywhere in memory, so that a copy waits for memory rather than for a core: two
    threads are nearly twice as fast.  The runs are too short for torch to split them over its own
    threads.  Those wait for each other: where another program wants the cores they lose a time
    slice at every call (20 to 70 times slower on two busy cores).  Here a thread that gets no core
    leaves its share to the others.
    """
    run = max(UNSPLIT_ELEMENTS // view.shape[1], 1)
    if len(rows) <= run:
        torch.index_select(view, 0, rows, out=out)
        return
    runs = iter(list(zip(torch.split(rows, run), torch.split(out, run), strict=True)))

    def copy() -> None:
        for indices, target in runs:
            torch.index_select(view, 0, indices, out=target)

    helpers = min(torch.get_num_threads(), threads, len(rows) // run) - 1
    if helpers < 1 or out.nbytes < SPLIT_BYTES:
        copy()
        return
    with ThreadPoolExecutor(helpers) as pool:
        jobs = [pool.submit(copy) for _ in range(helpers)]
        copy()
        for job in jobs:
            job.result()


def _fill(out: Tensor, padded: Int64Array, last: Int64Array | None = None) -> None:
    """Write zero bytes, or the rows at `last`, over those of (n, K, W) at positions `padded`."""
    rows = out.view(torch.uint8).numpy()
    records = rows.view(np.dtype((np.void, rows.shape[-1]))).reshape(-1)
    records[padded] = np.zeros((), records.dtype) if last is None else records[last]


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return PyTorch's dtype of the same name."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _windows(group: ColumnGroup, span: int) -> Tensor:
    """Return (rows - K + 1, K * W) words: row ``i`` is the window that begins at row ``i``.

    The rows overlap in memory and are only read.  Words are as wide as the row's size allows, for
    fewer and longer runs; only moved, whatever their type, so that no bit pattern changes.
    """
    row_bytes = group.rows.strides[0]
    width = next(w for w in (16, 8, 4, 2, 1) if row_bytes % w == 0)
    word = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}[width]
    words = torch.from_numpy(group.rows.view(word))
    count, wide = words.shape
    return words.as_strided((count - span + 1, span * wide), (wide, 1))


# Output memory.  A new block of megabytes costs more in page faults than the gather that fills it:
# a block is lent, and goes back to the arena when the last tensor over it is gone, and only then.


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a block; it dies with the storages of the tensors made from it."""


class Arena:
    """Lends blocks of bytes as tensors; with `pin` torch's allocator does, which is as careful."""

    def __init__(self, *, pin: bool = False) -> None:
        self.pin = pin
        self._free: list[UInt8Array] = []

    def blocks(self, ends: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return bytes ``[begin, end)`` of a block, of unspecified content, for each of `ends`.

        Begins are multiples of 64, and so are addresses.  A tensor is a storage of its own, as
        saving by torch asks for where dtypes differ; it keeps the whole block.
        """
        nbytes = max(end for _, end in ends)
        if self.pin:
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            return [pinned[begin:end] for begin, end in ends]
        try:
            owner = self._free.pop()  # one step, so that threads need no lock
        except IndexError:
            owner = _allocate_aligned(nbytes)
        if not nbytes <= owner.size <= 2 * nbytes:
            owner = _allocate_aligned(nbytes)
        lent = owner[:nbytes].view(_Lent)
        weakref.finalize(lent, _give_back, self._free, owner).atexit = False
        return [torch.from_numpy(lent[begin:end]) for begin, end in ends]


def _give_back(free: list[UInt8Array], block: UInt8Array) -> None:
    free.append(block)
    del free[:-SPARE_BLOCKS]


def _allocate_aligned(nbytes: int) -> UInt8Array:
    spare = np.empty(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
    begin = -spare.ctypes.data % ALIGNMENT_BYTES
    return spare[begin : begin + nbytes]


def carve(arena: Arena, layouts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Return one tensor of unspecified content per (shape, dtype), all in one block."""
    ends, total = [], 0
    for shape, dtype in layouts:
        begin = total
        total = begin + prod(shape) * dtype.itemsize
        ends.append((begin, total))
        total += -total % ALIGNMENT_BYTES
    return [
        block.view(dtype).view(shape)
        for block, (shape, dtype) in zip(arena.blocks(ends), layouts, strict=True)
    ]
