"""Threads that read windows from shards into slots, ahead of their use.

A thread takes a job from the plan, some megabytes of chunks, and has a
`tables.window_reader.WindowReader` bring its windows into their slots.  So it needs the lock
and the interpreter a few hundred times a second, however many windows there are.

The threads know nothing of the loader: it can be dropped while they wait.  Their first error ends
them all and is raised where batches are asked for.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gear_offline.errors import GearError
from gear_offline.tables.read_plan import Held, Job, ReadPlan, Stretch
from gear_offline.tables.window_reader import Array, ReadBuffer, Reading, WindowReader


@dataclass(frozen=True, kw_only=True)
class DiskCounts:
    """What was done since the loader was made.

    Attributes
    ----------
    read_bytes, reads
        From disk: whole pages, and parts of files.
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
    threads, buffers
        That read, and jobs that each has under way.
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
        buffers: int,
        release: Callable[[], None],
    ) -> None:
        self._windows, self._plan, self._targets = windows, plan, tuple(targets)
        self._release, self._buffers = release, buffers
        # One lock.  A thread that has read looks for more itself; another one is woken when the
        # plan has moved on, and wakes the next if it finds something.
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
        self._process: int | None = None  # in which they run, from their start on

    def take(self, first_step: int, steps: int) -> Held:
        """Wait until the windows of these steps are here, and return them, (steps * B,).

        They stay until `move`.

        Raises
        ------
        GearError
            What a thread met, or ``LOADER_CLOSED``.
        """
        with self._changed:
            self._raise()
            if self._process is None:
                self._process = os.getpid()
                for thread in self._threads:
                    thread.start()
            if self._plan.base_step != first_step:
                self._plan.move(first_step)
                self._changed.notify()
            while (held := self._plan.held(first_step, steps)) is None:
                self._arrived.wait()
                self._raise()
            return held

    def move(self, step: int) -> None:
        """Say that what lies before `step` was used."""
        with self._changed:
            self._plan.move(step)
            self._changed.notify()

    def counts(self) -> tuple[int, int, int]:
        """Return bytes read, calls, and windows that were let go of."""
        with self._changed:
            return self._read_bytes, self._reads, self._plan.evicted

    def stop(self) -> None:
        """End the threads and wait for them; can be repeated."""
        if self._is_copy():
            return
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            self._changed.notify_all()
            self._arrived.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._release()

    def check(self, *, ahead: bool = False) -> None:
        """Raise as `take` does if there is no going on, if wanted with what is read `ahead`.

        Without the lock: Ctrl-C may come between taking it and the block that gives it back.
        """
        if not self._is_copy():
            self._raise()
        elif ahead:
            raise GearError(
                "LOADER_CLOSED",
                "this process was forked from the one whose threads read ahead for the loader",
                remedy="make the loader here, or fork before its first batch is asked for",
            )

    def _is_copy(self) -> bool:
        """Whether a fork left the threads behind, of which one may have held the lock."""
        return self._process not in (None, os.getpid())

    def _raise(self) -> None:
        if self._stopped:
            raise GearError(
                "LOADER_CLOSED", "the loader was closed", remedy="make another one to go on"
            )
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        buffers = list[ReadBuffer]()
        try:
            for _ in range(self._buffers):
                buffers.append(self._windows.buffer())
            self._go_on(buffers)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
                self._arrived.notify_all()
        finally:
            for buffer in buffers:
                buffer.close()

    def _go_on(self, buffers: Sequence[ReadBuffer]) -> None:
        """Do what there is to do, until the end.

        While the windows of one job are copied, or somebody else has the processor or the lock,
        the disk works on the jobs that were begun behind it.
        """
        free, begun = deque(buffers), deque[tuple[Job, Reading]]()
        try:
            while True:
                task = self._next(wait=not begun) if free else None
                if isinstance(task, Job):
                    begun.append((task, self._windows.begin(task, free[0])))
                    free.popleft()
                elif task is not None:
                    generation, first_step, steps = task
                    self._extend(generation, self._plan.select(first_step, steps))
                elif begun:
                    job, reading = begun[0]
                    self._finish(job, reading)
                    begun.popleft()
                    free.append(reading.buffer)
                else:
                    return
        finally:
            for _, reading in begun:
                reading.close()

    def _next(self, *, wait: bool) -> Job | tuple[int, int, int] | None:
        """Return something to do; None at the end, or if there is nothing now and no `wait`."""
        with self._changed:
            while not self._stopped and self._error is None:
                task = self._plan.wanted() or self._plan.next_job(self._windows.chunks)
                if task is not None:
                    self._changed.notify()
                    return task
                if not wait:
                    break
                self._changed.wait()
            return None

    def _extend(self, generation: int, stretch: Stretch) -> None:
        with self._changed:
            self._plan.extend(generation, stretch)
            self._changed.notify()

    def _finish(self, job: Job, reading: Reading) -> None:
        count, calls = self._windows.finish(reading, self._targets)
        with self._changed:
            self._plan.finish(job)
            self._read_bytes += count
            self._reads += calls
            self._arrived.notify_all()
