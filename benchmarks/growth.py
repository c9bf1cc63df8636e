"""Growth of a call's work with each size of its data, the others fixed.

A size is made ten times larger.  Operations are calls of functions, Python's and C's, as cProfile
counts them; they do not depend on the machine.  Seconds are those of a call that is not profiled.
An exponent of 1 is work in proportion to the size, of 0 work that does not depend on it.
"""

from __future__ import annotations

import cProfile
import json
import math
import pstats
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gear_offline as go
from benchmarks.common import Call, timed
from gear_offline.training.json_lines import last_record

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


SIZES: dict[str, tuple[Make, str, int, int]] = {  # what grows, from where, `quick`: from where
    "convert": (convert, "episodes", 10_000, 100),
    "audit": (audit, "episodes", 10_000, 300),
    "a batch": (batch, "episodes", 10_000, 100),
    "episode(i), many columns": (episode_of_columns, "columns", 100, 20),
    "episode(i), many shards": (episode_of_shards, "shards", 100, 10),
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
        }
        rows.append(row)
    return {"results": rows}


def _measured(make: Make, size: int) -> tuple[int, float]:
    """Return the operations and the seconds of a call for data of a size."""
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        call = make(Path(folder), size)
        call()  # imports, caches
        seconds = min(timed(call) for _ in range(3))
        profile = cProfile.Profile()
        profile.runcall(call)
        return int(pstats.Stats(profile).total_calls), seconds  # type: ignore[attr-defined]
