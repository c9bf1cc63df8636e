"""Page-lock memory of this process and map it into the GPU, so that kernels read it in place.

`cudaHostRegister` is called through the CUDA runtime that torch has loaded, so nothing besides
torch is needed, and the registration lives in the same context as torch's kernels.
"""

from __future__ import annotations

import ctypes
import resource
import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gear_offline.errors import GearError, UnavailableError

PORTABLE, MAPPED = 1, 2  # cudaHostRegister*: for every context; with a device address
LAZY_PEERS = 1  # cudaIpcMemLazyEnablePeerAccess
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")

Array = npt.NDArray[Any]


class HostRuntime(Protocol):
    """The three calls of the CUDA runtime that pinning needs; `CudaRuntime` is the real one."""

    def register(self, address: int, nbytes: int) -> int:
        """Page-lock and map; return 0 or the error's number."""
        ...

    def device_address(self, address: int) -> int:
        """Return where the device sees a registered host address."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`; errors are ignored, since the process may be ending."""
        ...

    def describe(self, status: int) -> str:
        """Return the name of an error."""
        ...


class _IpcHandle(ctypes.Structure):
    """``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class CudaRuntime:
    """The CUDA runtime library that torch uses, through ctypes.

    Raises
    ------
    UnavailableError
        ``CUDA_RUNTIME`` if there is no CUDA device or the library cannot be found.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UnavailableError(
                "CUDA_RUNTIME",
                "host memory cannot be mapped into a GPU: there is no CUDA device",
                remedy="run `gear-offline doctor`, or use device='cpu'",
            )
        torch.cuda.current_device()  # makes the context
        library = _loaded_runtime()
        library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
        library.cudaHostGetDevicePointer.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_void_p,
            ctypes.c_uint,
        ]
        library.cudaGetLastError.argtypes = []
        library.cudaGetErrorName.argtypes = [ctypes.c_int]
        library.cudaGetErrorName.restype = ctypes.c_char_p
        self._library = library

    def register(self, address: int, nbytes: int) -> int:
        status = int(self._library.cudaHostRegister(address, nbytes, PORTABLE | MAPPED))
        if status:
            # Otherwise torch's next check of a launch would report this error as its own.
            self._library.cudaGetLastError()
        return status

    def device_address(self, address: int) -> int:
        found = ctypes.c_void_p()
        status = int(self._library.cudaHostGetDevicePointer(ctypes.byref(found), address, 0))
        if status or found.value is None:
            self._library.cudaGetLastError()
            raise GearError(
                "HOST_PIN",
                f"the GPU has no address for registered memory: {self.describe(status)}",
                remedy="use placement='hbm', or report the GPU and its driver",
            )
        return int(found.value)

    def unregister(self, address: int) -> None:
        if int(self._library.cudaHostUnregister(address)):
            self._library.cudaGetLastError()

    def allocate(self, nbytes: int) -> int:
        """Return the address of device memory of its own, which other processes can map; or 0."""
        found = ctypes.c_void_p()
        if int(self._library.cudaMalloc(ctypes.byref(found), ctypes.c_size_t(nbytes))):
            self._library.cudaGetLastError()
            return 0
        return int(found.value or 0)

    def share(self, address: int) -> str:
        """Return the handle of memory that `allocate` gave, in hexadecimal digits."""
        handle = _IpcHandle()
        status = int(
            self._library.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address))
        )
        if status:
            raise self._not_shared(status)
        return bytes(handle.reserved).hex()

    def open_shared(self, handle: str) -> int:
        """Map another process's memory; return where this process's GPU sees it."""
        found = ctypes.c_void_p()
        raw = _IpcHandle.from_buffer_copy(bytes.fromhex(handle))
        status = int(self._library.cudaIpcOpenMemHandle(ctypes.byref(found), raw, LAZY_PEERS))
        if status or found.value is None:
            raise self._not_shared(status)
        return int(found.value)

    def _not_shared(self, status: int) -> GearError:
        self._library.cudaGetLastError()
        return GearError(
            "PEER_MEMORY",
            f"GPUs of this node cannot map each other's memory ({self.describe(status)})",
            remedy="use loader.placement=hbm or host; peers need NVLink or PCIe peer access, and "
            "one container for all processes of the node",
        )

    def describe(self, status: int) -> str:
        return str(self._library.cudaGetErrorName(status).decode())


def _loaded_runtime() -> ctypes.CDLL:
    """Return the libcudart of this process, which torch has loaded."""
    names = [*_mapped_libraries("libcudart"), *_RUNTIMES]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnavailableError(
        "CUDA_RUNTIME",
        f"the CUDA runtime library is not found (tried {', '.join(names)})",
        remedy="install a torch wheel with CUDA, or put libcudart on LD_LIBRARY_PATH",
    )


def _mapped_libraries(stem: str) -> list[str]:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if f"/{stem}" in line}
    return sorted(paths)


class Pinned:
    """Registered memory; stays so until the last reference to this object is gone.

    Attributes
    ----------
    array
        The memory, kept alive.
    address
        int, where the device sees the array's first byte.
    """

    def __init__(self, array: Array, runtime: HostRuntime) -> None:
        begin = array.ctypes.data
        status = runtime.register(begin, array.nbytes)
        if status:
            raise _refused(array.nbytes, runtime.describe(status), status)
        self.array = array
        undo = weakref.finalize(self, runtime.unregister, begin)
        undo.atexit = False  # the driver drops what is left when the process ends
        self.address = runtime.device_address(begin)


_pins: weakref.WeakValueDictionary[tuple[int, int, int], Pinned] = weakref.WeakValueDictionary()
_pins_lock = threading.Lock()


def pin(array: Array, runtime: HostRuntime) -> Pinned:
    """Register a C-contiguous array; memory that is registered already is shared, not repeated.

    Raises
    ------
    GearError
        ``MEMLOCK_LIMIT`` or ``HOST_PIN``
    """
    key = (id(runtime), array.ctypes.data, array.nbytes)
    with _pins_lock:
        found = _pins.get(key)
        if found is None:
            found = _pins[key] = Pinned(array, runtime)
    return found


def _refused(nbytes: int, name: str, status: int) -> GearError:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = format_bytes(nbytes)
    if status == ALREADY_REGISTERED:
        return GearError(
            "HOST_PIN",
            f"{size} of host memory are registered already ({name})",
            remedy="close the other table over the same memory first",
        )
    if soft != resource.RLIM_INFINITY and soft < nbytes:
        return GearError(
            "MEMLOCK_LIMIT",
            f"{size} of host memory cannot be page-locked ({name}); the limit of this process is "
            f"{format_bytes(soft)}",
            remedy="raise it (`ulimit -l unlimited`, docker --ulimit memlock=-1), or use "
            "placement='hbm'",
        )
    return GearError(
        "HOST_PIN",
        f"{size} of host memory cannot be page-locked and mapped into the GPU ({name})",
        remedy="free host memory, or use placement='hbm', or run gear-offline doctor",
    )


def format_bytes(nbytes: int | float) -> str:
    """Return a size as people read it, e.g. ``"3.2 GiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def same_memory(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return (nbytes,) uint8 over memory of this process, for tests of addresses."""
    raw: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.ctypeslib.as_array(raw)
