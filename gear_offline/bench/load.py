"""Shards into the host tier, against the same threads reading the same bytes into such memory.

The peer opens the shards and reads the bytes of the same columns, a megabyte at a time, straight
into fresh shared memory, whose pages are made as the kernel copies into them: how files are read
into pinned memory.  No digest, no cast, no records, no returns-to-go.

Both begin without a page and end with all pages mapped.  Rounds take turns, the first one warms the
page cache, so this measures the processor and the memory, not the disk.  Figures are medians over
rounds; a ratio is the median of the rounds' ratios.  Beside the wall clock, the processor time of
all threads is taken: where other programs use the machine it says more.  Its ratio is that of the
shortest rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gear_offline.bench.convert import make_file
from gear_offline.convert import convert
from gear_offline.core.system import usable_cores
from gear_offline.core.types import Array
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.shard import read_exactly
from gear_offline.tables.fields import ACTIONS, REWARDS, STATES
from gear_offline.tables.shared import SharedMemory, share_table
from gear_offline.tables.table import MAX_THREADS

STEPS, QUICK_STEPS = 40_000_000, 1_000_000
SHARD_BYTES, QUICK_SHARD_BYTES = 64 << 20, 8 << 20
PIECE_BYTES = 1 << 20
COLUMNS = (STATES, ACTIONS, REWARDS)
RATIOS = ("ratio", "ratio_processor")


def read_raw(dataset: Dataset, threads: int) -> Array:
    """Read the bytes of the columns into shared memory, a tensor a thread: the peer."""
    spans = []
    for shard in dataset.manifest.shards:
        for tensor in dataset.manifest.tensors(shard):
            if tensor.name in COLUMNS:
                spans.append((shard.name, shard.header_bytes + tensor.start, tensor.bytes))
    memory = SharedMemory.create(sum(size for *_, size in spans))
    target = memory.allocate((memory.nbytes,), np.dtype(np.uint8))
    places = np.cumsum([0, *(size for *_, size in spans)]).tolist()

    def read(number: int) -> None:
        name, begin, size = spans[number]
        handle = os.open(dataset.path / name, os.O_RDONLY)
        try:
            for at in range(0, size, PIECE_BYTES):
                piece = target[places[number] + at :][: min(PIECE_BYTES, size - at)]
                read_exactly(handle, piece.data, begin + at, where=name)
        finally:
            os.close(handle)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(len(spans))))
    return target


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure with one thread, two, and one per core.  Needs 8.5 GB of disk, 3 GB of memory."""
    cores = min(MAX_THREADS, usable_cores())
    results = []
    with tempfile.TemporaryDirectory(prefix="gear-bench-") as name:
        source, target = Path(name, "source.hdf5"), Path(name, "dataset")
        make_file(source, QUICK_STEPS if quick else STEPS, {})
        shard_bytes = QUICK_SHARD_BYTES if quick else SHARD_BYTES
        convert(source, target, shard_bytes=shard_bytes, workers=min(cores, 8), quiet=True)
        source.unlink()
        dataset = open_dataset(target, verify=False)
        for threads in sorted({1, min(2, cores), cores}):
            results.append(_result(dataset, threads, 2 if quick else 5))
    return {"steps": dataset.spec.steps, "shards": len(dataset.manifest.shards), "results": results}


def _result(dataset: Dataset, threads: int, rounds: int) -> dict[str, Any]:
    calls: dict[str, Callable[[], object]] = {
        "raw": lambda: read_raw(dataset, threads),
        "load": lambda: share_table(dataset, context_length=20, threads=threads),
    }
    seconds: dict[str, list[float]] = {key: [] for key in calls}
    processor: dict[str, list[float]] = {key: [] for key in calls}
    for turn in range(rounds + 1):
        for key, call in calls.items():
            started, worked = time.perf_counter(), time.process_time()
            made = call()
            if turn:  # the first round warms the caches
                seconds[key].append(time.perf_counter() - started)
                processor[key].append(time.process_time() - worked)
            del made  # giving it back is not measured
    read_bytes = sum(dataset.spec[c].step_bytes for c in COLUMNS) * dataset.spec.steps
    pairs = zip(seconds["raw"], seconds["load"], strict=True)
    return {
        "threads": threads,
        "read_bytes": read_bytes,
        "seconds": seconds,
        "processor_seconds": processor,
        "gigabytes_per_second": {k: read_bytes / median(v) / 1e9 for k, v in seconds.items()},
        "ratio": median(peer / ours for peer, ours in pairs),
        "ratio_processor": min(processor["raw"]) / min(processor["load"]),
    }


def table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a header row and one row per number of threads: GB/s read, and the ratios."""
    rows: list[tuple[str, ...]] = [
        ("threads", "GB", "read only, GB/s", "load, GB/s", "ratio", "processor")
    ]
    for result in document["results"]:
        speed = result["gigabytes_per_second"]
        rows.append(
            (
                str(result["threads"]),
                f"{result['read_bytes'] / 1e9:.2f}",
                f"{speed['raw']:.2f}",
                f"{speed['load']:.2f}",
                *(f"{result[key]:.2f}" for key in RATIOS),
            )
        )
    return rows
