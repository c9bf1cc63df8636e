"""The next reads of the disk tier, and the threads that read ahead of use.

Selection is a pure function of (seed, step), so the windows of the coming steps are known.  They
are read in blocks: those of consecutive steps, which fill most of the memory, in the order of their
place on the disk, forth and back, so that a cache of a server's files has what comes first.  A
window is kept, in a slot of its own, until it was used; the next block takes the slots that become
free.  At the start, and after a jump, blocks are small, so that the first batches come soon, and
each is four times as large as the one before it.

Words: a *reference* q is a window of the stream, ``q = step * B + slot of the batch``.  The order
of q is the order of use.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from gear_offline.batches.tables.decoders import SharedFrames
from gear_offline.batches.tables.window_reader import Places, WindowReader
from gear_offline.core.remote import Answer, leave_servers_if
from gear_offline.core.types import Array, Int64Array
from gear_offline.errors import GearError

REFERENCE_BYTES = 128  # of the plan, for each slot, at most
JOBS = 64  # of a block: each takes slots and reads, while others do
DECODE_JOBS = 2  # of a block, for each thread that decodes: larger ones share groups of pictures
GROWTH = 4  # of blocks after a start
STOP_SECONDS = 5.0  # at most for threads that read: a server may not answer for minutes
T = TypeVar("T")


class DrawnWindows:
    """Consecutive references, in the order of use: first steps, steps, steps in front, (n,)."""

    def __init__(self, first: int, low: Int64Array, real: Array, before: Array) -> None:
        self.first, self.last, self.size = first, first + len(low), len(low)
        self.low, self.real, self.before = low, real.astype(np.int32), before.astype(np.int32)
        self.order = np.argsort(low, kind="stable")  # on the disk
        self.slots, self.ready = np.full(self.size, -1), np.zeros(self.size, bool)
        self.edges = [0, self.size]  # of jobs, in `order`
        self.begun = self.used = 0  # so many were given to jobs, of `order`; were used
        self.is_backward = False  # whether jobs take `order` from its end


Draw = Callable[[int, int], DrawnWindows]  # of a first step and a number of steps
Changes = Callable[[Int64Array], Int64Array]  # of rising first steps: places of new groups


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Windows to read."""

    block: DrawnWindows
    entries: Int64Array  # of the block, in the order of `places`
    places: Places


class ReadPlan:
    """The next windows to read, and their slots.  Nothing is read here and nothing is locked.

    `draw`, a pure function, gives the windows of consecutive steps, B (`batch`) of each; it may run
    beside everything else.  A window has its first step in the table, its number of steps, and the
    number of the episode's steps in front of it for stacks.  `slots` windows can be kept (S); up to
    `handout` are asked for at a time.

    Where windows take long, being decoded by so many `decoders`, a block fills half of the memory:
    it is there when the one before it is used up.  Its jobs are few, and end where groups of
    pictures do, for which `changes` gives the places in (n,) rising first steps.
    """

    def __init__(
        self,
        draw: Draw,
        *,
        batch: int,
        slots: int,
        handout: int,
        decoders: int = 0,
        changes: Changes | None = None,
    ) -> None:
        assert slots >= handout + batch and handout >= batch, "the caller sizes these"
        self.draw, self._batch, self._handout, self._changes = draw, batch, handout, changes
        self._most = slots - handout  # of a block, so a take may go on in the next block
        if decoders:
            self._most = max(self._most // 2, batch)
        self._jobs = DECODE_JOBS * decoders or JOBS
        self._free, self._free_count = np.arange(slots)[::-1].copy(), slots
        self._blocks: deque[DrawnWindows] = deque()
        self._base = self._end = 0  # the next reference that will be used; the end of those known
        self._size, self._drawing = handout, False  # of the next block
        self._is_backward = False

    def move(self, step: int) -> None:
        """Make `step` the next one and release the windows before it."""
        base = step * self._batch
        within = self._base <= base <= self._end
        for block in self._blocks:
            used = min(base - block.first, block.size) if within else block.size
            gone = np.arange(block.used, max(used, block.used))
            block.used = max(used, block.used)  # what is being read is dropped when it comes
            self._give_back(block.slots[gone[block.ready[gone]]])
        while self._blocks and self._blocks[0].used == self._blocks[0].size:
            self._blocks.popleft()
        self._base = base
        if not within:
            self._end, self._size, self._drawing = base, self._handout, False

    def next_block(self) -> tuple[int, int] | None:
        """Return ``(first step, steps)`` of the block to draw next, or None; marks it as begun."""
        if self._drawing or sum(block.begun < block.size for block in self._blocks) > 1:
            return None
        self._drawing = True
        most = min(self._size, self._most)
        return self._end // self._batch, max(most // self._batch, 1)

    def extend(self, block: DrawnWindows) -> None:
        """Add a block that `next_block` asked for, unless the plan has moved elsewhere since."""
        if block.first == self._end:
            self._blocks.append(block)
            block.edges = self._edges(block)
            block.is_backward, self._is_backward = self._is_backward, not self._is_backward
            self._end, self._size, self._drawing = block.last, GROWTH * self._size, False

    def next_job(self) -> Job | None:
        """Return the next job to read, or None if nothing should or can be read."""
        for block in self._blocks:
            while block.begun < block.size:
                edges = block.edges
                if block.is_backward:
                    at = bisect_left(edges, block.size - block.begun)
                else:
                    at = bisect_right(edges, block.begun)
                begin, end = edges[at - 1 : at + 1]
                entries = block.order[begin:end]
                entries = entries[entries >= block.used]
                if len(entries) > self._free_count:
                    return None
                block.begun += end - begin
                if len(entries):
                    return self._job(block, entries)
        return None

    def _edges(self, block: DrawnWindows) -> list[int]:
        """Part a block into jobs."""
        most, edges = max(block.size // self._jobs, 1), [0]
        changes = np.zeros(0, np.int64)
        if self._changes is not None:
            changes = self._changes(block.low[block.order])
        while (begin := edges[-1]) < block.size:
            end = min(begin + most, block.size)
            at = int(changes.searchsorted(end, side="right")) - 1
            edges.append(int(changes[at]) if at >= 0 and changes[at] > begin else end)
        return edges

    def _job(self, block: DrawnWindows, entries: Int64Array) -> Job:
        """Give windows their slots."""
        self._free_count -= len(entries)
        slots = self._free[self._free_count : self._free_count + len(entries)].copy()
        block.slots[entries] = slots
        places = Places(
            low=block.low[entries],
            real=block.real[entries].astype(np.int64),
            before=block.before[entries].astype(np.int64),
            slots=slots,
        )
        return Job(block=block, entries=entries, places=places)

    def finish(self, job: Job) -> None:
        """Mark the windows of `job` as read; those no longer wanted free their slots."""
        unused = job.entries >= job.block.used
        self._give_back(job.places.slots[~unused])
        job.block.ready[job.entries[unused]] = True

    def ready_windows(self, first_step: int, steps: int) -> tuple[Int64Array, Int64Array] | None:
        """Return slots and first steps of these steps' windows, (steps * B,) each.

        None while one is missing.
        """
        begin, end = first_step * self._batch, (first_step + steps) * self._batch
        assert begin == self._base and end - begin <= self._handout, "only what is read ahead comes"
        ranges = [
            (block, slice(max(begin - block.first, 0), end - block.first))
            for block in self._blocks
            if block.first < end
        ]
        if end > self._end or not all(block.ready[entries].all() for block, entries in ranges):
            return None
        slots = np.concatenate([block.slots[entries] for block, entries in ranges])
        return slots, np.concatenate([block.low[entries] for block, entries in ranges])

    def _give_back(self, slots: Array) -> None:
        count = self._free_count + len(slots)
        self._free[self._free_count : count] = slots
        self._free_count = count


class ReadAhead:
    """Threads that read by a plan; `targets` and `shared` as in `WindowReader.tools`.

    A thread takes a job, some megabytes, so it needs the lock a few hundred times a second, however
    many windows there are.  The threads know nothing of the loader: it can be dropped while they
    wait.  Their first error ends them all and is raised where batches are asked for.  The plan is
    used under this object's lock only.  The threads start with the first `take`.
    """

    def __init__(
        self,
        windows: WindowReader,
        plan: ReadPlan,
        targets: Sequence[Array],
        shared: SharedFrames | None,
        *,
        threads: int,
    ) -> None:
        self._windows, self._plan, self._targets = windows, plan, tuple(targets)
        self._shared = shared
        # One lock.  A thread that has read looks for more itself; another one is woken when the
        # plan has moved on, and wakes the next if it finds something.  `with` a condition, a Ctrl-C
        # may come between taking its lock and the block that gives it back: who asks takes `_lock`.
        self._lock = lock = threading.RLock()
        self._changed, self._arrived = threading.Condition(lock), threading.Condition(lock)
        self._error: BaseException | None = None
        self._stopped = False
        # Daemons: the interpreter waits for other threads before it runs what stops these.
        self._threads, self._count = list[threading.Thread](), threads
        # One thread for all takes: to start one takes milliseconds where decoders have all cores.
        self._takes = SimpleQueue[Callable[[], None] | None]()
        self._takers, self._turn = list[threading.Thread](), threading.Lock()  # who serves has it
        # In which they run, from their start on; a fork would share shared memory before that too.
        self._process = None if shared is None else os.getpid()

    def take(self, first_step: int, steps: int) -> tuple[Int64Array, Int64Array]:
        """Wait for the windows of these steps; return their slots and first steps, (steps * B,).

        They stay until `move`.  Only what `begin` runs calls this: no Ctrl-C comes there.
        """
        with self._changed:
            while (number := len(self._threads)) < self._count:
                thread = threading.Thread(
                    target=self._work, name=f"gear-disk-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._plan.move(first_step)
            self._changed.notify()
            while (ready := self._plan.ready_windows(first_step, steps)) is None:
                self._raise()
                self._arrived.wait()
            return ready

    def move(self, step: int) -> None:
        """Release the windows before `step`, which were used."""
        with self._changed:
            self._plan.move(step)
            self._changed.notify()

    def begin(self, work: Callable[[], T]) -> Answer[T]:
        """Begin work that takes what is read, in a thread of its own, behind what was begun."""
        answer = Answer(work)
        with self._lock:
            self._raise()
            self._process = os.getpid()
            if not self._takers:  # an interruption may leave one that comes later, or never
                threading.Thread(target=self._serve, name="gear-gather", daemon=True).start()
            self._takes.put(answer.make)
        return answer

    def stop(self) -> None:
        """End the threads and wait for them, but no server's answer; can be repeated."""
        if self._is_copy():
            return
        with self._lock:
            self._stopped = True
            self._takes.put(None)
            self._changed.notify_all()
            self._arrived.notify_all()
        end, threads = time.monotonic() + STOP_SECONDS, [*self._threads, *self._takers]
        if threading.current_thread() not in threads:  # where a cycle's end may be noticed
            for thread in threads:
                thread.join(max(end - time.monotonic(), 0.0))

    def check(self, *, ahead: bool = False) -> None:
        """Raise as `take` does if reading cannot go on; with `ahead` also in a forked copy."""
        if not self._is_copy():
            self._raise()
        elif ahead:
            problem = "this process was forked from the one whose threads read ahead for the loader"
            raise GearError("LOADER_STATE", problem, remedy="make the loader here")

    def _is_copy(self) -> bool:
        """True if a fork left the threads and their memory behind; one may have held the lock."""
        return self._process not in (None, os.getpid())

    def _raise(self) -> None:
        if self._stopped:
            raise GearError(
                "LOADER_STATE", "the loader was closed", remedy="make another one to go on"
            )
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        if not self._turn.acquire(blocking=False):
            return
        self._takers.append(threading.current_thread())
        while (run := self._takes.get()) is not None:
            run()
            del run  # which refers to what was gathered

    def _work(self) -> None:
        leave_servers_if(lambda: self._stopped)
        try:
            with self._windows.tools(self._targets, self._shared) as tools:
                while (task := self._next()) is not None:
                    if isinstance(task, Job):
                        self._windows.read(task.places, self._targets, tools)
                        with self._changed:
                            self._plan.finish(task)
                            self._arrived.notify_all()
                    else:
                        block = self._plan.draw(*task)
                        with self._changed:
                            self._plan.extend(block)
                            self._changed.notify()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
                self._arrived.notify_all()

    def _next(self) -> Any:
        """Wait for work and return it: a block to draw or a job; None at the end."""
        with self._changed:
            while not self._stopped and self._error is None:
                task = self._plan.next_block() or self._plan.next_job()
                if task is not None:
                    self._changed.notify()
                    return task
                self._changed.wait()
            return None
