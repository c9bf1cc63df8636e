"""NumPy's ``.npz`` files of flat arrays, one row a step; among them OGBench's.

A file is a zip of ``.npy`` members.  Rows of stored members are read where they lie, those of
compressed ones (OGBench writes these) are decoded on the way: in order, in memory for one read.

Shape legend: N rows.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from gear_offline.core.files import read_at
from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.dataset.schema import is_step_shape
from gear_offline.errors import InputError
from gear_offline.sources.base import (
    InputFile,
    Kinds,
    Piece,
    Source,
    SourceInfo,
    damage_told,
    renamed,
    some_names,
)
from gear_offline.sources.episode_ends import (
    ARTIFICIAL,
    FLAGS,
    SCALARS,
    TIME_FLAGS,
    default_rule,
    split_episodes,
)

READ_COMPRESSED = 1 << 18
NO_REWARDS = (
    "OGBench's files have no rewards, which depend on the goal; to train for returns save what "
    "ogbench adds for a singletask name: docs/how-to/convert.md"
)
DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    RuntimeError,
    NotImplementedError,
    SyntaxError,
)
Decoder = Any  # zlib gives its type no public name


@dataclass(kw_only=True, eq=False)
class Member:
    """An array of a file: where its bytes lie, and how far it was read in order."""

    file: InputFile
    where: str  # for messages
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # in the file, of the member
    size: int  # there
    header: bytes  # of the member before the first row
    crc: int
    window: int | None = -15  # zlib's wbits; None: stored as it is
    state: tuple[Decoder, int, int, int] | None = field(default=None)  # decoder, at, taken, crc

    @property
    def rows(self) -> int:
        """N."""
        return self.shape[0]

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)``, native byte order; in order, the checksum is compared."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        first = len(self.header) + start * prod(self.shape[1:]) * self.dtype.itemsize
        view = rows.reshape(-1).view(np.uint8).data
        with damage_told(self.file.path.suffix, self.where, DAMAGE), self.file.open() as file:
            if self.window is None:
                self._copy(file.fileno(), view, first)
            else:
                self._decode(file.fileno(), view, first)
        if self.dtype.kind == "b" and view.nbytes and np.frombuffer(view, np.uint8).max() > 1:
            what, remedy = "a bool array holds values other than 0 and 1", "the file is damaged"
            raise InputError("SOURCE_READ", what, where=self.where, remedy=remedy)
        return rows.astype(self.dtype.newbyteorder("="), copy=False)

    def _copy(self, file: int, out: memoryview, first: int) -> None:
        """Fill `out` with the stored bytes from `first` on."""
        if read_at(file, out, self.offset + first) < len(out):
            raise ValueError("the file ends before its data do")
        if first == len(self.header):
            self.state = None, first, first, zlib.crc32(self.header)
        if self.state and self.state[1] == first:
            at, crc = first + len(out), zlib.crc32(out, self.state[3])
            self._keep(None, at, at, crc)

    def _keep(self, decoder: Decoder, at: int, taken: int, crc: int) -> None:
        """Remember how far it was read; at the end compare the checksum."""
        if at < len(self.header) + prod(self.shape) * self.dtype.itemsize:
            self.state = decoder, at, taken, crc
        elif crc != self.crc:
            raise ValueError("the checksum differs")

    def _decode(self, file: int, out: memoryview, first: int) -> None:
        """Fill `out` with the decoded bytes from `first` on."""
        state, self.state = self.state, None
        if state is None or state[1] > first:  # backwards: once more from the beginning
            state = zlib.decompressobj(self.window or 0), 0, 0, 0
        decoder, at, taken, crc = state
        end = first + len(out)
        raw = decoder.unconsumed_tail
        while at < end:
            if not raw:  # nor more to read, at the end: the decoder may still hold some
                buffer = bytearray(min(READ_COMPRESSED, self.size - taken))
                if read_at(file, memoryview(buffer), self.offset + taken) < len(buffer):
                    raise ValueError("the file ends before its data do")
                raw, taken = bytes(buffer), taken + len(buffer)
            plain = decoder.decompress(raw, min(end - at, 16 * READ_COMPRESSED))
            raw = decoder.unconsumed_tail
            crc = zlib.crc32(plain, crc)
            low = max(first - at, 0)
            if low < len(plain):
                place = at + low - first
                out[place : place + len(plain) - low] = plain[low:]
            at += len(plain)
            if not plain and not raw and taken == self.size:
                raise ValueError("it holds less than it claims")
        self._keep(decoder, at, taken, crc)


def open_npz(path: Path, *, uri: str, rule: str | None, names: Mapping[str, str]) -> Source:
    """Open an ``.npz`` file of OGBench, or of flat arrays with flags."""
    path = path.absolute()
    file = InputFile.find(path)
    left_out: dict[str, str] = {}
    members = renamed(dict(_members(file, left_out)), names, path)
    if "valids" in members:
        what = "a compact dataset of OGBench: two rows are flagged at each end"
        remedy = "give the file that ogbench downloads, or save with compact_dataset=False"
        raise InputError("SOURCE_LAYOUT", what, where=str(path), remedy=remedy)
    # Its terminals are ends of trajectories, not of tasks; `masks` come with its rewards.
    ogbench = {"observations", "actions", "terminals"} <= set(members) and (
        "masks" in members or not {"rewards", *TIME_FLAGS} & set(members)
    )
    required = ("observations", "actions", *(() if ogbench else ("rewards",)))
    for name in required:
        if not any(n == name or n.startswith(f"{name}/") for n in members):
            remedy = f"needed: {', '.join(required)}; found: {some_names(members)}; other names: "
            remedy += f"--columns {name}=NAME,..."
            raise InputError("COLUMN", f"no array {name!r}", where=str(path), remedy=remedy)
    steps = _steps(members, left_out, path)
    kinds: dict[str, Any] = {
        n: (m.dtype, () if _scalar(n, m) else m.shape[1:]) for n, m in members.items()
    }

    def read(column: str, start: int, stop: int) -> Array:
        rows = members[column].read(start, stop)
        return rows[:, 0] if _scalar(column, members[column]) else rows

    notes: list[str] = []
    if ogbench:
        rule = rule or ARTIFICIAL
        if "rewards" not in members:
            notes.append(NO_REWARDS)
    elif rule is None:
        rule, notes = default_rule([flag for flag in FLAGS if flag in kinds], where=str(path))
    ends = split_episodes(rule, list(kinds), steps, read, where=str(path))
    return Source(
        [Piece(read=read, steps=steps)],
        _ordered(kinds),
        lengths=ends.lengths,
        terminated=ends.terminated,
        info=SourceInfo(
            uri=uri,
            format="ogbench" if ogbench else "npz",
            rule=rule,
            files=(file,),
            attributes={
                "left_out": left_out,
                "unfinished_tail_steps": ends.tail_steps,
                "warnings": notes,
            },
        ),
    )


def _scalar(name: str, member: Member) -> bool:
    return name in SCALARS and member.shape[1:] == (1,)


def _ordered(kinds: Kinds) -> Kinds:
    first = [n for n in ("observations", "actions", "rewards") if n in kinds]
    return {name: kinds[name] for name in (*first, *(n for n in kinds if n not in first))}


def _members(file: InputFile, left_out: dict[str, str]) -> Iterator[tuple[str, Member]]:
    """Yield the arrays of a file; those that are no columns come into `left_out`."""
    with (
        file.open() as raw,
        damage_told(".npz", file.path, DAMAGE),
        zipfile.ZipFile(raw) as archive,
    ):
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            where = f"{file.path}: {name}"
            with damage_told(".npz", where, DAMAGE):
                if entry.flag_bits & 1 or entry.compress_type not in (0, zipfile.ZIP_DEFLATED):
                    raise ValueError("it is encrypted, or compressed otherwise than by deflate")
                with archive.open(entry) as opened:
                    header, dtype, shape = npy_header(opened)
                local = bytearray(30)
                read_at(raw.fileno(), memoryview(local), entry.header_offset)
                lengths = (
                    int.from_bytes(local[26:28], "little"),
                    int.from_bytes(local[28:], "little"),
                )
                offset = entry.header_offset + 30 + sum(lengths)
                if (
                    dtype.kind not in "biufc"
                    or not shape
                    or not is_step_shape(shape[1:], dtype.itemsize)
                ):
                    left_out[name] = f"{dtype} of shape {list(shape)}"
                    continue
                if entry.file_size != len(header) + prod(shape) * dtype.itemsize:
                    raise ValueError(f"{entry.file_size} bytes for {dtype} {shape}")
                if offset + entry.compress_size > file.identity[2]:
                    raise ValueError("the file ends before its data do")
                yield (
                    name,
                    Member(
                        file=file,
                        where=where,
                        dtype=dtype,
                        shape=shape,
                        offset=offset,
                        size=entry.compress_size,
                        header=header,
                        crc=entry.CRC,
                        window=-15 if entry.compress_type else None,
                    ),
                )


def npy_header(opened: Any) -> tuple[bytes, np.dtype[Any], tuple[int, ...]]:
    """Return the header of an ``.npy`` file, and what it says: dtype and shape."""
    version = npy.read_magic(opened)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(opened)
    if fortran and len(shape) > 1:
        raise ValueError("it is stored by columns: save np.ascontiguousarray(array)")
    size = opened.tell()
    opened.seek(0)
    return opened.read(size), dtype, shape


def _steps(members: dict[str, Member], left_out: dict[str, str], path: Path) -> int:
    """Return N; what has other rows is left out, or refused where it is needed."""
    first = next(n for n in members if n.split("/")[0] == "observations")
    steps = members[first].rows
    for name in list(members):
        rows = members[name].rows
        if rows == steps and steps:
            continue
        if name in SCALARS or name.split("/")[0] in ("actions", "observations"):
            what = f"{name} has {count_text(rows, 'row')}, {first} has {steps:,}"
            remedy = "every array needs one row a step: the file is damaged or of another layout"
            raise InputError("SOURCE_LAYOUT", what, where=str(path), remedy=remedy)
        left_out[name] = f"{count_text(rows, 'row')} for {count_text(steps, 'step')}"
        del members[name]
    return steps
