"""Arrays that kernels read: copied to a device once, and kept there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class DeviceArrays:
    """Copies of arrays on a device, for as long as this lives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: list[Tensor] = []

    def keep(self, values: npt.NDArray[Any]) -> int:
        """Return the address of a copy."""
        copied = np.array(values)
        # torch has few operations on uint64; nothing here computes with it
        signed = copied.view(np.int64) if copied.dtype == np.uint64 else copied
        self._tensors.append(torch.from_numpy(signed).to(self.device))
        return int(self._tensors[-1].data_ptr())
