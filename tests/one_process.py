"""All ranks of a run in this process: their loaders, and an exchange that copies rows at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from gear_offline.distributed.exchange.contract import Destination, Reads, Shelf
from gear_offline.loaders.batch import Batch


class OneProcess:
    """An exchange between ranks of this process: rows are copied as they are posted.

    Parameters
    ----------
    rank
        Of this one.
    shelves
        Of each rank; all there when the first step is posted.
    """

    name, world = "fake", 0

    def __init__(self, rank: int, shelves: Mapping[int, Shelf]) -> None:
        self.rank, self.shelves = rank, shelves
        self.posted: list[int] = []
        self.waited: list[int] = []

    def register(self, buffers: Any) -> Destination:
        return Destination.of(buffers, self.shelves[self.rank].row_bytes)

    def post(self, step: int, reads: Reads, destination: Destination) -> None:
        self.posted.append(step)
        mine = reads.made_by(self.rank)
        for read in range(len(mine)):
            shelf = self.shelves[int(mine.owners[read])]
            episodes = shelf.episodes[0].tolist()
            place = episodes.index(int(mine.episodes[read]))
            first = int(shelf.lengths[episodes[:place]].sum() + mine.starts[read])
            count, row = int(mine.steps[read]), int(mine.rows[read])
            assert mine.starts[read] >= 0, "inside the episode"
            assert mine.starts[read] + count <= shelf.lengths[int(mine.episodes[read])]
            for source, target in zip(shelf.memory[0], destination.memory, strict=True):
                target.bytes[row : row + count] = source.bytes[first : first + count]

    def wait(self, step: int, *, timeout: timedelta | None = None) -> None:
        assert step in self.posted and step not in self.waited
        self.waited.append(step)

    def close(self) -> None:
        assert self.posted == self.waited


def row_digests(batch: Batch) -> list[str]:
    """Return (B,) xxh3 digests: segment, timesteps, mask and every field of each slot."""
    fields = batch.model_inputs() | {"segments": batch.segments} | dict(batch.extras)
    arrays = [np.ascontiguousarray(fields[name].numpy()) for name in sorted(fields)]
    found = []
    for slot in range(len(batch.segments)):
        state = xxhash.xxh3_128()
        for array in arrays:
            state.update(array[slot].tobytes())
        found.append(state.hexdigest())
    return found


def global_digest(slots: Sequence[npt.ArrayLike], digests: Sequence[Sequence[str]]) -> str:
    """Return the digest of a global batch from the slots and row digests of all its ranks."""
    order = np.concatenate([np.asarray(part) for part in slots])
    rows = [digest for part in digests for digest in part]
    assert sorted(order.tolist()) == list(range(len(rows))), "each slot once"
    return xxhash.xxh3_128("".join(rows[at] for at in np.argsort(order)).encode()).hexdigest()
