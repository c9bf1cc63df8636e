"""Shard files: safetensors, with a digest for every block of every tensor.

docs/reference/format.md specifies the bytes.  The header follows from columns, steps and episodes,
so a reader compares bytes and parses nothing.  Data are read into owned memory: a file that is cut
short while it is read gives an error, where a memory map would give a bus error.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from gear_offline.core.files import open_regular, read_at
from gear_offline.core.types import Array
from gear_offline.data.dataset.schema import ColumnSpec
from gear_offline.errors import InputError

ALIGNMENT_BYTES = 64  # tensor data begin at a multiple of this
DIGEST_CHARS = 32  # hexadecimal digits of 128 bits

CODES: dict[np.dtype[Any], str] = {  # safetensors' names
    np.dtype(np.bool_): "BOOL",
    **{np.dtype(f"{k}{n}"): f"{k.upper()}{8 * n}" for k in "ui" for n in (1, 2, 4, 8)},
    **{np.dtype(f"f{n}"): f"F{8 * n}" for n in (2, 4, 8)},
}

EPISODE_COLUMNS = (
    ColumnSpec(name="episode_lengths", dtype=np.dtype(np.int64)),
    ColumnSpec(name="episode_returns", dtype=np.dtype(np.float64)),
    ColumnSpec(name="episode_terminated", dtype=np.dtype(np.bool_)),
    ColumnSpec(name="episode_truncated", dtype=np.dtype(np.bool_)),
)
RESERVED_NAMES = frozenset({c.name for c in EPISODE_COLUMNS} | {"__metadata__"})
_METADATA = {"format": "gear-offline", "format_version": "1"}
_REMEDY = "the file is damaged or foreign: copy it again or convert the source again"


def damage_error(problem: str, where: str | Path) -> InputError:
    return InputError("DATASET_DAMAGED", problem, where=str(where), remedy=_REMEDY)


def stored_form(column: ColumnSpec) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and per-step shape in the file: complex becomes (real, imaginary) pairs."""
    if column.dtype.kind == "c":
        return np.dtype(f"f{column.dtype.itemsize // 2}"), (*column.shape, 2)
    return column.dtype, column.shape


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """The place of a tensor in a shard."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # begins with the number of steps or episodes
    start: int  # bytes after the header
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


def plan_tensors(
    columns: tuple[ColumnSpec, ...], *, steps: int, episodes: int
) -> tuple[TensorLayout, ...]:
    """Lay out a shard: widest dtype first, so that every tensor is aligned to its own dtype."""
    forms = [(c.name, *stored_form(c), steps) for c in columns]
    forms += [(c.name, c.dtype, c.shape, episodes) for c in EPISODE_COLUMNS]
    forms.sort(key=lambda form: -form[1].itemsize)
    tensors, offset = [], 0
    for name, dtype, shape, rows in forms:
        full = (rows, *shape)
        stop = offset + dtype.itemsize * prod(full)
        tensors.append(TensorLayout(name=name, dtype=dtype, shape=full, start=offset, stop=stop))
        offset = stop
    return tuple(tensors)


@lru_cache(maxsize=1 << 13)  # shards of one episode are many, and of few lengths
def encode_header(tensors: tuple[TensorLayout, ...]) -> bytes:
    """Return length, JSON and space padding; tensor data follow directly."""
    document: dict[str, Any] = {"__metadata__": _METADATA}
    for t in tensors:
        span = [t.start, t.stop]
        document[t.name] = {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": span}
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the 128-bit xxh3 digest of `data`, 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def byte_view(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array as a flat memoryview, without copying."""
    return array.reshape(-1).view(np.uint8).data


class BlockDigests:
    """Digests of consecutive blocks of a stream that arrives in pieces of any size."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._hash = xxhash.xxh3_128()
        self._room = block_bytes
        self.done: list[str] = []

    def update(self, data: memoryview) -> None:
        while len(data):
            piece = data[: self._room]
            self._hash.update(piece)
            self._room -= len(piece)
            data = data[len(piece) :]
            if not self._room:
                self._end_block()

    def _end_block(self) -> None:
        self.done.append(self._hash.hexdigest())
        self._hash.reset()
        self._room = self._block_bytes

    def finish(self) -> str:
        """Return the digests, joined; a last partial block counts as a block."""
        if self._room < self._block_bytes:
            self._end_block()
        return "".join(self.done)


class Readable(Protocol):
    """An open shard."""

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` (bytes) from byte `offset`; return the bytes that were there."""


class LocalFile(FileIO):
    """A file of this machine."""

    def read_at(self, buffer: memoryview, offset: int) -> int:
        return read_at(self.fileno(), buffer, offset)


def open_member(path: Path, *, size: int | None = None) -> LocalFile:
    """Open a file of a dataset's directory, a regular one of `size` bytes, or a link to one."""
    try:
        handle = open_regular(path)
    except OSError as error:
        raise damage_error(f"cannot read a file of the dataset: {error.strerror}", path) from error
    actual = os.fstat(handle).st_size
    if size is not None and actual != size:
        os.close(handle)
        raise damage_error(f"the file has {actual} bytes, the manifest says {size}", path)
    return LocalFile(handle)


def read_exactly(file: Readable, buffer: memoryview, offset: int, *, where: Path | str) -> None:
    """Fill `buffer` (bytes) from byte `offset` of a file (``DATASET_DAMAGED``)."""
    try:
        count = file.read_at(buffer, offset)
    except OSError as error:
        raise damage_error(f"cannot read: {error.strerror or error}", where) from error
    if count < len(buffer):
        raise damage_error(f"the file ends at byte {offset + count}, more were expected", where)
