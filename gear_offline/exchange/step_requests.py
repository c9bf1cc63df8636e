"""From the reads of a step to one array of work requests.

Shape legend: m reads of this rank, S stores, T entries of the directory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from gear_offline.errors import InputError
from gear_offline.exchange.contract import Destination, Int64Array, Reads
from gear_offline.exchange.directory import Directory
from gear_offline.exchange.work_requests import Chain

MOST_BYTES = 1 << 30  # of one read; a message of RDMA is at most 2 GiB


@dataclass(frozen=True)
class Part:
    """Rows [begin, end) of a chain, all for one peer."""

    rank: int
    begin: int
    end: int


def fill_requests(
    chain: Chain,
    reads: Reads,
    entries: Int64Array,
    directory: Directory,
    destination: Destination,
) -> deque[Part]:
    """Write m * S requests into `chain`, those of a read side by side; return each peer's rows.

    Parameters
    ----------
    chain
        With room for them.
    reads
        m reads, ordered by owner.
    entries
        (m,) entries of the directory, from `Directory.find`.
    directory
        With addresses and keys.
    destination
        Whose keys are the regions of its memory.

    Raises
    ------
    InputError
        ``EXCHANGE_RANGE`` for a read of more than a gibibyte.
    """
    if not len(reads):
        return deque()
    stores = len(destination.memory)
    for store, (memory, region) in enumerate(
        zip(destination.memory, destination.keys, strict=True)
    ):
        length = reads.steps * memory.row_bytes
        if int(length.max()) > MOST_BYTES:
            raise InputError(
                "EXCHANGE_RANGE",
                f"a read of {int(length.max())} bytes is larger than 1 GiB",
                remedy="read shorter segments",
            )
        chain.fill_store(
            store,
            stores,
            directory.address[store].take(entries) + reads.starts * memory.row_bytes,
            directory.key[store].take(entries),
            reads.rows * memory.row_bytes + region.base,
            length,
            region.local_key,
        )
    owners = reads.owners
    cuts = (np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist()
    return deque(
        Part(int(owners[begin]), begin * stores, end * stores)
        for begin, end in zip([0, *cuts], [*cuts, len(owners)], strict=True)
    )
