"""Growth of a call's work with each size of its data, the others fixed.

A size is made ten times larger.  Operations are calls of functions, Python's and C's, as cProfile
counts them; they do not depend on the machine.  Seconds are those of a call that is not profiled.
An exponent of 1 is work in proportion to the size, of 0 work that does not depend on it.  Bytes are
those that Python and NumPy hold at most at once, for each one more of what grows.
"""

from __future__ import annotations

import cProfile
import json
import math
import os
import pstats
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np

import gear_offline as go
from benchmarks.common import Call, timed
from gear_offline.artifacts.json_lines import last_record
from gear_offline.core.parts import admit
from gear_offline.data.dataset.growing import GrowingDataset
from gear_offline.data.dataset.scores import dataset_of_file

TIMES = 10  # larger
Make = Callable[[Path, int], Call]


def dataset(path: Path, *, episodes: int = 20, columns: int = 0, shards: int = 1) -> go.Dataset:
    """Make a dataset of episodes of ten steps."""
    steps = 10 * episodes
    rows = np.random.default_rng(0).normal(size=(steps, 4)).astype(np.float32)
    table = {"observations": rows, "actions": rows[:, :1], "rewards": rows[:, 1]}
    table |= {"terminals": np.arange(steps) % 10 == 9} | {f"c{i}": rows for i in range(columns)}
    step_bytes = sum(column.nbytes for column in table.values()) // steps
    go.convert(
        go.from_arrays(table), path, shard_bytes=step_bytes * steps // shards + 1, quiet=True
    )
    return go.open_dataset(path)


def convert(path: Path, episodes: int) -> Call:
    source = dataset(path / "d", episodes=episodes).path
    numbers = iter(range(99))
    return lambda: go.convert(source, path / f"out-{next(numbers)}", quiet=True)


def audit(path: Path, episodes: int) -> Call:
    return partial(go.audit, dataset(path / "d", episodes=episodes), quiet=True)


def audit_of_steps(path: Path, steps: int) -> Call:
    rows = np.random.default_rng(0).normal(size=(steps, 17)).astype(np.float32)
    table = {"observations": rows, "actions": rows[:, :6], "rewards": rows[:, 6]}
    go.convert(go.from_arrays(table, rule="none"), path / "d", quiet=True)
    return partial(go.audit, go.open_dataset(path / "d", verify=False), quiet=True)


def folder_of_files(path: Path, files: int) -> Call:
    with h5py.File(path / "0.hdf5", "w") as file:
        for name, shape in (("observations", (10, 4)), ("actions", (10, 1)), ("rewards", (10,))):
            file[name] = np.ones(shape, np.float32)
        file["terminals"] = np.arange(10) == 9
    (path / "files").mkdir()
    for number in range(files):
        shutil.copyfile(path / "0.hdf5", path / "files" / f"{number}.hdf5")
    numbers = iter(range(99))
    return lambda: go.convert(path / "files", path / f"out-{next(numbers)}", quiet=True)


def scores(path: Path, names: int) -> Call:
    return lambda: [dataset_of_file(f"part-{number}.hdf5") for number in range(names)]


def episodes_in_memory(path: Path, episodes: int) -> Call:
    rows = np.zeros((10, 4), np.float32)
    episode = {"observations": rows, "actions": rows[:, :1], "rewards": rows[:, 1], "done": True}
    return partial(go.from_episodes, [episode] * episodes)


def look_for_new(path: Path, pieces: int) -> Call:
    data = dataset(path / "d")
    appender = go.Appender(data.path)
    for _ in range(pieces):
        appender.append([data.episode(0)])
    growing = GrowingDataset(go.open_dataset(data.path, verify=False, admissions=0), quiet=True)
    growing.admit(1)
    return partial(growing.admit, 2)


def spikes(path: Path, records: int) -> Call:
    rng = np.random.default_rng(0)
    lines = (json.dumps({"step": n + 1, "loss": x}) for n, x in enumerate(rng.random(records)))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "recipe.yaml").write_text(go.load_recipe("smoke").to_yaml())
    return partial(go.find_spikes, path)


def export(path: Path, columns: int) -> Call:
    source, numbers = dataset(path / "d", columns=columns), iter(range(99))
    return lambda: go.export_hdf5(source, path / f"{next(numbers)}.hdf5", quiet=True)


def disk_index(path: Path, episodes: int) -> Call:
    data = dataset(path / "d", episodes=episodes)
    options: dict[str, Any] = {
        "batch_size": 4,
        "context_length": 2,
        "device": "cpu",
        "placement": "disk",
    }

    def call() -> None:
        go.GearLoader(data, **options, host_budget=64 << 20).close()

    return call


def episode_of_columns(path: Path, columns: int) -> Call:
    return partial(dataset(path / "d", columns=columns).episode, 3)


def episode_of_shards(path: Path, shards: int) -> Call:
    return partial(dataset(path / "d", episodes=shards, shards=shards).episode, shards - 1)


def batch(path: Path, episodes: int) -> Call:
    data = dataset(path / "d", episodes=episodes)
    loader = go.GearLoader(data, batch_size=64, context_length=5, device="cpu")
    return partial(loader.batch_at, 7)


def last_step(path: Path, records: int) -> Call:
    lines = (json.dumps({"step": step, "loss": 0.5}) for step in range(1, records + 1))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return partial(last_record, path / "metrics.jsonl")


def admissions(path: Path, names: int) -> Call:
    numbers = count()

    def call() -> None:
        with patch.dict(os.environ, XDG_STATE_HOME=str(path)):
            for name in range(names):
                (path / f"{name}.py").write_text(f"# {next(numbers)}")  # another file each time
                admit([f"{path}/{name}.py:Name"])

    return call


SIZES: dict[str, tuple[Make, str, int, int]] = {  # what grows, from where, `quick`: from where
    "convert": (convert, "episodes", 10_000, 100),
    "audit": (audit, "episodes", 10_000, 300),
    "audit, one episode": (audit_of_steps, "steps", 100_000, 3_000),
    "convert, a folder of HDF5": (folder_of_files, "files", 100, 10),
    "scores by name": (scores, "names", 10_000, 100),
    "episodes in memory": (episodes_in_memory, "episodes", 1_000, 100),
    "a look for new data": (look_for_new, "pieces", 100, 5),
    "spikes": (spikes, "records", 10_000, 300),
    "export": (export, "columns", 30, 5),
    "a loader of rows on disk": (disk_index, "episodes", 10_000, 100),
    "a batch": (batch, "episodes", 10_000, 100),
    "episode(i), many columns": (episode_of_columns, "columns", 100, 20),
    "episode(i), many shards": (episode_of_shards, "shards", 100, 10),
    "admissions of parts": (admissions, "names", 300, 30),
    "a run's last step": (last_step, "records", 100_000, 3_000),
}


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure on the CPU; about a minute."""
    rows = []
    for name, (make, grows, large, small) in SIZES.items():
        size = small if quick else large
        before, after = (_measured(make, size * times) for times in (1, TIMES))
        row = {
            "name": name,
            "grows": f"{grows}, {size:,} to {TIMES * size:,}",
            "milliseconds": f"{before[1] * 1e3:.3g} to {after[1] * 1e3:.3g}",
            "exponent_of_operations": math.log(after[0] / before[0], TIMES),
            "exponent_of_seconds": math.log(after[1] / before[1], TIMES),
            "bytes_each": round((after[2] - before[2]) / (size * (TIMES - 1))),
        }
        rows.append(row)
    return {"results": rows}


def _measured(make: Make, size: int) -> tuple[int, float, int]:
    """Return the operations, the seconds and the most bytes of a call for data of a size."""
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        call = make(Path(folder), size)
        call()  # imports, caches
        seconds = min(timed(call) for _ in range(3))
        profile = cProfile.Profile()
        profile.runcall(call)
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        calls: Any = pstats.Stats(profile)
        return int(calls.total_calls), seconds, peak
