"""All ranks of a run in this process: their loaders, and an exchange that copies rows at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

import gear_offline.distributed.exchange
from gear_offline.batches.tables.joint import TableData
from gear_offline.batches.tables.table import build_table
from gear_offline.distributed.reads import NodeRows, Reads
from gear_offline.distributed.world import World
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import RowOpener


class OneProcess:
    """An exchange of one rank of several in this process: rows are copied as they are posted.

    `held` is what each rank holds, all there when the first step is posted.
    """

    in_stream = False

    def __init__(
        self, rank: int, held: Mapping[int, NodeRows], landing: Sequence[npt.NDArray[Any]]
    ) -> None:
        self.rank, self.held, self.landing = rank, held, landing
        self.posted: list[int] = []
        self.waited: list[int] = []

    def ready(self, reads: Reads) -> Reads:
        return reads

    def post(self, step: int, reads: Reads) -> None:
        self.posted.append(step)
        reads.check(self.held[self.rank], len(self.landing[0]))
        for read in np.flatnonzero(reads.readers == self.rank).tolist():
            node_rows, episode = self.held[int(reads.owners[read])], int(reads.episodes[read])
            node = node_rows.nodes[episode]
            before = node_rows.lengths[:episode][node_rows.nodes[:episode] == node].sum()
            first, count = int(before + reads.starts[read]), int(reads.steps[read])
            row = int(reads.rows[read])
            for source, target in zip(node_rows.rows, self.landing, strict=True):
                target[row : row + count] = source[first : first + count]

    def wait(self, step: int) -> None:
        assert step in self.posted and step not in self.waited
        self.waited.append(step)

    def close(self) -> None:
        assert self.posted == self.waited


def open_ranks(
    dataset: TableData, nodes: tuple[int, ...], sharding: str, **options: Any
) -> list[GearLoader]:
    """Return the loader of every rank of a world."""
    held_by: dict[int, NodeRows] = {}
    loaders = []
    for rank in range(len(nodes)):

        def open_exchange(
            node_rows: NodeRows, landing: Any, world: World, *, rank: int = rank, **_: Any
        ) -> OneProcess:
            held_by[rank] = node_rows
            return OneProcess(rank, held_by, landing)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gear_offline.distributed.exchange, "open_exchange", open_exchange)
            # Ranks of one node would share a table in memory, by words between processes.
            patch.setattr(World, "gather", lambda self, value: [value] * self.size)
            patch.setattr(RowOpener, "_build", private_table)
            world = World(rank=rank, nodes=nodes)
            loaders.append(GearLoader(dataset, world=world, sharding=sharding, **options))  # type: ignore[arg-type]
    return loaders


def private_table(opener: RowOpener, ring: Any) -> Any:
    given: dict[str, Any] = {}
    if ring is not None:
        given["shards"] = ring.share.shards.tolist()
        given["landing_rows"] = ring.rows * len(opener.world.members)
    return build_table(opener.data, opener.options.table, **given)


def row_digests(batch: Batch) -> list[str]:
    """Return (B,) xxh3 digests: segment, timesteps, mask and every field of each slot."""
    fields = {**batch} | batch.model_inputs()
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
