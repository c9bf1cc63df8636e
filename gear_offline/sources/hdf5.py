"""Rows of the columns of one guarded HDF5 file, in bounded memory.

Shape legend: N rows.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5p

from gear_offline.dataset.schema import ColumnSpec
from gear_offline.errors import InputError
from gear_offline.sources.hdf5_guard import (
    DEFAULT_LIMITS,
    LIBRARY_ERRORS,
    ColumnCheck,
    DatasetFacts,
    Limits,
    no_plugins,
    open_file,
    unreadable,
    walk,
)
from gear_offline.sources.source_digests import Identity, file_identity

READ_BYTES = 8 << 20  # a read of about this size amortises the call
MAX_READ_BYTES = 256 << 20  # beyond this a row of chunks is read in parts
CACHE_BYTES = 64 << 20  # chunk cache of one open column; one chunk in any case
OPEN_CACHE_BYTES = 256 << 20  # chunk caches of all open columns
MAX_ATTRIBUTE_BYTES = 4096


class Hdf5Rows:
    """Columns of an HDF5 file, read by row range.

    Opening runs the guard over the whole file; a column can be read after `admit` has checked it.

    Parameters
    ----------
    path
        The file.
    limits
        What the file may claim.
    names
        Column name to the dataset, or group of datasets, that gets it.
    known
        `facts` of the same file from before, which is not looked through again then.

    Raises
    ------
    InputError
        ``FILE_MISSING``, ``COLUMN_MISSING`` and the ``HDF5_*`` codes of the guard.
    """

    def __init__(
        self,
        path: Path,
        *,
        limits: Limits = DEFAULT_LIMITS,
        names: Mapping[str, str] | None = None,
        known: Mapping[str, DatasetFacts] | None = None,
    ) -> None:
        self.path = path
        self._limits = limits
        self.identity: tuple[Identity, ...] = ()
        with suppress(InputError):  # opening tells better why
            self.identity = (file_identity(path),)
        self._file: h5py.File | None = open_file(path)
        self._open: OrderedDict[str, tuple[h5py.Dataset, int]] = OrderedDict()
        self._admitted: set[str] = set()
        try:
            self.facts: Mapping[str, DatasetFacts] = (
                renamed(walk(self._file, limits=limits), names or {}, path)
                if known is None
                else known
            )
        except InputError:
            self.close()
            raise

    def admit(self, names: Iterable[str]) -> list[str]:
        """Check the columns `names` for reading; returns warnings (see `ColumnCheck`)."""
        check = ColumnCheck(self.path, limits=self._limits)
        for name in names:
            check.add(self.facts[name])
            self._admitted.add(name)
        return check.warnings

    def spec(self, name: str, *, scalar: bool = False) -> ColumnSpec:
        """Return the column's spec; with `scalar`, (N, 1) counts as one number a step.

        Raises
        ------
        InputError
            ``HDF5_SHAPE`` where `scalar` is asked of a wider column.
        """
        fact = self.facts[name]
        assert fact.dtype is not None and fact.shape is not None, "admit() checks dtype and shape"
        shape = fact.shape[1:]
        if scalar and shape not in ((), (1,)):
            raise InputError(
                "HDF5_SHAPE",
                f"shape {fact.shape} where one number a step is expected",
                where=f"{self.path}: {name}",
                remedy="store one number a step, shape (steps,) or (steps, 1)",
            )
        return ColumnSpec(name=name, dtype=fact.dtype, shape=() if scalar else shape)

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)``, (stop - start, *stored step shape), native byte order.

        Raises
        ------
        InputError
            ``HDF5_UNREADABLE`` when the bytes cannot be decoded (damage), ``HDF5_VALUE`` when a
            bool column holds other bytes than 0 and 1.
        """
        fact = self.facts[name]
        assert name in self._admitted and fact.dtype is not None, f"{name} was not admitted"
        if not 0 <= start <= stop <= fact.rows:
            raise IndexError(f"rows [{start}, {stop}) of {fact.rows}")
        return read_rows(self._dataset(name), start, stop, dtype=fact.dtype, path=self.path)

    def preferred_rows(self, name: str) -> int:
        """Rows a read that suit the chunks: whole rows of chunks, about 8 MiB, at least 1."""
        fact = self.facts[name]
        chunk_rows, row_bytes = _chunk_rows(fact), _row_bytes(fact)
        rows = max(READ_BYTES // row_bytes // chunk_rows, 1) * chunk_rows
        return max(1, min(rows, MAX_READ_BYTES // row_bytes))

    def _dataset(self, name: str) -> h5py.Dataset:
        """Return the open dataset, its chunk cache sized for one row of chunks.

        gzip'ed files are often chunked by column, e.g. (6250, 1) for (200000, 11): a read touches
        every chunk of the row, and without room for all of them each read decodes them again.
        """
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name][0]
        if self._file is None:
            raise ValueError(f"{self.path.name} is closed")
        fact = self.facts[name]
        cache = 0
        access = h5p.create(h5p.DATASET_ACCESS)
        if fact.chunks:
            chunk_bytes = math.prod(fact.chunks) * _itemsize(fact)
            cache = min(_chunk_rows(fact) * _row_bytes(fact) + chunk_bytes, CACHE_BYTES)
            cache = max(cache, chunk_bytes)  # a chunk that has no room is decoded for every read
            slots = 100 * max(1, cache // chunk_bytes) + 1
            access.set_chunk_cache(min(slots, 1_000_003), cache, 1.0)
        opened = h5py.Dataset(h5d.open(self._file.id, fact.name.encode(), access))
        while self._open and cache + sum(c for _, c in self._open.values()) > OPEN_CACHE_BYTES:
            self._open.popitem(last=False)
        self._open[name] = (opened, cache)
        return opened

    def attributes(self) -> dict[str, Any]:
        """Return the root's small scalar attributes: numbers, bools and strings.

        Raises
        ------
        InputError
            ``HDF5_UNREADABLE`` when they cannot be listed (damage).
        """
        if self._file is None:
            raise ValueError(f"{self.path.name} is closed")
        found: dict[str, Any] = {}
        try:
            with no_plugins():
                names = list(self._file.attrs)
        except LIBRARY_ERRORS as error:
            raise unreadable(self.path, error) from error
        for name in names:
            try:
                with no_plugins():
                    handle = self._file.attrs.get_id(name)
                    if handle.shape == () and handle.get_storage_size() <= MAX_ATTRIBUTE_BYTES:
                        _keep(found, str(name), self._file.attrs[name])
            except LIBRARY_ERRORS:
                continue  # an attribute of an odd type is no reason to refuse the data
        return found

    def describe(self, prefix: str) -> dict[str, Any]:
        """Return what lies under `prefix`: small scalars by value, arrays by shape and dtype."""
        found: dict[str, Any] = {}
        for name, fact in sorted(self.facts.items()):
            if not name.startswith(prefix):
                continue
            if fact.shape == () and fact.stored_bytes <= MAX_ATTRIBUTE_BYTES and not fact.filters:
                try:
                    assert self._file is not None, "describe() before close()"
                    _keep(found, name, self._file[fact.name][()])
                except LIBRARY_ERRORS:
                    continue
            else:
                found[name] = f"{fact.type_name} {list(fact.shape or ())}"
        return found

    def close(self) -> None:
        """Close the file; reading afterwards raises ValueError."""
        self._open.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


def read_rows(
    dataset: h5py.Dataset, start: int, stop: int, *, dtype: np.dtype[Any], path: Path
) -> npt.NDArray[Any]:
    """Return rows ``[start, stop)`` of `dataset`, native byte order; see `Hdf5Rows.read`."""
    try:
        block = dataset[start:stop]
    except (*LIBRARY_ERRORS, MemoryError) as error:
        raise unreadable(path, error) from error
    rows = np.ascontiguousarray(block, dtype=dtype.newbyteorder("="))
    if rows.dtype.kind == "b" and rows.size and rows.view(np.uint8).max() > 1:
        raise InputError(
            "HDF5_VALUE",
            "a bool column holds values other than 0 and 1",
            where=f"{path}: {dataset.name}, rows {start} to {stop}",
            remedy="the file is damaged: get it again",
        )
    return rows.view(np.dtype(rows.dtype.str))  # drops h5py's enum metadata


def renamed(
    facts: Mapping[str, DatasetFacts], names: Mapping[str, str], path: Path
) -> dict[str, DatasetFacts]:
    """Return `facts` with other names: `names` says which dataset or group gets a new one.

    A dataset that already has the new name is hidden.

    Raises
    ------
    InputError
        ``COLUMN_MISSING`` if a dataset to be renamed is not there.
    """
    found: dict[str, DatasetFacts] = {}
    moved: set[str] = set()
    for new, old in names.items():
        stored = old.strip("/")
        parts = [n for n in facts if n == stored or n.startswith(f"{stored}/")]
        if not parts:
            raise InputError(
                "COLUMN_MISSING",
                f"no dataset {old!r} to take as {new!r}",
                where=str(path),
                remedy=f"found: {some_names(facts)}",
            )
        moved.update(parts)
        found |= {new + name.removeprefix(stored): facts[name] for name in parts}
    hidden = tuple(f"{new}/" for new in names)
    for name, fact in facts.items():
        if name not in moved and name not in found and not name.startswith(hidden):
            found[name] = fact
    return found


def some_names(names: Iterable[str], limit: int = 12) -> str:
    """Return the first names of many, for a message."""
    listed = sorted(names)
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "") or "nothing"


def _itemsize(fact: DatasetFacts) -> int:
    return fact.dtype.itemsize if fact.dtype is not None else 1


def _row_bytes(fact: DatasetFacts) -> int:
    return max(1, math.prod((fact.shape or ())[1:]) * _itemsize(fact))


def _chunk_rows(fact: DatasetFacts) -> int:
    return fact.chunks[0] if fact.chunks else 1


def _keep(found: dict[str, Any], name: str, value: Any) -> None:
    """Store `value` under `name` if it is a plain number, bool or short string."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        found[name] = value[:500]
    elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        found[name] = value
