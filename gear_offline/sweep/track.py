"""A stream and random numbers of its own: what one of several runs on a GPU works with.

PyTorch has one default generator a device, which dropout draws from, and a captured CUDA graph
reads the state that this generator had when it was captured.  Runs that take turns in one process
therefore each bring a state of their own, and each draws what it would have drawn alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Track:
    """Where one run after another trains beside others.

    Parameters
    ----------
    device
        On a CPU there is no stream, and only the random numbers are kept apart.
    stream
        A CUDA stream to use; by default a new one.
    """

    def __init__(self, device: torch.device, *, stream: Any = None) -> None:
        self.device = device
        self.stream = stream
        if device.type == "cuda" and stream is None:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._random: Any = None
        self.renew()

    def renew(self) -> None:
        """Forget the random numbers of the run before: seed them in the first `alone`."""
        self._cpu = torch.get_rng_state()
        if self.device.type == "cuda":
            self._random = torch.Generator(self.device)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let torch work on this stream with these random numbers, for anything a run does."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._cpu)
        try:
            with self._own_random(), self.launching():
                yield
        finally:
            self._cpu = torch.get_rng_state()
            torch.set_rng_state(before)

    def launching(self) -> AbstractContextManager[Any]:
        """Let torch launch on this stream: enough for replays, which know their generator."""
        if self.stream is None:
            return nullcontext()
        return torch.cuda.stream(self.stream)

    def mark(self) -> Any:
        """Return an event behind everything launched so far; None on a CPU."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        if self._random is None:
            yield
            return
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        default: Any = torch.cuda.default_generators[index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self._random)
        try:
            yield
        finally:
            default.graphsafe_set_state(before)
