"""Data of up to 10^9 steps in memory: seconds to a first batch, and batches/s beside 10^6 steps.

    python -m benchmarks billion                        10^6, 10^7, 10^8 steps
    BILLION=1e9 python -m benchmarks billion        needs 65 GB of disk, 45 GB of memory
    TIERS=3e8 python -m benchmarks billion              rows of 144 B over the tiers of a GPU

Each set is random, 28 B a step (32 in a table) in episodes of 200, as `.npz` files of 100,000 steps
or, above 10^8, 1,000 of them, which a folder is converted from.  Each size is measured in processes
of their own; its batches take turns with those of 10^6 steps there, so that a disturbance meets
both.  The bound is NumPy copying as many windows as a batch has from as many rows, with nothing to
draw.  With a GPU its loaders are measured too: it draws, its memory has the rows.  With `TIERS`
two fifths of the rows are in its memory and the others in the host's, or a fifth is, of those on
disk.  What a part measured is a line on stderr at once, and in the file that `PARTIAL` names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy import stats

import gear_offline as go
from benchmarks.common import keep_partial, timed, wait
from benchmarks.convert import convert_apart
from gear_offline.batches.tables.table import Table
from gear_offline.core.system import usable_cores
from gear_offline.core.types import Array
from gear_offline.data.dataset.inspect import inspect
from gear_offline.errors import GearError, InputError

SIZES, QUICK_SIZES = "1e6,1e7,1e8", "1e5,1e6"
EPISODE, FILE_STEPS, MOST_FILES = 200, 100_000, 1000
NARROW, WIDE = (4, 2), (28, 6)  # numbers of an observation and an action: rows of 32 and 144 B
SMALL = 10**6
BATCH, SPANS = 1024, (1, 20)
STRATEGIES, BEST_TENTH = ("uniform_steps", "return_weighted"), "top_percent:percent=10"
TURNS = 21
CALLS = {"cpu": 48, "cuda": 192}  # batches of a turn: some blocks of what a loader prepares at once
DRAWS = 100_000_000  # of the test that all steps are equally likely, in bins of equal steps
GPU_DRAWS = 65_536  # at a time
BINS = 1000
DISK_SECONDS = 10.0


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; half a minute for each 10^8 steps."""
    wide = os.environ.get("TIERS")
    sizes = _sizes(QUICK_SIZES if quick else wide or os.environ.get("BILLION", SIZES))
    parts: tuple[Callable[[Path, Path], object], ...] = (opened, batches, audited, chosen)
    if torch.cuda.is_available():
        parts = (opened, on_gpu, batches, audited, chosen)
    widths, parts = (NARROW, parts) if wide is None else (WIDE, (tiers,))
    rows, failed = list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory(
        prefix="gear-benchmark-", dir=os.environ.get("TMPDIR")
    ) as name:
        small = Path(name, "small")
        convert(small, SMALL, widths)
        for steps in sizes:
            folder = Path(name, f"{steps}")
            row = convert(folder, steps, widths)
            rows += _report(steps, row, rows)
            for part in parts:
                words = [sys.executable, "-m", "benchmarks.billion", part.__name__]
                words += [str(folder), str(small)]
                began = perf_counter()
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
                print(f"{part.__name__}: {perf_counter() - began:.0f} s", file=sys.stderr)
                if done.returncode:
                    failed.append(f"{part.__name__} of {steps:,} steps")  # others do not need it
                else:
                    rows += _report(steps, json.loads(done.stdout.splitlines()[-1]), rows)
            shutil.rmtree(folder)
    if failed:
        raise GearError("BENCHMARK", f"{', '.join(failed)} failed", remedy="see above")
    return {"results": rows}


def _sizes(text: str) -> list[int]:
    """Read a list of numbers of steps."""
    with suppress(ValueError, OverflowError):
        sizes = [int(float(size)) for size in text.split(",")]
        if min(sizes) >= EPISODE and len({*sizes}) == len(sizes):
            return sizes
    problem = f"{text!r} is no list of sizes of at least {EPISODE} steps, each once"
    raise InputError("USAGE", problem, "BILLION or TIERS", "write them like 1e6,1e7")


def _report(
    steps: int, row: Mapping[str, Any], before: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Say what a part measured, and write it behind what others did: a cut run leaves that."""
    print(steps, json.dumps(row), file=sys.stderr, flush=True)
    rows = [{"steps": steps, "what": key, "value": row[key]} for key in row]
    keep_partial([*before, *rows])
    return rows


def convert(folder: Path, steps: int, widths: tuple[int, int]) -> dict[str, Any]:
    """Make the files of a set, and convert them."""
    made = timed(lambda: make_files(folder / "files", steps, *widths))
    peak, seconds = convert_apart(folder / "files", folder / "data")
    shutil.rmtree(folder / "files")
    facts = {"make_seconds": made, "convert_seconds": seconds}
    return {**facts, "convert_megabytes": peak // 10**6}


def make_files(folder: Path, steps: int, states: int, actions: int) -> None:
    """Write the files of a set: rows of a pool, each file from another one on."""
    files = min(max(steps // FILE_STEPS, 1), MOST_FILES)
    each, width = steps // files, states + actions + 1
    pool = np.random.default_rng(0).normal(size=(each + files, width)).astype(np.float32)
    ends = np.arange(each) % EPISODE == EPISODE - 1
    folder.mkdir(parents=True)

    def write(number: int) -> None:
        rows = pool[number : number + each]
        columns = {"observations": rows[:, :states], "actions": rows[:, states:-1]}
        rewards = rows[:, -1] * np.float32(1 + number / 10_000)  # else episodes are repeated
        columns |= {"rewards": rewards, "terminals": ends}
        np.savez(folder / f"{number:04}.npz", allow_pickle=False, **columns)

    with ThreadPoolExecutor(usable_cores()) as pool_of_threads:
        list(pool_of_threads.map(write, range(files)))


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


def chosen(folder: Path, _: Path) -> dict[str, Any]:
    """Keep the best tenth of the episodes as a dataset of their own."""
    data, out = go.open_dataset(folder / "data", verify=False), folder / "where"
    where = f"return > {np.quantile(data.returns, 0.9)}"
    return {"where_seconds": timed(lambda: go.convert(data.path, out, where=where, quiet=True))}


def batches(folder: Path, small: Path) -> dict[str, Any]:
    """Measure loaders of the CPU beside those of the small set, and count what they draw."""
    row: dict[str, Any] = {}
    pair = [go.open_dataset(path, verify=False) for path in (folder / "data", small / "data")]
    for span in SPANS:
        uniform, _ = compare(row, pair, span, "", device="cpu", placement="host")
        tables = [loader.rows.memory for loader in uniform]
        rates = in_turns([window_copy(table, span) for table in tables])
        row[f"bound_k{span}_batches_per_second"] = 1 / median(rates[0])
        row[f"bound_k{span}_ratio"] = ratio_of(rates)
        del uniform, tables, _
    row["memory_megabytes"] = peak_bytes() // 10**6
    sampler = go.make_sampler("uniform_steps", pair[0])

    def draw(first: int) -> Array:
        segments = sampler.sample(1, first, block, BATCH)
        return np.asarray(pair[0].episodes.offsets[segments.episodes] + segments.starts)

    block = 16
    blocks = map(draw, range(0, DRAWS // BATCH, block))
    return row | {"chi_square_p": uniformity(blocks, pair[0].spec.steps)}


def on_gpu(folder: Path, small: Path) -> dict[str, Any]:
    """Measure loaders of a GPU that draws, and whose memory holds the rows."""
    row: dict[str, Any] = {}
    pair = [go.open_dataset(path, verify=False) for path in (folder / "data", small / "data")]
    options: dict[str, Any] = {"device": "cuda", "engine": "on", "placement": "hbm"}
    for span in reversed(SPANS):
        kept = compare(row, pair, span, "gpu_", **options)
    options["context_length"] = kept[0][0].context_length  # whose rows are there
    draws = go.GearLoader(pair[0], GPU_DRAWS, **options)
    offsets = torch.tensor(pair[0].episodes.offsets, device="cuda")
    blocks = (next(draws).segments for _ in range(DRAWS // GPU_DRAWS))
    steps = ((offsets[block[:, 0]] + block[:, 1]).cpu().numpy() for block in blocks)
    row["gpu_chi_square_p"] = uniformity(steps, pair[0].spec.steps)
    free, everything = torch.cuda.mem_get_info()
    return row | {"gpu_megabytes": (everything - free) // 10**6}


def tiers(folder: Path, small: Path) -> dict[str, Any]:
    """Measure loaders of rows in GPU memory, in part of it, on the host, on disk."""
    row: dict[str, Any] = {}
    pair = [go.open_dataset(path, verify=False) for path in (folder / "data", small / "data")]
    sizes = [4 * (sum(WIDE) + 2) * data.spec.steps for data in pair]
    span = SPANS[-1]
    places: dict[str, list[dict[str, Any]]] = {
        "hbm": [{"placement": "hbm"}] * 2,
        "hbm_host": [{"hbm_budget": 2 * size // 5} for size in sizes],
        "host": [{"placement": "host"}] * 2,
    }
    for name, options in places.items():
        if torch.cuda.is_available():
            compare(row, pair, span, f"{name}_", *options, device="cuda")
    began, budget = perf_counter(), sizes[0] // 5
    loader = go.GearLoader(
        pair[0], BATCH, context_length=span, placement="disk", host_budget=budget
    )
    timed(loader.__next__)
    row[f"disk_first_batch_k{span}_seconds"] = perf_counter() - began
    _, rate = (batches_of(loader, DISK_SECONDS) for _ in range(2))  # its memory fills first
    loader.close()
    return row | {f"disk_uniform_steps_k{span}_batches_per_second": rate}


def batches_of(loader: go.GearLoader, seconds: float) -> float:
    """Return the batches a second of so many seconds."""
    began, count = perf_counter(), 0
    while perf_counter() - began < seconds:
        next(loader)
        count += 1
    wait()
    return count / (perf_counter() - began)


def compare(
    row: dict[str, Any],
    pair: Sequence[go.Dataset],
    span: int,
    prefix: str,
    *each: Mapping[str, Any],
    **options: Any,
) -> list[list[go.GearLoader]]:
    """Measure loaders of two datasets in turns into `row`; return those of each strategy.

    All of a dataset are of one table, as long as one of them is there.
    """
    loaders = dict[str, list[go.GearLoader]]()
    for strategy in STRATEGIES:
        for data, more in zip(pair, each or ({}, {}), strict=True):
            began = perf_counter()
            loader = go.GearLoader(
                data, BATCH, context_length=span, selection=strategy, **options, **more
            )
            loaders.setdefault(strategy, []).append(loader)
            timed(loader.__next__)
            row.setdefault(f"{prefix}first_batch_k{span}_seconds", perf_counter() - began)
    began = perf_counter()  # of rows that are there
    best = go.GearLoader(
        pair[0],
        BATCH,
        context_length=span,
        selection=BEST_TENTH,
        **options,
        **(each[0] if each else {}),
    )
    timed(best.__next__)
    row[f"{prefix}top_percent_k{span}_first_batch_seconds"] = perf_counter() - began
    for strategy, two in loaders.items():
        rates = in_turns([loader.__next__ for loader in two], CALLS[options["device"]])
        name = f"{prefix}{strategy}_k{span}"
        row[f"{name}_batches_per_second"] = 1 / median(rates[0])
        row[f"{name}_ratio"] = ratio_of(rates)
    return list(loaders.values())


def in_turns(calls: Sequence[Callable[[], object]], count: int = CALLS["cpu"]) -> list[list[float]]:
    """Return the seconds of a call of each, turn by turn, of `count` of them."""
    for call in calls:
        timed(call, count)
    turns = [[timed(call, count) for call in calls] for _ in range(TURNS)]
    return [list(seconds) for seconds in zip(*turns, strict=True)]


def ratio_of(rates: list[list[float]]) -> float:
    """Return the median over turns of the small set's seconds, divided by the other's."""
    return float(median(small / large for large, small in zip(*rates, strict=True)))


def window_copy(table: Table, span: int) -> Callable[[], object]:
    """Return a call that copies a batch of windows from anywhere in a table's rows."""
    rows, generator = table.groups[0].rows, np.random.default_rng(0)
    shape, strides = (len(rows) - span + 1, span * rows.shape[1]), (rows.strides[0], rows.itemsize)
    windows: Array = np.lib.stride_tricks.as_strided(rows, shape, strides, writeable=False)
    starts = iter(generator.integers(0, len(windows), ((TURNS + 2) * CALLS["cpu"], BATCH)))
    return lambda: windows[next(starts)]


def uniformity(blocks: Iterable[Array], total: int) -> float:
    """Return the chi-square test's p of the steps that were drawn, by bins of as many steps."""
    counts = np.zeros(BINS, np.int64)
    for steps in blocks:
        counts += np.bincount(steps.ravel() * BINS // total, minlength=BINS)
    return float(stats.chisquare(counts).pvalue)


def peak_bytes() -> int:
    """Return the most memory that this process had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    part = globals()[sys.argv[1]]
    wait()  # else the first one who waits for the GPU starts it
    print(json.dumps(part(*map(Path, sys.argv[2:4]))))
