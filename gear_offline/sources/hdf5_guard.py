"""Looks at a foreign HDF5 file before anything is read from it.

HDF5 can name other files (external storage, virtual datasets, links), load native code (plug-in
filters) and claim sizes that it does not hold.  The guard walks the object headers only, follows
nothing, and refuses what a data file has no need of.  It does not make the HDF5 library itself
safe: a file made to exploit a bug in its parser is outside what this can catch.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5g, h5l, h5o, h5pl, h5z

from gear_offline.errors import InputError

ALLOWED_FILTERS = {
    h5z.FILTER_DEFLATE: "gzip",
    h5z.FILTER_SHUFFLE: "shuffle",
    h5z.FILTER_FLETCHER32: "fletcher32",
    h5z.FILTER_LZF: "lzf",
}
LIBRARY_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, NotImplementedError)
_COPY_REMEDY = "copy the data into plain datasets of one file, e.g. with h5repack"
_PLUGIN_LOCK = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a file may claim before it is refused."""

    objects: int = 20_000
    depth: int = 16
    dimensions: int = 9  # the step dimension and eight of the step's own shape
    chunk_bytes: int = 128 << 20
    unwritten_bytes: int = 16 << 20  # fill values in place of chunks that were never written
    expansion: int = 256  # total bytes of the columns over the file's bytes, ...
    allowance_bytes: int = 1 << 30  # ... beyond this many bytes (zeros compress 1,000 to 1)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """What an HDF5 dataset's header says; nothing of its content has been read.

    Attributes
    ----------
    name
        Path inside the file, without the leading slash.
    shape
        Dimensions; ``None`` for an empty (null) dataspace.
    dtype
        NumPy dtype as stored, ``None`` where the type is not numeric or bool.
    type_name
        Short description of the stored type, for messages.
    chunks
        Chunk shape, ``None`` for contiguous and compact storage.
    filters
        Filter numbers, in order.
    stored_bytes, unwritten_bytes
        Bytes in the file; bytes of the shape that the file does not hold.
    end
        Offset behind the last byte of contiguous storage, 0 where there is none.
    address
        Address of the object header: hard links to one dataset share it.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    type_name: str
    chunks: tuple[int, ...] | None
    filters: tuple[int, ...]
    stored_bytes: int
    unwritten_bytes: int
    end: int
    address: int

    @property
    def rows(self) -> int:
        """Length of the first dimension; 0 for scalars and empty dataspaces."""
        return self.shape[0] if self.shape else 0

    @property
    def claimed_bytes(self) -> int:
        """Bytes of the whole array in memory."""
        return prod(self.shape or ()) * (self.dtype.itemsize if self.dtype else 0)


@contextmanager
def no_plugins() -> Iterator[None]:
    """Empty HDF5's plug-in search path, so that no filter can make it load native code.

    A group's links and a file's attributes can be filtered too, which makes the library look for
    plug-ins while it lists names.  The path is put back at the end: it belongs to the process.
    """
    with _PLUGIN_LOCK:
        saved = [h5pl.get(i) for i in range(h5pl.size())]
        try:
            while h5pl.size():
                h5pl.remove(0)
            yield
        finally:
            for path in saved:
                h5pl.append(path)


def open_file(path: Path) -> h5py.File:
    """Open `path` for reading.

    Raises
    ------
    InputError
        ``FILE_MISSING``; ``SOURCE_READ`` when the operating system refuses to read it, or
        another program writes to it;
        ``HDF5_UNREADABLE`` for what is not an intact HDF5 file.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            os.close(os.open(path, os.O_RDONLY))  # what HDF5 says of it would look like damage
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise InputError(
                "FILE_MISSING",
                f"cannot open the file: {error.strerror}",
                where=str(path),
                remedy="check the path",
            ) from error
        raise source_read_error(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            "HDF5_UNREADABLE", "not a regular file", where=str(path), remedy="give a file"
        )
    try:
        with no_plugins():
            return h5py.File(path, "r", locking="best-effort")
    except LIBRARY_ERRORS as error:
        if isinstance(error, BlockingIOError):  # locked: not damaged, but not complete either
            raise InputError(
                "SOURCE_READ",
                "another program has the file open for writing",
                where=str(path),
                remedy="close it there, or wait for it to end",
            ) from error
        raise unreadable(path, error) from error


def source_read_error(path: Path, error: OSError) -> InputError:
    """Return the error ``SOURCE_READ`` for a file that may be sound but cannot be read."""
    return InputError(
        "SOURCE_READ",
        f"the file cannot be read: {error.strerror or error}",
        where=str(path),
        remedy="check its permissions and those of its folder, and the disk",
    )


def unreadable(path: Path, error: BaseException) -> InputError:
    """Return the one error for a file that HDF5 cannot make sense of."""
    reason = " ".join(str(error).split())[:200]
    return InputError(
        "HDF5_UNREADABLE",
        f"not a readable HDF5 file: {reason}",
        where=str(path),
        remedy="the file is damaged, cut short or of another format: get it again",
    )


def walk(file: h5py.File, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, DatasetFacts]:
    """Return the datasets of `file` by name; see `scan`."""
    with no_plugins():
        return {fact.name: fact for fact in scan(file, limits=limits)}


def scan(file: h5py.File, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[DatasetFacts]:
    """Yield the datasets of `file`, without following a link or reading content.

    A group's datasets come before those of its subgroups, and one subgroup is finished before the
    next begins.  Run it under `no_plugins`.

    Raises
    ------
    InputError
        ``HDF5_LINK``, ``HDF5_EXTERNAL_STORAGE``, ``HDF5_VIRTUAL``, ``HDF5_OBJECTS``,
        ``HDF5_UNREADABLE``.
    """
    path = Path(file.filename)
    try:
        yield from _scan(file, path, limits)
    except InputError:
        raise
    except LIBRARY_ERRORS as error:
        raise unreadable(path, error) from error


def _scan(file: h5py.File, path: Path, limits: Limits) -> Iterator[DatasetFacts]:
    root = h5g.open(file.id, b"/")
    seen = {h5o.get_info(root).addr}
    pending: list[tuple[str, bytes, int]] = [("", b"/", 0)]
    objects = 0
    while pending:
        prefix, group_path, depth = pending.pop()
        group = h5g.open(file.id, group_path)
        objects += group.get_num_objs()
        if objects > limits.objects or depth > limits.depth:
            raise InputError(
                "HDF5_OBJECTS",
                f"more than {limits.objects} objects or {limits.depth} levels of groups",
                where=str(path),
                remedy="keep only the dataset's own columns in the file",
            )
        names: list[bytes] = []
        group.links.iterate(names.append)
        for raw in names:
            name = prefix + raw.decode("utf-8", "backslashreplace")
            if group.links.get_info(raw).type != h5l.TYPE_HARD:
                _refuse("HDF5_LINK", "a soft, external or user-defined link", path, name)
            item = h5o.open(group, raw)
            if isinstance(item, h5d.DatasetID):
                yield _dataset_facts(item, path, name)
            elif isinstance(item, h5g.GroupID):
                address = h5o.get_info(item).addr
                if address in seen:
                    _refuse("HDF5_LINK", "a second link to one group", path, name)
                seen.add(address)
                pending.append((f"{name}/", group_path + raw + b"/", depth + 1))


def _refuse(code: str, what: str, path: Path, name: str) -> None:
    raise InputError(code, f"{what} is not accepted", where=f"{path}: {name}", remedy=_COPY_REMEDY)


def _dataset_facts(dataset: Any, path: Path, name: str) -> DatasetFacts:
    plan = dataset.get_create_plist()
    layout = plan.get_layout()
    if layout == h5d.VIRTUAL:
        _refuse("HDF5_VIRTUAL", "a virtual dataset", path, name)
    if plan.get_external_count():
        _refuse("HDF5_EXTERNAL_STORAGE", "data stored in another file", path, name)
    shape = dataset.shape
    dtype, type_name = _dtype(dataset)
    chunks = plan.get_chunk() if layout == h5d.CHUNKED else None
    stored = int(dataset.get_storage_size())
    itemsize = int(dataset.get_type().get_size())
    missing, end = 0, 0
    if shape is not None and chunks is not None:
        wanted = prod(-(-n // c) for n, c in zip(shape, chunks, strict=True))
        missing = max(0, wanted - int(dataset.get_num_chunks())) * prod(chunks) * itemsize
    elif shape is not None:
        missing = max(0, prod(shape) * itemsize - stored)
        offset = dataset.get_offset()
        end = offset + stored if offset is not None and layout == h5d.CONTIGUOUS else 0
    return DatasetFacts(
        name=name,
        shape=shape,
        dtype=dtype,
        type_name=type_name,
        chunks=chunks,
        filters=tuple(plan.get_filter(i)[0] for i in range(plan.get_nfilters())),
        stored_bytes=stored,
        unwritten_bytes=missing,
        end=end,
        address=int(h5o.get_info(dataset).addr),
    )


def _dtype(dataset: Any) -> tuple[np.dtype[Any] | None, str]:
    try:
        dtype = np.dtype(dataset.dtype)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return None, f"unknown type ({error})"
    if dtype.kind not in "biufc" or dtype.itemsize > 16 or dtype.char in "gG":
        return None, f"type {dtype}"
    return np.dtype(dtype.str), dtype.name


class ColumnCheck:
    """Checks that datasets can be read safely and hold what they claim.

    Parameters
    ----------
    path
        The file.
    limits
        What it may claim.

    Attributes
    ----------
    warnings
        Columns with parts that were never written.
    """

    def __init__(self, path: Path, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._limits = limits
        self._file_bytes = path.stat().st_size
        self._addresses: set[int] = set()
        self._stored_bytes = 0
        self._claimed_bytes = 0

    def add(self, fact: DatasetFacts) -> None:
        """Check one dataset, and the sum of all so far.

        Raises
        ------
        InputError
            ``HDF5_DTYPE``, ``HDF5_FILTER``, ``HDF5_SHAPE``.
        """
        _check_column(fact, self.path, self._file_bytes, self._limits)
        if fact.unwritten_bytes:
            self.warnings.append(
                f"column {fact.name}: {fact.unwritten_bytes} bytes were never written and read as "
                "the fill value"
            )
        self._claimed_bytes += fact.claimed_bytes
        if fact.address not in self._addresses:
            self._addresses.add(fact.address)
            self._stored_bytes += fact.stored_bytes
        most = self._limits.allowance_bytes + self._limits.expansion * self._file_bytes
        if self._stored_bytes > self._file_bytes or self._claimed_bytes > most:
            raise InputError(
                "HDF5_SHAPE",
                f"the columns claim {self._claimed_bytes} bytes, more than a file of "
                f"{self._file_bytes} bytes is trusted to hold",
                where=str(self.path),
                remedy="the file is damaged or made to exhaust memory; if it is genuine, store it "
                "without compression",
            )


def _check_column(fact: DatasetFacts, path: Path, file_bytes: int, limits: Limits) -> None:
    where = f"{path}: {fact.name}"
    if fact.dtype is None:
        raise InputError(
            "HDF5_DTYPE",
            f"{fact.type_name} is neither numeric nor bool",
            where=where,
            remedy="store the column as a NumPy bool, integer, float or complex dtype",
        )
    bad = [f for f in fact.filters if f not in ALLOWED_FILTERS]
    if bad or len(set(fact.filters)) != len(fact.filters):
        raise InputError(
            "HDF5_FILTER",
            f"HDF5 filter {bad[0] if bad else 'used twice'} is not accepted",
            where=where,
            remedy=f"store it with one of {', '.join(ALLOWED_FILTERS.values())}, or with none",
        )
    shape = fact.shape or ()
    problem, remedy = "", "the file is damaged, cut short or not a table of steps"
    if not 1 <= len(shape) <= limits.dimensions or any(n < 1 for n in shape[1:]):
        problem = f"shape {fact.shape} is not rows by positive step dimensions"
    elif fact.chunks and prod(fact.chunks) * fact.dtype.itemsize > limits.chunk_bytes:
        problem = f"chunks of {fact.chunks} exceed {limits.chunk_bytes} bytes"
        remedy = "store the column in chunks of about 1 MiB, e.g. with h5repack -l NAME:CHUNK=..."
    elif fact.unwritten_bytes > limits.unwritten_bytes or fact.end > file_bytes:
        problem = f"shape {fact.shape} claims more bytes than the file holds"
    if problem:
        raise InputError(
            "HDF5_SHAPE",
            problem,
            where=where,
            remedy=remedy,
        )
