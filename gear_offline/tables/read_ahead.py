"""The next reads of the disk tier, and the threads that read ahead of use.

Selection is a pure function of (seed, step), so the windows of the coming steps are known.  A sweep
goes over the shards from their first byte to their last, again and again, and takes along all known
windows where it passes.  A window is kept, in a slot of its own, until it was used.

In one sweep memory of S slots serves about 1.5 S windows: on average they are taken 0.8 S windows
before their use.  At the start, and after a jump, few windows are known, so that the first batches
come soon, and twice as many with each sweep.  What is due while the slots have no room for a sweep
is read by itself.

Words: a *reference* q is a window of the stream, ``q = step * B + slot of the batch``.  The order
of q is the order of use.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gear_offline.core.types import Array, Int64Array
from gear_offline.errors import GearError
from gear_offline.tables.window_reader import Places, WindowReader

PIECE = 4096  # references drawn in one go
STRETCHES = 6  # parts of the horizon; each is sorted by place on the disk once
REFERENCE_BYTES = 48  # of the plan, for each reference of the horizon, at most
WORTH_SHARE = 16  # of the slots: a read for fewer windows than one in so many waits for room

Needs = Callable[[int, int], tuple[Int64Array, Int64Array, Int64Array]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Windows to read."""

    references: Int64Array  # in the order of `places`
    places: Places
    generation: int  # of the plan: those before a jump are dropped


class Stretch:
    """Some consecutive references, sorted by where their windows begin."""

    def __init__(self, first: int, windows: Array) -> None:
        self.windows, self.first, self.last = windows, first, first + windows.shape[1]
        order = np.argsort(windows[0])
        self.low, self.references = windows[0, order], first + order
        self.missing = len(order)  # without a slot


class ReadPlan:
    """The next windows to read, and their slots.  Nothing is read here and nothing is locked.

    `needs(first_step, steps)`, a pure function, names the windows of consecutive steps, B (`batch`)
    of each.  A window has its first step in the table, its number of steps, and the number of the
    episode's steps in front of it for stacks.  `slots` windows can be kept (S), `horizon` are known
    ahead.  Those of the next `depth`, at most S, are read by themselves if need be.  A job of the
    sweep covers `sweep_steps` of the table.
    """

    def __init__(
        self, needs: Needs, *, batch: int, slots: int, depth: int, horizon: int, sweep_steps: int
    ) -> None:
        assert slots >= depth >= batch and horizon >= depth, "the caller sizes these"
        self._needs, self._batch, self._slots = needs, batch, slots
        self._depth, self._horizon, self._sweep_steps = depth, horizon, sweep_steps
        self._reach = depth  # references that are known ahead: it doubles with each sweep
        self._free = np.arange(slots)[::-1].copy()
        self._free_count = slots
        # Of each known reference q, at q % capacity: its window, its slot or -1, if it was read.
        capacity = horizon + self._stretch_steps(horizon) * batch
        self._low = np.zeros(capacity, np.int64)
        self._real, self._before = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
        self._slot, self._ready = np.full(capacity, -1, np.int32), np.zeros(capacity, bool)
        self._stretches: deque[Stretch] = deque()
        self._base = self._end = 0  # the next reference that will be used; the end of those known
        self._place = 0  # of the sweep: the step of the table that it has come to
        self._generation, self._selecting = 0, False

    @property
    def base_step(self) -> int:
        """The next step that will be used."""
        return self._base // self._batch

    def move(self, step: int) -> None:
        """Make `step` the next one and release the windows before it."""
        base = step * self._batch
        known = self._base <= base <= self._end
        passed = self._entries(self._base, base if known else self._end)
        gone = passed[self._ready[passed]]
        self._give_back(self._slot[gone])
        self._ready[gone] = False
        skipped = self._base + np.flatnonzero(self._slot[passed] < 0)
        self._count_out(skipped)
        if not known:  # what is being read is dropped when it comes
            self._stretches.clear()
            self._end, self._selecting, self._reach = base, False, self._depth
            self._generation += 1
        while self._stretches and self._stretches[0].last <= base:
            self._stretches.popleft()
        self._base = base

    def wanted(self) -> tuple[int, int, int] | None:
        """Return ``(generation, first step, steps)`` to select next, or None; marks it as begun."""
        if self._selecting or self._end - self._base >= self._reach:
            return None
        self._selecting = True
        steps = self._stretch_steps(self._reach)
        return self._generation, self._end // self._batch, steps

    def select(self, first_step: int, steps: int) -> Stretch:
        """Return the stretch of these steps.  Changes nothing: may run beside everything else."""
        # In pieces: drawing takes some hundred bytes for each reference in passing.
        size = max(PIECE // self._batch, 1)
        pieces = [
            np.stack(self._needs(first_step + at, min(size, steps - at)))
            for at in range(0, steps, size)
        ]
        return Stretch(first_step * self._batch, np.concatenate(pieces, axis=1))

    def extend(self, generation: int, stretch: Stretch) -> None:
        """Add the stretch that `wanted` asked for, unless the plan has moved elsewhere since."""
        if generation != self._generation:
            return
        self._selecting = False
        entries = self._entries(stretch.first, stretch.last)
        self._low[entries], self._real[entries], self._before[entries] = stretch.windows
        del stretch.windows  # they would take as much memory as all the rest
        self._slot[entries], self._ready[entries] = -1, False
        self._end = stretch.last
        self._stretches.append(stretch)

    def next_job(self) -> Job | None:
        """Return the next job to read, or None if nothing should or can be read."""
        due = self._entries(self._base, min(self._base + self._depth, self._end))
        missing = self._base + np.flatnonzero(self._slot[due] < 0)
        # Whatever the sweep takes along, there is room for what is due.
        references = self._sweep(self._free_count - (self._depth - len(due) + len(missing)))
        if not len(references):
            references = missing[: self._free_count]
        return self._job(references) if len(references) else None

    def _sweep(self, room: int) -> Int64Array:
        """Return up to `room` references without a slot that the sweep comes to next."""
        while waiting := [stretch for stretch in self._stretches if stretch.missing]:
            later = [s.low[s.low.searchsorted(self._place) :] for s in waiting]
            begins = [low[0] for low in later if len(low)]
            if not begins:  # at the end: once more from the beginning
                self._place, self._reach = 0, min(2 * self._reach, self._horizon)
                continue
            begin = min(begins)
            end = begin + self._sweep_steps
            parts = [s.references[slice(*s.low.searchsorted([begin, end]))] for s in waiting]
            references = np.concatenate(parts)
            unread = self._slot[references % len(self._slot)] < 0
            references = references[unread & (references >= self._base)]
            if room < min(len(references), max(self._slots // WORTH_SHARE, 1)):
                break
            if len(references) > room:
                low = self._low[references % len(self._slot)]
                order = np.argsort(low, kind="stable")
                references, end = references[order[:room]], low[order[room]]
            self._place = end
            if len(references):
                return references
        return np.empty(0, np.int64)

    def _job(self, references: Int64Array) -> Job:
        """Give references their slots, and return them as a job, sorted by place on the disk."""
        entries = references % len(self._slot)
        order = np.argsort(self._low[entries], kind="stable")
        references, entries = references[order], entries[order]
        self._free_count -= len(references)
        slots = self._free[self._free_count : self._free_count + len(references)].copy()
        self._slot[entries] = slots
        self._count_out(references)
        places = Places(
            low=self._low[entries],
            real=self._real[entries].astype(np.int64),
            before=self._before[entries].astype(np.int64),
            slots=slots,
        )
        return Job(references=references, places=places, generation=self._generation)

    def finish(self, job: Job) -> None:
        """Mark the windows of `job` as read; those no longer wanted free their slots."""
        wanted = (job.references >= self._base) & (job.generation == self._generation)
        self._give_back(job.places.slots[~wanted])
        self._ready[job.references[wanted] % len(self._ready)] = True

    def ready_windows(self, first_step: int, steps: int) -> tuple[Int64Array, Int64Array] | None:
        """Return slots and first steps of these steps' windows, (steps * B,) each.

        None while one is missing.
        """
        begin, end = first_step * self._batch, (first_step + steps) * self._batch
        assert begin == self._base and end - begin <= self._depth, "only what is read ahead comes"
        entries = self._entries(begin, end)
        if end > self._end or not self._ready[entries].all():
            return None
        return self._slot[entries].astype(np.int64), self._low[entries]

    def _count_out(self, references: Int64Array) -> None:
        """Leave these out of the sweep from now on."""
        for stretch in self._stretches:
            own = (references >= stretch.first) & (references < stretch.last)
            stretch.missing -= int(np.count_nonzero(own))

    def _stretch_steps(self, reach: int) -> int:
        return max(1, -(-reach // (STRETCHES * self._batch)))

    def _entries(self, first: int, last: int) -> Int64Array:
        return np.arange(first, last) % len(self._slot)

    def _give_back(self, slots: Array) -> None:
        count = self._free_count + len(slots)
        self._free[self._free_count : count] = slots
        self._free_count = count


class ReadAhead:
    """Threads that read by a plan; `targets` as in `WindowReader.read`.

    A thread takes a job, some megabytes, so it needs the lock a few hundred times a second, however
    many windows there are.  The threads know nothing of the loader: it can be dropped while they
    wait.  Their first error ends them all and is raised where batches are asked for.  The plan is
    used under this object's lock only.  The threads start with the first `take`.
    """

    def __init__(
        self, windows: WindowReader, plan: ReadPlan, targets: Sequence[Array], *, threads: int
    ) -> None:
        self._windows, self._plan, self._targets = windows, plan, tuple(targets)
        # One lock.  A thread that has read looks for more itself; another one is woken when the
        # plan has moved on, and wakes the next if it finds something.
        lock = threading.RLock()
        self._changed, self._arrived = threading.Condition(lock), threading.Condition(lock)
        self._error: BaseException | None = None
        self._stopped = False
        # Daemons: the interpreter waits for other threads before it runs what stops these.
        self._threads = [
            threading.Thread(target=self._work, name=f"gear-disk-{number}", daemon=True)
            for number in range(threads)
        ]
        self._process: int | None = None  # in which they run, from their start on

    def take(self, first_step: int, steps: int) -> tuple[Int64Array, Int64Array]:
        """Wait for the windows of these steps; return their slots and first steps, (steps * B,).

        They stay until `move`.  An interruption of the waiting costs nothing: call again.
        """
        self.check(ahead=True)
        with self._changed:
            self._process = os.getpid()
            for thread in self._threads:
                if thread.ident is None:  # an interruption may have left some to be started
                    thread.start()
            if self._plan.base_step != first_step:
                self._plan.move(first_step)
            self._changed.notify()
            while (ready := self._plan.ready_windows(first_step, steps)) is None:
                self._arrived.wait()
                self._raise()
            return ready

    def move(self, step: int) -> None:
        """Release the windows before `step`, which were used."""
        with self._changed:
            self._plan.move(step)
            self._changed.notify()

    def stop(self) -> None:
        """End the threads and wait for them; can be repeated."""
        if self._is_copy():
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._arrived.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def check(self, *, ahead: bool = False) -> None:
        """Raise as `take` does if reading cannot go on; with `ahead` also in a forked copy.

        Without the lock: Ctrl-C may come between taking it and the block that gives it back.
        """
        if not self._is_copy():
            self._raise()
        elif ahead:
            raise GearError(
                "LOADER_STATE",
                "this process was forked from the one whose threads read ahead for the loader",
                remedy="make the loader here, or fork before its first batch is asked for",
            )

    def _is_copy(self) -> bool:
        """True if a fork left the threads behind, of which one may have held the lock."""
        return self._process not in (None, os.getpid())

    def _raise(self) -> None:
        if self._stopped:
            raise GearError(
                "LOADER_STATE", "the loader was closed", remedy="make another one to go on"
            )
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            buffer = self._windows.buffer()
            while (task := self._next()) is not None:
                if isinstance(task, Job):
                    self._windows.read(task.places, self._targets, buffer)
                    with self._changed:
                        self._plan.finish(task)
                        self._arrived.notify_all()
                else:
                    generation, first_step, steps = task
                    stretch = self._plan.select(first_step, steps)
                    with self._changed:
                        self._plan.extend(generation, stretch)
                        self._changed.notify()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
                self._arrived.notify_all()

    def _next(self) -> Any:
        """Wait for work and return it: steps to select or a job; None at the end."""
        with self._changed:
            while not self._stopped and self._error is None:
                task = self._plan.wanted() or self._plan.next_job()
                if task is not None:
                    self._changed.notify()
                    return task
                self._changed.wait()
            return None
