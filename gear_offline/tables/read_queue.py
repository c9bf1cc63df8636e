"""Many reads with a few system calls: the kernel's asynchronous I/O, called directly.

A thread hands over arrays of reads (file, offset, size, address), does something else, and waits
for all of them without the interpreter's lock.  So what Python does no longer grows with the number
of reads.  The calls (``io_submit`` and its kin) are part of every Linux since 2.5; with
``O_DIRECT`` the disk works on all reads at once, which one ``preadv`` after the other would not
let it.

Where they are missing (another processor, a sandbox, no more contexts in ``fs.aio-max-nr``),
`open_queue` returns ``None`` and the caller reads one by one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.tables.host_memory import address_of, libc

Int64Array = npt.NDArray[np.int64]

DEPTH = 128  # reads under way in one queue, at most

# setup, destroy, submit and get events; by machine, as Linux numbers its calls there
CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}

# struct iocb and struct io_event of linux/aio_abi.h, little-endian
READ = np.dtype(
    [
        ("data", np.uint64),
        ("key", np.uint32),
        ("flags", np.int32),
        ("operation", np.uint16),  # 0: pread
        ("priority", np.int16),
        ("handle", np.uint32),
        ("address", np.uint64),
        ("nbytes", np.uint64),
        ("offset", np.int64),
        ("reserved", np.uint64),
        ("more_flags", np.uint32),
        ("event_handle", np.uint32),
    ]
)
EVENT = np.dtype(
    [("data", np.uint64), ("object", np.uint64), ("result", np.int64), ("result2", np.int64)]
)


class ReadQueue:
    """Reads of one thread that the kernel works on at once; see `open_queue`."""

    def __init__(self, context: int, calls: tuple[int, int, int, int]) -> None:
        self._context = ctypes.c_ulong(context)
        _, self._destroy, self._submit, self._wait = (ctypes.c_long(call) for call in calls)
        self._events = np.zeros(DEPTH, EVENT)
        # What was begun: descriptions of the reads and their addresses, which the kernel refers to,
        # and what became of each.
        self._reads, self._pointers = np.zeros(0, READ), np.zeros(0, np.uint64)
        self._results = np.zeros(0, np.int64)
        self._sent = self._done = 0

    def begin(
        self, handles: Int64Array, offsets: Int64Array, nbytes: Int64Array, addresses: Int64Array
    ) -> None:
        """Hand the first `DEPTH` reads over and return; `finish` must follow before the next.

        Parameters
        ----------
        handles, offsets, nbytes, addresses
            (n,) int64: open files, where in them, how much, and where to.  Files and memory stay
            until `finish` or `close` returns.

        Raises
        ------
        OSError
            If the kernel refuses the call itself; nothing is under way then.
        """
        assert self._done == len(self._reads), "what was begun was finished"
        count = len(handles)
        reads = np.zeros(count, READ)
        reads["data"], reads["handle"] = np.arange(count), handles
        reads["offset"], reads["nbytes"], reads["address"] = offsets, nbytes, addresses
        self._pointers = (address_of(reads) + READ.itemsize * np.arange(count)).astype(np.uint64)
        self._reads, self._results = reads, np.full(count, -errno.EIO, np.int64)
        self._sent = self._done = 0
        try:
            self._sent = self._send(self._pointers[:DEPTH], 0)
        except OSError:
            self.drop()
            raise

    def finish(self) -> Int64Array:
        """Wait for everything that was begun; return (n,) int64, the bytes of each read, or minus
        the error's number.

        Raises
        ------
        OSError
            As `begin`.
        """
        count, results = len(self._reads), self._results
        try:
            while self._done < count:
                under_way = self._sent - self._done
                # The disk has something to do while the next ones are handed over.
                self._take(under_way if self._sent == count else -(-under_way // 2))
                part = self._pointers[self._sent : self._done + DEPTH]
                self._sent += self._send(part, self._sent - self._done)
        finally:
            self.drop()
        return results

    def read(
        self, handles: Int64Array, offsets: Int64Array, nbytes: Int64Array, addresses: Int64Array
    ) -> Int64Array:
        """Do all reads: `begin` and `finish`."""
        self.begin(handles, offsets, nbytes, addresses)
        return self.finish()

    def drop(self) -> None:
        """Wait for what is under way, and forget what was begun.

        The memory must not go before the kernel is done with it.
        """
        while self._done < self._sent:
            self._take(self._sent - self._done)
        self._reads, self._pointers = self._reads[:0], self._pointers[:0]
        self._sent = self._done = 0

    def _send(self, pointers: npt.NDArray[Any], under_way: int) -> int:
        """Hand reads over; return how many, at least one unless some are under way."""
        if not len(pointers):
            return 0
        count = self._call(self._submit, len(pointers), pointers)
        if count >= 0:
            return count
        if count == -errno.EAGAIN and under_way:
            return 0
        raise OSError(-count, os.strerror(-count))

    def _take(self, least: int) -> None:
        """Wait for at least so many reads, and note what became of them."""
        while True:
            count = self._call(self._wait, least, len(self._events), self._events, None)
            if count > 0 or (count == 0 and not least):
                break
            if count != -errno.EINTR and count:
                raise OSError(-count, os.strerror(-count))
        ended = self._events[:count]
        self._results[ended["data"].astype(np.int64)] = ended["result"]
        self._done += count

    def _call(self, call: ctypes.c_long, *arguments: Any) -> int:
        """Call the kernel; return what it says, or minus the error's number."""
        given = [
            ctypes.c_void_p(address_of(a))
            if isinstance(a, np.ndarray)
            else a
            if a is None
            else ctypes.c_long(a)
            for a in arguments
        ]
        found = int(libc().syscall(call, self._context, *given))
        return found if found >= 0 else -ctypes.get_errno()

    def close(self) -> None:
        """Wait for what is under way, and give the context back."""
        self.drop()
        self._call(self._destroy)


def open_queue() -> ReadQueue | None:
    """Return a queue for one thread, or ``None`` where the kernel has none to give."""
    calls = CALLS.get(platform.machine())
    if sys.platform != "linux" or sys.byteorder != "little" or calls is None:
        return None
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    context = ctypes.c_ulong(0)
    try:
        found = libc().syscall(ctypes.c_long(calls[0]), ctypes.c_long(DEPTH), ctypes.byref(context))
    except (OSError, AttributeError):
        return None
    return ReadQueue(context.value, calls) if found == 0 else None
