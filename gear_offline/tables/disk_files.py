"""Read parts of shards past the page cache, and notice when a shard has changed.

Files are opened with ``O_DIRECT`` where the file system takes it: what is read then costs no memory
but the reader's own buffer.  Elsewhere the pages are dropped again after each read.

A read says nothing about digests, which cover blocks of 16 MiB.  Shards were verified when the
dataset was opened; every later read checks that device, inode, size and the times of the last
change are those from before the verification.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gear_offline.core.system import drop_pages, expect_random_reads, most_open
from gear_offline.dataset.dataset import Dataset
from gear_offline.dataset.shards import REMEDY_DAMAGED, file_stamp, open_member, read_error
from gear_offline.errors import GearError, InputError
from gear_offline.tables.read_queue import Int64Array, ReadQueue

DIRECT_BYTES = 4096  # offsets, sizes and addresses of direct reads are multiples of this
MAX_OPEN = 512  # shards kept open; beyond that each read opens its shard

UInt8Array = npt.NDArray[np.uint8]


class DiskFile:
    """An open file that is read in aligned parts.

    Parameters
    ----------
    handle
        Descriptor; the file closes it.
    where
        For messages.
    direct
        Ask for ``O_DIRECT``.

    Attributes
    ----------
    direct
        Whether the file system gave it.
    """

    def __init__(self, handle: int, where: str, *, direct: bool = True) -> None:
        self._handle, self._where = handle, where
        self.direct = direct and _make_direct(handle)
        if not self.direct:
            expect_random_reads(handle)

    def read(self, offset: int, nbytes: int, buffer: UInt8Array) -> tuple[int, int]:
        """Read bytes ``[offset, offset + nbytes)`` and what lies around them in whole pages.

        Parameters
        ----------
        buffer
            At an address that is a multiple of `DIRECT_BYTES`, with room for two pages more.

        Returns
        -------
        tuple
            Where in `buffer` byte `offset` is, and how many bytes were read.

        Raises
        ------
        InputError
            ``FILE_SIZE`` when the file ends early, ``DATASET_READ`` when the disk fails.
        """
        begin = offset - offset % DIRECT_BYTES
        end = offset + nbytes
        end += -end % DIRECT_BYTES
        data, at = buffer.data[: end - begin], 0
        while begin + at < offset + nbytes:
            try:
                count = os.preadv(self._handle, [data[at:]], begin + at)
            except OSError as error:
                raise read_error(error, self._where) from error
            if count == 0 or (count % DIRECT_BYTES and begin + at + count < offset + nbytes):
                raise InputError(
                    "FILE_SIZE",
                    f"the file ends at byte {begin + at + count}, more were expected",
                    where=self._where,
                    remedy=REMEDY_DAMAGED,
                )
            at += count
        if not self.direct:
            drop_pages(self._handle, begin, end - begin)
        return offset - begin, at

    def fileno(self) -> int:
        return self._handle

    def stamp(self) -> tuple[int, ...]:
        """Return what `gear_offline.dataset.shards.file_stamp` says of it now."""
        return file_stamp(self._handle)

    def close(self) -> None:
        os.close(self._handle)


class RangesRead:
    """Many ranges of several files that are on their way into one buffer.

    Parameters
    ----------
    files, ranges
        What to read; the files stay open until `finish`.
    buffer
        As for `DiskFile.read`.
    queue
        That has nothing else to do until `finish`, or ``None`` to read one after the other then.
    """

    def __init__(
        self,
        files: Sequence[DiskFile],
        ranges: Ranges,
        buffer: UInt8Array,
        queue: ReadQueue | None,
    ) -> None:
        self._files, self._ranges, self._buffer = files, ranges, buffer
        self._queue: ReadQueue | None = None
        if queue is None or not all(file.direct for file in files):
            return
        handles = np.array([file.fileno() for file in files], np.int64)
        # Whole pages; the last one of a file may end early.
        nbytes = ranges.end - ranges.begin + -ranges.end % DIRECT_BYTES
        address = int(buffer.__array_interface__["data"][0]) + ranges.place
        # A refusal of the call: everything is read the other way, which says what is wrong.
        with suppress(OSError):
            queue.begin(handles[ranges.file], ranges.begin, nbytes, address)
            self._queue = queue

    def finish(self) -> int:
        """Wait until everything is there; return how many bytes were read.

        Raises
        ------
        InputError
            ``FILE_SIZE`` when a file ends early, ``DATASET_READ`` when the disk fails.
        """
        ranges = self._ranges
        found = np.full(len(ranges.file), -1, np.int64)
        if self._queue is not None:
            with suppress(OSError):
                done = self._queue.finish()
                found[: len(done)] = done  # nothing if it was dropped
        late = np.flatnonzero(found < ranges.end - ranges.begin)
        for at in late.tolist():
            offset = int(ranges.begin[at])
            wanted = int(ranges.end[at]) - offset
            file = self._files[int(ranges.file[at])]
            _, found[at] = file.read(offset, wanted, self._buffer[int(ranges.place[at]) :])
        return int(found.sum())


def read_ranges(
    files: Sequence[DiskFile], ranges: Ranges, buffer: UInt8Array, queue: ReadQueue | None
) -> int:
    """Read many ranges and wait for them, as `RangesRead`; return how many bytes were read."""
    return RangesRead(files, ranges, buffer, queue).finish()


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranges:
    """Parts of files, (n,) int64 each.

    Attributes
    ----------
    file
        Which of the files.
    begin, end
        Bytes of it; `begin` is a multiple of `DIRECT_BYTES`.
    place
        Byte of the buffer where `begin` goes, a multiple of `DIRECT_BYTES`; up to a page more
        than asked for is written there.
    """

    file: Int64Array
    begin: Int64Array
    end: Int64Array
    place: Int64Array


def _make_direct(handle: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
    except (OSError, AttributeError):
        return False
    return True


class ShardFiles:
    """The shards of a dataset, opened when they are first read.

    Parameters
    ----------
    dataset
        Opened; its stamps are what the shards must still be.
    direct
        Ask for ``O_DIRECT``.
    """

    def __init__(self, dataset: Dataset, *, direct: bool = True) -> None:
        self._path, self._shards, self._stamps = (
            dataset.path,
            dataset.manifest.shards,
            dataset.stamps,
        )
        self._direct = direct
        with dataset.opened() as directory:
            self._directory = os.dup(directory)
        self._keep = len(self._shards) <= most_open(MAX_OPEN)
        self._open: dict[int, DiskFile] = {}
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close_all, self._directory, self._open)

    @contextmanager
    def opened(self, *indices: int) -> Iterator[list[DiskFile]]:
        """Give shards for reading; at the end checks that they are what was verified.

        Raises
        ------
        InputError
            ``DATASET_CHANGED``; what `gear_offline.dataset.shards.open_member` raises.
        """
        files: list[DiskFile] = []
        try:
            for index in indices:
                files.append(self._kept(index) if self._keep else self._opened(index))
            yield files
            for index, file in zip(indices, files, strict=True):
                self._check(index, file)
        finally:
            if not self._keep:
                for file in files:
                    file.close()

    def _kept(self, index: int) -> DiskFile:
        with self._lock:
            file = self._open.get(index)
            if file is None:
                file = self._open[index] = self._opened(index)
            return file

    def _opened(self, index: int) -> DiskFile:
        shard = self._shards[index]
        where = str(self._path / shard.name)
        handle = open_member(self._directory, shard.name, where=where, size=shard.bytes)
        file = DiskFile(handle, where, direct=self._direct)
        try:
            self._check(index, file)
        except BaseException:
            file.close()
            raise
        return file

    def _check(self, index: int, file: DiskFile) -> None:
        if file.stamp() != self._stamps[index]:
            raise InputError(
                "DATASET_CHANGED",
                "a shard changed since it was verified",
                where=str(self._path / self._shards[index].name),
                remedy="let nothing write to a dataset in use; open it again, which verifies it",
            )

    def close(self) -> None:
        """Close everything; can be repeated."""
        self._close()


def _close_all(directory: int, files: dict[int, DiskFile]) -> None:
    os.close(directory)
    while files:
        files.popitem()[1].close()


def scratch_file(beside: Path) -> int:
    """Return the descriptor of a new file without a name; it is gone when it is closed.

    It lies in the directory `beside`, where the disk is surely large; if nothing can be written
    there, where temporary files go.

    Raises
    ------
    GearError
        ``DISK_SCRATCH``
    """
    reasons = []
    for folder in (beside, Path(tempfile.gettempdir())):
        with suppress(OSError, AttributeError):  # not every file system, nor every system, does
            return _nameless_file(folder)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                return os.dup(file.fileno())
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    raise no_scratch("; ".join(reasons))


def _nameless_file(folder: Path) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def no_scratch(why: str) -> GearError:
    return GearError(
        "DISK_SCRATCH",
        f"the returns-to-go cannot be written to a temporary file: {why}",
        remedy="make room, or set TMPDIR to a directory on a disk with 4 bytes a step",
    )


def write_all(handle: int, data: memoryview, offset: int) -> None:
    """Write bytes at `offset` of a scratch file.

    Raises
    ------
    GearError
        ``DISK_SCRATCH``
    """
    while len(data):
        try:
            count = os.pwrite(handle, data, offset)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise no_scratch("the disk is full" if full else str(error.strerror)) from error
        data, offset = data[count:], offset + count
