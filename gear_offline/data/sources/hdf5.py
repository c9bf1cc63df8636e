"""One HDF5 file from outside: headers that are looked through, and rows.

HDF5 can name other files (external storage, virtual datasets, links), load native code (plug-in
filters) and claim sizes that it does not hold.  So no link is followed, and sizes are compared with
what is stored, chunk by chunk, before h5py reads rows.

Shape legend: N rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5g, h5l, h5o, h5t

from gear_offline.core.files import Closing, read_at
from gear_offline.data.dataset.schema import is_storable
from gear_offline.data.sources.base import READ_BYTES
from gear_offline.data.sources.columns import can_be_column
from gear_offline.data.sources.hdf5_filters import FILTERS, ChunkCheck
from gear_offline.data.sources.input_files import InputFile
from gear_offline.errors import InputError, reading_errors

SUFFIXES = (".hdf5", ".h5")
OTHER_FILES = {  # how a file of such a name comes in by Python
    ".csv": "pandas.read_csv({!r}).to_parquet('mine.parquet')",
    ".json": "pandas.read_json({!r}).to_parquet('mine.parquet')",
    ".jsonl": "pandas.read_json({!r}, lines=True).to_parquet('mine.parquet')",
    ".mat": "file = scipy.io.loadmat({!r}, squeeze_me=True); "
    "go.convert(go.from_arrays({{n: file[n] for n in file if n[0] != '_'}}), 'OUT')",
    ".npy": "go.convert(go.from_arrays({{'observations': numpy.load({!r}), 'actions': ...}}), "
    "'OUT')",
    ".pkl": "if you trust it, go.convert(go.from_arrays(pickle.load(open({!r}, 'rb'))), 'OUT'); "
    "of a list of episodes go.from_episodes",
    ".pt": "load it by torch with weights_only, and give its arrays to go.from_arrays",
    ".py": "import it, and give what it makes to go.from_episodes; {!r} is code",
}
OTHER_FILES |= {".pickle": OTHER_FILES[".pkl"], ".pth": OTHER_FILES[".pt"]}
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
    is_packed: bool = False  # integers of fewer bits than the dtype's
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
                is_other = path.suffix and not path.suffix.lower().startswith(".h")
                problem = f"{path.suffix} files are not read" if is_other else "not an HDF5 file"
                remedy = f"in Python: {way}; " * bool(way) + "a reader of your own: "
                remedy += "--reader FILE.py:FUNCTION, in a recipe data.reader"
                raise InputError("SOURCE_READ", problem, str(path), remedy)
            try:
                self._file = h5py.File(path, "r", locking="best-effort")
            except BlockingIOError as error:  # locked: not damaged, but not complete either
                problem, remedy = "another program has the file open for writing", "close it there"
                raise InputError("SOURCE_READ", problem, where=str(path), remedy=remedy) from error
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
        types: dict[bytes, tuple[np.dtype[Any] | None, str, bool]] = {}
        root = h5g.open(self._file.id, b"/")
        addresses = {h5o.get_info(root).addr}
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
                    type_code = item.get_type().encode()  # few types, many datasets
                    if type_code not in types:
                        types[type_code] = _dtype(item)
                    yield Hdf5Dataset(name, item.shape, *types[type_code])
                elif isinstance(item, h5g.GroupID):
                    address = h5o.get_info(item).addr
                    if address in addresses:
                        raise _unsafe("a second link to one group", self.path, name)
                    addresses.add(address)
                    pending.append((f"{name}/", item))

    def column(self, rows: Hdf5Dataset) -> Hdf5Column:
        """Return the rows of one that can be a column; to read them does not need this object."""
        with _reading(self.path):
            column = Hdf5Column(self.file, rows, h5d.open(self._file.id, rows.path.encode()))
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
                return _to_plain(attributes[name], most)
        return None

    def numbers(self, group: str) -> dict[str, np.generic]:
        """Return the attributes of a group that hold one finite number or bool."""
        with suppress(Exception):  # episodes may have no group of their own
            attributes = self._file[group].attrs
            names = [*islice(attributes, MAX_ATTRIBUTES)]
            attribute_ids = {name: attributes.get_id(name) for name in names}
            return {
                name: value
                for name, attribute in attribute_ids.items()
                if attribute.shape in ((), (1,)) and attribute.dtype.kind in "biuf"
                if not _find_inversion(attribute.dtype)
                if math.isfinite(value := np.asarray(attributes[name]).reshape(-1)[0])
            }
        return {}

    def texts(self, name: str) -> list[str]:
        """Return a list of names that the file stores as text."""
        with _reading(self.path):
            stored = self._file[name]
            is_text = stored.ndim == 1 and h5py.check_string_dtype(stored.dtype) is not None
            if not is_text or self._count_bytes(stored) > MAX_TEXT_BYTES:
                raise ValueError(f"{name} is no short list of text")
            if stored.id.get_storage_size() < stored.size * stored.dtype.itemsize:
                raise ValueError(f"{name} was not written to its end")
            return [str(_to_plain(text)) for text in stored[()]]

    def _count_bytes(self, stored: h5py.Dataset) -> int:
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
            if self._count_bytes(stored := self._file[name]) <= MAX_ATTRIBUTE_BYTES:
                return _to_plain(np.asarray(stored[()]).item())
        return None

    def metadata(self) -> dict[str, Any]:
        """Return the content of the group ``metadata``: small scalars by value, arrays by shape."""
        stored = [(n, h) for n, h in sorted(self.datasets.items()) if n.startswith("metadata/")]
        arrays = {n: f"{h.type_name} {list(h.shape or ())}" for n, h in stored if h.shape != ()}
        facts = {name: arrays.get(name) or self.scalar(name) for name, _ in stored}
        return {name: value for name, value in facts.items() if value is not None}


class Hdf5Column:
    """Rows of one dataset of an HDF5 file, read by h5py.  Between reads nothing is open."""

    def __init__(self, file: InputFile, header: Hdf5Dataset, dataset: h5d.DatasetID) -> None:
        assert header.shape and header.dtype is not None, "it can be a column"
        self._file, self._path, where = file, header.path, (file.path, header.path)
        self.shape, self._first, self._stored_dtype = header.shape, header.first, header.dtype
        self.dtype = self._stored_dtype.newbyteorder("=")
        plan, shape, itemsize = dataset.get_create_plist(), dataset.shape, self.dtype.itemsize
        is_filtered, is_chunked = bool(_filters(plan, *where)), plan.get_layout() == h5d.CHUNKED
        self._chunk = tuple(plan.get_chunk()) if is_chunked else shape
        self._grid = tuple(-(-n // max(c, 1)) for n, c in zip(shape, self._chunk, strict=True))
        self._row_bytes, chunk_bytes = prod(shape[1:]) * itemsize, prod(self._chunk) * itemsize
        self._band_bytes = self._chunk[0] * self._row_bytes  # of a row of chunks
        if is_chunked and (chunk_bytes > MAX_CHUNK_BYTES or self._band_bytes > MAX_BAND_BYTES):
            problem = f"a chunk of {chunk_bytes:,} bytes, or {self._band_bytes:,} in a row of them,"
            raise _unsafe(problem, *where, "store it in chunks of 1 MiB")
        stored = _Storage(dataset, is_chunked)
        # bytes of the chunks that were never written, which read as the fill value
        self.unwritten = max((prod(self._grid) - stored.chunks) * chunk_bytes, 0)
        if self.unwritten > MAX_UNWRITTEN_BYTES:
            problem = f"a column of shape {shape}, {self.unwritten} bytes of it never written,"
            raise _unsafe(problem, *where, "the file is damaged or cut short: get it again")
        is_exact = is_filtered or not stored.chunks or stored.least == stored.most == chunk_bytes
        if not is_exact or stored.most > 2 * chunk_bytes + 4096:
            raise ValueError(f"a chunk of {chunk_bytes} bytes is stored in others")
        if stored.end > file.identity[2]:
            raise ValueError("data lie behind the end of the file")
        # where rows lie one behind the other as NumPy has them: opening HDF5 takes 20 times as long
        self._offset = None if is_chunked or header.is_packed else dataset.get_offset()
        self._check = ChunkCheck(plan, itemsize) if is_filtered else None
        self._checked = bytearray(self._grid[0] if is_filtered else 0)  # a row of chunks each
        self._last_band = 0, np.empty((0, *shape[1:]), self.dtype)  # first row, last row of chunks
        chunk_rows = self._chunk[0] if is_chunked else 1
        # rows a read that suit the chunks: whole rows of them, about 8 MiB
        rows = max(READ_BYTES // self._row_bytes // chunk_rows, 1) * chunk_rows
        self.preferred_rows = max(1, min(rows, MAX_READ_BYTES // self._row_bytes))

    def check(self) -> None:
        """Refuse chunks that are shorter or longer than they claim."""
        with _reading(self._file.path), self._open() as dataset:
            self._check_chunks(dataset, 0, dataset.shape[0])

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)``, (stop - start, *shape), native byte order."""
        first, last = start + self._first, stop + self._first
        if self._offset is not None:
            rows = np.empty((last - first, *self.shape[1:]), self._stored_dtype)
            with _reading(self._file.path), self._file.open() as file:
                offset = self._offset + first * self._row_bytes
                _pread_into(file.fileno(), rows.reshape(-1).view(np.uint8).data, offset)
            return rows.astype(self.dtype, copy=False)
        kept_first, band = self._last_band
        before = band[first - kept_first : last - kept_first] if first >= kept_first else band[:0]
        first += len(before)
        after = self._decode(first, last) if first < last else before[:0]
        if stop == self.shape[0]:  # a file may have thousands of columns
            self._last_band = 0, band[:0]
        return np.concatenate([before, after]) if len(before) else after

    def _decode(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return rows ``[first, last)`` as stored, and keep the last row of chunks."""
        most, low, high = self._chunk[0], first, last
        is_kept = self._check is not None and self._band_bytes <= KEPT_BYTES
        if is_kept:  # chunks are decoded as a whole
            low, high = first // most * most, -(-last // most) * most
        with _reading(self._file.path), self._open() as dataset:
            self._check_chunks(dataset, first, last)
            rows: npt.NDArray[Any] = dataset[low:high].astype(self.dtype, copy=False)
        if is_kept:
            band = (last - 1) // most * most
            self._last_band = band, rows[band - low :].copy()
        return rows[first - low : last - low]

    @contextmanager
    def _open(self) -> Iterator[h5py.Dataset]:
        self._file.open().close()  # refuses one that has changed
        with h5py.File(self._file.path, "r", locking="best-effort") as file:
            yield file[self._path]

    def _check_chunks(self, dataset: h5py.Dataset, start: int, stop: int) -> None:
        """Check the chunks of rows that were not checked before."""
        for index in range(start // self._chunk[0], -(-stop // self._chunk[0])):
            if self._check is None or self._checked[index]:
                continue
            for cell in np.ndindex(*self._grid[1:]):
                corner = tuple(n * c for n, c in zip((index, *cell), self._chunk, strict=True))
                try:
                    skipped, raw = dataset.id.read_direct_chunk(corner)
                except RuntimeError:
                    if not self.unwritten:
                        raise
                    continue  # it was never written
                self._check.check(raw, skipped)
            self._checked[index] = True


class _Storage:
    """The stored bytes of a dataset: the number of its chunks, their sizes, where they end."""

    def __init__(self, dataset: h5d.DatasetID, is_chunked: bool) -> None:
        self.chunks = self.most = self.end = 0
        self.least = sys.maxsize
        if is_chunked:
            dataset.chunk_iter(lambda chunk: self._add(chunk.byte_offset, chunk.size))
        elif size := int(dataset.get_storage_size()):  # in the header where it has no offset
            self._add(dataset.get_offset() or 0, size)

    def _add(self, offset: int, size: int) -> None:
        self.chunks, self.end = self.chunks + 1, max(self.end, offset + size)
        self.least, self.most = min(self.least, size), max(self.most, size)


def _unsafe(problem: str, path: Path, name: str, remedy: str = _PLAIN) -> InputError:
    return InputError("SOURCE_UNSAFE", f"{problem} is not accepted", f"{path}: {name}", remedy)


def _filters(plan: Any, path: Path, name: str) -> tuple[int, ...]:
    filters = tuple(plan.get_filter(i)[0] for i in range(plan.get_nfilters()))
    if len(set(filters)) != len(filters) or not set(filters) <= set(FILTERS):
        accepted = ", ".join(name for name, _ in FILTERS.values())
        problem = f"a column behind the HDF5 filters {', '.join(map(str, filters))}"
        raise _unsafe(problem, path, name, f"store it with one of {accepted}, or with none")
    return filters


def _pread_into(file: int, buffer: memoryview, offset: int) -> None:
    if read_at(file, buffer, offset) < len(buffer):
        raise ValueError("the file ends before its data do")


def _dtype(dataset: Any) -> tuple[np.dtype[Any] | None, str, bool]:
    """Return the dtype, ``None`` where NumPy's only resemble it; its name; if bits are packed."""
    try:
        dtype, stored = np.dtype(dataset.dtype), dataset.get_type()
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return None, f"unknown type ({error})", False
    if not is_storable(dtype):
        return None, f"type {dtype}", False
    if inverted := _find_inversion(dtype):
        return None, inverted, False
    if dtype.kind in "iu" and stored.get_class() == h5t.ENUM:
        stored = stored.get_super()
    plain = np.dtype(dtype.str)  # without h5py's enum metadata
    is_packed = h5t.py_create(plain, logical=True) != stored
    if is_packed and (stored.get_class() != h5t.INTEGER or stored.get_size() != plain.itemsize):
        return None, f"a type that only resembles {plain}", False
    return plain, plain.name, is_packed


def _find_inversion(dtype: np.dtype[Any]) -> str:
    """Describe an enumeration in which 0 means true; "" of any other type."""
    for word, value in (h5py.check_enum_dtype(dtype) or {}).items():
        if (word.lower(), value != 0) in (("true", False), ("false", True)):
            return f"an enumeration in which {word} is {value}"
    return ""


def _to_plain(value: Any, most: int = 500) -> Plain | None:
    """Return a plain number, bool or string of up to `most` characters, else ``None``."""
    value = value.item() if isinstance(value, np.generic) else value
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if isinstance(text, str):
        return text[:most]
    return value if isinstance(value, int | float) and math.isfinite(value) else None
