"""GPU memory as a dma-buf, so that a network card can write into it (GPUDirect RDMA)."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

from gear_offline.errors import GearError

DMA_BUF_HANDLE = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS


@dataclass(frozen=True, kw_only=True)
class DmaBuf:
    """A range of GPU memory as a file descriptor.

    Attributes
    ----------
    descriptor
        Of the dma-buf; closed by `close`.
    offset
        Where the memory begins in it, in bytes: a dma-buf begins at a page.
    """

    descriptor: int
    offset: int

    def close(self) -> None:
        os.close(self.descriptor)


def export_dma_buf(address: int, nbytes: int) -> DmaBuf:
    """Return a dma-buf over ``[address, address + nbytes)`` of CUDA device memory.

    Raises
    ------
    GearError
        ``EXCHANGE_MEMORY`` if the driver cannot: it needs an open kernel module, Linux 5.12, and
        memory of `cudaMalloc`.
    """
    page = mmap.PAGESIZE
    begin = address // page * page
    size = -(-(address + nbytes - begin) // page) * page
    descriptor = ctypes.c_int(-1)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        export = driver.cuMemGetHandleForAddressRange
    except (OSError, AttributeError) as error:
        raise _cannot(str(error)) from error
    # Copies by the driver complete before they return, so that none overtakes the network card.
    flag = ctypes.c_uint(1)
    driver.cuPointerSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    driver.cuPointerSetAttribute(ctypes.byref(flag), SYNC_MEMOPS, address)
    export.argtypes = [
        ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64,
    ]  # fmt: skip
    status = export(ctypes.byref(descriptor), begin, size, DMA_BUF_HANDLE, 0)
    if status or descriptor.value < 0:
        raise _cannot(f"CUDA error {status}")
    return DmaBuf(descriptor=descriptor.value, offset=address - begin)


def _cannot(why: str) -> GearError:
    return GearError(
        "EXCHANGE_MEMORY",
        f"GPU memory cannot be exported as a dma-buf: {why}",
        remedy="use page-locked host memory, or a driver with the open kernel module",
    )
