"""Headers of Arrow's batches of rows: what each one claims, before pyarrow unpacks it.

They are flatbuffers, as Arrow's ``Message.fbs`` and ``File.fbs`` define them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.types import Array

MAGIC, CONTINUED = b"ARROW1", b"\xff\xff\xff\xff"
MAX_HEADER_BYTES = 64 << 20
DICTIONARY, BATCH = 2, 3  # types of messages
BLOCK = np.dtype([("at", "<i8"), ("header", "<i4"), ("_", "<i4"), ("body", "<i8")])
BUFFER = np.dtype([("at", "<i8"), ("size", "<i8")])


class Batch(NamedTuple):
    """A batch of rows, or the values of a dictionary."""

    rows: int
    stored: int  # bytes in the file
    claimed: int  # bytes in memory
    is_dictionary: bool


class FlatTable(NamedTuple):
    """A table of a flatbuffer, whose fields are numbered."""

    content: bytes
    at: int

    @classmethod
    def root(cls, content: bytes) -> FlatTable:
        """Return the table that a buffer begins with."""
        return cls(content, _number(content, 0, "I"))

    def offset(self, field: int) -> int:
        """Return the place of a field, 0 where it is not there."""
        fields = self.at - _number(self.content, self.at, "i")
        entry = 4 + 2 * field
        has_entry = entry < _number(self.content, fields, "H")
        offset = _number(self.content, fields + entry, "H") if has_entry else 0
        return self.at + offset if offset else 0

    def number(self, field: int, code: str) -> int:
        """Return a field that is a number, of a type of the module `struct`."""
        offset = self.offset(field)
        return _number(self.content, offset, code) if offset else 0

    def table(self, field: int) -> FlatTable:
        """Return a field that is a table."""
        offset = self.offset(field)
        return FlatTable(self.content, offset + _number(self.content, offset, "I"))

    def structs(self, field: int, dtype: np.dtype[Any]) -> Array:
        """Return a field that is a list of structs."""
        if not (offset := self.offset(field)):
            return np.empty(0, dtype)
        offset += _number(self.content, offset, "I")
        count = _number(self.content, offset, "I")
        return np.frombuffer(self.content, dtype, count, offset + 4)


def read_batches(raw: Any, size: int) -> list[Batch]:
    """Read the headers of a file, or a stream, of `size` bytes."""
    batches, stored = list[Batch](), 0
    for at in _messages(raw, size):
        message, body, end = _read_header(raw, at)
        code, stored = message.number(1, "B"), stored + end - at
        if not at < end <= size or stored > size:
            raise ValueError("a batch is cut short, or two are in one place")
        if code in (DICTIONARY, BATCH):
            batch = message.table(2)
            batch = batch.table(1) if code == DICTIONARY else batch
            claimed = _sum_unpacked_bytes(raw, body, batch)
            batches.append(Batch(batch.number(0, "q"), end - body, claimed, code == DICTIONARY))
    return batches


def _messages(raw: Any, size: int) -> Iterator[int]:
    """Yield the places of messages: those that a file lists at its end, or one after the other."""
    raw.seek(0)
    if raw.read(len(MAGIC)) == MAGIC:
        raw.seek(size - 10)
        length, magic = struct.unpack("<i6s", raw.read(10))
        if magic != MAGIC or not 0 < length <= min(size, MAX_HEADER_BYTES):
            raise ValueError("the file has no end")
        raw.seek(size - 10 - length)
        footer = FlatTable.root(raw.read(length))
        for field in (2, 3):
            yield from footer.structs(field, BLOCK)["at"].tolist()
        return
    at = 0
    while True:
        raw.seek(at)
        start = raw.read(8)
        if start in (CONTINUED + bytes(4), bytes(4)):
            return
        if len(start) < 8:
            raise ValueError("the stream has no end")
        yield at
        at = _read_header(raw, at)[2]


def _read_header(raw: Any, at: int) -> tuple[FlatTable, int, int]:
    """Return a message, the place of its body, and that behind it."""
    raw.seek(at)
    begin = raw.read(8)
    skipped = 8 if begin[:4] == CONTINUED else 4  # of older files
    length = _number(begin, skipped - 4, "i")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise ValueError("a header has no length")
    raw.seek(at + skipped)
    message, body = FlatTable.root(raw.read(length)), at + skipped + length
    return message, body, body + message.number(3, "q")


def _sum_unpacked_bytes(raw: Any, body: int, batch: FlatTable) -> int:
    """Return the bytes of a batch's buffers; a compressed one begins with its size, or -1."""
    buffers = batch.structs(2, BUFFER)
    if not batch.offset(3):
        return int(buffers["size"].sum())
    claimed = 0
    for at, size in buffers[buffers["size"] > 0].tolist():
        raw.seek(body + at)
        unpacked = _number(raw.read(8), 0, "q")
        claimed += size if unpacked == -1 else abs(unpacked)
    return claimed


def _number(content: bytes, at: int, code: str) -> int:
    return int(struct.unpack_from(f"<{code}", content, at)[0])
