"""One HDF5 file from outside: headers that are looked through, and rows.

HDF5 can name other files (external storage, virtual datasets, links), load native code (plug-in
filters) and claim sizes that it does not hold.  The library reads headers only and follows no link.
Rows are read and decoded here, each chunk to exactly the bytes that it claims.

Shape legend: N rows.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5g, h5l, h5o, h5s, h5t

from gear_offline.core.files import Closing, read_at
from gear_offline.core.types import Int64Array
from gear_offline.errors import InputError
from gear_offline.sources.base import READ_BYTES
from gear_offline.sources.columns import can_be_column
from gear_offline.sources.hdf5_filters import FILTERS, ChunkDecoder
from gear_offline.sources.input_files import InputFile, reading_errors

SUFFIXES = (".hdf5", ".h5")
OTHER_FILES = {  # how a file of such a name comes in by Python
    ".csv": "pandas.read_csv({!r}).to_parquet('mine.parquet')",
    ".json": "pandas.read_json({!r}).to_parquet('mine.parquet')",
    ".mat": "file = scipy.io.loadmat({!r}, squeeze_me=True); "
    "go.convert(go.from_arrays({{n: file[n] for n in file if n[0] != '_'}}), 'OUT')",
    ".pkl": "if you trust it, go.convert(go.from_arrays(pickle.load(open({!r}, 'rb'))), 'OUT'); "
    "of a list of episodes go.from_episodes",
}
OTHER_FILES[".pickle"] = OTHER_FILES[".pkl"]
OTHER_FILES |= {
    ".npy": "go.convert(go.from_arrays({{'observations': numpy.load({!r}), 'actions': ...}}), "
    "'OUT')",
    ".pt": "file = torch.load({!r}, weights_only=True); "
    "go.convert(go.from_arrays({{n: v.numpy() for n, v in file.items()}}), 'OUT')",
    ".jsonl": "pandas.read_json({!r}, lines=True).to_parquet('mine.parquet')",
    ".py": "import it, and give what it makes to go.from_episodes; {!r} is code",
}
OTHER_FILES[".pth"] = OTHER_FILES[".pt"]
MAX_READ_BYTES = 256 << 20  # beyond this a row of chunks is read in parts
KEPT_BYTES = 64 << 20  # of each column the row of chunks that was decoded last, up to this
MAX_CHUNK_BYTES, MAX_BAND_BYTES = 512 << 20, 1 << 30
MAX_UNWRITTEN_BYTES = 16 << 20  # fill values in place of chunks that were never written
MAX_ATTRIBUTES, MAX_ATTRIBUTE_BYTES = 200, 4096
MAX_TEXT_BYTES = 16 << 20
Plain = str | int | float
_reading = partial(reading_errors, "HDF5")
_PLAIN = "copy the data into plain datasets of one file: new[name] = old[name][()] with h5py"


class Hdf5Dataset(NamedTuple):
    """The header of an HDF5 dataset, of whose content nothing has been read."""

    path: str  # in the file, without the leading slash
    shape: tuple[int, ...] | None  # None for an empty (null) dataspace
    dtype: np.dtype[Any] | None  # as stored; None where it is not a plain number or bool
    type_name: str  # for messages
    first: int = 0  # row that counts as the first


class Hdf5File(Closing):
    """An open HDF5 file whose headers were looked through; use it in a ``with`` statement.

    `datasets` holds what it has by its path in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A pipe would block HDF5, and of other failures it would say "damaged".
        self.file = InputFile.find(path)
        self.warnings: list[str] = []
        with _reading(path):
            if not h5py.is_hdf5(path):
                way = OTHER_FILES.get(path.suffix.lower(), "").format(str(path))
                what = f"{path.suffix} files are not read" if way else "not an HDF5 file"
                remedy = f"in Python: {way}; " * bool(way) + "docs/how-to/convert.md, Other files: "
                remedy += "HDF5, npz, parquet, arrow and zarr are read"
                raise InputError("SOURCE_READ", what, str(path), remedy)
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
                    raise _unsafe("a soft, external or user-defined link", self.path, name)
                item = h5o.open(group, raw)
                if isinstance(item, h5d.DatasetID):
                    plan = item.get_create_plist()
                    if plan.get_layout() == h5d.VIRTUAL:
                        raise _unsafe("a virtual dataset", self.path, name)
                    if plan.get_external_count():
                        raise _unsafe("data stored in another file", self.path, name)
                    kind = item.get_type().encode()  # few types, many datasets
                    if kind not in types:
                        types[kind] = _dtype(item)
                    dtype, text = types[kind]
                    yield Hdf5Dataset(path=name, shape=item.shape, dtype=dtype, type_name=text)
                elif isinstance(item, h5g.GroupID):
                    address = h5o.get_info(item).addr
                    if address in seen:
                        raise _unsafe("a second link to one group", self.path, name)
                    seen.add(address)
                    pending.append((f"{name}/", item))

    def column(self, rows: Hdf5Dataset) -> Hdf5Column:
        """Return the rows of one that can be a column; to read them does not need this object."""
        with _reading(self.path):
            dataset, block = h5d.open(self._file.id, rows.path.encode()), self._file.userblock_size
            column = Hdf5Column(self.file, rows, dataset, block)
        if column.unwritten:
            note = f"{column.unwritten} bytes were never written and read as the fill value"
            self.warnings.append(f"column {rows.path}: {note}")
        return column

    def check_all(self) -> None:
        """Check every dataset of a file that another program is going to read through HDF5."""
        for name, header in self.datasets.items():
            if can_be_column(header.shape, header.dtype):
                self.column(header).check()
                continue
            with _reading(self.path):  # text lies elsewhere in the file
                plan = h5d.open(self._file.id, name.encode()).get_create_plist()
                _filters(plan, self.path, name)

    def attributes(self) -> dict[str, Any]:
        """Return the root's small scalar attributes: numbers, bools and strings."""
        with _reading(self.path):
            names = list(self._file.attrs)[:MAX_ATTRIBUTES]
        facts = {str(name): self.attribute("/", name, most=500) for name in names}
        return {name: value for name, value in facts.items() if value is not None}

    def attribute(self, group: str, name: str, most: int = MAX_TEXT_BYTES) -> Plain | None:
        """Return a scalar attribute of a group, ``None`` where it has none."""
        with suppress(Exception):
            attributes = self._file[group].attrs
            if attributes.get_id(name).shape == ():
                return _plain(attributes[name], most)
        return None

    def texts(self, name: str) -> list[str]:
        """Return a list of names that the file stores as text."""
        with _reading(self.path):
            stored = self._file[name]
            is_text = stored.ndim == 1 and h5py.check_string_dtype(stored.dtype) is not None
            if not is_text or self._claimed(stored) > MAX_TEXT_BYTES:
                raise ValueError(f"{name} is no short list of text")
            if stored.id.get_storage_size() < stored.size * stored.dtype.itemsize:
                raise ValueError(f"{name} was not written to its end")
            return [str(_plain(text)) for text in stored[()]]

    def _claimed(self, stored: h5py.Dataset) -> int:
        """Return the bytes that numbers or text claim, for which HDF5 makes room unseen."""
        size, text = int(stored.id.get_storage_size()), h5py.check_string_dtype(stored.dtype)
        if size > MAX_TEXT_BYTES or stored.chunks or not (text or stored.dtype.kind in "biufcS"):
            raise ValueError("no short numbers or text")
        if text is None or text.length is not None:
            return size
        raw = bytearray(size)  # a length of 4 bytes and the place, of each text
        with self.file.open() as file:
            _pread_into(file.fileno(), memoryview(raw), int(stored.id.get_offset()))
        return int(np.frombuffer(raw, "<u4")[::4].sum(dtype=np.int64))

    def scalar(self, name: str) -> Plain | None:
        """Return a dataset of one number or text, ``None`` where it is another."""
        with suppress(Exception):
            if self._claimed(stored := self._file[name]) <= MAX_ATTRIBUTE_BYTES:
                return _plain(np.asarray(stored[()]).item())
        return None

    def metadata(self) -> dict[str, Any]:
        """Return the content of the group ``metadata``: small scalars by value, arrays by shape."""
        stored = [(n, h) for n, h in sorted(self.datasets.items()) if n.startswith("metadata/")]
        arrays = {n: f"{h.type_name} {list(h.shape or ())}" for n, h in stored if h.shape != ()}
        facts = {name: arrays.get(name) or self.scalar(name) for name, _ in stored}
        return {name: value for name, value in facts.items() if value is not None}


class Hdf5Column:
    """Rows of one dataset of an HDF5 file.  Between reads nothing is open."""

    def __init__(
        self, file: InputFile, header: Hdf5Dataset, dataset: h5d.DatasetID, user_block: int
    ) -> None:
        self._file, where = file, (file.path, header.path)
        assert header.shape and header.dtype is not None, "it can be a column"
        self.shape, self._first, self._stored_dtype = header.shape, header.first, header.dtype
        self.dtype, shape = self._stored_dtype.newbyteorder("="), dataset.shape
        self._plan, self._type = dataset.get_create_plist(), dataset.get_type().copy()
        self._filters = _filters(self._plan, *where)
        self._decoder: ChunkDecoder | None = None
        layout = self._plan.get_layout()
        chunked = layout == h5d.CHUNKED
        self._chunks = tuple(self._plan.get_chunk()) if chunked else shape  # contiguous: one chunk
        chunk_bytes = prod(self._chunks) * self.dtype.itemsize
        self._row_bytes = prod(shape[1:]) * self.dtype.itemsize
        band_bytes = self._chunks[0] * self._row_bytes
        if chunked and (chunk_bytes > MAX_CHUNK_BYTES or band_bytes > MAX_BAND_BYTES):
            what = f"a chunk of {chunk_bytes:,} bytes, or {band_bytes:,} in a row of them,"
            raise _unsafe(what, *where, "store it in chunks of 1 MiB")
        grid = tuple(-(-n // max(c, 1)) for n, c in zip(shape, self._chunks, strict=True))
        self._compact = np.empty(0, self._stored_dtype)
        if layout == h5d.COMPACT:  # in the header, at most 64 KiB
            if dataset.get_storage_size() != chunk_bytes:
                raise ValueError(f"a column of {chunk_bytes} bytes holds others")
            self._compact, grid = np.empty(shape, self._stored_dtype), (0,)
            dataset.read(h5s.ALL, h5s.ALL, self._compact, mtype=self._type)
        listed = _listed_chunks(dataset, chunked, user_block)
        # bytes of the chunks that were never written, which read as the fill value
        self.unwritten = max((prod(grid) - len(listed)) * chunk_bytes, 0)
        if self.unwritten > MAX_UNWRITTEN_BYTES:
            what = f"a column of shape {shape} of which {self.unwritten} bytes were never written"
            raise _unsafe(what, *where, "the file is damaged or cut short: get it again")
        offsets, sizes = listed[:, 0], listed[:, 1]
        exact = bool(self._filters) or (sizes == chunk_bytes).all()
        if not exact or sizes.max(initial=0) > 2 * chunk_bytes + 4096:
            raise ValueError(f"a chunk of {chunk_bytes} bytes is stored in others")
        if (offsets + sizes).max(initial=0) > file.identity[2]:
            raise ValueError("data lie behind the end of the file")
        # of each chunk, in row-major order: offset in the file or -1, bytes, skipped filters
        self._stored = np.full((prod(grid), 3), (-1, 0, 0), np.int64)
        if listed.size:
            coordinates = listed[:, 3:] // np.array(self._chunks)
            self._stored[np.ravel_multi_index(tuple(coordinates.T), grid)] = listed[:, :3]
        fill = h5py.Dataset(dataset).fillvalue if self.unwritten else 0
        self._fill = np.asarray(fill).astype(self._stored_dtype)
        same = self._type == h5t.py_create(self._stored_dtype)
        self._is_odd = self._type.get_class() == h5t.INTEGER and not same
        if self._is_odd and self._fill:
            raise ValueError(f"a fill value of a type that only resembles {self.dtype}")
        self._kept: tuple[int, npt.NDArray[Any]] | None = None  # the last row of chunks
        chunk_rows = self._chunks[0] if chunked else 1
        # rows a read that suit the chunks: whole rows of them, about 8 MiB
        rows = max(READ_BYTES // self._row_bytes // chunk_rows, 1) * chunk_rows
        self.preferred_rows = max(1, min(rows, MAX_READ_BYTES // self._row_bytes))

    def check(self) -> None:
        """Refuse chunks that are shorter or longer than they claim."""
        if not self._filters:
            return  # seen when it was opened
        with _reading(self._file.path), self._file.open() as file:
            for number in range(len(self._stored)):
                self._chunk(file.fileno(), number)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)``, (stop - start, *shape), native byte order."""
        rows = np.empty((stop - start, *self.shape[1:]), self._stored_dtype)
        first = start + self._first
        if self._compact.size:
            rows[:] = self._compact[first : first + len(rows)]
        elif rows.size:
            with _reading(self._file.path), self._file.open() as file:
                self._read_into(rows, file.fileno(), first)
        if stop == self.shape[0]:  # a file may have thousands of columns
            self._kept = self._decoder = None
        if self._is_odd:  # as 12-bit integers
            h5t.convert(self._type, h5t.py_create(self.dtype), rows.size, rows)
            return rows.view(self.dtype)
        return rows.astype(self.dtype, copy=False)

    def _read_into(self, rows: npt.NDArray[Any], file: int, start: int) -> None:
        view: npt.NDArray[np.uint8] = rows.reshape(-1).view(np.uint8)
        most, row_bytes, stop = self._chunks[0], self._row_bytes, start + len(rows)
        whole = not self._filters and self._chunks[1:] == self.shape[1:]
        for index in range(start // most, -(-stop // most)):  # rows of chunks
            first, last = max(start, index * most), min(stop, (index + 1) * most)
            if whole and (offset := int(self._stored[index, 0])) >= 0:
                part = view[(first - start) * row_bytes : (last - start) * row_bytes]
                _pread_into(file, part.data, offset + (first - index * most) * row_bytes)
            else:
                band = self._decode(file, index)
                rows[first - start : last - start] = band[first - index * most :][: last - first]

    def _decode(self, file: int, index: int) -> npt.NDArray[Any]:
        """Return a row of chunks, (chunk rows, *stored step); the next read may go on in it."""
        if self._kept and self._kept[0] == index:
            return self._kept[1]
        shape, widths = self.shape[1:], self._chunks[1:]
        grid = [-(-n // c) for n, c in zip(shape, widths, strict=True)]
        band = np.empty((self._chunks[0], *shape), self._stored_dtype)
        for number, place in enumerate(np.ndindex(*grid)):
            plain = self._chunk(file, index * prod(grid) + number)
            corner = zip(place, widths, strict=True)
            target = band[(slice(None), *(slice(i * w, (i + 1) * w) for i, w in corner))]
            target[...] = self._fill if plain is None else plain[tuple(map(slice, target.shape))]
        self._kept = (index, band) if band.nbytes <= KEPT_BYTES else None
        return band

    def _chunk(self, file: int, number: int) -> npt.NDArray[Any] | None:
        """Read and decode a chunk; ``None`` if it was never written."""
        offset, size, skipped = self._stored[number].tolist()
        if offset < 0:
            return None
        raw = bytearray(size)
        _pread_into(file, memoryview(raw), offset)
        self._decoder = self._decoder or ChunkDecoder(self._plan, self._type)
        plain = self._decoder.decode(raw, skipped)
        return np.frombuffer(plain, self._stored_dtype).reshape(self._chunks)


def _unsafe(what: str, path: Path, name: str, remedy: str = _PLAIN) -> InputError:
    return InputError("SOURCE_UNSAFE", f"{what} is not accepted", f"{path}: {name}", remedy)


@cache
def _leaves_out_user_block() -> bool:
    """Tell an HDF5 before 1.14.4, whose addresses of chunks begin behind the user block."""
    image = BytesIO()
    with h5py.File(image, "w", userblock_size=512) as file:
        chunk = file.create_dataset("x", data=np.frombuffer(b"chunk", np.uint8), chunks=(5,))
        file.flush()
        offset = chunk.id.get_chunk_info(0).byte_offset
    return image.getvalue()[offset : offset + 5] != b"chunk"


def _listed_chunks(dataset: h5d.DatasetID, chunked: bool, user_block: int) -> Int64Array:
    """Return for each chunk that was written its offset, bytes, skipped filters and first row."""
    flat = array("q")  # 1,000,000 chunks are not rare: h5py's appending makes them
    if chunked:
        before = user_block if user_block and _leaves_out_user_block() else 0
        dataset.chunk_iter(lambda c: flat.extend((c[2] + before, c[3], c[1], *c[0])))
    elif (offset := dataset.get_offset()) is not None:  # neither compact nor never written
        flat.extend((offset, int(dataset.get_storage_size()), 0, *(0 for _ in dataset.shape)))
    return np.frombuffer(flat, np.int64).reshape(-1, 3 + len(dataset.shape))


def _filters(plan: Any, path: Path, name: str) -> tuple[int, ...]:
    filters = tuple(plan.get_filter(i)[0] for i in range(plan.get_nfilters()))
    if len(set(filters)) != len(filters) or not set(filters) <= set(FILTERS):
        known = ", ".join(name for name, _ in FILTERS.values())
        what = f"a column behind the HDF5 filters {', '.join(map(str, filters))}"
        raise _unsafe(what, path, name, f"store it with one of {known}, or with none")
    return filters


def _pread_into(file: int, buffer: memoryview, offset: int) -> None:
    if read_at(file, buffer, offset) < len(buffer):
        raise ValueError("the file ends before its data do")


def _dtype(dataset: Any) -> tuple[np.dtype[Any] | None, str]:
    """Return the dtype whose bytes are those of the file, ``None`` if there is none; and its name.

    HDF5 has types that NumPy's only resemble.  Integers of fewer bits are converted when read.
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
    is_packed = stored.get_class() == h5t.INTEGER and stored.get_size() == plain.itemsize
    if h5t.py_create(plain, logical=True) != stored and not is_packed:
        return None, f"a type that only resembles {plain}"
    return plain, plain.name


def _plain(value: Any, most: int = 500) -> Plain | None:
    """Return a plain number, bool or string of up to `most` characters, else ``None``."""
    value = value.item() if isinstance(value, np.generic) else value
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if isinstance(text, str):
        return text[:most]
    return value if isinstance(value, int | float) and math.isfinite(value) else None
