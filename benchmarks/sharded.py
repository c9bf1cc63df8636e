"""Batches a second with the rows spread over nodes, against the same ranks with all rows each.

    torchrun --nproc-per-node 2 -m benchmarks sharded      each rank poses as a node

Hopper's windows, a global batch of 1,024.  How rows travel is what `exchange="auto"` finds.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.common import CONTEXT, hopper_like, timed
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.world import World, open_world
from gear_offline.errors import UnavailableError
from gear_offline.loaders.loader import GearLoader

BATCH = 1024


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure under torchrun."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        remedy = "torchrun --nproc-per-node 2 -m benchmarks sharded"
        raise UnavailableError("DEVICE", "one process is no cluster", remedy=remedy)
    os.environ["GROUP_RANK"] = os.environ["RANK"]  # each rank is a node of its own
    device = torch.device("cpu")
    if torch.cuda.device_count() >= ranks:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    with open_world(device) as world, hopper_like(quick=quick, shard_bytes=1 << 20) as data:
        path = Path(world.gather(str(data.dataset.path))[0])
        dataset = open_dataset(path, verify=False)
        rows = [
            {"name": sharding, "batches_per_second": _rate(dataset, device, world, sharding, quick)}
            for sharding in ("replicate", "shard")
        ]
        world.gather(None)
    rows[1]["ratio"] = rows[1]["batches_per_second"] / rows[0]["batches_per_second"]  # type: ignore[operator]
    return {"ranks": ranks, "results": rows}


def _rate(
    dataset: Dataset,
    device: torch.device,
    world: World,
    sharding: Literal["replicate", "shard"],
    quick: bool,
) -> float:
    """Return the slowest rank's median."""
    loader = GearLoader(
        dataset,
        batch_size=BATCH,
        context_length=CONTEXT,
        device=device,
        world=world,
        sharding=sharding,
    )
    count, turns = (100, 2) if quick else (500, 5)
    timed(loader.__next__, count)
    found = []
    for _ in range(turns):
        world.gather(None)
        found.append(1 / timed(loader.__next__, count))
    slowest: float = min(world.gather(statistics.median(found)))
    loader.close()
    return slowest
