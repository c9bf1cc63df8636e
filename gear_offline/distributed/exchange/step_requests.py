"""From the reads of a step to one array of work requests.

Shape legend: m reads of this rank, S stores, T entries of the directory.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from gear_offline.distributed.exchange.contract import Destination, Int64Array, Reads
from gear_offline.distributed.exchange.directory import Directory
from gear_offline.distributed.exchange.work_requests import Chain
from gear_offline.errors import InputError

MOST_BYTES = 1 << 30  # of one read; a message of RDMA is at most 2 GiB


class Part(NamedTuple):
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
    longest = int(directory.longest)
    for store, (memory, region) in enumerate(
        zip(destination.memory, destination.keys, strict=True)
    ):
        row_bytes = memory.row_bytes
        if longest * row_bytes > MOST_BYTES:
            _check_length(reads, row_bytes)
        chain.fill_reads(
            store,
            stores,
            directory.regions[store].take(entries),
            reads.starts,
            reads.rows,
            reads.steps,
            row_bytes=row_bytes,
            base=region.base,
            lkey=region.local_key,
        )
    owners = reads.owners
    cuts = (np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist()
    return deque(
        Part(int(owners[begin]), begin * stores, end * stores)
        for begin, end in zip([0, *cuts], [*cuts, len(owners)], strict=True)
    )


def _check_length(reads: Reads, row_bytes: int) -> None:
    most = int(reads.steps.max()) * row_bytes
    if most > MOST_BYTES:
        raise InputError(
            "EXCHANGE_RANGE",
            f"a read of {most} bytes is larger than 1 GiB",
            remedy="read shorter segments",
        )
