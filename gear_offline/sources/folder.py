"""A folder of HDF5 files as one source: episodes of the first file, of the second, and so on."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.core.system import most_open
from gear_offline.errors import InputError
from gear_offline.sources.generic import open_hdf5
from gear_offline.sources.hdf5 import Hdf5Rows
from gear_offline.sources.hdf5_guard import source_read_error
from gear_offline.sources.pieces import PieceSource, join_sources

SUFFIXES = (".hdf5", ".h5")
MOST_OPEN = 512  # files at a time, and a quarter of the descriptors that the process may have
LEAST_OPEN, OPEN_BYTES = 4, 256 << 20  # fewer if they are large: each has chunk caches of its own


def hdf5_files(path: Path) -> list[Path]:
    """Return the HDF5 files right in a folder, ``part_2`` before ``part_10``."""
    found = [
        p
        for p in path.iterdir()
        if p.suffix.lower() in SUFFIXES and p.is_file() and not p.name.startswith(".")
    ]
    return sorted(found, key=lambda p: _natural(p.name))


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"([0-9]+)", name)
    return [(1, int(p), p) if p.isdigit() and p.isascii() else (0, 0, p) for p in parts]


class _Pool:
    """Keeps the files that were read last open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, Hdf5Rows] = OrderedDict()
        self._sizes: dict[Path, int] = {}
        self._bytes = 0
        self._most = most_open(MOST_OPEN)

    def get(self, path: Path, size: int, open_file: Callable[[], Hdf5Rows]) -> Hdf5Rows:
        """Return the open file of `size` bytes."""
        rows = self._open.pop(path, None)
        if rows is None:
            while self._open and (
                len(self._open) >= self._most
                or (self._bytes + size > OPEN_BYTES and len(self._open) >= LEAST_OPEN)
            ):
                self._drop()
            rows = open_file()
            self._bytes += size
            self._sizes[path] = size
        self._open[path] = rows
        return rows

    def _drop(self) -> None:
        path, rows = self._open.popitem(last=False)
        self._bytes -= self._sizes.pop(path)
        rows.close()

    def close(self) -> None:
        while self._open:
            self._drop()


class FileSource(Closing):
    """A `Source` over a file that is opened when it is read."""

    def __init__(self, path: Path, rule: str | None, names: Mapping[str, str], pool: _Pool) -> None:
        self._path, self._pool, self._stamp = path, pool, _stamp(path)
        with open_hdf5(path, uri=path.name, name=path.name, rule=rule, names=names) as source:
            self.info, self.spec, self.episodes = source.info, source.spec, source.episodes
            self.terminated, self.truncated = source.terminated, source.truncated
            self._preferred = {c.name: source.preferred_rows(c.name) for c in source.spec}
            self._facts = source.facts

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        rows = self._pool.get(self._path, self._stamp[1], self._again)
        return rows.read(column, start, stop).reshape(stop - start, *self.spec[column].shape)

    def _again(self) -> Hdf5Rows:
        """Open the file, which is the one that the guard went through."""
        if _stamp(self._path) != self._stamp:
            raise InputError(
                "SOURCE_CHANGED",
                "the source changed while it was converted",
                where=self._path.name,
                remedy="convert again once nothing writes to it",
            )
        rows = Hdf5Rows(self._path, known=self._facts)
        rows.admit(self._preferred)
        return rows

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage; at least 1."""
        return self._preferred[column]

    def close(self) -> None:
        """Close all files of the folder."""
        self._pool.close()


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes with a file's bytes; its size is second."""
    try:
        found = path.stat()
    except OSError as error:
        raise source_read_error(path, error) from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def open_folder(path: Path, *, rule: str | None, names: Mapping[str, str]) -> PieceSource:
    """Open the HDF5 files of a folder as one source.

    Raises
    ------
    InputError
        ``SOURCE_JOIN`` if their columns differ in dtype or shape; those of `open_hdf5`.
    """
    pool = _Pool()
    files = [FileSource(file, rule, names, pool) for file in hdf5_files(path.absolute())]
    return join_sources(files, uri=path.absolute().name)
