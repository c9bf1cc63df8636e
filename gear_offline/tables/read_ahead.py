"""Threads that read windows from shards into slots, ahead of their use.

A thread takes a job from the plan, some chunks of a megabyte, and has a
`gear_offline.tables.window_reader.WindowReader` bring its windows into their slots: it needs the
lock a few hundred times a second, however many windows there are.  The threads know nothing of the
loader: it can be dropped while they wait.  Their first error ends them all and is raised where
batches are asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from gear_offline.core.types import Array
from gear_offline.errors import GearError
from gear_offline.tables.read_plan import Job, ReadPlan, Ready
from gear_offline.tables.window_reader import WindowReader


class ReadAhead:
    """Reads what a plan says; `targets` as `WindowReader.read`.

    The plan is used under this object's lock only.  The threads start with the first `take`.
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

    def take(self, first_step: int, steps: int) -> Ready:
        """Wait until the windows of these steps are here, and return them, (steps * B,).

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
        """Say that what lies before `step` was used."""
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
        """Raise as `take` does if there is no going on, if wanted with what is read `ahead`.

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
        """Whether a fork left the threads behind, of which one may have held the lock."""
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

    def _next(self) -> Job | tuple[int, int, int] | None:
        """Wait for something to do, and return it: steps to select or a job; None at the end."""
        with self._changed:
            while not self._stopped and self._error is None:
                task = self._plan.wanted() or self._plan.next_job(self._windows.chunks)
                if task is not None:
                    self._changed.notify()
                    return task
                self._changed.wait()
            return None
