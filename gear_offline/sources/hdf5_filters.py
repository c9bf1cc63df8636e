"""Decoders of HDF5's filters, each bounded in what it may produce.

Why chunks are not read through h5py: HDF5's pipeline hands a chunk that decodes to fewer bytes than
its size on with whatever the memory held before, and lets one that decodes to more grow without
limit.  So Python's zlib and NumPy undo gzip, shuffle and checksums, which tell the length; HDF5
itself decodes the rest, one filter at a time, behind a marker or a check of the length.
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
Decoder = Callable[[Bytes], Bytes]
SLACK = 64  # bytes of headers and checksums that filters put around a chunk's own
MARKER_BYTES = 32  # of the longest literal run of LZF


def make_decoders(plan: Any, kind: Any) -> list[Decoder]:
    """Return what undoes each filter of a dataset, in the writer's order, for chunks of a type."""
    filters = [plan.get_filter(number) for number in range(plan.get_nfilters())]
    return [FILTERS[code][1](plan, kind, values) for code, _, values, _ in filters]


def decode_chunk(raw: Bytes, decoders: list[Decoder], skipped: int, chunk_bytes: int) -> Bytes:
    """Undo filters, in the writer's order; anything but `chunk_bytes` is a ValueError.

    Bit i of `skipped` is set where filter i was not applied, as for data that do not compress.
    """
    for index in reversed(range(len(decoders))):
        if not skipped >> index & 1:
            raw = decoders[index](raw)
    if len(raw) != chunk_bytes:
        raise ValueError(f"a chunk of {chunk_bytes} bytes holds {len(raw)}")
    return raw


def _most(plan: Any, kind: Any) -> int:
    return int(prod(plan.get_chunk()) * kind.get_size()) + SLACK


def _gzip(plan: Any, kind: Any, _: tuple[int, ...]) -> Decoder:
    most = _most(plan, kind)

    def decode(raw: Bytes) -> Bytes:
        decoder = zlib.decompressobj()
        plain = decoder.decompress(raw, most)
        if not decoder.eof:
            raise ValueError("a gzip'ed chunk ends early, or is larger than it says")
        return plain

    return decode


def _shuffle(plan: Any, kind: Any, _: tuple[int, ...]) -> Decoder:
    size = int(kind.get_size())

    def decode(raw: Bytes) -> Bytes:
        """Put the bytes of each element together; behind the last they stay as they are."""
        whole = len(raw) // size * size
        plain = np.frombuffer(raw, np.uint8, whole).reshape(size, -1).T.tobytes()
        return plain + raw[whole:] if whole < len(raw) else plain

    return decode


def _fletcher32(plan: Any, kind: Any, _: tuple[int, ...]) -> Decoder:
    def decode(raw: Bytes) -> Bytes:
        """Compare the checksum behind the data: sums of 16-bit words, and of these, mod 65,535."""
        plain, stored = raw[:-4], np.frombuffer(raw[-4:], "<u2").astype(np.uint64)
        words = np.frombuffer(plain + bytes(len(plain) % 2), ">u2").astype(np.uint64)
        places = np.arange(words.size, 0, -1, dtype=np.uint64) % 65535
        sums = np.array([words.sum(), (words * places).sum()])
        if (sums % 65535 != stored % 65535).any():
            raise ValueError("a chunk's checksum does not match")
        return plain

    return decode


def _lzf(plan: Any, kind: Any, _: tuple[int, ...]) -> Decoder:
    most = _most(plan, kind) + MARKER_BYTES
    chunk = _new_file().create_dataset("x", (most,), "u1", chunks=(most,), compression="lzf")

    def decode(raw: Bytes) -> Bytes:
        # A literal run behind the data: where its random bytes come out, the data end.
        marker = os.urandom(MARKER_BYTES)
        if len(raw) > most:  # stored as it is
            raise ValueError("an LZF chunk is longer than what it holds")
        chunk.id.write_direct_chunk((0,), bytes(raw) + bytes([MARKER_BYTES - 1]) + marker)
        plain: bytes = chunk[()].tobytes()
        end = plain.find(marker)
        if end < 0:
            raise ValueError("an LZF chunk ends early, or is larger than it says")
        return plain[:end]

    return decode


def _packed(code: int, bits_of: Callable[[Bytes, tuple[int, ...]], tuple[int, int]]) -> Any:
    """Return what makes a decoder of a filter of HDF5 that packs numbers into fewer bits.

    ``bits_of(raw, values)`` gives a chunk's bytes of header and bits a number.
    """

    def make(plan: Any, kind: Any, values: tuple[int, ...]) -> Decoder:
        plan, shape, most = plan.copy(), plan.get_chunk(), _most(plan, kind)
        for other in [plan.get_filter(number)[0] for number in range(plan.get_nfilters())]:
            if other != code:
                plan.remove_filter(other)
        space = h5s.create_simple(shape)
        chunk = h5d.create(_new_file().id, b"x", kind, space, dcpl=plan)
        if chunk.get_create_plist().get_filter(0)[2] != values:  # what HDF5 makes of the type
            raise ValueError("a filter's parameters are not those of its column")

        def decode(raw: Bytes) -> Bytes:
            header, bits = bits_of(raw, values)
            if bits > 8 * kind.get_size() or 8 * (len(raw) - header) < bits * prod(shape):
                raise ValueError("a packed chunk ends early")
            # HDF5 trusts the length: zeros behind it keep it inside the memory.
            chunk.write_direct_chunk((0,) * len(shape), bytes(raw).ljust(most, b"\0"))
            plain = np.empty(most - SLACK, np.uint8)
            chunk.read(h5s.ALL, h5s.ALL, plain, mtype=kind)
            return plain.tobytes()

        return decode

    return make


def _scale_bits(raw: Bytes, _: tuple[int, ...]) -> tuple[int, int]:
    return 21, int.from_bytes(raw[:4], "little")


def _nbit_bits(_: Bytes, values: tuple[int, ...]) -> tuple[int, int]:
    whole, atomic = values[1], values[3] == 1
    if not atomic:
        raise ValueError("packed bits of a type that is no number")
    return 0, 8 * values[4] if whole else values[6]


def _new_file() -> h5py.File:
    return h5py.File(os.urandom(8).hex(), "w", driver="core", backing_store=False)


FILTERS: dict[int, tuple[str, Callable[[Any, Any, tuple[int, ...]], Decoder]]] = {
    h5z.FILTER_DEFLATE: ("gzip", _gzip),
    h5z.FILTER_SHUFFLE: ("shuffle", _shuffle),
    h5z.FILTER_FLETCHER32: ("fletcher32", _fletcher32),
    h5z.FILTER_LZF: ("lzf", _lzf),
    h5z.FILTER_SCALEOFFSET: ("scaleoffset", _packed(h5z.FILTER_SCALEOFFSET, _scale_bits)),
    h5z.FILTER_NBIT: ("nbit", _packed(h5z.FILTER_NBIT, _nbit_bits)),
}
