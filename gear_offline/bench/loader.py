"""Batches a second: GearLoader against plain NumPy, d3rlpy, TorchRL and the original procedure.

All cut segments of K=20 steps out of the same hopper-like table in memory and hand them over as
CPU tensors: states, actions, rewards, returns-to-go, timesteps, mask.  Measurements take turns, so
that a disturbance of the machine meets all of them; figures are medians over the turns.

What each row includes: GearLoader selects, gathers and builds its `Batch`.  "NumPy gather" gets
its segments for free: only index arithmetic and `numpy.take` are timed; "NumPy gather + selection"
also draws them.  TorchRL hands out flat, unpadded slices, which is less than a batch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch

from gear_offline.bench import loader_peers
from gear_offline.bench.loader_peers import Data, NextBatch
from gear_offline.convert import convert
from gear_offline.core.progress import progress, say
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.tables.returns import sum_returns

STEPS, EPISODES = 1_000_000, 2_186  # as D4RL's hopper-medium-v2
STATE_DIM, ACTION_DIM, CONTEXT = 11, 3, 20
BATCH_SIZES = (64, 1024)
BASE = "NumPy gather"  # what ratios refer to


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure and return the document; `quick` uses a tenth of the data and a few turns."""
    steps, episodes = (STEPS // 10, EPISODES // 10) if quick else (STEPS, EPISODES)
    turns, seconds = (3, 0.05) if quick else (9, 0.25)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    with _hopper_like(steps, episodes) as (dataset, data):
        for batch_size in BATCH_SIZES:
            candidates = {
                "GearLoader": _gear_loader(dataset, batch_size),
            }
            for name, make in loader_peers.PEERS.items():
                try:
                    candidates[name] = make(data, batch_size, CONTEXT)
                except ImportError as error:
                    skipped[name] = f"{error}; pip install 'gear-offline[bench]'"
            times = _measure(candidates, turns=turns, seconds=seconds, label=f"B={batch_size}")
            rows += [
                {
                    "name": name,
                    "batch_size": batch_size,
                    "batches_per_second": 1 / found,
                    "microseconds": found * 1e6,
                    "ratio": times[BASE] / found,
                }
                for name, found in times.items()
            ]
    for name, reason in skipped.items():
        say(f"skipped {name}: {reason}")
    return {
        "data": {
            "steps": steps,
            "episodes": episodes,
            "state_dim": STATE_DIM,
            "action_dim": ACTION_DIM,
            "context_length": CONTEXT,
        },
        "threads": torch.get_num_threads(),
        "base": BASE,
        "results": rows,
        "skipped": skipped,
    }


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row per candidate: batches a second and ratio per batch size."""
    sizes = sorted({row["batch_size"] for row in document["results"]})
    header = ["", *(f"B={b}, batches/s" for b in sizes), *(f"B={b}, x NumPy" for b in sizes)]
    found = {(row["name"], row["batch_size"]): row for row in document["results"]}
    rows: list[tuple[Any, ...]] = [tuple(header)]
    for name in dict.fromkeys(row["name"] for row in document["results"]):
        cells = [found[name, b] for b in sizes]
        rows.append(
            (
                name,
                *(f"{cell['batches_per_second']:,.0f}" for cell in cells),
                *(f"{cell['ratio']:.2f}" for cell in cells),
            )
        )
    return rows


def _gear_loader(dataset: Dataset, batch_size: int) -> NextBatch:
    loader = GearLoader(dataset, batch_size=batch_size, context_length=CONTEXT, device="cpu")
    return loader.__next__


def _measure(
    candidates: dict[str, NextBatch], *, turns: int, seconds: float, label: str
) -> dict[str, float]:
    """Return the median seconds of one call of each candidate; a turn lasts about `seconds`."""
    calls: dict[str, int] = {}
    for name, call in candidates.items():
        call()  # warm-up: caches, lazy buffers, imports
        calls[name] = max(1, int(seconds / max(_timed(call, 1), 1e-6)))
        calls[name] = max(1, int(seconds / max(_timed(call, min(calls[name], 20)), 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in candidates}
    with progress(turns * len(candidates), f"loader {label}", unit="turns") as advance:
        for _ in range(turns):
            for name, call in candidates.items():
                found[name].append(_timed(call, calls[name]))
                advance(1)
    return {name: statistics.median(times) for name, times in found.items()}


def _timed(call: NextBatch, count: int) -> float:
    """Return seconds a call, over `count` calls."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


@contextmanager
def _hopper_like(steps: int, episodes: int) -> Iterator[tuple[Dataset, Data]]:
    """Make random data of hopper's shape, as a dataset on disk and as plain arrays."""
    generator = np.random.default_rng(0)
    lengths = generator.multinomial(steps - episodes, np.full(episodes, 1 / episodes)) + 1
    ends = np.cumsum(lengths) - 1
    terminals = np.zeros(steps, dtype=bool)
    terminals[ends] = True
    columns: dict[str, npt.NDArray[Any]] = {
        "observations": generator.normal(size=(steps, STATE_DIM)).astype(np.float32),
        "actions": generator.uniform(-1, 1, size=(steps, ACTION_DIM)).astype(np.float32),
        "rewards": generator.normal(1.0, 0.5, size=steps).astype(np.float32),
        "terminals": terminals,
        "timeouts": np.zeros(steps, dtype=bool),
    }
    with tempfile.TemporaryDirectory(prefix="gear-offline-bench-") as folder:
        source = Path(folder) / "hopper-like.hdf5"
        with h5py.File(source, "w") as file:
            for name, values in columns.items():
                file.create_dataset(name, data=values)
        convert(source, Path(folder) / "dataset", quiet=True)
        dataset = open_dataset(Path(folder) / "dataset")
        assert np.array_equal(dataset.episodes.lengths, lengths), "episode ends survive conversion"
        yield (
            dataset,
            Data(
                states=columns["observations"],
                actions=columns["actions"],
                rewards=columns["rewards"],
                returns_to_go=sum_returns(
                    dataset.column("rewards"), dataset.episodes.offsets, gamma=1.0, scale=1.0
                ),
                offsets=dataset.episodes.offsets,
            ),
        )
