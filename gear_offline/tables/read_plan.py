"""What to read from disk next, and what to keep: the plan of the disk tier.

Selection is a pure function of (seed, step), so the windows of the coming steps are known.  Shards
are cut into chunks of consecutive steps, and every window belongs to the chunk that it begins in.
Whenever a window is needed soon and not here, its chunk is read, and all windows that begin in it
and are needed within the known horizon are taken from that one read.  What is kept are windows,
packed, each in a slot; a slot is free again once its window was used.

Where there are fewer slots than windows, those needed soonest stay and those needed last go
(Belady's rule).  A window that went is read again when its time comes.

Several chunks are planned in one go, with a few NumPy calls for all of their windows: work in
Python for each window, or each chunk, would cost more time than a good disk needs to read it.

Nothing is read here and nothing is locked: `gear_offline.tables.read_ahead` does both.

Words: a *reference* q is a window of the stream, ``q = step * B + slot of the batch``, so that the
order of q is the order of use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.types import Int64Array

SCAN = 4096  # references looked at in one go for the next one that is missing
PIECE = 4096  # references drawn in one go
STRETCHES = 6  # parts of the horizon; each is sorted by chunk once
GOLDEN_RATIO = 0.6180339887498949  # its multiples, modulo 1, are evenly spread
REFERENCE_BYTES = 48  # of the plan, for each reference of the horizon, at most


@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """Windows of consecutive steps, in the order of use, (n,) int64 each."""

    low: Int64Array  # first step of the window in the table
    real: Int64Array  # steps that the window has
    chunk: Int64Array  # in which it begins; rises with `low`
    before: Int64Array  # steps of the episode in front of it that are wanted too, for stacks


@dataclass(frozen=True, kw_only=True, eq=False)
class Ready:
    """Windows that are here, in the order of use, (n,) int64 each: their slots, and as `Needs`."""

    slots: Int64Array
    low: Int64Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Windows as `Needs` and their slots, in the order of first steps, (n,) int64 each."""

    low: Int64Array
    real: Int64Array
    before: Int64Array
    slots: Int64Array

    def part(self, begin: int, end: int) -> Places:
        """Return windows `begin` to `end`."""
        return Places(**{name: values[begin:end] for name, values in vars(self).items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Chunks to read, and the windows to take from them."""

    chunks: Int64Array  # in the order of need
    references: Int64Array  # which windows, in the order of `places`
    places: Places
    generation: int  # of the plan: those before a jump are dropped


class Stretch:
    """Some consecutive steps of the stream, sorted by where their windows begin."""

    def __init__(self, first: int, pieces: Sequence[Needs]) -> None:
        def joined(name: str, dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
            return np.concatenate(
                [getattr(piece, name) for piece in pieces], dtype=dtype, casting="unsafe"
            )

        self.low, self.chunk = joined("low", np.int64), joined("chunk", np.int64)
        self.real, self.before = joined("real", np.int32), joined("before", np.int16)
        count = len(self.low)
        self.first, self.last = first, first + count
        self.slot = np.full(count, -1, np.int32)
        self.ready = np.zeros(count, bool)
        self.residents = 0  # ready ones
        self._order = np.argsort(self.low).astype(np.int32)
        chunks = self.chunk[self._order]
        starts = np.append(0, np.flatnonzero(np.diff(chunks)) + 1)
        self._chunks, self._bounds = chunks[starts], np.append(starts, count)

    def missing_in(self, chunks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return which of `chunks`, and the reference, of each window of theirs without a slot.

        In the order of the chunks, and of the windows' first steps within a chunk.
        """
        place = np.minimum(self._chunks.searchsorted(chunks), len(self._chunks) - 1)
        known = np.flatnonzero(self._chunks[place] == chunks)
        begin = self._bounds[place[known]]
        counts = self._bounds[place[known] + 1] - begin
        behind = np.cumsum(counts) - counts
        places = self._order[np.arange(counts.sum()) + np.repeat(begin - behind, counts)]
        missing = self.slot[places] < 0
        return np.repeat(known, counts)[missing], self.first + places[missing].astype(np.int64)

    def latest_ready(self, count: int, after: int) -> Int64Array:
        """Return up to `count` ready references beyond `after`, the latest ones."""
        begin = max(after + 1 - self.first, 0)
        latest: Int64Array = np.flatnonzero(self.ready[begin:])[-count:] + (begin + self.first)
        return latest


class ReadPlan:
    """Which chunk is read next into which slots.

    `needs(first_step, steps)` names the windows of consecutive steps, `batch` (B) of each; a pure
    function.  `slots` windows can be kept (S).  `depth` windows ahead of the next step are read for
    their own sake; those up to `horizon` (at least `depth`) are kept only if a chunk was read
    anyhow: a chunk that is read later has more of use in it.
    """

    def __init__(
        self,
        needs: Callable[[int, int], Needs],
        *,
        batch: int,
        slots: int,
        depth: int,
        horizon: int,
    ) -> None:
        assert slots >= batch and horizon >= depth >= 1, "the caller sizes these"
        self._needs = needs
        self._batch = batch
        self._depth, self._horizon = depth, horizon
        self._stretch_steps = max(1, -(-horizon // (STRETCHES * batch)))
        self._free = np.arange(slots, dtype=np.int64)[::-1].copy()
        self._free_count = slots
        self._stretches: deque[Stretch] = deque()
        self._generation = 0
        self._base = self._cursor = self._start = 0
        self._open: tuple[int, int] | None = None  # steps that somebody is selecting

    @property
    def base_step(self) -> int:
        """The next step that will be used."""
        return self._base // self._batch

    def move(self, step: int) -> None:
        """Make `step` the next one: what lies before it is let go of."""
        base = step * self._batch
        known = self._stretches[-1].last if self._stretches else self._base
        if not self._base <= base <= known:
            self._restart(base)
            return
        while self._stretches and self._stretches[0].first < base:
            stretch = self._stretches[0]
            begin, end = max(self._base - stretch.first, 0), base - stretch.first
            self._drop(stretch, np.flatnonzero(stretch.ready[begin:end]) + begin)
            if stretch.last > base:
                break
            self._stretches.popleft()
        self._base = base
        self._cursor = max(self._cursor, base)

    def _restart(self, base: int) -> None:
        """Forget everything but what is being read."""
        for stretch in self._stretches:
            self._drop(stretch, np.flatnonzero(stretch.ready))
        self._stretches.clear()
        self._generation += 1
        self._open = None
        self._base = self._cursor = self._start = base

    def wanted(self) -> tuple[int, int, int] | None:
        """Return ``(generation, first step, steps)`` to select next, or None; marks it as begun."""
        end = self._stretches[-1].last if self._stretches else self._base
        if self._open is not None or end - self._base >= self._horizon:
            return None
        self._open = (end // self._batch, self._stretch_steps)
        return self._generation, *self._open

    def select(self, first_step: int, steps: int) -> Stretch:
        """Return the stretch of these steps.  Changes nothing: may run beside everything else."""
        # In pieces: drawing takes some hundred bytes for each reference in passing.
        size = max(PIECE // self._batch, 1)
        begins = range(0, steps, size)
        pieces = [self._needs(first_step + at, min(size, steps - at)) for at in begins]
        return Stretch(first_step * self._batch, pieces)

    def extend(self, generation: int, stretch: Stretch) -> None:
        """Add what `wanted` asked for; ignored if the plan has moved elsewhere since."""
        if generation == self._generation:
            self._open = None
            if stretch.last > self._base:
                self._stretches.append(stretch)

    def next_job(self, most: int) -> Job | None:
        """Return what to read next, up to `most` chunks, or None if nothing should or can be."""
        chunks = self._due_chunks(most)
        if not len(chunks):
            return None
        ranked = np.argsort(chunks)  # then the windows of each stretch come as they lie on disk
        parts = [stretch.missing_in(chunks[ranked]) for stretch in self._stretches]
        which, missing = (np.concatenate(part) for part in zip(*parts, strict=True))
        known = (missing >= self._base) & (missing < self._base + self._horizon)
        which, missing = self._spread(chunks, ranked[which[known]], missing[known])
        if len(missing) <= self._free_count:
            return self._job(chunks, missing, self._assign(missing))
        references, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number in range(len(chunks)):
            admitted = self._admit(np.sort(missing[which == number]))
            if not len(admitted):
                chunks = chunks[:number]
                break
            references.append(admitted)
            slots.append(self._assign(admitted))
        admitted = np.concatenate(references)
        order = np.argsort(admitted)
        if not len(order):
            return None
        return self._job(chunks, admitted[order], np.concatenate(slots)[order])

    def _due_chunks(self, most: int) -> Int64Array:
        """Return up to `most` chunks of windows that are due and have no slot, the soonest first.

        Not all if there are very many windows: the others are found the next time.
        """
        end = self._base + self._depth
        chunks = np.empty(0, np.int64)
        if self._first_missing():
            for stretch in self._stretches:
                part = slice(max(self._cursor - stretch.first, 0), max(end - stretch.first, 0))
                missing = np.flatnonzero(stretch.slot[part] < 0)[:SCAN]
                chunks = np.concatenate([chunks, stretch.chunk[part][missing]])
        _, first = np.unique(chunks, return_index=True)
        soonest: Int64Array = chunks[np.sort(first)[:most]]
        return soonest

    def _spread(
        self, chunks: Int64Array, which: Int64Array, missing: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Return the part of `missing` that may be taken, so that chunks run out one by one.

        At the start nearly all chunks are needed at once.  If each were read for the whole horizon,
        they would all run out at the same time, and memory would be half empty before that.
        """
        ends = self._start + (self._horizon * (chunks * GOLDEN_RATIO % 1.0)).astype(np.int64)
        first = np.full(len(chunks), np.iinfo(np.int64).max)
        np.minimum.at(first, which, missing)
        kept = (missing < ends[which]) | (first >= ends)[which]
        return which[kept], missing[kept]

    def _first_missing(self) -> bool:
        """Move the cursor to the soonest window without a slot; return whether it is due."""
        end = self._base + self._depth
        for stretch in self._stretches:
            while stretch.first <= self._cursor < min(stretch.last, end):
                begin = self._cursor - stretch.first
                missing = stretch.slot[begin : begin + SCAN] < 0
                place = int(missing.argmax())
                if missing[place]:
                    self._cursor += place
                    return self._cursor < end
                self._cursor += len(missing)
        return False

    def _admit(self, missing: Int64Array) -> Int64Array:
        """Return those of `missing` that get a slot, after letting go of windows needed later."""
        due = int(missing.searchsorted(self._base + self._depth))
        short = due - self._free_count
        if short <= 0:
            return missing[: self._free_count]
        missing = missing[:due]
        last = np.empty(0, np.int64)
        for stretch in reversed(self._stretches):
            if len(last) == short or stretch.last <= missing[0]:
                break
            if stretch.residents:
                latest = stretch.latest_ready(short - len(last), int(missing[0]))
                last = np.concatenate([latest, last])
        # The soonest of both stay.
        both = np.sort(np.concatenate([missing, last]))
        kept = len(both) - short
        if kept <= 0:
            return missing[:0]
        bound = both[kept - 1]
        for stretch in self._stretches:
            gone = last[(last > bound) & (last >= stretch.first) & (last < stretch.last)]
            if len(gone):
                self._drop(stretch, gone - stretch.first)
        admitted: Int64Array = missing[missing <= bound]
        return admitted

    def _assign(self, references: Int64Array) -> Int64Array:
        """Give `references`, sorted by stretch, their slots, and return these."""
        left = self._free_count - len(references)
        slots = self._free[left : self._free_count].copy()
        self._free_count = left
        for stretch, part in self._parts(references):
            stretch.slot[references[part] - stretch.first] = slots[part]
        return slots

    def _parts(self, references: Int64Array) -> Iterator[tuple[Stretch, slice]]:
        """Yield each stretch and its part of `references`, which are sorted by stretch."""
        end = 0
        for stretch in self._stretches:
            begin, end = end, int(np.count_nonzero(references < stretch.last))
            yield stretch, slice(begin, end)

    def _job(self, chunks: Int64Array, references: Int64Array, slots: Int64Array) -> Job:
        """Return `references`, sorted by stretch, as a job."""
        about = np.empty((3, len(references)), np.int64)
        for stretch, part in self._parts(references):
            places = references[part] - stretch.first
            known: list[npt.NDArray[Any]] = [stretch.low, stretch.real, stretch.before]
            for row, values in zip(about, known, strict=True):
                row[part] = values[places]
        order = np.argsort(about[0], kind="stable")  # quick where runs of it are in order already
        low, real, before = about[:, order]
        return Job(
            chunks=chunks,
            references=references[order],
            places=Places(low=low, real=real, before=before, slots=slots[order]),
            generation=self._generation,
        )

    def finish(self, job: Job) -> None:
        """Say that the windows of `job` are in their slots; those no longer wanted free theirs."""
        wanted = job.references >= self._base
        if job.generation != self._generation:
            wanted[:] = False
        self._give_back(job.places.slots[~wanted])
        references = job.references[wanted]
        for stretch in self._stretches:
            own = references[(references >= stretch.first) & (references < stretch.last)]
            stretch.ready[own - stretch.first] = True
            stretch.residents += len(own)

    def ready_windows(self, first_step: int, steps: int) -> Ready | None:
        """Return these steps' windows, (steps * B,), or None while one is missing."""
        begin, end = first_step * self._batch, (first_step + steps) * self._batch
        assert begin == self._base and end - begin <= self._depth, "only what is read ahead comes"
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        for stretch in self._stretches:
            part = slice(max(begin - stretch.first, 0), max(end - stretch.first, 0))
            if not stretch.ready[part].all():
                return None
            parts.append((stretch.slot[part], stretch.low[part]))
        if sum(len(slots) for slots, *_ in parts) < end - begin:
            return None
        slots, low = (np.concatenate(part, dtype=np.int64) for part in zip(*parts, strict=True))
        return Ready(slots=slots, low=low)

    def _drop(self, stretch: Stretch, places: Int64Array) -> None:
        """Let go of ready windows of a stretch."""
        self._give_back(stretch.slot[places])
        stretch.slot[places] = -1
        stretch.ready[places] = False
        stretch.residents -= len(places)

    def _give_back(self, slots: npt.NDArray[Any]) -> None:
        count = self._free_count + len(slots)
        self._free[self._free_count : count] = slots
        self._free_count = count
