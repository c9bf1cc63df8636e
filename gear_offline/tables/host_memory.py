"""One block of memory for a dataset on a node, shared by the node's processes.

The block is an anonymous file (``memfd_create``): it has no name in any file system, only
processes of the same user can reach it (mode 0600), its size is sealed, and the kernel frees it
when the last process that holds it is gone, ``kill -9`` included.

    rank 0:   block = HostBlock.create(nbytes); handle = block.handle()   # JSON-able
    others:   block = HostBlock.attach(handle)                            # the same pages

Where processes do not see each other's ``/proc`` (containers), send `fileno()` over a Unix socket
with ``socket.send_fds`` and use `HostBlock.from_descriptor`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from threading import Lock, Semaphore
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from gear_offline.core.system import available_bytes, usable_cores
from gear_offline.errors import GearError, InputError, UnavailableError
from gear_offline.tables.anonymous_file import anonymous_file, is_sealed
from gear_offline.tables.pinning import format_bytes

__all__ = ["HostBlock", "HostHandle"]

PAGE_BYTES = mmap.PAGESIZE
RESERVE_BYTES = 256 << 20  # of the available memory, left to everything else
FAULT_AROUND_BYTES = 64 << 10  # what Linux maps at a read fault, of pages that are there
MADV_POPULATE_WRITE = 23  # Linux 5.14: fault pages in, with an error where there is no memory
MAX_THREADS = 16
POPULATE_BYTES = 64 << 20  # one thread's share at a time

Array = npt.NDArray[Any]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]


@dataclass(frozen=True, kw_only=True)
class HostHandle:
    """What another process of the node needs to attach; plain numbers.

    Attributes
    ----------
    process, descriptor
        Who holds the block open, and as what.
    nbytes
        Size.
    device, inode
        The file's identity, so that a number that was used again is noticed.
    """

    process: int
    descriptor: int
    nbytes: int
    device: int
    inode: int

    def to_json(self) -> dict[str, int]:
        """Return the numbers by name, to be sent to the other processes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, int]) -> Self:
        """Build from `to_json`'s form."""
        return cls(**value)


class HostBlock:
    """Shared memory with an allocator: arrays begin at pages of their own.

    Arrays keep the memory alive; closing the `descriptor` only stops giving out more and lets
    other processes no longer attach through this one.

    Attributes
    ----------
    nbytes
        Size, a multiple of the page size.
    writers
        For two who write through the file at once: one writes, the next one waits and keeps the
        file busy.  Others do better elsewhere.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Take over an open `descriptor`; use `create`, `attach` or `from_descriptor`."""
        self.nbytes = nbytes
        self.writers = Semaphore(2)
        self.writing = Lock()  # waiting here costs nothing, while the kernel's lock is spun on
        self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._descriptor = descriptor
        self._used = 0
        self._close = weakref.finalize(self, os.close, descriptor)
        _blocks[id(self)] = self

    @classmethod
    def create(cls, nbytes: int, *, name: str = "gear-table") -> Self:
        """Make a block, `name` in /proc, of at least `nbytes` zeros that take memory when touched.

        Raises
        ------
        GearError
            ``HOST_MEMORY`` if the machine, or this container, has less memory available.
        UnavailableError
            ``HOST_SHARED`` if the system has no anonymous files.
        """
        nbytes = max(pages(nbytes), PAGE_BYTES)
        check_available(nbytes)
        try:
            descriptor = anonymous_file(name, nbytes)
        except (AttributeError, OSError) as error:
            raise UnavailableError(
                "HOST_SHARED",
                f"no shared memory: memfd_create failed ({error})",
                remedy="use Linux 3.17 or newer, and a container that allows memfd_create",
            ) from error
        try:
            return cls(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, handle: HostHandle) -> Self:
        """Map the block of another process of this user on this node.

        Raises
        ------
        GearError
            ``HOST_ATTACH`` if the process is gone, or is not visible from here.
        """
        path = f"/proc/{handle.process}/fd/{handle.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _not_attached(handle, str(error.strerror)) from error
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != (handle.device, handle.inode):
            os.close(descriptor)
            raise _not_attached(handle, "its descriptor is another file now")
        return cls.from_descriptor(descriptor)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Self:
        """Map a block whose descriptor came over a Unix socket or a fork; takes it over.

        Raises
        ------
        InputError
            ``HOST_ATTACH`` if it is not a sealed anonymous file.
        """
        if not is_sealed(descriptor):
            os.close(descriptor)
            raise InputError(
                "HOST_ATTACH",
                "the descriptor is not a block of shared memory of gear-offline",
                remedy="pass what HostBlock.fileno() or handle() gave",
            )
        return cls(descriptor, os.fstat(descriptor).st_size)

    def fileno(self) -> int:
        """Return the descriptor, for ``socket.send_fds``."""
        return self._descriptor

    def handle(self) -> HostHandle:
        """Return what `attach` takes in another process, as long as this one holds the block."""
        found = os.fstat(self._descriptor)
        return HostHandle(
            process=os.getpid(),
            descriptor=self._descriptor,
            nbytes=self.nbytes,
            device=found.st_dev,
            inode=found.st_ino,
        )

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the next array of `shape` and `dtype`, at a page; same calls give same places.

        Raises
        ------
        GearError
            ``HOST_MEMORY`` if the block is used up.
        """
        nbytes = prod(shape) * dtype.itemsize
        begin, end = self._used, self._used + pages(nbytes)
        if end > self.nbytes:
            raise GearError(
                "HOST_MEMORY",
                f"the block of {format_bytes(self.nbytes)} is used up",
                remedy="create it with the sum of the page-aligned sizes",
            )
        self._used = end
        return self._bytes[begin : begin + nbytes].view(dtype).reshape(shape)

    def populate(self, *, threads: int | None = None) -> None:
        """Touch every page, in several threads: four times as fast as one thread on 16 cores.

        Raises
        ------
        GearError
            ``HOST_MEMORY`` if memory runs out.
        """
        populate(self._bytes, threads=threads)

    def place(self, array: Array) -> int | None:
        """Return at which byte of the file an array begins; ``None`` if it is elsewhere."""
        begin = address_of(array) - address_of(self._bytes)
        inside = self._close.alive and 0 <= begin <= self.nbytes - array.nbytes
        return begin if inside else None

    def close(self) -> None:
        """Close the descriptor; arrays stay valid, further processes cannot attach.

        Not while a table is being filled in it: that writes through the descriptor.
        """
        self._close()


_blocks: weakref.WeakValueDictionary[int, HostBlock] = weakref.WeakValueDictionary()


def block_of(array: Array) -> HostBlock | None:
    """Return the open block that an array lies in, or ``None``."""
    found = (reference() for reference in _blocks.valuerefs())
    return next((block for block in found if block and block.place(array) is not None), None)


def write_through(block: HostBlock, target: Array, values: Array) -> None:
    """Copy C-contiguous `values` to `target`, an array of the same size in `block`.

    By a write to the file and a mapping of its pages afterwards: the kernel fills a new page
    instead of clearing it first, which takes a third less than storing to fresh pages.  But only
    one thread at a time can write to a file.

    Raises
    ------
    GearError
        ``HOST_MEMORY`` if memory runs out.
    """
    offset = block.place(target)
    assert offset is not None, "the array lies in the block"
    data = values.reshape(-1).view(np.uint8).data
    try:
        with block.writing:
            while len(data):
                count = os.pwrite(block.fileno(), data, offset)
                data, offset = data[count:], offset + count
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise short_of_memory(target.nbytes) from error
        raise
    flat = target.reshape(-1).view(np.uint8)
    flat[::FAULT_AROUND_BYTES].max(initial=0)  # reading a byte maps the written pages around it


def populate(array: Array, *, threads: int | None = None) -> None:
    """Touch the pages of page-aligned memory without changing it; as `HostBlock.populate`."""
    flat = array.reshape(-1).view(np.uint8)

    def touch_part(begin: int) -> None:
        part = flat[begin : begin + POPULATE_BYTES]
        if not touch(part):
            part[::PAGE_BYTES] |= 0

    with ThreadPoolExecutor(_threads(threads)) as pool:
        for _ in pool.map(touch_part, range(0, flat.size, POPULATE_BYTES)):
            pass


def touch(array: Array) -> bool:
    """Fault in the pages that lie wholly in a C-contiguous array, without changing them.

    Cheaper than a fault for each when it is written to, and done without the interpreter's lock.

    Returns
    -------
    bool
        ``False`` where the kernel cannot: before Linux 5.14.

    Raises
    ------
    GearError
        ``HOST_MEMORY`` if memory runs out.
    """
    if _advise(array, MADV_POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise short_of_memory(array.nbytes)
    return False


def _advise(array: Array, advice: int) -> int:
    """Call ``madvise`` on the whole pages inside an array."""
    begin = address_of(array)
    end = (begin + array.nbytes) // PAGE_BYTES * PAGE_BYTES
    begin = pages(begin)
    return 0 if begin >= end else int(libc().madvise(begin, end - begin, advice))


def address_of(array: Array) -> int:
    """Return where an array begins."""
    return int(array.__array_interface__["data"][0])  # in a fifth of the time of .ctypes.data


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, with its error numbers."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _threads(threads: int | None) -> int:
    return max(1, threads or min(MAX_THREADS, usable_cores()))


def pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return nbytes + -nbytes % PAGE_BYTES


def check_available(nbytes: int) -> None:
    """Raise `GearError` (``HOST_MEMORY``) unless that much memory is available.

    Asked before, because a machine that runs out of shared memory kills processes instead.
    """
    available = available_bytes()
    if nbytes + RESERVE_BYTES > available:
        raise short_of_memory(nbytes, available)


def short_of_memory(nbytes: int, available: int | None = None) -> GearError:
    """Return the error that says so."""
    available = available_bytes() if available is None else available
    return GearError(
        "HOST_MEMORY",
        f"{format_bytes(nbytes)} of host memory are needed, {format_bytes(available)} are "
        "available",
        remedy="free memory, use fewer columns, or keep the data on disk",
    )


def _not_attached(handle: HostHandle, why: str) -> GearError:
    return GearError(
        "HOST_ATTACH",
        f"cannot attach to the table of process {handle.process}: {why}",
        remedy="check that it still runs on this node as the same user and in the same container; "
        "between containers send the descriptor over a Unix socket",
    )
