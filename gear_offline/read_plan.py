"""What to read from disk next, and what to keep: the plan of the disk tier.

Selection is a pure function of (seed, step), so the windows of the coming steps are known.  Shards
are cut into chunks of consecutive steps, and every window belongs to the chunk that it begins in.
Whenever a window is needed soon and not here, its chunk is read, and all windows that begin in it
and are needed within the known horizon are taken from that one read.  What is kept are windows,
packed, each in a slot; a slot is free again once its window was used.

Where there are fewer slots than windows, those needed soonest stay and those needed last go
(Belady's rule).  A window that went is read again when its time comes.

Nothing is read here and nothing is locked: `gear_offline.disk_reader` does both.

Words: a *reference* q is a window of the stream, ``q = step * B + slot of the batch``, so that the
order of q is the order of use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
SCAN = 4096  # references looked at in one go for the next one that is missing
STRETCHES = 6  # parts of the horizon; each is sorted by chunk once
GOLDEN_RATIO = 0.6180339887498949  # its multiples, modulo 1, are evenly spread
REFERENCE_BYTES = 48  # of the plan, for each reference of the horizon, at most


@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """Windows of consecutive steps, in the order of use, (n,) int64 each.

    Attributes
    ----------
    low, real
        First step of the window in the table, and how many of its steps exist.
    chunk
        The chunk in which it begins.
    """

    low: Int64Array
    real: Int64Array
    chunk: Int64Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One chunk to read, and the windows to take from it, in the order of their first steps.

    Attributes
    ----------
    chunk
        Number of the chunk.
    references, slots, low, real
        (m,) int64: which windows, where they go, their first steps and real steps.
    generation
        Of the plan that made it.
    """

    chunk: int
    references: Int64Array
    slots: Int64Array
    low: Int64Array
    real: Int64Array
    generation: int


class Stretch:
    """Some consecutive steps of the stream, sorted by chunk."""

    def __init__(self, first: int, needs: Needs) -> None:
        count = len(needs.low)
        self.first, self.last = first, first + count
        self.low, self.real, self.chunk = needs.low, needs.real.astype(np.int32), needs.chunk
        self.slot = np.full(count, -1, np.int32)
        self.ready = np.zeros(count, bool)
        self.residents = 0  # ready ones
        # Stable: within a chunk the order of use stays.
        self._order = np.argsort(needs.chunk, kind="stable").astype(np.int32)
        self._chunks, starts = np.unique(needs.chunk[self._order], return_index=True)
        self._bounds = np.append(starts, count)

    def missing_in(self, chunk: int) -> Int64Array:
        """Return the references of `chunk` that have no slot, in the order of use."""
        place = int(self._chunks.searchsorted(chunk))
        if place == len(self._chunks) or self._chunks[place] != chunk:
            return np.empty(0, np.int64)
        mine = self._order[self._bounds[place] : self._bounds[place + 1]]
        found: Int64Array = self.first + mine[self.slot[mine] < 0].astype(np.int64)
        return found

    def latest_ready(self, count: int, after: int) -> Int64Array:
        """Return up to `count` ready references beyond `after`, the latest ones."""
        begin = max(after + 1 - self.first, 0)
        found: Int64Array = np.flatnonzero(self.ready[begin:])[-count:] + (begin + self.first)
        return found


class ReadPlan:
    """Which chunk is read next into which slots.

    Parameters
    ----------
    needs
        ``needs(first_step, steps)`` names the windows of consecutive steps; a pure function.
    batch
        Windows of a step, B.
    slots
        Windows that can be kept, S.
    depth
        Windows ahead of the next step that are read for their own sake.  Others are kept only if
        a chunk was read anyhow: a chunk that is read later has more of use in it.
    horizon
        Windows ahead that are known, at least `depth`.
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
        self.evicted = 0  # windows that were let go of before their use

    @property
    def base_step(self) -> int:
        """The next step that will be used."""
        return self._base // self._batch

    @property
    def free_slots(self) -> int:
        return self._free_count

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
            done = np.flatnonzero(stretch.ready[begin:end]) + begin
            self._drop(stretch, done)
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
        return Stretch(first_step * self._batch, self._needs(first_step, steps))

    def extend(self, generation: int, stretch: Stretch) -> None:
        """Add what `wanted` asked for; ignored if the plan has moved elsewhere since."""
        if generation == self._generation:
            self._open = None
            if stretch.last > self._base:
                self._stretches.append(stretch)

    def next_job(self) -> Job | None:
        """Return what to read next, or None if nothing should be or can be read now."""
        needed = self._first_missing()
        if needed is None:
            return None
        stretch, place = needed
        if stretch.first + place >= self._base + self._depth:
            return None
        chunk = int(stretch.chunk[place])
        missing = np.concatenate([part.missing_in(chunk) for part in self._stretches])
        known = missing[(missing >= self._base) & (missing < self._base + self._horizon)]
        references = self._admit(self._spread(chunk, known))
        return self._job(chunk, references) if len(references) else None

    def _spread(self, chunk: int, missing: Int64Array) -> Int64Array:
        """Return the part of `missing` that may be taken, so that chunks run out one by one.

        At the start nearly all chunks are needed at once.  If each were read for the whole horizon,
        they would all run out at the same time, and memory would be half empty before that.
        """
        end = self._start + int(self._horizon * (chunk * GOLDEN_RATIO % 1.0))
        return missing[missing < end] if missing[0] < end else missing

    def _first_missing(self) -> tuple[Stretch, int] | None:
        """Return the soonest window without a slot that is due, by its place in its stretch."""
        for stretch in self._stretches:
            while stretch.first <= self._cursor < stretch.last:
                begin = self._cursor - stretch.first
                missing = stretch.slot[begin : begin + SCAN] < 0
                place = int(missing.argmax())
                if missing[place]:
                    self._cursor += place
                    return stretch, begin + place
                self._cursor += len(missing)
        return None

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
                found = stretch.latest_ready(short - len(last), int(missing[0]))
                last = np.concatenate([found, last])
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
                self.evicted += len(gone)
        admitted: Int64Array = missing[missing <= bound]
        return admitted

    def _job(self, chunk: int, references: Int64Array) -> Job:
        """Give `references` their slots."""
        low, real = np.empty_like(references), np.empty_like(references)
        left = self._free_count - len(references)
        slots = self._free[left : self._free_count].copy()
        self._free_count = left
        for stretch in self._stretches:
            begin, end = references.searchsorted([stretch.first, stretch.last])
            if begin < end:
                places = references[begin:end] - stretch.first
                low[begin:end], real[begin:end] = stretch.low[places], stretch.real[places]
                stretch.slot[places] = slots[begin:end]
        order = np.argsort(low, kind="stable")
        return Job(
            chunk=chunk,
            references=references[order],
            slots=slots[order],
            low=low[order],
            real=real[order],
            generation=self._generation,
        )

    def finish(self, job: Job) -> None:
        """Say that the windows of `job` are in their slots; those no longer wanted free theirs."""
        wanted = job.references >= self._base
        if job.generation != self._generation:
            wanted[:] = False
        self._give_back(job.slots[~wanted])
        references = job.references[wanted]
        for stretch in self._stretches:
            mine = references[(references >= stretch.first) & (references < stretch.last)]
            stretch.ready[mine - stretch.first] = True
            stretch.residents += len(mine)

    def slots_of(self, first_step: int, steps: int) -> Int64Array | None:
        """Return the slots of these steps' windows, (steps * B,), or None while one is missing."""
        begin, end = first_step * self._batch, (first_step + steps) * self._batch
        assert begin == self._base and end - begin <= self._depth, "only what is read ahead comes"
        found = []
        for stretch in self._stretches:
            part = slice(max(begin - stretch.first, 0), max(end - stretch.first, 0))
            if not stretch.ready[part].all():
                return None
            found.append(stretch.slot[part])
        slots = np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)
        return slots if len(slots) == end - begin else None

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
