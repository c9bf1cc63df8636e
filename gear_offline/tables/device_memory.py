"""Memory of a GPU, and host memory that it reads, as placing a table needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from gear_offline.errors import GearError
from gear_offline.tables.pinning import CudaRuntime, Pinned, format_bytes, pin

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]


class Memory(Protocol):
    """What placing needs from a device; the tests use one without a GPU."""

    def free_bytes(self) -> int: ...
    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """Return the address of new device memory and what keeps it alive."""
        ...

    def upload(self, buffer: Any, begin: int, rows: Array) -> None:
        """Copy the bytes of C-contiguous `rows` to byte `begin` of a buffer."""
        ...

    def pin(self, rows: Array) -> Pinned: ...


class CudaMemory:
    """Memory of one GPU, and host memory mapped into it."""

    _runtime: CudaRuntime | None = None  # one for the process, so that pins are shared

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free_bytes(self) -> int:
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        import torch

        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise too_large(nbytes, self.free_bytes(), "free on the device") from error
        return int(buffer.data_ptr()), buffer

    def upload(self, buffer: Any, begin: int, rows: Array) -> None:
        import torch

        flat = rows.reshape(-1).view(np.uint8)
        buffer[begin : begin + flat.nbytes].copy_(torch.from_numpy(flat))

    def pin(self, rows: Array) -> Pinned:
        import torch

        with torch.cuda.device(self.device):
            return pin(rows, self.runtime)

    @property
    def runtime(self) -> CudaRuntime:
        if CudaMemory._runtime is None:
            CudaMemory._runtime = CudaRuntime()
        return CudaMemory._runtime

    def allocate_shared(self, nbytes: int) -> tuple[int, Any, str]:
        """Return address, tensor and handle of memory that is freed when the process ends.

        Only then is it certain that no other process reads it any more.
        """
        import torch

        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()  # this memory does not come from torch's pool
            address = self.runtime.allocate(nbytes)
            if not address:
                raise too_large(nbytes, self.free_bytes(), "free on the device")
            return address, raw_tensor(address, nbytes, self.device), self.runtime.share(address)

    def open_shared(self, handle: str) -> tuple[int, Any]:
        """Return the address of another GPU's memory; mapped until the process ends."""
        import torch

        with torch.cuda.device(self.device):
            return self.runtime.open_shared(handle), handle


def raw_tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return (nbytes,) uint8 over device memory that something else keeps."""
    import torch

    return torch.as_tensor(_Raw(address, nbytes), device=device)


class _Raw:
    """Device memory as torch takes it over."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def too_large(nbytes: int, budget: int, source: str) -> GearError:
    return GearError(
        "HBM_SHORT",
        f"the table needs {format_bytes(nbytes)} of GPU memory, {format_bytes(budget)} are "
        f"{source}",
        remedy="use placement='auto' to keep the rest in pinned host memory, or raise hbm_budget",
    )
