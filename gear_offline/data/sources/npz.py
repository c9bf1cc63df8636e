"""NumPy's ``.npz`` files of flat arrays, one row a step; among them OGBench's.

A file is a zip of ``.npy`` members.  Rows are read in order, which decodes them once and compares
the checksum; backwards begins again.

Shape legend: N rows.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from gear_offline.core.files import read_at
from gear_offline.core.types import Array
from gear_offline.data.sources.base import Source, SourceRequest
from gear_offline.data.sources.columns import rename_columns
from gear_offline.data.sources.flags import FLAGS, TIME_FLAGS
from gear_offline.data.sources.flat import single_values, table_source
from gear_offline.data.sources.input_files import InputFile, misfit
from gear_offline.data.sources.rules import ARTIFICIAL
from gear_offline.errors import reading_errors

READ_BYTES = 1 << 20
KEPT_BYTES = 1 << 14  # of each open archive, and there may be thousands; long reads pass by it
MAX_RATIO = 1032  # of deflate
MAX_WHOLE_BYTES = 1 << 30  # of an array that is stored by columns
MASKS = ("mask", "masks", "valid", "valids", "is_valid", "attention_mask")  # true where real
LENGTHS = ("lengths", "length", "episode_lengths", "episode_length", "seq_lens", "traj_lengths")
OGBENCH = "taken for OGBench's: terminals end recordings; --rule terminals counts terminations"


class Member:
    """An array in a stream of ``.npy``, which is opened by its first read and read in order."""

    _stream: Any
    _whole: Array | None

    def __init__(self, path: Path, where: str, decoded: Callable[[], Any]) -> None:
        self.where = where  # for messages
        self._reading, self._decoded = partial(reading_errors, path.suffix, where), decoded
        with self._reading(), decoded() as stream:
            version = npy.read_magic(stream)
            header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            self.shape, self._fortran, self.dtype = header(stream)
            self.type_name, self._begin = str(self.dtype), int(stream.tell())
        self.close()

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)``, native byte order."""
        with self._reading():
            if self._fortran and len(self.shape) > 1:  # no part of the stream has the rows of one
                if self._whole is None:
                    if prod(self.shape) * self.dtype.itemsize > MAX_WHOLE_BYTES:
                        remedy = "save np.ascontiguousarray(array)"
                        raise misfit("more than 1 GiB stored by columns", self.where, remedy)
                    columns = np.empty(self.shape[::-1], self.dtype)
                    self._fill(columns, 0)
                    self._whole = columns.T
                rows = self._whole[start:stop]
            else:
                rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
                self._fill(rows, start * prod(self.shape[1:]) * self.dtype.itemsize)
            if stop == (*self.shape, 1)[0]:
                if self._stream is not None:
                    self._stream.read(1)  # which compares the checksum
                self.close()
        return rows.astype(self.dtype.newbyteorder("="), order="C", copy=False)

    def _fill(self, rows: Array, at: int) -> None:
        view = rows.reshape(-1).view(np.uint8).data
        if self._stream is None:
            self._stream = self._decoded()
        self._stream.seek(self._begin + at)
        done = 0
        while done < len(view):
            count = self._stream.readinto(view[done : done + READ_BYTES])
            if not count:
                raise ValueError("it holds less than it claims")
            done += count

    def close(self) -> None:
        """Drop what was decoded; a read begins again."""
        self._stream = self._whole = None


class _LazyFile(io.RawIOBase):  # a folder may have thousands of files
    def __init__(self, file: InputFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.identity[2])[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        with self._file.open() as file:
            count = read_at(file.fileno(), memoryview(buffer), self._at)
        self._at += count
        return count


def open_lazily(file: InputFile, kept_bytes: int = READ_BYTES) -> io.BufferedReader:
    """Return a file for reads of any size, which is open only while it is read."""
    return io.BufferedReader(_LazyFile(file), kept_bytes)


def open_members(path: Path) -> tuple[InputFile, dict[str, Member]]:
    """Open an ``.npz`` file; return it, and its arrays by name."""
    file = InputFile.find(path)
    members = dict[str, Member]()
    with reading_errors(".npz", path):
        archive = zipfile.ZipFile(open_lazily(file, KEPT_BYTES))
        for entry in archive.infolist():
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{entry.filename} is compressed as NumPy does not")
            name = entry.filename.removesuffix(".npy")
            members[name] = Member(path, f"{path}: {name}", partial(archive.open, entry))
            shape, dtype = members[name].shape, members[name].dtype
            claimed = 0 if dtype.hasobject else prod(shape) * dtype.itemsize
            most = MAX_RATIO * min(entry.compress_size, file.identity[2])
            if not claimed <= entry.file_size <= most:
                raise ValueError(f"{entry.filename} holds less than it claims")
    return file, members


def find_padding(members: Mapping[str, Any], path: Path) -> list[str]:
    """Return the masks and lengths of arrays (E, T, ...), by names and shapes alone.

    ``SOURCE_LAYOUT`` where only a name tells that has two meanings.
    """
    stepwise = [members[n].shape for n in ("rewards", "actions") if n in members]
    if not stepwise or min(map(len, stepwise)) < 2 or len({shape[:2] for shape in stepwise}) > 1:
        return []
    episodes, steps = stepwise[0][:2]
    seen = members["observations"].shape if "observations" in members else (episodes, steps)
    if steps < 2 or seen[:2] not in ((episodes, steps), (episodes, steps + 1)):
        return []
    shapes = dict.fromkeys(MASKS, (episodes, steps)) | dict.fromkeys(LENGTHS, (episodes,))
    fits = [n for n, shape in shapes.items() if n in members and members[n].shape == shape]
    names = [n for n in fits if members[n].dtype.kind in "biuf"]
    if names == ["masks"]:
        problem = "masks may be 1 at real steps, or 0 at terminations as in JAX code"
        remedy = f"call it {MASKS[0]} if it tells the real steps, else give {LENGTHS[0]} (E,) too"
        raise misfit(problem, path, remedy)
    return [name for name in names if name != "masks"]


def open_npz(path: Path, request: SourceRequest) -> Source:
    """Open an ``.npz`` file of OGBench, or of flat arrays with flags."""
    path = path.absolute()
    file, members = open_members(path)
    if not request.rule and (padding := find_padding(members, path)):
        problem = f"{padding[0]} tells of arrays (episodes, steps, ...)"
        raise misfit(problem, path, "--reader padded reads them; a --rule takes rows for steps")
    if "valids" in members:
        problem = "a compact dataset of OGBench: two rows are flagged at each end"
        raise misfit(problem, path, "give ogbench's own file, or save with compact_dataset=False")
    columns = rename_columns(members, request.names)
    # Its terminals are ends of trajectories, not of tasks; `masks` come with its rewards.
    ogbench = {"observations", "actions", "terminals"} <= columns
    ogbench = ogbench and not {*FLAGS} & {*request.names}
    ogbench = ogbench and ("masks" in columns or not {"rewards", *TIME_FLAGS} & columns)
    single = {n: members[n] for n in single_values(members) if members[n].dtype.kind in "biuf"}
    values = {name: member.read(0, 1).item() for name, member in single.items()}
    numbers = {name: value for name, value in values.items() if np.isfinite(value)}
    info: dict[str, Any] = {"format": "ogbench" if ogbench else "npz"}
    info |= {"facts": {"attributes": numbers}, "rule": request.rule or None}
    if ogbench and not request.rule:
        info |= {"rule": ARTIFICIAL, "notes": [OGBENCH] * ("masks" not in columns)}
    return table_source(members, request, (file,), numbers=numbers, **info)
