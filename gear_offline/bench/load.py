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

All of them begin without a page and end with all pages mapped.  Where there is a GPU, locking the
pages for it comes afterwards, with a time of its own: it costs the same for the same bytes, and is
part of filling pinned memory, so a second ratio counts it on both sides.  Rounds take turns, the
first one warms the page cache, so this measures the processor and the memory, not the disk.
Figures are medians over rounds; a ratio is the median of the rounds' ratios.

Beside the wall clock, the processor time of all threads is taken: where other programs use the
machine it says more.  Its ratio is that of the shortest rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gear_offline.bench.convert import make_file
from gear_offline.convert import convert
from gear_offline.core.system import usable_cores
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.shard import read_exactly
from gear_offline.tables.fields import ACTIONS, REWARDS, STATES
from gear_offline.tables.host_memory import HostBlock, write_through
from gear_offline.tables.host_table import host_table
from gear_offline.tables.pinning import CudaRuntime, HostRuntime, Pinned
from gear_offline.tables.table_filling import MAX_THREADS

STEPS, QUICK_STEPS = 40_000_000, 1_000_000
SHARD_BYTES, QUICK_SHARD_BYTES = 64 << 20, 8 << 20
PIECE_BYTES = 1 << 20
COLUMNS = (STATES, ACTIONS, REWARDS)
RATIOS = ("ratio", "ratio_locked", "ratio_written", "ratio_processor")

Memory = list[npt.NDArray[Any]]


def read_raw(dataset: Dataset, threads: int, *, through: bool = False) -> npt.NDArray[Any]:
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
                read_exactly(handle, taken.data, begin + at, where=name)
                if through:
                    write_through(block, piece, taken)
        finally:
            os.close(handle)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(len(spans))))
    return target


def load(dataset: Dataset, threads: int, *, verify: bool = True) -> Memory:
    """Return the rows of a table in shared memory."""
    table, _ = host_table(dataset, context_length=20, verify=verify, threads=threads)
    return [group.rows for group in table.groups if group.rows is not None]


@dataclass
class _Rounds:
    """Seconds of each round of one way: of the wall clock, of the processor, of locking."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    locking: list[float] = field(default_factory=list)

    def measure(self, call: Callable[[], Memory], runtime: HostRuntime | None) -> None:
        started, worked = time.perf_counter(), time.process_time()
        memory = call()
        self.wall.append(time.perf_counter() - started)
        self.processor.append(time.process_time() - worked)
        if runtime is not None:
            started = time.perf_counter()
            pins = [Pinned(array, runtime) for array in memory]
            self.locking.append(time.perf_counter() - started)
            del pins
        del memory  # giving it back is not measured

    @property
    def whole(self) -> list[float]:
        """With locking; empty where there is no GPU."""
        return [sum(both) for both in zip(self.wall, self.locking, strict=False)]


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure with one thread, two, and one per core.  Needs 8.5 GB of disk, 3 GB of memory."""
    cores = min(MAX_THREADS, usable_cores())
    runtime = CudaRuntime() if torch.cuda.is_available() else None
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
            found = _measure(dataset, threads, 2 if quick else 5, runtime)
            results.append(_result(threads, read_bytes, found))
    return {"steps": dataset.spec.steps, "shards": len(dataset.manifest.shards), "results": results}


def _measure(
    dataset: Dataset, threads: int, rounds: int, runtime: HostRuntime | None
) -> dict[str, _Rounds]:
    calls: dict[str, Callable[[], Memory]] = {
        "raw": lambda: [read_raw(dataset, threads)],
        "raw, written": lambda: [read_raw(dataset, threads, through=True)],
        "load": lambda: load(dataset, threads),
        "load, no digests": lambda: load(dataset, threads, verify=False),
    }
    for call in calls.values():  # the first round warms the caches
        call()
    found = {key: _Rounds() for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            found[key].measure(call, runtime)
    return found


def _result(threads: int, read_bytes: int, found: dict[str, _Rounds]) -> dict[str, Any]:
    def ratio(peers: list[float], ours: list[float]) -> float:
        return median(peer / mine for peer, mine in zip(peers, ours, strict=True))

    raw, written, ours = found["raw"], found["raw, written"], found["load"]
    return {
        "threads": threads,
        "read_bytes": read_bytes,
        "seconds": {key: rounds.wall for key, rounds in found.items()},
        "processor_seconds": {key: rounds.processor for key, rounds in found.items()},
        "locking_seconds": {key: rounds.locking for key, rounds in found.items()},
        "gigabytes_per_second": {k: read_bytes / median(v.wall) / 1e9 for k, v in found.items()},
        "ratio": ratio(raw.wall, ours.wall),
        "ratio_locked": ratio(raw.whole, ours.whole) if ours.locking else None,
        "ratio_written": ratio(written.wall, ours.wall),
        "ratio_processor": min(raw.processor) / min(ours.processor),
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
            "locked too",
            "to written",
            "processor",
        )
    ]
    for result in document["results"]:
        speed = result["gigabytes_per_second"]
        names = ("raw", "raw, written", "load", "load, no digests")
        size = f"{result['read_bytes'] / 1e9:.2f}"
        ratios = ["-" if result[key] is None else f"{result[key]:.2f}" for key in RATIOS]
        cells = [f"{speed[name]:.2f}" for name in names]
        rows.append((str(result["threads"]), size, *cells, *ratios))
    return rows
