"""One table for the processes of a node, for several runs, or for a dataset that grows.

A process has one table of the same data and options (`get_table`), for as long as something holds
it.  One process of a node fills the memory, the others map it (`share_table`).  It is an
anonymous file (``memfd_create``) without a name in any file system.  Only processes of the same
user can reach it (mode 0600), and its size is sealed.  The kernel frees it when the last process
that holds it is gone, ``kill -9`` included.

    rank 0:   table, memory = share_table(dataset, options); handle = memory.handle()
    others:   table, _ = share_table(dataset, options, handle=handle)  # the same pages
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np

from gear_offline.batches.tables.joint import TableData, data_digest
from gear_offline.batches.tables.table import (
    Table,
    TableOptions,
    build_table,
    private_rows,
    span_index,
    table_bytes,
    whole_pages,
)
from gear_offline.core.system import RESERVE_BYTES, available_bytes, check_available
from gear_offline.core.text import size_text
from gear_offline.core.types import Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.errors import GearError, UnavailableError

SPARE = 2  # times the rows: memory of a growing table; what is not used takes none


@dataclass(frozen=True, kw_only=True)
class Handle:
    """The plain numbers by which another process of the node attaches."""

    process: int
    descriptor: int
    device: int  # this and the inode tell when the descriptor's number is used again
    inode: int


class SharedMemory:
    """Memory that processes share, with an allocator: arrays begin at pages of their own.

    Arrays keep the memory alive; others can attach through this one for as long as it lives.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Take over an open `descriptor`; use `create` or `attach`."""
        self.nbytes, self._descriptor, self._used = nbytes, descriptor, 0
        weakref.finalize(self, os.close, descriptor)
        with _memory_errors(nbytes):
            self._bytes = np.frombuffer(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED), np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Make at least `nbytes` zeros that take memory when touched."""
        nbytes = max(whole_pages(nbytes), mmap.PAGESIZE)
        check_available(nbytes)
        try:
            descriptor = os.memfd_create("gear-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as error:
            problem = f"no shared memory: memfd_create failed ({error})"
            remedy = "use Linux 3.17 or newer, and a container that allows memfd_create"
            raise UnavailableError("SYSTEM", problem, remedy=remedy) from error
        try:
            os.fchmod(descriptor, 0o600)
            with _memory_errors(nbytes):
                os.ftruncate(descriptor, nbytes)
            # Nobody can make it shorter: reading it never ends in SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, nbytes)

    @classmethod
    def attach(cls, handle: Handle) -> Self:
        """Map the memory of another process of this user on this node."""
        try:
            path = f"/proc/{handle.process}/fd/{handle.descriptor}"
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _not_attached(handle, str(error.strerror)) from error
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (handle.device, handle.inode):
            os.close(descriptor)
            raise _not_attached(handle, "its descriptor is another file now")
        return cls(descriptor, status.st_size)

    def handle(self) -> Handle:
        """Return the handle for `attach` in another process while this one holds the memory."""
        status = os.fstat(self._descriptor)
        return Handle(
            process=os.getpid(),
            descriptor=self._descriptor,
            device=status.st_dev,
            inode=status.st_ino,
        )

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the next array of `shape` and `dtype`, at a page; same calls give same places."""
        begin, size = self._used, prod(shape) * dtype.itemsize
        self._used += whole_pages(size)
        assert self._used <= self.nbytes, "made with the sum of the page-aligned sizes"
        return self._bytes[begin : begin + size].view(dtype).reshape(shape)


def share_table(
    source: TableData,
    options: TableOptions,
    *,
    shards: Sequence[int] | None = None,
    landing_rows: int = 0,
    handle: Handle | None = None,
) -> tuple[Table, SharedMemory]:
    """Build a table in shared memory, or take one that another process of the node has built.

    The first process calls this without `handle` and gives ``memory.handle()`` to the others, which
    pass it with the same options; they return at once and read the same pages.  Other arguments are
    those of `build_table`.
    """
    nbytes = table_bytes(source, options, shards=shards, landing_rows=landing_rows)
    memory = SharedMemory.create(nbytes) if handle is None else SharedMemory.attach(handle)
    if handle is not None and memory.nbytes != max(nbytes, mmap.PAGESIZE):
        raise _not_attached(
            handle, f"it has {size_text(memory.nbytes)}, {size_text(nbytes)} were expected"
        )
    table = build_table(
        source,
        options,
        shards=shards,
        allocate=memory.allocate,
        fill=handle is None,
        landing_rows=landing_rows,
    )
    return table, memory


# The tables of this process that something holds, by `table_key`; their copies on GPUs, by that and
# more; and those of other processes.
_TABLES: WeakValueDictionary[str, Table] = WeakValueDictionary()
PLACED: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
_HANDLES: dict[str, Handle] = {}


def table_key(source: TableData, options: TableOptions) -> str:
    """Return the key of a table: its data's digest, and its options."""
    return json.dumps([data_digest(source), asdict(options)])


def is_known(source: TableData, options: TableOptions) -> bool:
    """Return true if `get_table` has the table without reading the data."""
    key = table_key(source, options)
    return key in _TABLES or key in _HANDLES


def get_table(source: TableData, options: TableOptions) -> Table:
    """Return the one table of these data and options of this process; build it if nobody holds it.

    It is attached where another process has given its handle.
    """
    key = table_key(source, options)
    if (table := _TABLES.get(key)) is None:
        if (handle := _HANDLES.get(key)) is not None:
            table, _ = share_table(source, options, handle=handle)
        else:
            table = build_table(source, options)
        _TABLES[key] = table
    return table


class PublishedTables:
    """Tables in shared memory that other processes attach, for as long as this lives."""

    def __init__(self) -> None:
        self._memory: dict[str, SharedMemory] = {}

    def add(self, source: TableData, loader: Mapping[str, Any]) -> None:
        """Build the table of a loader with these options, unless its rows may stay on disk."""
        options = TableOptions.of(loader)
        key = table_key(source, options)
        if key not in self._memory and fits_in_memory(source, loader, options):
            _, self._memory[key] = share_table(source, options)

    def handles(self) -> str:
        """Return JSON text for `attach_tables`."""
        return json.dumps({key: asdict(memory.handle()) for key, memory in self._memory.items()})


def attach_tables(handles: str) -> None:
    """Hand the tables that another process has published to `get_table`."""
    _HANDLES.update({key: Handle(**numbers) for key, numbers in json.loads(handles).items()})


class GrowingTable:
    """The table of a dataset that grows: at each of its sizes one, over the same memory.

    New shards are read behind the rows that are there, where the margin was.  Those stay in place;
    only when the memory is full they are copied, to `SPARE` times as much.  A copy on a GPU goes on
    in that of the next table: `place_table` adds the new episodes to it.
    """

    def __init__(self) -> None:
        self._memory: list[Array] = []  # of each group, with rows to spare
        self._shards = 0  # that are in it
        self._key = ""

    def grow(self, dataset: Dataset, loader: Mapping[str, Any]) -> Table | None:
        """Make the table of these data, for loaders of these options to get while it is held.

        None where rows may stay on disk.
        """
        options = TableOptions.of(loader)
        if not fits_in_memory(dataset, loader, options):
            return None
        before, self._memory = iter(self._memory), []

        def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
            """Return the next group's memory, with its content, from its beginning on."""
            rows = next(before, np.empty((0, *shape[1:]), dtype))
            if len(rows) < shape[0]:
                larger = private_rows((SPARE * shape[0], *shape[1:]), dtype)
                larger[: len(rows)] = rows
                rows = larger
            self._memory.append(rows)
            return rows[: shape[0]]

        key, grown_from = table_key(dataset, options), self._key
        if not span_index(dataset, options).is_side_by_side:  # new rows lie between others
            self._shards, grown_from, before = 0, "", iter(())
        table = build_table(dataset, options, allocate=allocate, filled_shards=self._shards)
        _TABLES[key] = table = replace(table, grown_from=grown_from)
        self._key, self._shards = key, len(dataset.manifest.shards)
        return table


def fits_in_memory(source: TableData, loader: Mapping[str, Any], options: TableOptions) -> bool:
    """Return true if the rows of a loader surely stay in host memory: a table may be built."""
    if loader.get("placement") == "disk" or loader.get("host_budget") is not None:
        return False
    return table_bytes(source, options) + RESERVE_BYTES <= available_bytes()


@contextmanager
def _memory_errors(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"no {size_text(nbytes)} of shared memory: {error.strerror}"
        remedy = "allow more (ulimit -v, ulimit -f), or ask for less: loader.host_budget"
        raise GearError("MEMORY", problem, remedy=remedy) from error


def _not_attached(handle: Handle, why: str) -> GearError:
    problem = f"cannot attach to the table of process {handle.process}: {why}"
    remedy = "check that it still runs on this node as the same user and in the same container, "
    remedy += "with the same dataset and options"
    return GearError("MEMORY", problem, remedy=remedy)
