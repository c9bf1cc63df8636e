"""Pages of shared memory that come into being with their bytes, in several threads at once.

Whoever stores to a fresh page has the kernel clear it first.  A write to the file behind the memory
does without, but a file has one writer at a time.  ``userfaultfd`` (Linux 4.11 for shared memory;
made for moving virtual machines) hands the kernel the bytes of new pages: it copies them once, maps
the pages at once, and takes any number of threads.  For 256 MB on two cores of an AMD EPYC: 129 ms
of the processor, 147 through the file, 219 by storing; docs/log.md.

It is a system call that containers and kernels may refuse: see `fill_pages`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.tables.host_memory import (
    PAGE_BYTES,
    HostBlock,
    address_of,
    block_of,
    libc,
    pages,
    short_of_memory,
    write_through,
)

HUGE_BYTES = 2 << 20  # on x86-64, and on ARM with pages of 4 KiB
SYSTEM_CALL = {"x86_64": 323, "aarch64": 282}
USER_FAULTS_ONLY = 1  # Linux 5.11: what anyone may ask for
API = 0xAA
FAIL_ELSEWHERE = 1 << 7  # who touches a page that is not there gets SIGBUS, and does not wait


def _request(number: int, size: int) -> int:
    """Return the number of an ioctl of userfaultfd, as ``linux/userfaultfd.h`` builds it."""
    return 3 << 30 | size << 16 | API << 8 | number


class _Greeting(ctypes.Structure):
    _fields_ = (("api", ctypes.c_uint64), ("features", ctypes.c_uint64), ("calls", ctypes.c_uint64))


class _Register(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("calls", ctypes.c_uint64),
    )


class _Copy(ctypes.Structure):
    _fields_ = (
        ("target", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("copied", ctypes.c_int64),
    )


GREET, REGISTER, COPY = _request(0x3F, 24), _request(0x00, 32), _request(0x03, 40)
MISSING = 1  # pages that are not there
CAN_COPY = 1 << 3  # of the calls that a registered range takes

Array = npt.NDArray[Any]


class PageFiller:
    """Fills arrays of one block whose pages are not there yet.

    Until it is closed nobody else may touch pages of those arrays that were not filled: in this
    process that is a bus error.

    Parameters
    ----------
    block
        That holds the arrays.
    arrays
        Each at pages of its own, as `HostBlock.allocate` gives them.

    Raises
    ------
    OSError
        Where the system has no such call, or refuses it.
    """

    def __init__(self, block: HostBlock, arrays: Sequence[Array]) -> None:
        self._block = block
        self._descriptor: int
        call = SYSTEM_CALL.get(platform.machine())
        if call is None or sys.platform != "linux":
            raise OSError(errno.ENOSYS, "no userfaultfd")
        self._descriptor = int(libc().syscall(call, os.O_CLOEXEC | USER_FAULTS_ONLY))
        if self._descriptor < 0:
            raise _error()
        try:
            self._ask(GREET, _Greeting(api=API, features=FAIL_ELSEWHERE))
            for array in arrays:
                length = pages(array.nbytes)
                asked = _Register(start=address_of(array), length=length, mode=MISSING)
                self._ask(REGISTER, asked)
                if not asked.calls & CAN_COPY:
                    raise OSError(errno.ENOTSUP, "this memory takes no pages")
        except BaseException:
            self.close()
            raise

    def fill(self, target: Array, values: Array) -> None:
        """Copy C-contiguous `values` to `target`, of the same size in one of the arrays.

        From several threads at once, for parts that do not overlap.

        Raises
        ------
        GearError
            ``HOST_MEMORY`` if memory runs out.
        """
        begin, size = address_of(target), target.nbytes
        first = min(pages(begin) - begin, size)  # pages at the ends belong to others too
        whole = (size - first) // PAGE_BYTES * PAGE_BYTES
        flat, given = (array.reshape(-1).view(np.uint8) for array in (target, values))
        self._write(flat[:first], given[:first])
        at = first
        while at < first + whole:
            at += self._copy(begin + at, address_of(given) + at, first + whole - at)
            if at < first + whole:  # a page that is there already, perhaps a large one
                rest = HUGE_BYTES - (begin + at) % HUGE_BYTES
                part = slice(at, min(at + rest, first + whole))
                self._write(flat[part], given[part])
                at = part.stop
        self._write(flat[at:], given[at:])

    def close(self) -> None:
        """Leave the memory as any other."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _copy(self, target: int, source: int, length: int) -> int:
        """Fill whole pages up to one that is there; return the bytes."""
        done = 0
        while done < length:
            asked = _Copy(target=target + done, source=source + done, length=length - done)
            try:
                self._ask(COPY, asked)
            except OSError as error:
                done += max(asked.copied, 0)
                if error.errno == errno.EAGAIN:  # the kernel was interrupted
                    continue
                if error.errno in (errno.ENOMEM, errno.ENOSPC):
                    raise short_of_memory(length - done) from error
                if error.errno != errno.EEXIST:
                    raise
                break
            done += asked.copied
        return done

    def _write(self, target: Array, values: Array) -> None:
        """By the file: it takes pages that are there, and parts of pages."""
        if len(values):
            write_through(self._block, target, values)

    def _ask(self, request: int, argument: ctypes.Structure) -> None:
        """Make an ioctl; without the interpreter's lock."""
        number = ctypes.c_ulong(request)
        if libc().ioctl(self._descriptor, number, ctypes.byref(argument)) < 0:
            raise _error()


def _error() -> OSError:
    found = ctypes.get_errno()
    return OSError(found, os.strerror(found))


@contextmanager
def fill_pages(arrays: Sequence[Array]) -> Iterator[PageFiller | None]:
    """Give a filler of arrays in one block; ``None`` where there is no block, or no such call."""
    blocks = {block_of(array) for array in arrays}
    block = blocks.pop() if len(blocks) == 1 else None
    filler = None
    if block is not None:
        with suppress(OSError):
            filler = PageFiller(block, [array for array in arrays if array.size])
    try:
        yield filler
    finally:
        if filler is not None:
            filler.close()
