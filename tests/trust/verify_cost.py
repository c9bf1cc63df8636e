"""What verification costs: ``python -m tests.trust.verify_cost [--steps N] [--rounds N]``.

Opens a dataset and loads it into a table: with each block compared on its way, without, and with
everything compared at the opening besides, in turns, from the page cache, on one thread.  And
scrubs it (`inspect --verify`) against reading the same bytes.  Prints one JSON document with
medians of processor time, so that other programs matter little.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gear_offline.convert import convert
from gear_offline.dataset.dataset import Dataset, Verify, open_dataset
from gear_offline.dataset.shards import read_into
from gear_offline.dataset.verification import PIECE_BYTES, verify_dataset
from gear_offline.tables.table import build_table
from tests.support import ArraySource, hopper_columns

EPISODE = 1000
CONTEXT = 20


def seconds_of(work: Callable[[], object]) -> float:
    """Return the processor time of `work`: from the page cache that is what it takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def read_all(dataset: Dataset) -> None:
    """Read every byte of the shards, a megabyte at a time, into one buffer: one thread."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    for shard in dataset.manifest.shards:
        handle = os.open(dataset.path / shard.name, os.O_RDONLY)
        for start in range(0, shard.bytes, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, shard.bytes - start)]
            read_into(handle, piece, start, where=shard.name)
        os.close(handle)


def measure(dataset: Dataset, rounds: int) -> dict[str, Any]:
    """Return medians over `rounds` of loading and scrubbing, one thread each."""

    def load(verify: Verify) -> None:
        opened = open_dataset(path, verify=verify, threads=1)
        build_table(opened, context_length=CONTEXT, threads=1)

    path = dataset.path
    works: dict[str, Callable[[], object]] = {
        "load_on_use": lambda: load("on_use"),
        "load_unverified": lambda: load(False),
        "load_verified": lambda: load(True),
        "open_verified": lambda: open_dataset(path, threads=1),
        "open_on_use": lambda: open_dataset(path, verify="on_use"),
        "scrub": lambda: verify_dataset(path, threads=1),
        "read": lambda: read_all(dataset),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        # Forth and back: what comes before, and leaves memory and caches warm, is no advantage.
        order = list(works.items())[:: -1 if number % 2 else 1]
        for name, work in order:
            took = seconds_of(work)
            if number:  # the first round warms the page cache
                taken[name].append(took)
    middle = {name: median(values) for name, values in taken.items()}
    pairs = zip(taken["load_on_use"], taken["load_unverified"], strict=True)
    size = dataset.manifest.total_bytes
    return {
        "bytes": size,
        "rounds": rounds,
        "seconds": {name: round(value, 4) for name, value in middle.items()},
        "verification_share_of_load": round(median(1 - b / a for a, b in pairs), 4),
        "least_share": round(1 - min(taken["load_unverified"]) / min(taken["load_on_use"]), 4),
        "compared_twice_over_unverified": round(
            middle["load_verified"] / middle["load_unverified"], 3
        ),
        "scrub_gbps": round(size / middle["scrub"] / 1e9, 2),
        "read_gbps": round(size / middle["read"] / 1e9, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    episodes = max(arguments.steps // EPISODE, 1)
    columns = hopper_columns(episodes * EPISODE)
    columns = {name: np.ascontiguousarray(values) for name, values in columns.items()}
    with tempfile.TemporaryDirectory(prefix="gear-verify-") as temporary:
        path = Path(temporary) / "d"
        source = ArraySource(columns, [EPISODE] * episodes, rows_per_read=1 << 16)
        convert(source, path, shard_bytes=64 << 20, quiet=True)
        del columns, source
        print(json.dumps(measure(open_dataset(path), arguments.rounds), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
