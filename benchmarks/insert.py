"""Episodes a second that actors append, against `np.save` with fsync; what a learner feels of it.

- *append*, *save*: pieces of so many Hopper episodes of 400 steps, as `go.Appender` and as one
  ``.npy`` file each, both durable when they return; in turn.
- *admit*: milliseconds from a look of the learner until a new piece is in its dataset.
- *batches*: of B = 64, K = 20 a second, alone and while four actors append without a pause.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import gear_offline as go
from benchmarks.common import timed
from gear_offline.dataset.growing import GrowingDataset

STEPS, ACTORS = 400, 4
PIECES = (1, 10, 100)  # episodes
ACTOR = "from benchmarks.insert import append_for_ever; append_for_ever({!r})"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; a few seconds, 200 MB of disk."""
    repeats, seconds = (5, 0.5) if quick else (30, 5.0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as name:
        path, plain = Path(name, "dataset"), Path(name, "plain.npy")
        go.convert(go.from_episodes([episode(seed) for seed in range(100)]), path, quiet=True)
        appender = go.Appender(path)
        for size in PIECES:
            piece = [episode(seed) for seed in range(size)]
            times: dict[str, list[float]] = {"append": [], "save": []}
            for _ in range(repeats):
                times["append"].append(timed(partial(appender.append, piece)))
                times["save"].append(timed(partial(save, plain, piece)))
            rates = {f"{key}_per_second": size / median(value) for key, value in times.items()}
            pairs = zip(times["append"], times["save"], strict=True)
            ratio = median(peer / ours for ours, peer in pairs)
            rows.append({"episodes_a_piece": size, **rates, "ratio": ratio})
        with GrowingDataset(path, quiet=True) as growing:
            growing.admit(0)
            waits = []
            for step in range(1, repeats + 1):
                appender.append([episode(step)])
                waits.append(timed(partial(growing.admit, step)))
        loader = go.GearLoader(path, 64, context_length=20, device="cpu")
        alone = batches_per_second(loader, seconds)
        command = [sys.executable, "-c", ACTOR.format(str(path))]
        actors = [subprocess.Popen(command) for _ in range(ACTORS)]
        try:
            time.sleep(2.0)  # until they have begun
            beside = batches_per_second(loader, seconds)
        finally:
            for actor in actors:
                actor.kill()
                actor.wait()
    return {
        "results": rows,
        "admit_milliseconds": 1e3 * median(waits),
        "batches_per_second": {"alone": alone, f"beside {ACTORS} actors": beside},
    }


def episode(seed: int) -> dict[str, Any]:
    """Return an episode of Hopper's sizes."""
    generator = np.random.default_rng(seed)
    return {
        "observations": generator.normal(size=(STEPS, 11)).astype(np.float32),
        "actions": generator.uniform(-1, 1, (STEPS, 3)).astype(np.float32),
        "rewards": np.ones(STEPS, np.float32),
        "terminated": True,
    }


def save(path: Path, piece: list[dict[str, Any]]) -> None:
    """Write the steps of a piece as one array."""
    names = ("observations", "actions", "rewards")
    columns = [[e[name].reshape(STEPS, -1) for name in names] for e in piece]
    with open(path, "wb") as file:
        np.save(file, np.concatenate([np.concatenate(parts, 1) for parts in columns]))
        file.flush()
        os.fsync(file.fileno())


def batches_per_second(loader: go.GearLoader, seconds: float) -> float:
    """Return how many batches a loader gives."""
    next(loader)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        next(loader)
        count += 1
    return count / (time.perf_counter() - began)


def append_for_ever(path: str) -> None:
    """Append an episode again and again, each in a piece of its own."""
    appender, one = go.Appender(path), episode(0)
    while True:
        appender.append([one])
