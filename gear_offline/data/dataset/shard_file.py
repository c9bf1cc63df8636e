"""A shard's file, read as the manifest describes it, each block compared with its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gear_offline.core.types import Array
from gear_offline.data.dataset.manifest import Manifest, ShardRecord
from gear_offline.data.dataset.shard import (
    DIGEST_CHARS,
    EPISODE_COLUMNS,
    BlockDigests,
    Readable,
    TensorLayout,
    byte_view,
    damage_error,
    encode_header,
    read_exactly,
)

PIECE_BYTES = 1 << 20  # read and digested while it is in the cache
OnProgress = Callable[[int], None]


class ShardFile(NamedTuple):
    """An open file, and the record of the manifest that it has to fit."""

    file: Readable
    folder: Path
    manifest: Manifest
    record: ShardRecord

    def stream(self, tensor: TensorLayout, buffer: Array) -> Iterator[int]:
        """Read a tensor into `buffer`, (n, *stored shape), again and again; yield the rows read."""
        where, digests = self.folder / self.record.name, self.record.digests[tensor.name]
        blocks, checked = BlockDigests(self.manifest.block_bytes), 0
        begin, end = (self.record.header_bytes + byte for byte in (tensor.start, tensor.stop))
        while begin < end:
            data = byte_view(buffer)[: end - begin]
            for at in range(0, len(data), PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                read_exactly(self.file, piece, begin + at, where=where)
                blocks.update(piece)
            begin += len(data)
            if begin == end:
                blocks.finish()
            for block in range(checked, len(blocks.done)):
                if blocks.done[block] != digests[block * DIGEST_CHARS : (block + 1) * DIGEST_CHARS]:
                    place = f"{where}, tensor {tensor.name}, block {block}"
                    raise damage_error("data do not match their digest", place)
            checked = len(blocks.done)
            yield len(data) // buffer[:1].nbytes

    def compare(self, on_progress: OnProgress = lambda n: None) -> None:
        """Compare every block with its digest."""
        buffer = np.empty(PIECE_BYTES, np.uint8)
        for tensor in self.manifest.tensors(self.record):
            for read in self.stream(tensor, buffer):
                on_progress(read)

    def read_episodes(self) -> tuple[Array, ...]:
        """Check the header, and return the `EPISODE_COLUMNS`."""
        where, record = self.folder / self.record.name, self.record
        header = bytearray(record.header_bytes)
        read_exactly(self.file, memoryview(header), 0, where=where)
        if header != encode_header(self.manifest.tensors(record)):
            raise damage_error("the shard's header is not the one that the manifest implies", where)
        values: list[Array] = []
        for column in EPISODE_COLUMNS:
            tensor = self.manifest.layouts(record)[column.name]
            raw = np.empty(tensor.bytes, np.uint8)
            for _ in self.stream(tensor, raw):
                pass
            if tensor.dtype == np.bool_ and raw.max() > 1:
                raise damage_error(f"{column.name} is not 0 or 1 everywhere", where)
            values.append(raw.view(tensor.dtype))
        lengths, _, terminated, truncated = values
        if (terminated & truncated).any():
            raise damage_error("an episode is both terminated and truncated", where)
        if (lengths < 1).any() or (lengths > record.steps).any() or lengths.sum() != record.steps:
            raise damage_error(f"lengths do not add up to {record.steps} steps", where)
        return tuple(values)
