"""Memory that a GPU reads: its own (`hbm`), other GPUs' (`peer`), mapped host memory (`host`).

CuPy calls the CUDA runtime, in the context that torch's kernels run in.
"""

from __future__ import annotations

import resource
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from gear_offline.core.text import size_text
from gear_offline.core.types import Array
from gear_offline.errors import GearError, UnavailableError
from gear_offline.kernels.cuda_module import numbered_device

PORTABLE, MAPPED = 1, 2  # cudaHostRegister*: for every context; with a device address
HOST_TO_DEVICE = 1  # cudaMemcpyKind
LAZY_PEERS = 1  # cudaIpcMemLazyEnablePeerAccess


class Pinned:
    """Host memory that is page-locked and mapped; stays so until the last reference is gone."""

    def __init__(self, array: Array, address: int) -> None:
        self.array = array  # kept alive
        self.address = address  # where the device sees its first byte


class DeviceMemory:
    """Memory that one GPU reads: `allocate` is `hbm`, the shared calls `peer`, `pin` is `host`."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cupy.cuda import runtime
        except ImportError as error:
            problem = f"tables are not placed for GPUs without CuPy ({error})"
            remedy = "pip install 'gear-offline[gpu]', or use device='cpu' or engine='off'"
            raise UnavailableError("PACKAGE_MISSING", problem, remedy=remedy) from error
        self.device, self._runtime = numbered_device(device), runtime

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """Return the address of new device memory, and its owner, which keeps it alive."""
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise too_large(nbytes, self.free_bytes(), "free on the device") from error
        return int(buffer.data_ptr()), buffer

    def allocate_shared(self, nbytes: int) -> tuple[int, str]:
        """Return address and handle of memory that other processes of the node can map.

        It is freed when the process ends: only then is it certain that no other one reads it.
        """
        torch.cuda.empty_cache()  # this memory does not come from torch's pool
        with self._current():
            try:
                address = int(self._runtime.malloc(nbytes))
            except self._runtime.CUDARuntimeError as error:
                raise too_large(nbytes, self.free_bytes(), "free on the device") from error
            try:
                return address, bytes(self._runtime.ipcGetMemHandle(address)).hex()
            except self._runtime.CUDARuntimeError as error:
                raise _not_shared(error) from error

    def open_shared(self, handle: str) -> int:
        """Map another process's memory until this process ends; return its address."""
        with self._current():
            try:
                raw = bytes.fromhex(handle)
                return int(self._runtime.ipcOpenMemHandle(raw, LAZY_PEERS))
            except self._runtime.CUDARuntimeError as error:
                raise _not_shared(error) from error

    def copy_stream(self) -> torch.cuda.Stream:
        """Return a stream for `upload`, behind all that torch's stream of this thread has to do.

        Memory from torch's pool may still be in use there, and other threads have streams of their
        own.  Copies do not wait for what that stream gets to do meanwhile.
        """
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return stream

    def upload(self, address: int, rows: Array, stream: torch.cuda.Stream) -> None:
        """Copy the bytes of C-contiguous `rows` to device memory, and wait for them.

        On a `copy_stream`, which threads may share: a copy on CUDA's default stream may end after
        the call, beside kernels on other streams.
        """
        with self._current():
            self._runtime.memcpyAsync(
                address, rows.ctypes.data, rows.nbytes, HOST_TO_DEVICE, stream.cuda_stream
            )
            self._runtime.streamSynchronize(stream.cuda_stream)

    def pin(self, rows: Array) -> Pinned:
        """Page-lock and map C-contiguous memory; share memory that is mapped already."""
        key = (rows.ctypes.data, rows.nbytes)
        with _pins_lock, self._current():
            pinned = _pins.get(key)
            if pinned is None:
                try:
                    self._runtime.hostRegister(*key, PORTABLE | MAPPED)
                    attributes = self._runtime.pointerGetAttributes(key[0])
                except self._runtime.CUDARuntimeError as error:
                    raise not_pinned(rows.nbytes, str(error)) from error
                pinned = _pins[key] = Pinned(rows, int(attributes.devicePointer))
                undo = weakref.finalize(pinned, self._runtime.hostUnregister, key[0])
                undo.atexit = False  # the driver drops what is left when the process ends
        return pinned

    def wait(self) -> None:
        """Wait for the GPU: a kernel may still read memory that is freed next."""
        torch.cuda.synchronize(self.device)

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)


_pins: weakref.WeakValueDictionary[tuple[int, int], Pinned] = weakref.WeakValueDictionary()
_pins_lock = threading.Lock()


def too_large(nbytes: int, budget: int, source: str) -> GearError:
    problem = f"the table needs {size_text(nbytes)} of GPU memory, {size_text(budget)} are {source}"
    remedy = "use placement='auto' to keep the rest in pinned host memory, or raise hbm_budget"
    return GearError("MEMORY", problem, remedy=remedy)


def not_pinned(nbytes: int, why: str) -> GearError:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = ""
    if soft != resource.RLIM_INFINITY and soft < nbytes:
        limit = f"; the limit of this process is {size_text(soft)}, see `ulimit -l`"
    problem = f"{size_text(nbytes)} of host memory cannot be page-locked and mapped ({why}{limit})"
    remedy = "free host memory, raise the limit (docker --ulimit memlock=-1), or use "
    remedy += "placement='hbm'"
    return GearError("MEMORY", problem, remedy=remedy)


def _not_shared(error: Exception) -> GearError:
    problem = f"GPUs of this node cannot map each other's memory ({error})"
    remedy = "use loader.placement=hbm or host; peers need NVLink or PCIe peer access, and "
    remedy += "one container for all processes of the node"
    return GearError("DEVICE", problem, remedy=remedy)
