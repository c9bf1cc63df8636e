"""Data of up to 10^9 steps on the host: seconds to a first batch, and batches/s beside 10^6 steps.

    python -m benchmarks billion                        10^6, 10^7, 10^8 steps
    BILLION=1e6,1e9 python -m benchmarks billion        needs 75 GB of disk, 40 GB of memory

Each set is random, 28 B a step (32 in a table) in episodes of 200, as `.npz` files of 100,000 steps
or, above 10^8, 1,000 of them, which a folder is converted from.  Each size is measured in a process
of its own; its batches take turns with those of 10^6 steps there, so that a disturbance meets both.
The bound is NumPy copying as many windows as a batch has from as many rows, with nothing to draw.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from scipy import stats

import gear_offline as go
from benchmarks.common import timed
from benchmarks.convert import find_peak
from gear_offline.batches.tables.table import Table
from gear_offline.core.types import Array
from gear_offline.data.dataset.inspect import inspect

SIZES, QUICK_SIZES = "1e6,1e7,1e8", "1e5,1e6"
EPISODE, FILE_STEPS, MOST_FILES = 200, 100_000, 1000
BATCH, SPANS = 1024, (1, 20)
STRATEGIES = ("uniform_steps", "return_weighted")
TURNS, CALLS = 21, 48  # batches of a turn: some blocks of what a loader prepares at once
DRAWS = 100_000_000  # of the test that all steps are equally likely, in bins of equal steps
BINS = 1000


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; minutes for each 10^8 steps."""
    sizes = [int(float(n)) for n in os.environ.get("BILLION", SIZES).split(",")]
    sizes = [int(float(n)) for n in QUICK_SIZES.split(",")] if quick else sizes
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(
        prefix="gear-benchmark-", dir=os.environ.get("TMPDIR")
    ) as name:
        small = Path(name, "small")
        for steps in (sizes[0], *sizes):
            folder = Path(name, f"{steps}")
            row: dict[str, Any] = {}
            make_files(folder / "files", steps)
            for part in (convert, opened, audited, batches):
                words = [sys.executable, "-m", "benchmarks.billion", part.__name__]
                words += [str(folder), str(small if small.exists() else folder / "data")]
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
                row |= json.loads(done.stdout.splitlines()[-1])
            if not small.exists():  # the first size, which is measured beside itself after that
                shutil.move(folder / "data", small)
            else:
                rows += [{"steps": steps, "what": key, "value": row[key]} for key in row]
                print(steps, row, file=sys.stderr, flush=True)
            shutil.rmtree(folder)
    return {"results": rows}


def make_files(folder: Path, steps: int) -> None:
    """Write the files of a set: rows of a pool, each file from another one on."""
    files = min(max(steps // FILE_STEPS, 1), MOST_FILES)
    each = steps // files
    pool = np.random.default_rng(0).normal(size=(each + files, 7)).astype(np.float32)
    ends = np.arange(each) % EPISODE == EPISODE - 1
    folder.mkdir(parents=True)
    for number in range(files):
        rows = pool[number : number + each]
        columns = {"observations": rows[:, :4], "actions": rows[:, 4:6], "rewards": rows[:, 6]}
        np.savez(folder / f"{number:04}.npz", allow_pickle=False, terminals=ends, **columns)


def convert(folder: Path, _: Path) -> dict[str, Any]:
    peak = find_peak(folder / "files", folder / "data")  # without torch
    seconds = timed(lambda: go.convert(folder / "files", folder / "data", quiet=True))
    shutil.rmtree(folder / "files")
    return {"convert_seconds": seconds, "convert_megabytes": peak // 10**6}


def opened(folder: Path, _: Path) -> dict[str, Any]:
    path = folder / "data"
    return {
        "open_seconds": timed(lambda: go.open_dataset(path, verify=False)),
        "open_with_digests_seconds": timed(lambda: go.open_dataset(path)),
        "inspect_seconds": timed(lambda: inspect(path)),
    }


def audited(folder: Path, _: Path) -> dict[str, Any]:
    data = go.open_dataset(folder / "data", verify=False)
    seconds = timed(lambda: go.audit(data, quiet=True))
    return {"audit_seconds": seconds, "audit_megabytes": peak_bytes() // 10**6}


def batches(folder: Path, small: Path) -> dict[str, Any]:
    """Measure loaders beside those of the small set, and count what they draw."""
    row: dict[str, Any] = {}
    pair = [go.open_dataset(path, verify=False) for path in (folder / "data", small)]
    for span in SPANS:
        loaders = dict[str, list[go.GearLoader]]()  # of one table, as long as one of them is there
        for strategy in STRATEGIES:
            options: Any = {"context_length": span, "selection": strategy, "device": "cpu"}
            for data in pair:
                began = perf_counter()
                loaders.setdefault(strategy, []).append(go.GearLoader(data, BATCH, **options))
                next(loaders[strategy][-1])
                row.setdefault("first_batch_seconds", perf_counter() - began)
        for strategy, two in loaders.items():
            rates = in_turns([loader.__next__ for loader in two])
            name = f"{strategy}_k{span}"
            row[f"{name}_batches_per_second"] = 1 / median(rates[0])
            row[f"{name}_ratio"] = ratio_of(rates)
        tables: list[Any] = [loader.rows.memory for loader in loaders[STRATEGIES[0]]]
        rates = in_turns([window_copy(table, span) for table in tables])
        row[f"bound_k{span}_batches_per_second"] = 1 / median(rates[0])
        row[f"bound_k{span}_ratio"] = ratio_of(rates)
    row["memory_megabytes"] = peak_bytes() // 10**6
    return row | {"chi_square_p": uniformity(pair[0])}


def in_turns(calls: list[Callable[[], object]]) -> list[list[float]]:
    """Return the seconds of a call of each, turn by turn."""
    for call in calls:
        timed(call, CALLS)
    turns = [[timed(call, CALLS) for call in calls] for _ in range(TURNS)]
    return [list(seconds) for seconds in zip(*turns, strict=True)]


def ratio_of(rates: list[list[float]]) -> float:
    """Return the median over turns of the small set's seconds, divided by the other's."""
    return float(median(small / large for large, small in zip(*rates, strict=True)))


def window_copy(table: Table, span: int) -> Callable[[], object]:
    """Return a call that copies a batch of windows from anywhere in a table's rows."""
    rows, generator = table.groups[0].rows, np.random.default_rng(0)
    shape, strides = (len(rows) - span + 1, span * rows.shape[1]), (rows.strides[0], rows.itemsize)
    windows: Array = np.lib.stride_tricks.as_strided(rows, shape, strides, writeable=False)
    starts = iter(generator.integers(0, len(windows), ((TURNS + 2) * CALLS, BATCH)))
    return lambda: windows[next(starts)]


def uniformity(data: go.Dataset) -> float:
    """Return the chi-square test's p of so many draws, by bins of equally many steps."""
    sampler, counts = go.make_sampler("uniform_steps", data), np.zeros(BINS, np.int64)
    block = 16
    for first in range(0, DRAWS // BATCH, block):
        segments = sampler.sample(1, first, block, BATCH)
        steps = data.episodes.offsets[segments.episodes] + segments.starts
        counts += np.bincount(steps.ravel() * BINS // data.spec.steps, minlength=BINS)
    return float(stats.chisquare(counts).pvalue)


def peak_bytes() -> int:
    """Return the most memory that this process had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    part = {each.__name__: each for each in (convert, opened, audited, batches)}[sys.argv[1]]
    print(json.dumps(part(*map(Path, sys.argv[2:4]))))
