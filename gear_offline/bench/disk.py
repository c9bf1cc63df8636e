"""Batches from a dataset four times as large as the memory budget, against reading it in order.

For each kind of row a dataset is made.  A process opens it with ``placement="disk"`` and a budget:
a quarter of what batches need of it (observations, actions, rewards, returns-to-go).  It asks for
batches as fast as they come.

- *sequential*: bytes a second when eight threads read the same files from their first byte to
  their last, 2 MiB at a time, past the page cache (``O_DIRECT``) into the same kind of memory, with
  the loader idle.
- *random*: bytes a second of reads as large as the loader's are on average, at random places, with
  as many threads and jobs under way, and nothing else: what the disk allows for reads of that size.
- *disk rate*: bytes a second that the loader reads, the same way, while batches are asked for.
- *useful rate*: bytes a second of the windows handed out, padding apart, in the source's dtypes.
- *amplification*: disk bytes for each useful byte; below 1 where one read serves several windows.
- *processor*: seconds of processor time of the loader's process for each GiB that it reads.
- *memory*: ``(peak of the loader's process - peak of one that only imports) / budget``, from
  ``VmHWM``; the goal is 1.05.

The loader warms up for twice the horizon of its plan, so that it is not measured while it fills its
memory.  Rates are medians over rounds that take turns; the ratios, to *sequential* and to *random*,
are the medians of the rounds' ratios.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from gear_offline.tables.disk_files import (
    DIRECT_BYTES,
    Ranges,
    RangesRead,
    ShardFiles,
)
from gear_offline.tables.disk_sizes import ROUND_BYTES
from gear_offline.tables.host_memory import pages
from gear_offline.tables.huge_memory import huge_memory
from gear_offline.tables.window_reader import ReadBuffer

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


def read_in_order(dataset: Dataset, *, threads: int, seconds: float) -> float:
    """Return bytes a second of threads that read pieces of all shards in their order: the peer."""
    files = ShardFiles(dataset)
    pieces = [
        (index, begin, min(PIECE_BYTES, shard.bytes - begin))
        for index, shard in enumerate(dataset.manifest.shards)
        for begin in range(0, shard.bytes, PIECE_BYTES)
    ]
    done, lock, place = [0], threading.Lock(), [0]
    end = time.perf_counter() + seconds

    def work(_: int) -> None:
        buffer = huge_memory(PIECE_BYTES + 8192)
        while time.perf_counter() < end or not done[0]:
            with lock:
                index, begin, count = pieces[place[0] % len(pieces)]
                place[0] += 1
            with files.opened(index) as (file,):
                file.read(begin, count, buffer)
            with lock:
                done[0] += count

    taken = _together(work, threads)
    files.close()
    return done[0] / taken


def read_at_random(
    dataset: Dataset, *, nbytes: int, threads: int, buffers: int, seconds: float
) -> float:
    """Return bytes a second of reads of `nbytes` at random places, and nothing else: the bound.

    Each thread has as many jobs under way as `buffers`, like those of the loader, and does one at
    least.
    """
    files, sizes = ShardFiles(dataset), np.array([s.bytes for s in dataset.manifest.shards])
    nbytes = min(pages(nbytes), int(sizes.min()) // DIRECT_BYTES * DIRECT_BYTES)
    count = max(ROUND_BYTES // nbytes, 1)
    done = [0] * threads
    end = time.perf_counter() + seconds

    def work(thread: int) -> None:
        generator = np.random.default_rng(thread)
        free = [ReadBuffer(count * nbytes + DIRECT_BYTES, direct=True) for _ in range(buffers)]
        begun = deque[tuple[RangesRead, ReadBuffer]]()
        with files.opened(*range(len(sizes))) as opened:
            while time.perf_counter() < end or not (begun or done[thread]):
                file = generator.choice(len(sizes), count, p=sizes / sizes.sum())
                begin = generator.integers(0, (sizes[file] - nbytes) // DIRECT_BYTES + 1)
                begin *= DIRECT_BYTES
                place = nbytes * np.arange(count)
                ranges = Ranges(file=file, begin=begin, end=begin + nbytes, place=place)
                buffer = free.pop()
                begun.append((RangesRead(opened, ranges, buffer.memory, buffer.queue), buffer))
                if not free:
                    first, buffer = begun.popleft()
                    done[thread] += first.finish()
                    free.append(buffer)
            for first, buffer in begun:
                done[thread] += first.finish()
                free.append(buffer)
        for buffer in free:
            buffer.close()

    taken = _together(work, threads)
    files.close()
    return sum(done) / taken


def _together(work: Callable[[int], None], threads: int) -> float:
    """Run `work` in threads, each with its number; return the seconds."""
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


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
        buffers=sizes.buffers,
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
            rate = read_in_order(dataset, threads=THREADS, seconds=seconds)
            found.setdefault("sequential", []).append(rate)
            print(seconds, file=process.stdin, flush=True)
            for key, value in _answer(process).items():
                found.setdefault(key, []).append(value)
            rate = read_at_random(
                dataset,
                nbytes=int(found["read_bytes"][-1]),
                threads=sizes["threads"],
                buffers=sizes["buffers"],
                seconds=seconds,
            )
            found.setdefault("random", []).append(rate)
        process.stdin.close()
    ratios = [ours / peer for ours, peer in zip(found["disk"], found["sequential"], strict=True)]
    return {
        "kind": kind,
        "data_bytes": needed,
        "budget_bytes": budget,
        **sizes,
        "bytes_per_second": {key: found[key] for key in ("sequential", "random", "disk", "useful")},
        "ratio": median(ratios),
        "ratio_to_random": median(
            ours / peer for ours, peer in zip(found["disk"], found["random"], strict=True)
        ),
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
            "random",
            "disk",
            "ratio",
            "of random",
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
                rates["random"],
                rates["disk"],
                f"{result['ratio']:.2f}",
                f"{result['ratio_to_random']:.2f}",
                rates["useful"],
                f"{result['amplification']:.2f}",
                f"{result['processor_seconds_per_gib']:.2f}",
                f"{result['memory']:.3f}",
            )
        )
    return rows
