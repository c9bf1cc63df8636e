"""Owners push rows: one all_to_all_single a step, over gloo, from and to host memory.

Every rank knows all reads of a step, so every rank knows all sizes and there is no round for them.
The gloo group is the exchange's own, so that a thread may use it while others use the world's.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.core.types import Int64Array
from gear_offline.distributed.reads import NodeRows, Reads, as_bytes, ranges
from gear_offline.distributed.world import World, rank_lost


class CollectiveExchange:
    """An `Exchange` over the gloo group of a world."""

    name = "collective"

    def __init__(
        self, node_rows: NodeRows, landing: tuple[npt.NDArray[np.generic], ...], world: World
    ) -> None:
        self._world, self._node_rows = world, node_rows
        self._sources = [as_bytes(rows) for rows in node_rows.rows]
        self._landing = [as_bytes(rows) for rows in landing]
        self._first_rows = node_rows.first_rows()
        # Of a posted step: the collective, this rank's reads, and what it receives and sends.
        self._posted: dict[int, tuple[Any, Reads, Tensor, Tensor] | None] = {}
        self._timeout = timedelta(seconds=world.timeout)
        with world.guard("opening the exchange"):
            self._group = dist.new_group(
                dist.get_process_group_ranks(world.control or dist.group.WORLD),
                backend="gloo",
                timeout=self._timeout,
                use_local_synchronization=True,
            )

    def post(self, step: int, reads: Reads) -> None:
        assert step not in self._posted, "each step is posted once"
        self._posted[step] = None
        if not len(reads):
            return
        own, served = reads.made_by(self._world.rank), reads.served_by(self._world.rank)
        own.check(self._node_rows, len(self._landing[0]))
        rows = ranges(self._first_rows[served.episodes] + served.starts, served.steps)
        columns = [np.take(source, rows, axis=0) for source in self._sources]
        sent = torch.from_numpy(np.concatenate(columns, axis=1))
        received = torch.empty((int(own.steps.sum()), sent.shape[1]), dtype=torch.uint8)
        sizes = self._rows_of(own.owners, own), self._rows_of(served.readers, served)
        with self._world.guard(f"posting the rows of step {step}"):
            work = dist.all_to_all_single(received, sent, *sizes, group=self._group, async_op=True)
        self._posted[step] = work, own, received, sent

    def _rows_of(self, ranks: Int64Array, reads: Reads) -> list[int]:
        """Return how many rows each rank sends or gets."""
        rows = np.zeros(self._world.size, np.int64)
        np.add.at(rows, ranks, reads.steps)
        return rows.tolist()

    def wait(self, step: int) -> None:
        posted = self._posted.pop(step)
        if posted is None:
            return
        work, reads, received, _ = posted
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            owners = ", ".join(map(str, np.unique(reads.owners)))
            doing = f"waiting for the rows of step {step}" + f" from ranks {owners}" * bool(owners)
            raise rank_lost(doing, error) from error
        rows, begin = ranges(reads.rows, reads.steps), 0
        for landing in self._landing:
            end = begin + landing.shape[1]
            landing[rows] = received.numpy()[:, begin:end]
            begin = end

    def close(self) -> None:
        self._posted.clear()  # the group ends with torch's: its name cannot be used again
