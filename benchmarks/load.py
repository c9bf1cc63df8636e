"""GB/s from shards to a table in memory, against the same threads reading the same bytes.

The loader reads, compares digests, casts, derives the returns and lays rows out; the peer only
reads whole shards into memory.  All in turn, from the page cache; ratios are those of single
rounds.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import Call, timed
from benchmarks.convert import make_file
from gear_offline.batches.tables.table import TableOptions, build_table
from gear_offline.core.system import usable_cores
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset

STEPS, QUICK_STEPS = 20_000_000, 500_000
COLUMNS = ["observations", "actions", "rewards"]
PIECE_BYTES = 1 << 20


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure with one thread, two, and one per core up to 8.  Needs 4 GB of disk and memory."""
    cores = min(8, usable_cores())
    rows = []
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as name:
        source, target = Path(name, "source.hdf5"), Path(name, "dataset")
        make_file(source, QUICK_STEPS if quick else STEPS, {})
        shard_bytes = (8 if quick else 64) << 20
        convert(source, target, columns=COLUMNS, shard_bytes=shard_bytes, quiet=True)
        source.unlink()
        dataset = open_dataset(target, verify=False)
        nbytes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
        for threads in sorted({1, min(2, cores), cores}):
            calls: dict[str, Call] = {
                "raw": partial(read_raw, dataset, threads),
                "load": partial(
                    build_table, dataset, TableOptions(context_length=20), threads=threads
                ),
            }
            times: dict[str, list[float]] = {key: [] for key in calls}
            for number in range(3 if quick else 6):
                for key, call in calls.items():
                    seconds = timed(call)
                    if number:  # the first warms the page cache
                        times[key].append(seconds)
            pairs = zip(times["raw"], times["load"], strict=True)
            row: dict[str, Any] = {"threads": threads, "gigabytes": nbytes / 1e9}
            row |= {f"{k}_gigabytes_per_second": nbytes / median(v) / 1e9 for k, v in times.items()}
            rows.append(row | {"ratio": median(peer / ours for peer, ours in pairs)})
    return {"results": rows}


def read_raw(dataset: Dataset, threads: int) -> None:
    """Read all shards into memory, a shard a thread: the peer."""
    paths = sorted(dataset.path.glob("*.safetensors"))

    def read(path: Path) -> None:
        target = np.empty(path.stat().st_size, np.uint8).data
        handle = os.open(path, os.O_RDONLY)
        try:
            for at in range(0, len(target), PIECE_BYTES):
                os.preadv(handle, [target[at : at + PIECE_BYTES]], at)
        finally:
            os.close(handle)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, paths))
