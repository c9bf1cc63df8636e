"""Shards into the host tier, against the same threads reading the same bytes into such memory.

Two peers open the shards and read the bytes of the same columns, a megabyte at a time, into a fresh
block of shared memory: no digest, no cast, no records, no returns-to-go.

``raw``
    Reads straight into the mapped block, whose pages are made as the kernel copies into them: how
    files are read into pinned memory.  The ratio compares with this one.
``raw, written``
    Reads into a buffer and writes that to the block's file, whose pages are mapped afterwards.
    Cheaper for one thread, as the kernel does not clear the pages; but a file has one writer at a
    time.

All of them begin without a page and end with all pages mapped.  Page-locking is left out: it comes
afterwards, and costs the same for the same bytes.  Rounds take turns, the first one warms the
page cache, so this measures the processor and the memory, not the disk.  Figures are medians over
rounds; a ratio is the median of the rounds' ratios.

Beside the wall clock, the processor time of all threads is taken: where other programs use the
machine it says more.  Its ratio is that of the shortest rounds.
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
from gear_offline.dataset import Dataset, open_dataset
from gear_offline.fields import ACTIONS, REWARDS, STATES
from gear_offline.host_memory import HostBlock, write_through
from gear_offline.host_table import host_table
from gear_offline.shards import read_into
from gear_offline.table_filling import MAX_THREADS

STEPS, QUICK_STEPS = 40_000_000, 1_000_000
SHARD_BYTES, QUICK_SHARD_BYTES = 64 << 20, 8 << 20
PIECE_BYTES = 1 << 20
COLUMNS = (STATES, ACTIONS, REWARDS)
RATIOS = ("ratio", "ratio_written", "ratio_processor")


def read_raw(dataset: Dataset, threads: int, *, through: bool = False) -> HostBlock:
    """Read the bytes of the columns into a block, a tensor a thread: the peers."""
    spans = []
    for shard in dataset.manifest.shards:
        for tensor in dataset.manifest.tensors(shard):
            if tensor.name in COLUMNS:
                spans.append((shard.name, shard.header_bytes + tensor.start, tensor.bytes))
    block = HostBlock.create(sum(size for *_, size in spans))
    target = block.allocate((block.nbytes,), np.dtype(np.uint8))
    places = np.cumsum([0, *(size for *_, size in spans)]).tolist()

    def read(number: int) -> None:
        name, begin, size = spans[number]
        buffer = np.empty(PIECE_BYTES if through else 0, np.uint8)
        handle = os.open(dataset.path / name, os.O_RDONLY)
        try:
            for at in range(0, size, PIECE_BYTES):
                piece = target[places[number] + at :][: min(PIECE_BYTES, size - at)]
                taken = buffer[: len(piece)] if through else piece
                read_into(handle, taken.data, begin + at, where=name)
                if through:
                    write_through(block, piece, taken)
        finally:
            os.close(handle)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(len(spans))))
    return block


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the wall clock and of the processor."""
    started, worked = time.perf_counter(), time.process_time()
    held = call()
    taken = time.perf_counter() - started, time.process_time() - worked
    del held  # giving the memory back is not measured
    return taken


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure with one thread, two, and one per core.  Needs 8.5 GB of disk, 3 GB of memory."""
    cores = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    rounds = 2 if quick else 5
    results = []
    with tempfile.TemporaryDirectory(prefix="gear-bench-") as name:
        source, target = Path(name, "source.hdf5"), Path(name, "dataset")
        make_file(source, QUICK_STEPS if quick else STEPS, {})
        shard_bytes = QUICK_SHARD_BYTES if quick else SHARD_BYTES
        convert(source, target, shard_bytes=shard_bytes, workers=min(cores, 8), quiet=True)
        source.unlink()
        dataset = open_dataset(target, verify=False)
        read_bytes = sum(dataset.spec[c].step_bytes for c in COLUMNS) * dataset.spec.steps
        for threads in sorted({1, min(2, cores), cores}):
            calls: dict[str, Callable[[], object]] = {
                "raw": lambda n=threads: read_raw(dataset, n),  # type: ignore[misc]
                "raw, written": lambda n=threads: read_raw(  # type: ignore[misc]
                    dataset, n, through=True
                ),
                "load": lambda n=threads: host_table(  # type: ignore[misc]
                    dataset, context_length=20, verify=True, threads=n
                ),
                "load, no digests": lambda n=threads: host_table(  # type: ignore[misc]
                    dataset, context_length=20, verify=False, threads=n
                ),
            }
            found: dict[str, list[float]] = {key: [] for key in calls}
            worked: dict[str, list[float]] = {key: [] for key in calls}
            for number in range(rounds + 1):
                for key, call in calls.items():
                    seconds, processor = _seconds(call)
                    if number:
                        found[key].append(seconds)
                        worked[key].append(processor)
            results.append(_result(threads, read_bytes, found, worked))
    return {"steps": dataset.spec.steps, "shards": len(dataset.manifest.shards), "results": results}


def _result(
    threads: int,
    read_bytes: int,
    found: dict[str, list[float]],
    worked: dict[str, list[float]],
) -> dict[str, Any]:
    ratios = {
        peer: median(raw / ours for raw, ours in zip(found[peer], found["load"], strict=True))
        for peer in ("raw", "raw, written")
    }
    return {
        "threads": threads,
        "read_bytes": read_bytes,
        "seconds": found,
        "processor_seconds": worked,
        "gigabytes_per_second": {k: read_bytes / median(v) / 1e9 for k, v in found.items()},
        "ratio": ratios["raw"],
        "ratio_written": ratios["raw, written"],
        "ratio_processor": min(worked["raw"]) / min(worked["load"]),
    }


def table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a header row and one row per number of threads: GB/s read, and the ratios."""
    rows: list[tuple[str, ...]] = [
        (
            "threads",
            "GB",
            "read only, GB/s",
            "read and written, GB/s",
            "load, GB/s",
            "without digests, GB/s",
            "ratio",
            "to written",
            "processor",
        )
    ]
    for result in document["results"]:
        speed = result["gigabytes_per_second"]
        names = ("raw", "raw, written", "load", "load, no digests")
        size = f"{result['read_bytes'] / 1e9:.2f}"
        ratios = [f"{result[key]:.2f}" for key in RATIOS]
        cells = [f"{speed[name]:.2f}" for name in names]
        rows.append((str(result["threads"]), size, *cells, *ratios))
    return rows
