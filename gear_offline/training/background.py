"""Work that is done beside the training, one piece after the other, and whose errors come back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class Background:
    """A thread that does what it is given, in order; nothing is given up on the way.

    The first error ends it: what was given afterwards is not done, and `check`, `wait` and
    `submit` raise that error in the caller's thread, each time.

    Parameters
    ----------
    beside
        False: do the work in the caller's thread, before `submit` returns.
    name
        Of the thread.
    """

    def __init__(self, *, beside: bool, name: str) -> None:
        self._beside, self._name = beside, name
        self._work: deque[Work | None] = deque()  # None: the end
        self._change = threading.Condition()
        self._busy = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Have `work` done after what was submitted before."""
        self.check()
        if not self._beside:
            try:
                work()
            except BaseException as error:
                self._error = error
                raise
            return
        with self._change:
            self._work.append(work)
            self._change.notify_all()
            if self._thread is None:
                # A daemon: a second Ctrl-C ends the process at once, as it ends everything else.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raise the error of the work so far, if there was one."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when everything is done.

        Raises
        ------
        BaseException
            The first error of the work.
        """
        with self._change:
            while self._work or self._busy:
                self._change.wait()
        self.check()

    def close(self) -> None:
        """Finish what was submitted and end the thread; errors stay with `check`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._change:
                self._work.append(None)
                self._change.notify_all()
            thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._work:
                    self._change.wait()
                work = self._work.popleft()
                if work is None:
                    return
                self._busy = True
            try:
                if self._error is None:
                    work()
            except BaseException as error:
                self._error = error
            finally:
                del work  # it may hold a copy of the model
                with self._change:
                    self._busy = False
                    self._change.notify_all()
