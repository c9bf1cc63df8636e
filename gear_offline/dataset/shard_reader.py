"""Read columns of one shard from their first row to their last, with digests on the way.

Unlike `Dataset.read`, which may begin anywhere and then reads whole blocks around it, every byte
is read once: the digest of a block is computed while its rows are in the cache, and compared at
the block's end.  Rows are handed out before that, so what was made of them counts only once all
rows were read without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy.typing as npt
import xxhash

from gear_offline.dataset.manifest import Manifest, ShardRecord
from gear_offline.dataset.shard import (
    DIGEST_CHARS,
    PIECE_BYTES,
    TensorLayout,
    byte_view,
    damaged,
    read_exactly,
)


class _Stream:
    """Position in one tensor, and the digest of the block begun."""

    def __init__(self, tensor: TensorLayout) -> None:
        self.tensor = tensor
        self.at = tensor.start
        self.block = 0
        self.hash = xxhash.xxh3_128()


class ShardReader:
    """Sequential reads of several columns of one shard.

    Parameters
    ----------
    handle
        The open shard.
    columns
        That will be read.
    check
        Compare digests.
    """

    def __init__(
        self,
        handle: int,
        manifest: Manifest,
        shard: ShardRecord,
        path: Path,
        *,
        columns: Iterable[str],
        check: bool,
    ) -> None:
        self._handle = handle
        self._shard = shard
        self._path = path
        self._where = str(path / shard.name)
        self._block_bytes = manifest.block_bytes
        self._check = check
        tensors = {tensor.name: tensor for tensor in manifest.tensors(shard)}
        self._streams = {column: _Stream(tensors[column]) for column in columns}

    def read(self, column: str, out: npt.NDArray[Any]) -> None:
        """Fill C-contiguous `out`, (n, ...), with the next n rows of a column.

        Raises
        ------
        InputError
            ``DATASET_DAMAGED``.
        """
        stream = self._streams[column]
        data = byte_view(out)
        while len(data):
            end = stream.tensor.start + (stream.block + 1) * self._block_bytes
            end = min(end, stream.tensor.stop)
            part = data[: end - stream.at]
            begin = self._shard.header_bytes + stream.at
            for at in range(0, len(part), PIECE_BYTES):
                piece = part[at : at + PIECE_BYTES]
                read_exactly(self._handle, piece, begin + at, where=self._where)
                if self._check:
                    stream.hash.update(piece)
            stream.at += len(part)
            data = data[len(part) :]
            if stream.at == end:
                self._end_block(stream)

    def _end_block(self, stream: _Stream) -> None:
        name, block = stream.tensor.name, stream.block
        at = block * DIGEST_CHARS
        expected = self._shard.digests[name][at : at + DIGEST_CHARS]
        if self._check and stream.hash.hexdigest() != expected:
            place = f"{self._where}, tensor {name}, block {block}"
            raise damaged("data do not match their digest", place)
        stream.hash.reset()
        stream.block += 1
