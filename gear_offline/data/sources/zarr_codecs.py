"""Codecs of zarr chunks that give no more bytes than the chunk has by its header.

Importing this needs the zarr package.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numcodecs
import numpy as np
from numcodecs.abc import Codec
from zarr.abc.codec import BytesBytesCodec

from gear_offline.errors import package_needed

SIZES = {"blosc": slice(4, 8), "lz4": slice(0, 4)}  # of what is unpacked, where it is stored
STREAMS = ("zlib", "gzip", "bz2", "lzma", "zstd")
CHECKSUMS = ("crc32", "crc32c", "adler32", "fletcher32")
# an array of numbers in another order or type
FILTERS = ("shuffle", "delta", "fixedscaleoffset", "quantize", "bitround", "packbits")
READ = (*SIZES, *STREAMS, *CHECKSUMS, *FILTERS)
PLAIN = ("bytes", "transpose", "crc32c")  # of version 3, which keep the size
LARGEST_ITEM = 16  # bytes of a number
MARGIN = 64  # bytes of checksums and of headers
LZMA_MEMORY = 256 << 20


class CodecNotRead(ValueError):
    """A codec that is not read: it is unknown, or may run code or fill the memory."""


class BoundedCodec(Codec):  # type: ignore[misc]
    """A codec of zarr version 2 that decodes to at most `most` bytes."""

    codec_id = "bounded"

    def __init__(self, codec: Any, most: int) -> None:
        if codec.codec_id not in READ:
            raise CodecNotRead(f"stored by the codec {codec.codec_id}, which is not read")
        _import_reader(codec.codec_id)
        self._codec, self._most = codec, most

    def encode(self, buf: Any) -> Any:
        raise NotImplementedError

    def decode(self, buf: Any, out: Any = None) -> Any:
        return unpack(self._codec, buf, self._most)


@dataclass(frozen=True)
class BoundedBytesCodec(BytesBytesCodec):
    """A compressor of zarr version 3 that decodes to at most the bytes of the chunk."""

    codec: Any
    is_fixed_size = False

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        most = prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize + MARGIN
        content = unpack(self.codec, chunk_bytes.as_numpy_array(), most)
        return chunk_spec.prototype.buffer.from_bytes(bytes(content))

    def compute_encoded_size(self, _input_byte_length: int, _chunk_spec: Any) -> int:
        raise NotImplementedError


def bound_codecs(metadata: Any) -> dict[str, Any]:
    """Return an array's metadata with codecs that are bounded."""
    facts = dict(metadata.to_dict())
    if metadata.zarr_format == 3:
        return facts | {"codecs": _bound_codecs(metadata.codecs)}
    dtype, filters = metadata.dtype.to_native_dtype(), metadata.filters or ()
    most = prod(metadata.chunks) * (LARGEST_ITEM if filters else dtype.itemsize) + MARGIN
    compressor = metadata.compressor and BoundedCodec(metadata.compressor, most)
    bounded = [BoundedCodec(codec, most) for codec in filters]
    return facts | {"compressor": compressor, "filters": bounded or None}


def _bound_codecs(codecs: Iterable[Any]) -> tuple[Any, ...]:
    bounded = list[Any]()
    for codec in codecs:
        facts = codec.to_dict()
        name = facts["name"].removeprefix("numcodecs.")
        if name == "sharding_indexed":
            bounded.append(replace(codec, codecs=_bound_codecs(codec.codecs)))
        elif name in PLAIN:
            bounded.append(codec)
        elif name in SIZES or name in STREAMS:
            _import_reader(name)
            options = facts.get("configuration", {}) if name == "lzma" else {}
            bounded.append(BoundedBytesCodec(numcodecs.get_codec({"id": name, **options})))
        else:
            raise CodecNotRead(f"stored by the codec {facts['name']}, which is not read")
    return tuple(bounded)


def _import_reader(codec_id: str) -> None:
    """Import pyarrow here for zstd: first imported by a thread of zarr, it may crash there."""
    if codec_id == "zstd":
        with package_needed("zarr chunks in zstd are read by pyarrow", "zarr"):
            import pyarrow  # noqa: F401


def unpack(codec: Any, content: Any, most: int) -> Any:
    """Decode by a codec of the numcodecs package; raise `ValueError` beyond `most` bytes."""
    codec_id, view = codec.codec_id, np.asarray(content).reshape(-1).view(np.uint8)
    if codec_id in STREAMS:
        unpacked = _unpack_stream(codec, view.data, most + 1)
        size = len(unpacked)
    else:
        size = int.from_bytes(view[SIZES[codec_id]], "little") if codec_id in SIZES else view.size
        dtypes: list[Any] = [getattr(codec, name, None) for name in ("dtype", "astype")]
        if codec_id == "packbits":
            size *= 8
        elif codec_id in FILTERS and all(dtypes):
            size = size // dtypes[1].itemsize * dtypes[0].itemsize
        if codec_id == "blosc" and int.from_bytes(view[12:16], "little") != view.size:
            raise ValueError("a chunk is cut short")  # blosc would read on behind its end
        unpacked = content
    if size > most:
        raise ValueError(f"a chunk unpacks to more than the {most:,} bytes that it may have")
    return unpacked if codec_id in STREAMS else codec.decode(content)


def _unpack_stream(codec: Any, content: memoryview, most: int) -> bytes:
    """Return the first `most` bytes of a stream; raise `ValueError` if it has no end."""
    if codec.codec_id == "zstd":
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.BufferReader(content), "zstd") as stream:
            return bytes(stream.read(most))
    decoder: Any = bz2.BZ2Decompressor()
    if codec.codec_id in ("zlib", "gzip"):
        decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either
    elif codec.codec_id == "lzma":
        limit = None if codec.format == lzma.FORMAT_RAW else LZMA_MEMORY
        decoder = lzma.LZMADecompressor(codec.format, limit, codec.filters)
    unpacked: bytes = decoder.decompress(content, most)
    if not decoder.eof and len(unpacked) < most:
        raise ValueError("a chunk is cut short")
    return unpacked
