"""Arrays that kernels read: copied to a device once, and kept there.

Shape legend: E episodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.kernels.guide import guide

Array = npt.NDArray[Any]


class DeviceArrays:
    """Copies of arrays on a device, for as long as this lives.

    Parameters
    ----------
    device
        Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: list[Tensor] = []
        self._known: dict[int, tuple[Array, int]] = {}  # by identity, which the array keeps
        self._guides: dict[int, tuple[Array, tuple[int, int]]] = {}

    def keep(self, values: Array) -> int:
        """Return the address of a copy; an array that cannot be written to is copied once."""
        fixed = not values.flags.writeable
        if fixed and id(values) in self._known:
            return self._known[id(values)][1]
        copied = np.array(values)
        # torch has few operations on uint64; nothing here computes with it
        signed = copied.view(np.int64) if copied.dtype == np.uint64 else copied
        self._tensors.append(torch.from_numpy(signed).to(self.device))
        address = int(self._tensors[-1].data_ptr())
        if fixed:
            self._known[id(values)] = values, address
        return address

    def guide(self, offsets: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Return the address and the shift of the guide of (E + 1,) offsets."""
        if id(offsets) not in self._guides:
            table, shift = guide(offsets)
            self._guides[id(offsets)] = offsets, (self.keep(table), shift)
        return self._guides[id(offsets)][1]
