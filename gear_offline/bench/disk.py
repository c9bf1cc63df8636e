"""Batches from a dataset four times as large as the memory budget, against reading it in order.

For each kind of row a dataset is made.  A process opens it with ``placement="disk"`` and a budget:
a quarter of what batches need of it (observations, actions, rewards, returns-to-go).  It asks for
batches as fast as they come.

- *sequential*: bytes a second when eight threads read the same files from their first byte to
  their last, 2 MiB at a time, past the page cache (``O_DIRECT``) into the same kind of memory, with
  the loader idle.
- *disk rate*: bytes a second that the loader reads, the same way, while batches are asked for.
- *useful rate*: bytes a second of the windows handed out, padding apart, in the source's dtypes.
- *amplification*: disk bytes for each useful byte; below 1 where one read serves several windows.
- *processor*: seconds of processor time of the loader's process for each GiB that it reads.
- *memory*: ``(peak of the loader's process - peak of one that only imports) / budget``, from
  ``VmHWM``; the goal is 1.05.

The loader warms up for twice the horizon of its plan, so that it is not measured while it fills
its memory.  Rates are medians over rounds that take turns; the ratio to *sequential* is the median
of the rounds' ratios.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gear_offline.convert import convert
from gear_offline.core.closing import Closing
from gear_offline.core.system import peak_bytes
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.sources.base import SourceInfo
from gear_offline.tables.window_reader import PAGE_BYTES, ShardFiles, read_pages

DATA_BYTES, QUICK_DATA_BYTES = 4 << 30, 512 << 20
SHARD_BYTES = 256 << 20
SECONDS, QUICK_SECONDS = 2.5, 1.0  # of a round, for either
THREADS = 8  # that read in order
WARM_HORIZONS = 2
OVER = 4  # how many times the budget the data are
PIECE_BYTES = 2 << 20
EPISODE_STEPS = 500
BATCH, SPAN = 64, 20
RETURNS_BYTES = 4  # of a step, derived
POOL_BYTES = 8 << 20
KINDS: dict[str, tuple[tuple[int, ...], type[np.generic], int]] = {
    # observations: shape and dtype; size of the actions, 0 for one discrete action
    "narrow (11 + 3 float32)": ((11,), np.float32, 3),
    "wide (84 x 84 uint8)": ((84, 84), np.uint8, 0),
}


class MadeSource(Closing):
    """Random rows of any number, from a small pool: nothing is kept."""

    def __init__(self, kind: str, nbytes: int) -> None:
        shape, dtype, actions = KINDS[kind]
        columns = (
            ColumnSpec(name="observations", dtype=np.dtype(dtype), shape=shape),
            ColumnSpec(name="actions", dtype=np.dtype(np.float32), shape=(actions,))
            if actions
            else ColumnSpec(name="actions", dtype=np.dtype(np.int64)),
            ColumnSpec(name="rewards", dtype=np.dtype(np.float32)),
        )
        self.step_bytes = sum(column.step_bytes for column in columns) + RETURNS_BYTES
        episodes = max(nbytes // (self.step_bytes * EPISODE_STEPS), 1)
        self.episodes = EpisodeIndex(lengths=np.full(episodes, EPISODE_STEPS, np.int64))
        self.terminated = np.ones(episodes, bool)
        self.truncated = np.zeros(episodes, bool)
        self.spec = TableSpec(columns=columns, steps=self.episodes.steps, episodes=episodes)
        self.info = SourceInfo(uri=kind, format="made", rule="made")
        self._pool = np.random.default_rng(0).integers(0, 100, POOL_BYTES, np.uint8)

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        spec = self.spec[column]
        count = (stop - start) * spec.step_bytes // spec.dtype.itemsize
        found = np.resize(np.roll(self._pool, -start % 4093), count)
        return found.astype(spec.dtype).reshape(stop - start, *spec.shape)

    def preferred_rows(self, column: str) -> int:
        return 1

    def close(self) -> None:
        pass


def read_in_order(dataset: Dataset, *, seconds: float) -> float:
    """Return bytes a second of threads that read pieces of all shards in their order: the peer."""
    files = ShardFiles([dataset], None)
    pieces = cycle(
        (index, begin, min(PIECE_BYTES, shard.bytes - begin))
        for index, shard in enumerate(dataset.manifest.shards)
        for begin in range(0, shard.bytes, PIECE_BYTES)
    )
    done, lock = [0], threading.Lock()
    began = time.perf_counter()

    def work(_: int) -> None:
        memory = np.empty(2 * PIECE_BYTES + PAGE_BYTES, np.uint8)  # NumPy takes large pages
        memory = memory[-memory.ctypes.data % PAGE_BYTES :][:PIECE_BYTES]
        while time.perf_counter() - began < seconds or not done[0]:
            with lock:
                index, begin, count = next(pieces)
            with files.opened([index]) as handles:
                read_pages(handles[index], memory, begin, count, files.names[index])
            with lock:
                done[0] += count

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    taken = time.perf_counter() - began
    files.close()
    return done[0] / taken


def child(arguments: Sequence[str], requests: IO[str], answers: IO[str]) -> None:
    """Measure in a process of its own: a line of JSON for each line that is asked.

    ``arguments``: the dataset and the budget; without them the process only imports.
    """
    from gear_offline.loaders.loader import GearLoader

    def answer(**document: Any) -> None:
        print(json.dumps(document), file=answers, flush=True)

    if not arguments:
        answer(peak_bytes=peak_bytes())
        return
    loader = GearLoader(
        arguments[0],
        batch_size=BATCH,
        context_length=SPAN,
        device="cpu",
        placement="disk",
        host_budget=int(arguments[1]),
    )
    disk = loader.disk
    assert disk is not None, "it was asked for"
    while disk.counts().windows < WARM_HORIZONS * disk.sizes.horizon:
        next(loader)
    sizes = disk.sizes
    answer(
        slots=sizes.slots,
        threads=sizes.threads,
        chunk_steps=sizes.chunk_steps,
    )
    for request in requests:
        before, began, batches = disk.counts(), time.perf_counter(), 0
        worked = time.process_time()
        while time.perf_counter() - began < float(request):
            next(loader)
            batches += 1
        taken, after = time.perf_counter() - began, disk.counts()
        answer(
            disk=(after.read_bytes - before.read_bytes) / taken,
            useful=(after.window_bytes - before.window_bytes) / taken,
            read_bytes=(after.read_bytes - before.read_bytes) / (after.reads - before.reads),
            batches=batches / taken,
            processor=(time.process_time() - worked)
            / max(after.read_bytes - before.read_bytes, 1)
            * (1 << 30),
            peak_bytes=peak_bytes(),
        )
    loader.close()


def _start(*arguments: str) -> subprocess.Popen[str]:
    code = "import sys; from gear_offline.bench import disk; "
    code += "disk.child(sys.argv[1:], sys.stdin, sys.stdout)"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None, "a pipe was asked for"
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the measuring process ended with status {process.wait()}")
    document: dict[str, Any] = json.loads(line)
    return document


def _measure(kind: str, folder: Path, *, nbytes: int, rounds: int, seconds: float) -> Any:
    source = MadeSource(kind, nbytes)
    convert(source, folder, shard_bytes=min(SHARD_BYTES, nbytes // 8), quiet=True)
    dataset = open_dataset(folder, verify=False)
    needed = source.step_bytes * source.spec.steps
    budget = needed // OVER
    with _start() as imports:
        base = _answer(imports)["peak_bytes"]
    found: dict[str, list[float]] = {}
    with _start(str(folder), str(budget)) as process:
        assert process.stdin is not None, "a pipe was asked for"
        sizes = _answer(process)
        for _ in range(rounds):
            rate = read_in_order(dataset, seconds=seconds)
            found.setdefault("sequential", []).append(rate)
            print(seconds, file=process.stdin, flush=True)
            for key, value in _answer(process).items():
                found.setdefault(key, []).append(value)
        process.stdin.close()
    ratios = [ours / peer for ours, peer in zip(found["disk"], found["sequential"], strict=True)]
    return {
        "kind": kind,
        "data_bytes": needed,
        "budget_bytes": budget,
        **sizes,
        "bytes_per_second": {key: found[key] for key in ("sequential", "disk", "useful")},
        "ratio": median(ratios),
        "amplification": median(
            read / useful for read, useful in zip(found["disk"], found["useful"], strict=True)
        ),
        "bytes_per_read": median(found["read_bytes"]),
        "processor_seconds_per_gib": median(found["processor"]),
        "batches_per_second": median(found["batches"]),
        "imports_bytes": base,
        "peak_bytes": int(max(found["peak_bytes"])),
        "memory": (max(found["peak_bytes"]) - base) / budget,
    }


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure both kinds of rows.  Needs 4.3 GB of disk and 1.4 GB of memory."""
    nbytes = QUICK_DATA_BYTES if quick else DATA_BYTES
    results = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="gear-bench-") as name:
            target = Path(name, "dataset")
            seconds, rounds = (QUICK_SECONDS, 3) if quick else (SECONDS, 5)
            results.append(_measure(kind, target, nbytes=nbytes, rounds=rounds, seconds=seconds))
    return {"batch_size": BATCH, "context_length": SPAN, "results": results}


def table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a header row and one row per kind of rows; rates in GB/s."""
    rows: list[tuple[str, ...]] = [
        (
            "rows",
            "GB",
            "sequential",
            "disk",
            "ratio",
            "useful",
            "amplification",
            "processor s/GiB",
            "memory / budget",
        )
    ]
    for result in document["results"]:
        rates = {k: f"{median(v) / 1e9:.2f}" for k, v in result["bytes_per_second"].items()}
        rows.append(
            (
                result["kind"],
                f"{result['data_bytes'] / 1e9:.2f}",
                rates["sequential"],
                rates["disk"],
                f"{result['ratio']:.2f}",
                rates["useful"],
                f"{result['amplification']:.2f}",
                f"{result['processor_seconds_per_gib']:.2f}",
                f"{result['memory']:.3f}",
            )
        )
    return rows
