"""Gather the next block of batches while the one before it is used.

A thread of its own waits for the windows of the block and copies them out of their slots, so that
whoever asks for batches only takes them.  It knows nothing of the loader, which can be dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gear_offline.kernels.gather import Windows

Fill = Callable[[int, int], Windows]


class GatherAhead:
    """Calls a function for consecutive blocks of steps, one block ahead.

    Parameters
    ----------
    fill
        ``fill(first_step, steps)``; only ever called by one thread at a time.
    """

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        # Ctrl-C while the pool starts its thread makes it forget this one, and start another.
        self._one_by_one = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gear-gather")
        self._next: tuple[int, int, Future[Windows]] | None = None

    def take(self, first_step: int, steps: int) -> Windows:
        """Return what `fill` gives for these steps; begin with as many that follow.

        Raises
        ------
        BaseException
            What `fill` raises.  An interruption of the waiting costs nothing: call again.
        """
        if self._next is None or self._next[:2] != (first_step, steps):
            self._begin(first_step, steps)
        assert self._next is not None, "it was begun"
        future = self._next[2]
        try:
            found = future.result()
        finally:
            if future.done():
                self._next = None
        self._begin(first_step + steps, steps)
        return found

    def _begin(self, first_step: int, steps: int) -> None:
        """Have steps gathered, after what is being gathered now."""
        self._next = (first_step, steps, self._pool.submit(self._alone, first_step, steps))

    def _alone(self, first_step: int, steps: int) -> Windows:
        with self._one_by_one:
            return self._fill(first_step, steps)

    def close(self) -> None:
        """Wait for the thread; what makes `fill` return is the caller's."""
        self._pool.shutdown(wait=True, cancel_futures=True)
