"""Chunks behind HDF5's filters, measured before HDF5 decodes them.

HDF5 fills up a chunk that decodes to fewer bytes than its size with whatever the memory held.  It
lets one that decodes to more grow without limit, and reads packed numbers behind their end.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import h5py
import numpy as np
from h5py import h5z

Values = tuple[int, ...]  # parameters of a filter
SLACK = 64  # bytes of headers and checksums that filters put around a chunk's own
MARKER_BYTES = 32  # of the longest literal run of LZF


class ChunkCheck:
    """Refuses chunks of a dataset that do not decode to exactly their size."""

    def __init__(self, plan: Any, itemsize: int) -> None:
        stored = [plan.get_filter(number) for number in range(plan.get_nfilters())]
        self.filters = [(code, values) for code, _, values, _ in stored]
        self.itemsize, self.bytes = itemsize, prod(plan.get_chunk()) * itemsize
        self.is_packed = any(code in PACKED for code, _ in self.filters)
        if self.is_packed and self.filters[0][0] not in PACKED:
            raise ValueError("numbers are packed behind another filter")

    def check(self, raw: bytes, skipped: int) -> None:
        """Follow the filters back; anything but a chunk's bytes is a ValueError.

        Bit i of `skipped` is set where filter i was not applied, as for data that do not compress.
        """
        for index, (code, values) in reversed([*enumerate(self.filters)]):
            if not skipped >> index & 1:
                raw = FILTERS[code][1](self, raw, values)
        if len(raw) != self.bytes:
            raise ValueError(f"a chunk of {self.bytes} bytes holds {len(raw)}")


def _gzip(chunk: ChunkCheck, raw: bytes, _: Values) -> bytes:
    decoder = zlib.decompressobj()
    plain = decoder.decompress(raw, chunk.bytes + SLACK)
    if not decoder.eof:
        raise ValueError("a gzip'ed chunk ends early, or is larger than it says")
    return plain


def _shuffle(chunk: ChunkCheck, raw: bytes, _: Values) -> bytes:
    if not chunk.is_packed:
        return raw  # in another order
    size = len(raw) // chunk.itemsize * chunk.itemsize
    plain = np.frombuffer(raw, np.uint8, size).reshape(chunk.itemsize, -1).T.tobytes()
    return plain + raw[size:]


def _fletcher32(_: ChunkCheck, raw: bytes, __: Values) -> bytes:
    if len(raw) < 4:
        raise ValueError("a chunk ends before its checksum")
    return raw[:-4]  # which HDF5 compares


def _lzf(chunk: ChunkCheck, raw: bytes, _: Values) -> bytes:
    most = chunk.bytes + SLACK + MARKER_BYTES
    if len(raw) > most:  # stored as it is
        raise ValueError("an LZF chunk is longer than what it holds")
    # A literal run behind the data: where its random bytes come out, the data end.
    marker, scratch = os.urandom(MARKER_BYTES), _lzf_scratch(most)
    scratch.id.write_direct_chunk((0,), raw + bytes([MARKER_BYTES - 1]) + marker)
    plain: bytes = scratch[()].tobytes()
    end = plain.find(marker)
    if end < 0:
        raise ValueError("an LZF chunk ends early, or is larger than it says")
    return plain[:end]


@lru_cache(maxsize=1)
def _lzf_scratch(most: int) -> Any:
    file = h5py.File(os.urandom(8).hex(), "w", driver="core", backing_store=False)
    return file.create_dataset("x", (most,), "u1", chunks=(most,), compression="lzf")


def _scaleoffset(chunk: ChunkCheck, raw: bytes, values: Values) -> bytes:
    bits = int.from_bytes(raw[:4], "little")
    return _check_packed(chunk, len(raw) - 21, bits, values[2], values[4])


def _nbit(chunk: ChunkCheck, raw: bytes, values: Values) -> bytes:
    if values[1]:  # nothing to pack
        return raw
    _, _, count, type_class, size, _, bits, offset = values
    if type_class != 1 or not 0 < bits <= 8 * size - offset:
        raise ValueError("packed bits of a type that is no number")
    return _check_packed(chunk, len(raw), bits, count, size)


def _check_packed(chunk: ChunkCheck, stored: int, bits: int, count: int, size: int) -> bytes:
    if size != chunk.itemsize or count * size != chunk.bytes:
        raise ValueError("a filter's parameters are not those of its column")
    if bits > 8 * size or 8 * stored < bits * count:
        raise ValueError("a packed chunk ends early")
    return bytes(chunk.bytes)


PACKED = (h5z.FILTER_SCALEOFFSET, h5z.FILTER_NBIT)
FILTERS: dict[int, tuple[str, Callable[[ChunkCheck, bytes, Values], bytes]]] = {
    h5z.FILTER_DEFLATE: ("gzip", _gzip),
    h5z.FILTER_SHUFFLE: ("shuffle", _shuffle),
    h5z.FILTER_FLETCHER32: ("fletcher32", _fletcher32),
    h5z.FILTER_LZF: ("lzf", _lzf),
    h5z.FILTER_SCALEOFFSET: ("scaleoffset", _scaleoffset),
    h5z.FILTER_NBIT: ("nbit", _nbit),
}
