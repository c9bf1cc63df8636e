"""Conversion speed against reading the columns with h5py and writing their bytes to one file.

The peer does no more than the input and output that any converter must do: no check, no digest, no
statistics.  It is measured twice: leaving its file in the page cache, and with an fsync as convert
does one.  Each round runs all of them in turn and removes what they wrote, so that they meet the
same page cache; the first round only warms it.  Figures are medians over rounds, and the ratio is
the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np

from gear_offline.convert import convert

EPISODE_STEPS = 1000
WRITE_STEPS = 250_000
STEP_BYTES = 4 * (11 + 3 + 11 + 1) + 2
KINDS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": {"compression": "gzip"},
}
_PEAK = """
import json, sys
from pathlib import Path
import gear_offline.sources
from gear_offline.convert import convert
from gear_offline.core.system import peak_bytes
before = peak_bytes()
convert(sys.argv[1], Path(sys.argv[2]), quiet=True)
print(json.dumps([before, peak_bytes()]))
"""


def make_file(path: Path, steps: int, options: dict[str, Any]) -> None:
    """Write a D4RL-layout file that looks like hopper: `steps` steps of smooth float32 motion."""
    generator = np.random.default_rng(0)
    widths = {"observations": 11, "actions": 3, "next_observations": 11, "rewards": 0}
    with h5py.File(path, "w") as file:
        file.attrs["env_id"] = "Hopper-v5"
        for name, width in widths.items():
            shape = (steps, width) if width else (steps,)
            dataset = file.create_dataset(name, shape=shape, dtype="f4", **options)
            for start in range(0, steps, WRITE_STEPS):
                rows = (min(WRITE_STEPS, steps - start), *shape[1:])
                walk = generator.normal(scale=0.02, size=rows).cumsum(axis=0) % 3
                dataset[start : start + rows[0]] = walk.astype(np.float32)
        timeouts = np.zeros(steps, bool)
        timeouts[EPISODE_STEPS - 1 :: EPISODE_STEPS] = True
        file.create_dataset("timeouts", data=timeouts, **options)
        file.create_dataset("terminals", data=np.zeros(steps, bool), **options)


def write_raw(source: Path, target: Path, *, sync: bool) -> None:
    """Read each column with h5py, write its bytes: the peer."""
    with h5py.File(source) as file, open(target, "wb") as out:
        for name in file:
            out.write(file[name][:].data)
        out.flush()
        if sync:
            os.fsync(out.fileno())


def _seconds(call: Callable[[], object], clean: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    taken = time.perf_counter() - started
    clean()
    return taken


def _rounds(source: Path, folder: Path, *, rounds: int, workers: int) -> dict[str, list[float]]:
    raw, out = folder / "raw", folder / "out"
    shard_bytes = 256 << 20 if workers == 1 else 32 << 20
    jobs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "raw": (lambda: write_raw(source, raw, sync=False), raw.unlink),
        "convert": (
            lambda: convert(source, out, workers=workers, shard_bytes=shard_bytes, quiet=True),
            lambda: shutil.rmtree(out),
        ),
        "raw_fsync": (lambda: write_raw(source, raw, sync=True), raw.unlink),
    }
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for index in range(rounds + 1):
        # Every other round runs backwards: whoever comes later gains nothing on average.
        for name in list(jobs) if index % 2 else reversed(jobs):
            taken = _seconds(*jobs[name])
            if index:
                found[name].append(taken)
    return found


def _measurement(
    kind: str, source: Path, folder: Path, *, steps: int, rounds: int, workers: int
) -> dict[str, Any]:
    found = _rounds(source, folder, rounds=rounds, workers=workers)
    data_bytes = steps * STEP_BYTES
    return {
        "input": kind,
        "workers": workers,
        "data_bytes": data_bytes,
        "file_bytes": source.stat().st_size,
        "seconds": found,
        "megabytes_per_second": {
            name: data_bytes / median(times) / 1e6 for name, times in found.items()
        },
        "ratio": _ratio(found["raw"], found["convert"]),
        "ratio_fsync": _ratio(found["raw_fsync"], found["convert"]),
    }


def _ratio(peer: Sequence[float], ours: Sequence[float]) -> float:
    return median(p / o for p, o in zip(peer, ours, strict=True))


def peak_memory(source: Path, target: Path) -> dict[str, int]:
    """Convert in a process of its own; return its resident memory before, and its peak."""
    found = subprocess.run(
        [sys.executable, "-c", _PEAK, str(source), str(target)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    before, after = json.loads(found.stdout)
    return {"imports_bytes": before, "peak_bytes": after}


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about a minute, or seconds with `quick`.  Needs about 3 GB of disk (0.2 quick)."""
    steps = {"contiguous": 300_000 if quick else 9_500_000, "gzip": 100_000 if quick else 1_500_000}
    rounds = 1 if quick else 5
    results = []
    memory: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gear-bench-") as name:
        folder = Path(name)
        for kind, options in KINDS.items():
            source = folder / f"{kind}.hdf5"
            make_file(source, steps[kind], options)
            for workers in (1, 2):
                results.append(
                    _measurement(
                        kind, source, folder, steps=steps[kind], rounds=rounds, workers=workers
                    )
                )
            memory[kind] = {
                "file_bytes": source.stat().st_size,
                "data_bytes": steps[kind] * STEP_BYTES,
                **peak_memory(source, folder / "memory"),
            }
            shutil.rmtree(folder / "memory")
            source.unlink()
    return {"results": results, "memory": memory}


def table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a header row and one row a measurement: speeds in MB/s, ratios, peak memory in MB."""
    rows: list[tuple[str, ...]] = [
        ("input", "MB", "raw", "raw, fsync", "convert", "ratio", "ratio, fsync", "peak RSS")
    ]
    for result in document["results"]:
        speed = result["megabytes_per_second"]
        workers = result["workers"]
        peak = document["memory"][result["input"]]["peak_bytes"] / 1e6
        rows.append(
            (
                result["input"] + (f", {workers} workers" if workers > 1 else ""),
                f"{result['data_bytes'] / 1e6:.0f}",
                *(f"{speed[name]:.0f}" for name in ("raw", "raw_fsync", "convert")),
                f"{result['ratio']:.2f}",
                f"{result['ratio_fsync']:.2f}",
                f"{peak:.0f}" if workers == 1 else "",
            )
        )
    return rows
