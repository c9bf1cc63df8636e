"""NumPy's ``.npz`` files of flat arrays, one row a step; among them OGBench's.

A file is a zip of ``.npy`` members, compressed (OGBench writes these) or not.  Their rows are read
in order, which decodes them once and compares the checksum; backwards begins again.

Shape legend: N rows.
"""

from __future__ import annotations

import tokenize
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from io import FileIO
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from gear_offline.core.types import Array
from gear_offline.sources.base import Asked, InputFile, Source, damage_told, misfit, names_after
from gear_offline.sources.episode_ends import ARTIFICIAL, FLAGS, TIME_FLAGS
from gear_offline.sources.flat import find_columns, flat_source, shorter

READ_BYTES = 1 << 20
OGBENCH = (
    "taken for OGBench's: terminals without rewards and timeouts, which mark ends of recordings, "
    "not terminations; --rule terminals counts them as terminations"
)
_FORMAT = (tokenize.TokenError, zipfile.BadZipFile, zlib.error)  # of what reads it
DAMAGE = (OSError, ValueError, EOFError, RuntimeError, SyntaxError, MemoryError, *_FORMAT)


class Member:
    """An array in a stream of ``.npy``, which is opened by its first read and read in order."""

    def __init__(self, file: InputFile, where: str, decoded: Callable[[FileIO], Any]) -> None:
        self.where = where  # for messages
        self._file, self._decoded = file, decoded
        self._stream: Any = None
        with self._told(), file.open() as raw, decoded(raw) as stream:
            version = npy.read_magic(stream)
            header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            self.shape, fortran, self.dtype = header(stream)
            if fortran and len(self.shape) > 1:
                raise ValueError("it is stored by columns: save np.ascontiguousarray(array)")
            self.type_name, self._begin = str(self.dtype), int(stream.tell())

    @property
    def rows(self) -> int:
        """N."""
        return self.shape[0] if self.shape else 1

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)``, native byte order."""
        with self._told():
            rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
            view = rows.reshape(-1).view(np.uint8).data
            if self._stream is None:
                raw = self._file.open()
                self._closing = weakref.finalize(self, raw.close)
                self._stream = self._decoded(raw)
            self._stream.seek(self._begin + start * prod(self.shape[1:]) * self.dtype.itemsize)
            done = 0
            while done < len(view):
                count = self._stream.readinto(view[done : done + READ_BYTES])
                if not count:
                    raise ValueError("it holds less than it claims")
                done += count
            if stop == self.rows:
                self._stream.read(1)  # which compares the checksum
        return rows.astype(self.dtype.newbyteorder("="), copy=False)

    def close(self) -> None:
        """Close the stream; a read opens it again."""
        if self._stream is not None:
            self._closing()
            self._stream = None

    def _told(self) -> AbstractContextManager[None]:
        return damage_told(self._file.path.suffix, self.where)


def open_npz(path: Path, asked: Asked) -> Source:
    """Open an ``.npz`` file of OGBench, or of flat arrays with flags."""
    path = path.absolute()
    file = InputFile.find(path)
    members = dict(_members(file))
    if "valids" in members:
        what = "a compact dataset of OGBench: two rows are flagged at each end"
        raise misfit(what, path, "give ogbench's own file, or save with compact_dataset=False")
    names = asked.names
    here = names_after(members, names)
    # Its terminals are ends of trajectories, not of tasks; `masks` come with its rewards.
    ogbench = {"observations", "actions", "terminals"} <= here and not {*FLAGS} & {*names}
    ogbench = ogbench and ("masks" in here or not {"rewards", *TIME_FLAGS} & here)
    chosen, left_out = find_columns(members, names, where=str(path))
    return flat_source(
        {name: members[name] for name in chosen},
        others={name: members[name] for name in shorter(members, left_out)},
        names=names,
        uri=asked.uri,
        format="ogbench" if ogbench else "npz",
        rule=asked.rule or (ARTIFICIAL if ogbench else None),
        where=str(path),
        files=(file,),
        facts={"left_out": left_out},
        notes=[OGBENCH] if ogbench and "masks" not in here and not asked.rule else [],
    )


def _members(file: InputFile) -> Iterator[tuple[str, Member]]:
    """Yield the arrays of a file."""
    with damage_told(".npz", file.path), file.open() as raw:
        entries = zipfile.ZipFile(raw).infolist()
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        decoded = partial(_decoded, name=entry.filename)
        yield name, Member(file, f"{file.path}: {name}", decoded)


def _decoded(raw: FileIO, *, name: str) -> IO[bytes]:
    return zipfile.ZipFile(raw).open(name)
