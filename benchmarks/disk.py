"""Batches from a dataset four times as large as the memory budget, against reading it in order.

- *sequential*: MB/s of eight threads that read the same files from first byte to last, 2 MiB at a
  time, past the page cache (``O_DIRECT``), with the loader idle.
- *read*: MB/s that the loader's process gets from storage while batches are asked for.
- *useful*: MB/s of the windows handed out, padding apart, in the source's dtypes.

The loader warms up first, so that it is not measured while it fills its memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common import write_rows
from gear_offline.loaders.loader import GearLoader

DATA_BYTES, QUICK_DATA_BYTES = 2 << 30, 256 << 20
OVER = 4  # how many times the budget the data are
THREADS, PIECE_BYTES = 8, 2 << 20  # that read in order
EPISODE_STEPS, BATCH, SPAN = 500, 64, 20
# observations of a step: shape and dtype
KINDS: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
    "narrow (11 + 3 float32)": ((11,), np.float32),
    "wide (84 x 84 uint8)": ((84, 84), np.uint8),
}


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about a minute, 2 GiB of disk."""
    nbytes, seconds = (QUICK_DATA_BYTES, 0.5) if quick else (DATA_BYTES, 4.0)
    rows = []
    for kind, (shape, dtype) in KINDS.items():
        with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
            path = Path(folder) / "dataset"
            step_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize + 4 * 4
            steps = max(nbytes // step_bytes // EPISODE_STEPS, 8) * EPISODE_STEPS
            sizes: Any = {"actions": 3, "episode_steps": EPISODE_STEPS, "shard_bytes": nbytes // 8}
            write_rows(path, steps, shape, dtype, **sizes)
            sequential = [read_in_order(path, seconds)]
            loader = GearLoader(
                path,
                batch_size=BATCH,
                context_length=SPAN,
                device="cpu",
                placement="disk",
                host_budget=nbytes // OVER,
            )
            _useful_steps(loader, 2 * seconds)
            drop_cache(path)
            before, began = _storage_bytes(), time.perf_counter()
            steps = _useful_steps(loader, 2 * seconds)
            taken = time.perf_counter() - began
            read = (_storage_bytes() - before) / taken
            loader.close()
            sequential.append(read_in_order(path, seconds))
            rows.append(
                {
                    "rows": kind,
                    "sequential": mean(sequential) / 1e6,
                    "read": read / 1e6,
                    "useful": steps * step_bytes / taken / 1e6,
                    "ratio": read / mean(sequential),
                }
            )
    return {"unit": "MB/s", "data_bytes": nbytes, "over": OVER, "results": rows}


def read_in_order(folder: Path, seconds: float) -> float:
    """Return bytes a second of threads that read pieces of all shards in their order: the peer."""
    paths = sorted(folder.glob("*.safetensors"))
    try:
        handles = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    except OSError:  # a file system without it
        drop_cache(folder)
        handles = [os.open(path, os.O_RDONLY) for path in paths]
    pieces = [
        (handle, begin)
        for handle, path in zip(handles, paths, strict=True)
        for begin in range(0, path.stat().st_size, PIECE_BYTES)
    ]
    lock, place, done = threading.Lock(), 0, 0
    began = time.perf_counter()

    def work() -> None:
        nonlocal place, done
        buffer = mmap.mmap(-1, PIECE_BYTES)
        while time.perf_counter() - began < seconds:
            with lock:
                handle, begin = pieces[place % len(pieces)]
                place += 1
            count = os.preadv(handle, [buffer], begin)
            with lock:
                done += count

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    for handle in handles:
        os.close(handle)
    return done / taken


def drop_cache(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _storage_bytes() -> int:
    """Return the bytes that this process has read from storage."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def _useful_steps(loader: GearLoader, seconds: float) -> int:
    """Take batches until the time is over; return their steps, padding apart."""
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        steps += int(next(loader).attention_mask.sum())
    return steps
