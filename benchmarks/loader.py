"""Batches a second of GearLoader and of other libraries, plain NumPy, the original procedure.

All cut segments of K=20 steps out of the same table in memory and hand them over as tensors on the
CPU: states, actions, rewards, returns-to-go, timesteps, mask.  GearLoader selects, gathers and
builds its `Batch`; "NumPy gather" gets its segments for free.  TorchRL hands out flat, unpadded
slices, which is less than a batch.  With a GPU, GearLoader's batches there too.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.common import CONTEXT, Call, alternate, hopper_like
from benchmarks.loader_peers import PEERS
from gear_offline.core.text import say
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.loaders.loader import GearLoader

BATCH_SIZES = (64, 1024)
BASE = "NumPy gather"  # what ratios refer to


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; `quick` uses a tenth of the data and a few turns."""
    rows: list[dict[str, Any]] = []
    with hopper_like(quick=quick) as data:
        for size in BATCH_SIZES:
            candidates: dict[str, Call] = {"GearLoader": batches(data.dataset, size)}
            if torch.cuda.is_available():
                for tier in ("hbm", "host"):
                    name = f"GearLoader, GPU, rows in {tier}"
                    options = {"device": "cuda", "engine": "on", "placement": tier}
                    candidates[name] = batches(data.dataset, size, **options)
            for name, make in PEERS.items():
                try:
                    candidates[name] = make(data, size, CONTEXT)
                except ImportError as error:
                    say(f"skipped {name}: {error}; the extra `bench` brings all but Reverb")
            turns, seconds = (3, 0.05) if quick else (9, 0.25)
            times = alternate(candidates, turns=turns, seconds=seconds, label=f"B={size}")
            rows += [
                {
                    "name": name,
                    "batch_size": size,
                    "batches_per_second": 1 / taken,
                    "times_numpy": times[BASE] / taken,
                }
                for name, taken in times.items()
            ]
    return {"threads": torch.get_num_threads(), "results": rows}


def batches(dataset: Dataset, size: int, **options: Any) -> Call:
    """Return GearLoader's next batch."""
    options = {"device": "cpu", **options}
    return GearLoader(dataset, batch_size=size, context_length=CONTEXT, **options).__next__
