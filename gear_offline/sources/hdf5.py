"""One HDF5 file from outside: what it holds, whether that may be read, and the rows themselves.

HDF5 can name other files (external storage, virtual datasets, links), load native code (plug-in
filters) and claim sizes that it does not hold.  The library is asked for headers only, follows no
link, and is closed again when a file is open; rows are read and decoded here, each chunk to exactly
the bytes that it claims.

Shape legend: N rows.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5g, h5l, h5o, h5t
from numpy.lib.stride_tricks import sliding_window_view

from gear_offline.core.closing import Closing
from gear_offline.core.files import read_at
from gear_offline.core.types import Int64Array
from gear_offline.dataset.schema import MAX_DIMENSIONS
from gear_offline.errors import InputError
from gear_offline.sources.base import READ_BYTES, InputFile, damage_told
from gear_offline.sources.hdf5_filters import FILTERS, Bytes, decode_chunk

MAX_READ_BYTES = 256 << 20  # beyond this a row of chunks is read in parts
KEPT_BYTES = 64 << 20  # of each column the row of chunks that was decoded last, up to this
SMALL_CHUNK_BYTES, GATHERED_CHUNKS = 4096, 4096
MAX_STEP_BYTES = 64 << 20
MAX_CHUNK_BYTES = 1 << 30
MAX_UNWRITTEN_BYTES = 16 << 20  # fill values in place of chunks that were never written
MAX_ATTRIBUTES, MAX_ATTRIBUTE_BYTES = 200, 4096
MAX_TEXT_BYTES = 16 << 20
LIBRARY_ERRORS = (
    *(OSError, RuntimeError, KeyError, ValueError, TypeError, NotImplementedError),
    OverflowError,  # an address that no signed number holds
)
_PLAIN = "copy the data into plain datasets of one file, e.g. with h5repack"


@dataclass(frozen=True, kw_only=True)
class Hdf5Dataset:
    """What the header of an HDF5 dataset says; nothing of its content has been read."""

    path: str  # in the file, without the leading slash
    shape: tuple[int, ...] | None  # None for an empty (null) dataspace
    dtype: np.dtype[Any] | None  # as stored; None where it is not a plain number or bool
    type_name: str  # for messages

    @property
    def rows(self) -> int:
        """Length of the first dimension; 0 for scalars and empty dataspaces."""
        return self.shape[0] if self.shape else 0


class Hdf5File(Closing):
    """An open HDF5 file whose headers were looked through; use it in a ``with`` statement.

    `datasets` holds what it has by its path in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A pipe would block HDF5, and of other failures it would say "damaged".
        self.file = InputFile.find(path)
        self.warnings: list[str] = []
        with _told_as_damaged(path):
            if not h5py.is_hdf5(path):
                what, remedy = "not an HDF5 file", "give a .hdf5 file, or a file of that format"
                raise InputError("SOURCE_READ", what, where=str(path), remedy=remedy)
            try:
                self._file = h5py.File(path, "r", locking="best-effort")
            except BlockingIOError as error:  # locked: not damaged, but not complete either
                what, remedy = "another program has the file open for writing", "close it there"
                raise InputError("SOURCE_READ", what, where=str(path), remedy=remedy) from error
            try:
                self.datasets = {dataset.path: dataset for dataset in self._walk()}
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the library's file; columns can be read on."""
        self._file.close()

    def _walk(self) -> Iterator[Hdf5Dataset]:
        """Yield all datasets, those of a group before those of its subgroups."""
        types: dict[bytes, tuple[np.dtype[Any] | None, str]] = {}
        root = h5g.open(self._file.id, b"/")
        seen = {h5o.get_info(root).addr}
        pending = [("", root)]
        while pending:
            prefix, group = pending.pop()
            names: list[bytes] = []
            group.links.iterate(names.append)
            for raw in names:
                name = prefix + raw.decode("utf-8", "backslashreplace")
                if group.links.get_info(raw).type != h5l.TYPE_HARD:
                    raise self._unsafe("a soft, external or user-defined link", name)
                item = h5o.open(group, raw)
                if isinstance(item, h5d.DatasetID):
                    plan = item.get_create_plist()
                    if plan.get_layout() == h5d.VIRTUAL:
                        raise self._unsafe("a virtual dataset", name)
                    if plan.get_external_count():
                        raise self._unsafe("data stored in another file", name)
                    kind = item.get_type().encode()  # few types, many datasets
                    if kind not in types:
                        types[kind] = _dtype(item)
                    dtype, text = types[kind]
                    yield Hdf5Dataset(path=name, shape=item.shape, dtype=dtype, type_name=text)
                elif isinstance(item, h5g.GroupID):
                    address = h5o.get_info(item).addr
                    if address in seen:
                        raise self._unsafe("a second link to one group", name)
                    seen.add(address)
                    pending.append((f"{name}/", item))

    def _unsafe(self, what: str, name: str, remedy: str = _PLAIN) -> InputError:
        where = f"{self.path}: {name}"
        return InputError("SOURCE_UNSAFE", f"{what} is not accepted", where=where, remedy=remedy)

    def column(self, path: str) -> Hdf5Column:
        """Return a dataset's rows for reading, which does not need this object any more."""
        with _told_as_damaged(self.path):
            return self._column(self.datasets[path])

    def _column(self, found: Hdf5Dataset) -> Hdf5Column:
        where, shape, dtype = f"{self.path}: {found.path}", found.shape or (), found.dtype
        if dtype is None:
            what = f"{found.type_name} is neither numeric nor bool"
            remedy = "store the column as a NumPy bool, integer, float or complex dtype"
            raise InputError("COLUMN", what, where=where, remedy=remedy)
        if not 1 <= len(shape) <= MAX_DIMENSIONS + 1 or any(n < 1 for n in shape[1:]):
            what = f"shape {found.shape} is not rows by positive step dimensions"
            remedy = "the file is damaged, cut short or not a table of steps"
            raise InputError("SOURCE_LAYOUT", what, where=where, remedy=remedy)
        if prod(shape[1:]) * dtype.itemsize > MAX_STEP_BYTES:
            raise self._unsafe(f"a step of more than {MAX_STEP_BYTES >> 20} MiB", found.path)
        dataset = h5d.open(self._file.id, found.path.encode())
        plan, filters = dataset.get_create_plist(), self._filters(dataset, found)
        if plan.get_layout() == h5d.COMPACT:
            raise self._unsafe("a column in the header of the file", found.path)
        chunked = plan.get_layout() == h5d.CHUNKED
        chunks = tuple(plan.get_chunk()) if chunked else shape  # contiguous data are one chunk
        chunk_bytes = prod(chunks) * dtype.itemsize
        if chunked and chunk_bytes > MAX_CHUNK_BYTES:
            remedy = "store it in chunks of about 1 MiB, e.g. with h5repack -l NAME:CHUNK=..."
            raise self._unsafe("a chunk of more than 1 GiB", found.path, remedy)
        stored = self._stored_chunks(dataset, found, chunks, chunk_bytes)
        offsets, sizes, _ = stored.T
        if (offsets + sizes).max(initial=0) > self.file.identity[2]:
            raise ValueError("data lie behind the end of the file")
        if sizes.max(initial=0) > 2 * chunk_bytes + 4096:
            raise ValueError("a chunk is stored in more bytes than it holds")
        if not filters and (sizes[offsets >= 0] != chunk_bytes).any():
            raise ValueError(f"a chunk of {chunk_bytes} bytes holds others")
        unwritten = offsets.min(initial=0) < 0
        return Hdf5Column(
            file=self.file,
            name=found.path,
            stored_dtype=dtype,
            shape=shape,
            chunks=chunks,
            filters=filters,
            stored=stored,
            fill=np.asarray(h5py.Dataset(dataset).fillvalue if unwritten else 0).astype(dtype),
        )

    def _stored_chunks(
        self, dataset: Any, found: Hdf5Dataset, chunks: tuple[int, ...], chunk_bytes: int
    ) -> Int64Array:
        """Return where chunks lie, (chunks, 3): offset or -1, bytes, filters that were skipped."""
        shape = found.shape or ()
        flat = array("q")  # 1,000,000 chunks are not rare: h5py's appending makes them

        def add(info: Any) -> None:
            place, mask, offset, size = info
            flat.extend((offset, size, mask, *place))

        if dataset.get_create_plist().get_layout() == h5d.CHUNKED:
            dataset.chunk_iter(add)
        elif size := int(dataset.get_storage_size()):
            add((np.zeros(len(shape), np.int64), 0, dataset.get_offset(), size))
        listed = np.frombuffer(flat, np.int64).reshape(-1, 3 + len(shape))
        grid = tuple(-(-n // max(c, 1)) for n, c in zip(shape, chunks, strict=True))
        unwritten = (prod(grid) - len(listed)) * chunk_bytes
        if unwritten > MAX_UNWRITTEN_BYTES:
            what = f"a column of shape {shape} of which {unwritten} bytes were never written"
            remedy = "the file is damaged, cut short or made to exhaust memory: get it again"
            raise self._unsafe(what, found.path, remedy)
        if unwritten > 0:
            note = f"{unwritten} bytes were never written and read as the fill value"
            self.warnings.append(f"column {found.path}: {note}")
        stored = np.full((prod(grid), 3), (-1, 0, 0), np.int64)
        if listed.size:
            coordinates = listed[:, 3:] // np.array(chunks)
            stored[np.ravel_multi_index(tuple(coordinates.T), grid)] = listed[:, :3]
        return stored

    def _filters(self, dataset: Any, found: Hdf5Dataset) -> tuple[int, ...]:
        plan = dataset.get_create_plist()
        filters = tuple(plan.get_filter(i)[0] for i in range(plan.get_nfilters()))
        if len(set(filters)) != len(filters) or any(f not in FILTERS for f in filters):
            text = f"a column behind the HDF5 filters {', '.join(map(str, filters))}"
            known = ", ".join(name for name, _ in FILTERS.values())
            remedy = f"store it with one of {known}, or with none"
            raise self._unsafe(text, found.path, remedy)
        return filters

    def check_all(self) -> None:
        """Check every dataset of a file that another program is going to read.

        The library would fill up a chunk that holds fewer bytes than it claims with those that
        were in memory before.
        """
        for name, header in self.datasets.items():
            if header.shape and header.dtype is not None:
                self.column(name).check()
            else:  # text lies elsewhere in the file
                with _told_as_damaged(self.path):
                    self._filters(h5d.open(self._file.id, header.path.encode()), header)

    def attributes(self) -> dict[str, Any]:
        """Return the root's small scalar attributes: numbers, bools and strings."""
        with _told_as_damaged(self.path):
            names = list(self._file.attrs)[:MAX_ATTRIBUTES]
        facts = {str(name): self.attribute("/", name, most=500) for name in names}
        return {name: value for name, value in facts.items() if value is not None}

    def attribute(
        self, group: str, name: str, most: int = MAX_TEXT_BYTES
    ) -> str | int | float | None:
        """Return a scalar attribute of a group, ``None`` where it has none."""
        with suppress(*LIBRARY_ERRORS):
            attributes = self._file[group].attrs
            if attributes.get_id(name).shape == ():
                return _plain(attributes[name], most)
        return None

    def texts(self, name: str) -> list[str]:
        """Return a list of names that the file stores as text."""
        with _told_as_damaged(self.path):
            stored = self._file[name]
            size = stored.id.get_storage_size()
            if (
                stored.ndim != 1
                or stored.chunks
                or h5py.check_string_dtype(stored.dtype) is None
                or not stored.size * stored.dtype.itemsize <= size <= MAX_TEXT_BYTES
            ):
                raise ValueError(f"{name} is no short list of text")
            return [str(_plain(text)) for text in stored[()]]

    def metadata(self) -> dict[str, Any]:
        """Return what lies under ``metadata``: small scalars by value, arrays by shape."""
        facts: dict[str, Any] = {}
        for name, dataset in sorted(self.datasets.items()):
            if name.startswith("metadata/") and dataset.shape != ():
                facts[name] = f"{dataset.type_name} {list(dataset.shape or ())}"
            elif name.startswith("metadata/"):
                with suppress(*LIBRARY_ERRORS):
                    opened = self._file[dataset.path]
                    if opened.id.get_storage_size() <= MAX_ATTRIBUTE_BYTES:
                        facts[name] = _plain(opened[()])
        return {name: value for name, value in facts.items() if value is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Hdf5Column:
    """Rows of one dataset of an HDF5 file; made by `Hdf5File.column`.

    `stored` has a row for each chunk, in row-major order: offset in the file or -1, bytes, and the
    filters that were skipped.  Between reads nothing is open.
    """

    file: InputFile
    name: str
    shape: tuple[int, ...]  # begins with N
    stored_dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    filters: tuple[int, ...]
    stored: Int64Array
    fill: npt.NDArray[Any]
    kept: dict[int, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Native byte order."""
        return self.stored_dtype.newbyteorder("=")

    @property
    def _row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.stored_dtype.itemsize

    @property
    def _chunk_bytes(self) -> int:
        return prod(self.chunks) * self.stored_dtype.itemsize

    @property
    def preferred_rows(self) -> int:
        """Rows a read that suit the chunks: whole rows of chunks, about 8 MiB, at least 1."""
        chunk_rows = 1 if self.chunks == self.shape else self.chunks[0]
        rows = max(READ_BYTES // self._row_bytes // chunk_rows, 1) * chunk_rows
        return max(1, min(rows, MAX_READ_BYTES // self._row_bytes))

    def check(self) -> None:
        """Refuse chunks that are shorter or longer than they claim."""
        if not self.filters:
            return  # seen when it was opened
        with _told_as_damaged(self.file.path), self.file.open() as file:
            for number in range(len(self.stored)):
                self._chunk(file.fileno(), number)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)``, (stop - start, *shape), native byte order."""
        rows = np.empty((stop - start, *self.shape[1:]), self.stored_dtype)
        if rows.size:
            with _told_as_damaged(self.file.path), self.file.open() as file:
                self._read_into(rows, file.fileno(), start)
        if stop == self.shape[0]:
            self.kept.clear()  # a file may have thousands of columns
        return rows.astype(self.dtype, copy=False)

    def _read_into(self, rows: npt.NDArray[Any], file: int, start: int) -> None:
        most, stop = self.chunks[0], start + len(rows)
        bands = range(start // most, -(-stop // most))  # rows of chunks
        offsets = self.stored[bands.start : bands.stop, 0]
        if not self.filters and self.chunks[1:] == self.shape[1:] and offsets.min() >= 0:
            view: npt.NDArray[np.uint8] = rows.reshape(-1).view(np.uint8)
            before = (start - bands.start * most) * self._row_bytes
            if len(bands) == 1:
                return _pread_into(file, view.data, int(offsets[0]) + before)
            if self._chunk_bytes <= SMALL_CHUNK_BYTES:
                view[:] = self._gather(file, offsets)[before : before + len(view)]
                return None
        for index in bands:
            first, last = max(start, index * most), min(stop, (index + 1) * most)
            band = self.kept.get(index)
            if band is None:
                band = self._decode(file, index)
                self.kept.clear()  # a read that ends inside it goes on in it
                if band.nbytes <= KEPT_BYTES:
                    self.kept[index] = band
            rows[first - start : last - start] = band[first - index * most : last - index * most]
        return None

    def _gather(self, file: int, offsets: Int64Array) -> npt.NDArray[np.uint8]:
        """Return the bytes of small chunks, read with those that lie between them.

        One call a chunk takes 10 us: 40 s for the columns of 1,000,000 steps in chunks of one row.
        """
        size = self._chunk_bytes
        chunks = np.empty((len(offsets), size), np.uint8)
        for begin in range(0, len(offsets), GATHERED_CHUNKS):
            part = offsets[begin : begin + GATHERED_CHUNKS]
            low, high = int(part.min()), int(part.max()) + size
            if high - low <= READ_BYTES:
                span = np.empty(high - low, np.uint8)
                _pread_into(file, span.data, low)
                chunks[begin : begin + len(part)] = sliding_window_view(span, size)[part - low]
            else:
                for row, offset in zip(chunks[begin:], part.tolist(), strict=False):
                    _pread_into(file, row.data, offset)
        return chunks.reshape(-1)

    def _decode(self, file: int, index: int) -> npt.NDArray[Any]:
        """Return a row of chunks, (chunk rows, *stored step)."""
        shape, widths = self.shape[1:], self.chunks[1:]
        grid = [-(-n // c) for n, c in zip(shape, widths, strict=True)]
        band = np.empty((self.chunks[0], *shape), self.stored_dtype)
        for number, place in enumerate(np.ndindex(*grid)):
            plain = self._chunk(file, index * prod(grid) + number)
            corner = zip(place, widths, strict=True)
            target = band[(slice(None), *(slice(i * w, (i + 1) * w) for i, w in corner))]
            if plain is None:
                target[...] = self.fill
            else:
                chunk = np.frombuffer(plain, self.stored_dtype).reshape(self.chunks)
                target[...] = chunk[tuple(map(slice, target.shape))]
        return band

    def _chunk(self, file: int, number: int) -> Bytes | None:
        """Return the decoded bytes of a chunk, ``None`` if it was never written."""
        offset, size, skipped = self.stored[number].tolist()
        if offset < 0:
            return None
        raw = bytearray(size)
        _pread_into(file, memoryview(raw), offset)
        return decode_chunk(
            raw,
            self.filters,
            skipped,
            chunk_bytes=self._chunk_bytes,
            itemsize=self.stored_dtype.itemsize,
        )


def _told_as_damaged(path: Path) -> AbstractContextManager[None]:
    return damage_told("HDF5", path, LIBRARY_ERRORS)


def _pread_into(file: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` from `offset` on."""
    if read_at(file, buffer, offset) < len(buffer):
        raise ValueError("the file ends before its data do")


def _dtype(dataset: Any) -> tuple[np.dtype[Any] | None, str]:
    """Return the dtype whose bytes are those of the file, ``None`` if there is none; and its name.

    HDF5 has types that NumPy's only resemble, as 12-bit integers: reading their bytes would differ.
    """
    try:
        dtype, stored = np.dtype(dataset.dtype), dataset.get_type()
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return None, f"unknown type ({error})"
    if dtype.kind not in "biufc" or dtype.itemsize > 16 or dtype.char in "gG":
        return None, f"type {dtype}"
    if dtype.kind in "iu" and stored.get_class() == h5t.ENUM:
        stored = stored.get_super()
    plain = np.dtype(dtype.str)  # without h5py's enum metadata
    if h5t.py_create(plain, logical=True) != stored:
        return None, f"a type that only resembles {plain}"
    return plain, plain.name


def _plain(value: Any, most: int = 500) -> str | int | float | None:
    """Return a plain number, bool or string of up to `most` characters, else ``None``."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value[:most]
    plain = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else None
