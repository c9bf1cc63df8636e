"""Decoders of HDF5's filters, each bounded in what it may produce.

A hostile chunk is why chunks are not read through h5py.  HDF5 hands one that decodes to fewer bytes
than its size on with whatever the memory held before, and lets one that decodes to more grow
without limit.  So Python's zlib and NumPy undo gzip, shuffle and checksums.  HDF5 itself undoes the
rest, one filter at a time, behind a marker or a check of the length.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from math import prod
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5s, h5z

Bytes = bytes | bytearray
SLACK = 64  # bytes of headers and checksums that filters put around a chunk's own
MARKER_BYTES = 32  # of the longest literal run of LZF


class ChunkDecoder:
    """The filters of a dataset, and datasets in memory by which HDF5 undoes one of them."""

    def __init__(self, plan: Any, kind: Any) -> None:
        self.plan, self.kind, self.size = plan, kind, int(kind.get_size())
        self.filters = [plan.get_filter(number) for number in range(plan.get_nfilters())]
        self.bytes = prod(plan.get_chunk()) * self.size
        self.most = self.bytes + SLACK
        self.scratch: dict[int, h5d.DatasetID] = {}

    def decode(self, raw: Bytes, skipped: int) -> Bytes:
        """Undo filters; anything but a chunk's bytes is a ValueError.

        Bit i of `skipped` is set where filter i was not applied, as for data that do not compress.
        """
        for index, (code, _, values, _) in reversed([*enumerate(self.filters)]):
            if not skipped >> index & 1:
                raw = FILTERS[code][1](self, raw, values)
        if len(raw) != self.bytes:
            raise ValueError(f"a chunk of {self.bytes} bytes holds {len(raw)}")
        return raw

    def unpack(
        self, code: int, values: tuple[int, ...], raw: Bytes, header: int, bits: int
    ) -> Bytes:
        """Let HDF5 undo a filter that packs numbers into some bits behind bytes of a header."""
        if code not in self.scratch:
            plan = self.plan.copy()
            for other in {code for code, *_ in self.filters} - {code}:
                plan.remove_filter(other)
            space = h5s.create_simple(self.plan.get_chunk())
            chunk = h5d.create(_new_file().id, b"x", self.kind, space, dcpl=plan)
            if chunk.get_create_plist().get_filter(0)[2] != values:  # what HDF5 makes of the type
                raise ValueError("a filter's parameters are not those of its column")
            self.scratch[code] = chunk
        if bits > 8 * self.size or 8 * (len(raw) - header) < bits * (self.bytes // self.size):
            raise ValueError("a packed chunk ends early")
        # HDF5 trusts the length: zeros behind it keep it inside the memory.
        padded = bytes(raw).ljust(self.most, b"\0")
        self.scratch[code].write_direct_chunk((0,) * len(self.plan.get_chunk()), padded)
        plain = np.empty(self.bytes, np.uint8)
        self.scratch[code].read(h5s.ALL, h5s.ALL, plain, mtype=self.kind)
        return plain.tobytes()


def _gzip(chunk: ChunkDecoder, raw: Bytes, _: tuple[int, ...]) -> Bytes:
    decoder = zlib.decompressobj()
    plain = decoder.decompress(raw, chunk.most)
    if not decoder.eof:
        raise ValueError("a gzip'ed chunk ends early, or is larger than it says")
    return plain


def _shuffle(chunk: ChunkDecoder, raw: Bytes, _: tuple[int, ...]) -> Bytes:
    """Put the bytes of each element together; behind the last they stay as they are."""
    whole = len(raw) // chunk.size * chunk.size
    plain = np.frombuffer(raw, np.uint8, whole).reshape(chunk.size, -1).T.tobytes()
    return plain + raw[whole:] if whole < len(raw) else plain


def _fletcher32(_: ChunkDecoder, raw: Bytes, __: tuple[int, ...]) -> Bytes:
    """Compare the checksum behind the data: sums of 16-bit words, and of these, mod 65,535."""
    plain, stored = raw[:-4], np.frombuffer(raw[-4:], "<u2").astype(np.uint64)
    words = np.frombuffer(plain + bytes(len(plain) % 2), ">u2").astype(np.uint64)
    places = np.arange(words.size, 0, -1, dtype=np.uint64) % 65535
    sums = np.array([words.sum(), (words * places).sum()])
    if (sums % 65535 != stored % 65535).any():
        raise ValueError("a chunk's checksum does not match")
    return plain


def _lzf(chunk: ChunkDecoder, raw: Bytes, _: tuple[int, ...]) -> Bytes:
    most, code = chunk.most + MARKER_BYTES, h5z.FILTER_LZF
    if code not in chunk.scratch:
        plain = _new_file().create_dataset("x", (most,), "u1", chunks=(most,), compression="lzf")
        chunk.scratch[code] = plain.id
    if len(raw) > most:  # stored as it is
        raise ValueError("an LZF chunk is longer than what it holds")
    # A literal run behind the data: where its random bytes come out, the data end.
    marker = os.urandom(MARKER_BYTES)
    literal = bytes(raw) + bytes([MARKER_BYTES - 1]) + marker
    chunk.scratch[code].write_direct_chunk((0,), literal)
    decoded: bytes = h5py.Dataset(chunk.scratch[code])[()].tobytes()
    end = decoded.find(marker)
    if end < 0:
        raise ValueError("an LZF chunk ends early, or is larger than it says")
    return decoded[:end]


def _scaleoffset(chunk: ChunkDecoder, raw: Bytes, values: tuple[int, ...]) -> Bytes:
    bits = int.from_bytes(raw[:4], "little")
    return chunk.unpack(h5z.FILTER_SCALEOFFSET, values, raw, 21, bits)


def _nbit(chunk: ChunkDecoder, raw: Bytes, values: tuple[int, ...]) -> Bytes:
    if values[3] != 1:
        raise ValueError("packed bits of a type that is no number")
    return chunk.unpack(h5z.FILTER_NBIT, values, raw, 0, 8 * values[4] if values[1] else values[6])


def _new_file() -> h5py.File:
    return h5py.File(os.urandom(8).hex(), "w", driver="core", backing_store=False)


FILTERS: dict[int, tuple[str, Callable[[ChunkDecoder, Bytes, tuple[int, ...]], Bytes]]] = {
    h5z.FILTER_DEFLATE: ("gzip", _gzip),
    h5z.FILTER_SHUFFLE: ("shuffle", _shuffle),
    h5z.FILTER_FLETCHER32: ("fletcher32", _fletcher32),
    h5z.FILTER_LZF: ("lzf", _lzf),
    h5z.FILTER_SCALEOFFSET: ("scaleoffset", _scaleoffset),
    h5z.FILTER_NBIT: ("nbit", _nbit),
}
