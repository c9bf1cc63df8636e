"""Decoders of HDF5's filters, each bounded in what it may produce.

HDF5's own pipeline hands a chunk that decodes to fewer bytes than its size on with whatever the
memory held before, and lets one that decodes to more grow without limit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from h5py import h5z

Bytes = bytes | bytearray


def decode_chunk(
    raw: Bytes, filters: Sequence[int], skipped: int, *, chunk_bytes: int, itemsize: int
) -> Bytes:
    """Undo `filters`, in the writer's order; anything but `chunk_bytes` is a ValueError.

    Bit i of `skipped` is set where filter i was not applied, as for data that do not compress.
    """
    for index in reversed(range(len(filters))):
        if not skipped >> index & 1:
            raw = FILTERS[filters[index]][1](raw, chunk_bytes, itemsize)
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


def _expand_lzf(raw: Bytes, most: int, _: int) -> Bytes:
    """Decode LZF: runs of literal bytes, and references to bytes up to 8 KiB back."""
    plain, at = bytearray(), 0
    try:
        while at < len(raw) and len(plain) <= most:
            control, at = raw[at], at + 1
            if control < 32:
                plain += raw[at : at + control + 1]
                at += control + 1
                continue
            length = control >> 5
            if length == 7:
                length, at = length + raw[at], at + 1
            begin = len(plain) - ((control & 31) << 8 | raw[at]) - 1
            length, at = length + 2, at + 1
            if begin < 0:
                raise ValueError("an LZF chunk refers to bytes before its own")
            piece = plain[begin : begin + length]
            # A reference that overlaps what it makes repeats it.
            plain += (piece * -(-length // len(piece)))[:length]
    except IndexError:
        raise ValueError("an LZF chunk ends early") from None
    return plain


FILTERS: dict[int, tuple[str, Callable[[Bytes, int, int], Bytes]]] = {
    h5z.FILTER_DEFLATE: ("gzip", _inflate),
    h5z.FILTER_SHUFFLE: ("shuffle", _unshuffle),
    h5z.FILTER_LZF: ("lzf", _expand_lzf),
}
