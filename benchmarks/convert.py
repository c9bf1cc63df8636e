"""Conversion speed, against reading the columns with h5py and writing their bytes to one file.

The peer does no more than the input and output that any converter must do: no check, no digest, no
statistics.  It is measured twice: leaving its file in the page cache, and with an fsync as convert
does one.  All run in turn and remove what they wrote; figures are medians, and ratios are those of
single rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np

from benchmarks.common import Call, timed
from gear_offline.data.convert.conversion import convert

STEP_BYTES = 4 * (11 + 3 + 11 + 1) + 2
KINDS: dict[str, dict[str, Any]] = {"contiguous": {}, "gzip": {"compression": "gzip"}}
_PEAK = """
import json, sys, time
from pathlib import Path
from gear_offline.data.convert.conversion import convert
began = time.perf_counter()
convert(sys.argv[1], Path(sys.argv[2]), quiet=True, **json.loads(sys.argv[3]))
seconds = time.perf_counter() - began
# Not getrusage: its maximum survives exec, so it would be the parent's.
lines = Path("/proc/self/status").read_text().splitlines()
print(*(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), seconds)
"""


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about a minute, or seconds with `quick`.  Needs about 3 GB of disk (0.2 quick)."""
    steps = {"contiguous": 300_000 if quick else 9_500_000, "gzip": 100_000 if quick else 1_500_000}
    rows = []
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as name:
        folder = Path(name)
        for kind, options in KINDS.items():
            source, nbytes = folder / f"{kind}.hdf5", steps[kind] * STEP_BYTES
            make_file(source, steps[kind], options)
            for workers in (1, 2):
                times = _rounds(source, folder, rounds=1 if quick else 5, workers=workers)
                ratios = {
                    f"times_{peer}": median(
                        peer_time / own_time
                        for peer_time, own_time in zip(times[peer], times["convert"], strict=True)
                    )
                    for peer in ("raw", "raw_fsync")
                }
                row = {"input": kind, "workers": workers, "megabytes": nbytes // 10**6}
                row |= {k: round(nbytes / median(v) / 1e6) for k, v in times.items()}
                if workers == 1:
                    row["peak_megabytes"] = convert_apart(source, folder / "memory")[0] // 10**6
                    shutil.rmtree(folder / "memory")
                rows.append({**row, **ratios})
            source.unlink()
    return {"unit": "MB/s", "results": rows}


def make_file(path: Path, steps: int, options: Mapping[str, Any]) -> None:
    """Write a D4RL-layout file that looks like hopper: `steps` steps of smooth float32 motion."""
    rng = np.random.default_rng(0)
    widths = {"observations": 11, "actions": 3, "next_observations": 11, "rewards": 0}
    with h5py.File(path, "w") as file:
        file.attrs["env_id"] = "Hopper-v5"
        for name, width in widths.items():
            shape = (steps, width) if width else (steps,)
            dataset = file.create_dataset(name, shape=shape, dtype="f4", **options)
            for start in range(0, steps, 250_000):
                rows = (min(250_000, steps - start), *shape[1:])
                walk = rng.normal(scale=0.02, size=rows).cumsum(axis=0) % 3
                dataset[start : start + rows[0]] = walk.astype(np.float32)
        timeouts = np.zeros(steps, bool)
        timeouts[999::1000] = True
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


def _rounds(source: Path, folder: Path, *, rounds: int, workers: int) -> dict[str, list[float]]:
    raw, out = folder / "raw", folder / "out"
    shard_bytes = 256 << 20 if workers == 1 else 32 << 20
    ours = partial(convert, source, out, workers=workers, shard_bytes=shard_bytes, quiet=True)
    calls: dict[str, Call] = {
        "raw": partial(write_raw, source, raw, sync=False),
        "convert": ours,
        "raw_fsync": partial(write_raw, source, raw, sync=True),
    }
    seconds_of: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        # Every other round runs backwards: whoever comes later gains nothing on average.
        for name in list(calls) if number % 2 else reversed(calls):
            seconds = timed(calls[name])
            if number:  # the first warms the page cache
                seconds_of[name].append(seconds)
            raw.unlink(missing_ok=True)
            shutil.rmtree(out, ignore_errors=True)
    return seconds_of


def convert_apart(source: Path, target: Path, **options: Any) -> tuple[int, float]:
    """Convert in a process without torch; return its peak of resident memory, and seconds."""
    words = [sys.executable, "-c", _PEAK, str(source), str(target), json.dumps(options)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    peak, seconds = done.stdout.split()
    return int(peak), float(seconds)
