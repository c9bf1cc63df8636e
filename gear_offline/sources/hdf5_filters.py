"""Decoders of HDF5's built-in filters, each bounded in what it may produce.

HDF5's own pipeline hands a chunk that decodes to fewer bytes than its size on with whatever the
memory held before, and lets one that decodes to more grow without limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from h5py import h5z

Bytes = bytes | bytearray

_CHECKSUM_BYTES = 4
_BLOCK_WORDS = 1 << 20


def decode_chunk(
    raw: Bytes, filters: Sequence[int], skipped: int, *, chunk_bytes: int, itemsize: int
) -> Bytes:
    """Undo `filters`, in the writer's order; anything but `chunk_bytes` is a ValueError.

    Bit i of `skipped` is set where filter i was not applied, as for data that do not compress.
    """
    most = chunk_bytes + _CHECKSUM_BYTES
    for index in reversed(range(len(filters))):
        if not skipped >> index & 1:
            raw = FILTERS[filters[index]][1](raw, most, itemsize)
    if len(raw) != chunk_bytes:
        raise ValueError(f"a chunk of {chunk_bytes} bytes holds {len(raw)}")
    return raw


def _inflate(raw: Bytes, most: int, _: int) -> Bytes:
    decoder = zlib.decompressobj()
    try:
        plain = decoder.decompress(raw, most + 1)
    except zlib.error as error:
        raise ValueError(f"gzip: {error}") from error
    if not decoder.eof:
        raise ValueError("a gzip'ed chunk ends early, or is larger than it says")
    return plain


def _unshuffle(raw: Bytes, _: int, itemsize: int) -> Bytes:
    """Put the bytes of each element together; behind the last whole one they stay as they are."""
    whole = len(raw) // itemsize * itemsize
    planes = np.frombuffer(raw, np.uint8, whole).reshape(itemsize, -1)
    return planes.T.tobytes() + raw[whole:]


def _check_fletcher32(raw: Bytes, _most: int, _itemsize: int) -> Bytes:
    """Compare and drop the checksum at the end: Fletcher's of big-endian 16-bit words."""
    data, stored = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2")
    low = high = 0
    for start in range(0, words.size, _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS].astype(np.int64)
        high = (high + low * block.size + int(block @ np.arange(block.size, 0, -1))) % 65535
        low = (low + int(block.sum())) % 65535
    # Sums of 0 and 65,535 are one and the same modulo 65,535.
    wanted = (int.from_bytes(stored[:2], "little"), int.from_bytes(stored[2:], "little"))
    if tuple(part % 65535 for part in wanted) != (low, high):
        raise ValueError("the checksum of a chunk does not fit its bytes")
    return data


def _expand_lzf(raw: Bytes, most: int, _: int) -> Bytes:
    """Decode LZF: runs of literal bytes, and references to bytes up to 8 KiB back."""
    plain, at, end = bytearray(), 0, len(raw)
    try:
        while at < end:
            control = raw[at]
            if control < 32:
                plain += raw[at + 1 : at + control + 2]
                at += control + 2
                continue
            length, at = control >> 5, at + 1
            if length == 7:
                length, at = length + raw[at], at + 1
            length += 2
            begin = len(plain) - ((control & 31) << 8 | raw[at]) - 1
            at += 1
            if begin < 0:
                raise ValueError("an LZF chunk refers to bytes before its own")
            piece = plain[begin : begin + length]
            while len(piece) < length:  # the reference overlaps what it makes
                piece += piece[: length - len(piece)]
            plain += piece
            if len(plain) > most:
                break
    except IndexError:
        raise ValueError("an LZF chunk ends early") from None
    return bytes(plain)


FILTERS: dict[int, tuple[str, Callable[[Bytes, int, int], Bytes]]] = {
    h5z.FILTER_DEFLATE: ("gzip", _inflate),
    h5z.FILTER_SHUFFLE: ("shuffle", _unshuffle),
    h5z.FILTER_FLETCHER32: ("fletcher32", _check_fletcher32),
    h5z.FILTER_LZF: ("lzf", _expand_lzf),
}
