"""Ctrl-C, SIGTERM and SIGHUP as a request to stop at the next safe place."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, Self

from gear_offline.core.files import Closing


class Aborted(KeyboardInterrupt):
    """A requested stop of what waits: inside `StopRequest.abortable`, or for a server."""


class StopRequest(Closing):
    """While entered, SIGINT, SIGTERM and SIGHUP set `signal_name` instead of ending the process.

    A second SIGINT or SIGTERM raises `KeyboardInterrupt`.  A second SIGHUP does not: a shell and
    its terminal both send one.  Under `nohup` SIGHUP stays ignored.  Off the main thread, where
    Python lets nobody handle signals, nothing changes.
    """

    asked_at: ClassVar[float] = float("inf")  # of `time.monotonic`, to the one that is entered

    def __init__(self) -> None:
        self.signal_name: str | None = None  # such as "SIGTERM"
        self._abortable = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def close(self) -> None:
        """Let signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        StopRequest.asked_at = float("inf")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number != signal.SIGHUP:
            raise KeyboardInterrupt
        if self.signal_name is None:
            self.signal_name, StopRequest.asked_at = signal.Signals(number).name, time.monotonic()
        if self._abortable:
            raise Aborted

    @contextmanager
    def abortable(self) -> Iterator[None]:
        """Let a request end the body at once, by `Aborted`, rather than wait for it."""
        self._abortable = True
        try:
            if self.signal_name is not None:
                raise Aborted
            yield
        finally:
            self._abortable = False
