"""Shard files: safetensors with strict checks and a digest for every block of every tensor.

docs/format.md specifies the bytes.  This module lays tensors out, writes and parses headers,
opens files without following links, and reads into owned memory: a file that is cut short while
it is read gives an error, where a memory map would give a bus error.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gear_offline.dataset.schema import ColumnSpec
from gear_offline.errors import InputError

ALIGNMENT_BYTES = 64  # tensor data begin at a multiple of this
MAX_HEADER_BYTES = 16 << 20
DIGEST_BYTES = 16

DTYPE_CODES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}
CODES = {dtype: code for code, dtype in DTYPE_CODES.items()}

EPISODE_COLUMNS = (
    ColumnSpec(name="episode_lengths", dtype=np.dtype(np.int64)),
    ColumnSpec(name="episode_returns", dtype=np.dtype(np.float64)),
    ColumnSpec(name="episode_terminated", dtype=np.dtype(np.bool_)),
    ColumnSpec(name="episode_truncated", dtype=np.dtype(np.bool_)),
)
RESERVED_NAMES = frozenset({c.name for c in EPISODE_COLUMNS} | {"__metadata__"})
HEADER_METADATA = {"format": "gear-offline", "format_version": "1"}


def stored_form(column: ColumnSpec) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and per-step shape in the file: complex becomes (real, imaginary) pairs."""
    if column.dtype.kind == "c":
        return np.dtype(f"f{column.dtype.itemsize // 2}"), (*column.shape, 2)
    return column.dtype, column.shape


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """Where one tensor lies in a shard.

    Attributes
    ----------
    name, dtype, shape
        As the safetensors header says; `shape` includes the leading steps or episodes.
    start, stop
        Bytes ``[start, stop)``, counted from the end of the header.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    def blocks(self, block_bytes: int) -> Iterable[tuple[int, int]]:
        """Yield ``(start, stop)`` of each digest block, counted from the end of the header."""
        for start in range(self.start, self.stop, block_bytes):
            yield start, min(start + block_bytes, self.stop)


def plan_tensors(
    columns: Sequence[ColumnSpec], *, steps: int, episodes: int
) -> tuple[TensorLayout, ...]:
    """Lay out a shard: widest dtype first, so that every tensor is aligned to its own dtype."""
    forms = [(c.name, *stored_form(c), steps) for c in columns]
    forms += [(c.name, c.dtype, c.shape, episodes) for c in EPISODE_COLUMNS]
    forms.sort(key=lambda form: -form[1].itemsize)
    found, offset = [], 0
    for name, dtype, shape, rows in forms:
        full = (rows, *shape)
        stop = offset + dtype.itemsize * prod(full)
        found.append(TensorLayout(name=name, dtype=dtype, shape=full, start=offset, stop=stop))
        offset = stop
    return tuple(found)


def encode_header(tensors: Sequence[TensorLayout]) -> bytes:
    """Return length, JSON and space padding; tensor data follow directly."""
    document: dict[str, Any] = {"__metadata__": HEADER_METADATA}
    for t in tensors:
        document[t.name] = {
            "dtype": CODES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [t.start, t.stop],
        }
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _bad_header(where: str, what: str) -> InputError:
    return InputError(
        "SHARD_HEADER", f"shard header is not usable: {what}", where=where, remedy=REMEDY_DAMAGED
    )


REMEDY_DAMAGED = "the file is damaged or foreign: copy it again or convert the source again"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object for `json.loads`, refusing repeated keys."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def parse_header(raw: bytes, *, file_bytes: int, where: str) -> tuple[TensorLayout, ...]:
    """Parse and check a safetensors header.

    Parameters
    ----------
    raw
        The first ``8 + header length`` bytes of the file.
    file_bytes
        Size of the whole file: tensors must cover it exactly, without holes or overlap.
    where
        File name for messages.

    Raises
    ------
    InputError
        ``SHARD_HEADER``.
    """
    if len(raw) < 10 or len(raw) != 8 + int.from_bytes(raw[:8], "little"):
        raise _bad_header(where, "its length field does not match")
    try:
        document = json.loads(raw[8:].decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _bad_header(where, str(error)[:200]) from error
    if not isinstance(document, dict) or raw[8:9] != b"{":
        raise _bad_header(where, "it is not a JSON object")
    document.pop("__metadata__", None)
    found = sorted(
        (_parse_tensor(name, value, where) for name, value in document.items()),
        key=lambda t: (t.start, t.stop),
    )
    offset = 0
    for t in found:
        if t.start != offset or t.bytes != t.dtype.itemsize * prod(t.shape):
            raise _bad_header(where, f"tensor {t.name!r} has offsets that do not fit")
        offset = t.stop
    if len(raw) + offset != file_bytes:
        raise _bad_header(where, f"tensors end at byte {len(raw) + offset} of {file_bytes}")
    return tuple(found)


def _parse_tensor(name: str, value: Any, where: str) -> TensorLayout:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _bad_header(where, f"tensor {name[:100]!r} is not described by dtype, shape, offsets")
    dtype = DTYPE_CODES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    numbers = (value["shape"], value["data_offsets"])
    if dtype is None or not all(
        isinstance(part, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in part)
        for part in numbers
    ):
        raise _bad_header(where, f"tensor {name[:100]!r} has an unknown dtype or a bad number")
    shape, offsets = numbers
    if len(shape) > 32 or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad_header(where, f"tensor {name[:100]!r} has a bad shape or bad offsets")
    return TensorLayout(
        name=name, dtype=dtype, shape=tuple(shape), start=offsets[0], stop=offsets[1]
    )


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the 128-bit xxh3 digest of `data`, 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class BlockDigests:
    """Digests of consecutive blocks of a stream that arrives in pieces of any size."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._hash = xxhash.xxh3_128()
        self._room = block_bytes
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """Add bytes (a flat memoryview of bytes)."""
        while len(data):
            piece = data[: self._room]
            self._hash.update(piece)
            self._room -= len(piece)
            data = data[len(piece) :]
            if not self._room:
                self._close_block()

    def _close_block(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash.reset()
        self._room = self._block_bytes

    def finish(self) -> tuple[str, ...]:
        """Return the digests; a last partial block counts as a block."""
        if self._room < self._block_bytes:
            self._close_block()
        return tuple(self._done)


def open_directory(path: Path) -> int:
    """Open a dataset directory and return its descriptor; the caller closes it.

    Raises
    ------
    InputError
        ``DATASET_MISSING``, ``DATASET_KIND``, ``DATASET_READ``.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise InputError(
            "DATASET_MISSING", "no such dataset", where=str(path), remedy="check the path"
        ) from error
    except NotADirectoryError as error:
        raise InputError(
            "DATASET_KIND",
            "a dataset is a directory, this is a file",
            where=str(path),
            remedy="give the directory, or run `gear-offline convert` on the file first",
        ) from error
    except OSError as error:
        raise read_error(error, str(path)) from error


def open_member(directory: int, name: str, *, where: str, size: int | None = None) -> int:
    """Open a regular file of a dataset directory, without following links.

    Parameters
    ----------
    directory
        Descriptor of the dataset directory.
    name
        Plain file name; the caller has checked it against the allowed names.
    size
        Bytes that the file must have, ``None`` for any.

    Raises
    ------
    InputError
        ``FILE_MISSING``, ``FILE_KIND`` (link, directory, device), ``FILE_SIZE``, ``DATASET_READ``.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        handle = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError as error:
        if name == "manifest.json":
            raise InputError(
                "DATASET_KIND",
                "the directory is not a dataset: it has no manifest",
                where=where,
                remedy="make one with `gear-offline convert SOURCE OUT`",
            ) from error
        raise InputError(
            "FILE_MISSING", "a file of the dataset is missing", where=where, remedy=REMEDY_DAMAGED
        ) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise _bad_kind(where) from error
        raise read_error(error, where) from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise _bad_kind(where)
    if size is not None and found.st_size != size:
        os.close(handle)
        raise InputError(
            "FILE_SIZE",
            f"the file has {found.st_size} bytes, the manifest says {size}",
            where=where,
            remedy=REMEDY_DAMAGED,
        )
    return handle


def file_stamp(handle: int) -> tuple[int, ...]:
    """Return device, inode, size and the times of the last changes (ns) of an open file."""
    found = os.fstat(handle)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _bad_kind(where: str) -> InputError:
    return InputError(
        "FILE_KIND",
        "a file of the dataset is not a regular file (links are not followed)",
        where=where,
        remedy="put the file itself there",
    )


def read_error(error: OSError, where: str) -> InputError:
    """Wrap an operating-system error met while reading."""
    return InputError(
        "DATASET_READ",
        f"cannot read: {error.strerror or error}",
        where=where,
        remedy="check permissions and the disk",
    )


def read_into(handle: int, buffer: memoryview, offset: int, *, where: str) -> None:
    """Fill `buffer` (bytes) from byte `offset` of a file.

    Raises
    ------
    InputError
        ``FILE_SIZE`` when the file ends early, ``DATASET_READ`` when the disk fails.
    """
    left = len(buffer)
    while left:
        try:
            count = os.preadv(handle, [buffer], offset)
        except OSError as error:
            raise read_error(error, where) from error
        if count == left:
            return
        if count == 0:
            raise InputError(
                "FILE_SIZE",
                f"the file ends at byte {offset}, more were expected",
                where=where,
                remedy=REMEDY_DAMAGED,
            )
        buffer, offset, left = buffer[count:], offset + count, left - count


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of a C-contiguous array as a flat memoryview, without copying."""
    return array.reshape(-1).view(np.uint8).data
