"""Copies of tensors as they are at one instant, made without waiting for what is done with them.

On the CPU tensors are cloned.  On a GPU the copies are enqueued behind the steps so far, and the
host goes on: to GPU memory where there is room, else to page-locked host memory.  Steps that come
later run after the copies, so they change nothing of a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROOM_SHARE = 0.5  # of the free GPU memory that a snapshot may take


class Snapshot:
    """Named tensors at the instant of the call.

    Parameters
    ----------
    tensors
        On the CPU, or on GPUs where the current stream has them ready.

    Attributes
    ----------
    place
        ``"host"``, ``"device"`` (in GPU memory) or ``"pinned"`` (in page-locked host memory).
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.place = "host"
        self._events: list[Any] = []
        devices = {t.device for t in tensors.values() if t.is_cuda}
        if devices:
            self.place = "device" if all(_has_room(d, tensors) for d in devices) else "pinned"
        self._copies = {name: self._copy(tensor.detach()) for name, tensor in tensors.items()}
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def wait(self) -> dict[str, Tensor]:
        """Return the copies once they are there; for the thread that works on them."""
        for event in self._events:
            event.synchronize()
        return dict(self._copies)

    def _copy(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone(memory_format=torch.contiguous_format)
        if self.place == "device":
            try:
                return tensor.clone(memory_format=torch.contiguous_format)
            except torch.OutOfMemoryError:
                self.place = "pinned"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _has_room(device: torch.device, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether copies leave half of the memory that is free on `device`."""
    wanted = sum(t.numel() * t.element_size() for t in tensors.values() if t.device == device)
    free = torch.cuda.mem_get_info(device)[0]
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return wanted <= ROOM_SHARE * (free + kept)
