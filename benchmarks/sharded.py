"""Batches a second with the rows spread over nodes, against the same ranks with all rows each.

    torchrun --nproc-per-node 4 -m benchmarks sharded      each rank poses as a node

Windows of three sizes, in host and in GPU memory, and NCCL's all-to-all alone.  How rows travel is
what `exchange="auto"` finds.  GB/s are those of all ranks together.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import CONTEXT, gpu_seconds, hopper_like, timed, write_rows
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.distributed.world import World, open_world
from gear_offline.errors import UnavailableError
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import MemoryRows, window_bytes

# batch size, numbers of a state and steps of the data; None: Hopper's
WINDOWS = {
    "1 KiB": (1024, None),
    "160 KiB": (256, (2_048, 160_000)),
    "1 MiB": (128, (13_104, 24_000)),
}
PLACEMENTS = {"host": "host", "GPU": "hbm"}
MESSAGES = (8 << 20, 64 << 20)  # bytes of a rank


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
    rows = list[dict[str, Any]]()
    with open_world(device) as world, ExitStack() as stack:
        for name, (batch, shape) in WINDOWS.items():
            if quick and shape is not None:
                continue
            path = _written(world, shape, stack, quick=quick)
            for memory in PLACEMENTS if device.type == "cuda" else ["host"]:
                whole = 0.0
                for sharding in ("replicate", "shard"):
                    rate = _rate(path, batch, device, world, sharding, memory, quick)
                    whole = whole or rate["batches_per_second"]
                    rate["ratio"] = rate["batches_per_second"] / whole
                    row = {"window": name, "batch": batch, "memory": memory, "rows": sharding}
                    rows.append(row | rate)
        for nbytes in MESSAGES if device.type == "cuda" else ():
            rows.append(_all_to_all(nbytes, device, world))
        world.gather(None)
    return {"ranks": ranks, "results": rows}


def _written(world: World, shape: Any, stack: ExitStack, *, quick: bool) -> Path:
    """Return the path where the first rank wrote a dataset."""

    def write() -> Path:
        if shape is None:
            return stack.enter_context(hopper_like(quick=quick, shard_bytes=1 << 20)).dataset.path
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gear-benchmark-"))
        width, steps = shape
        write_rows(
            path := Path(folder) / "dataset",
            steps,
            (width,),
            actions=3,
            episode_steps=500,
            shard_bytes=16 << 20,
        )
        return path

    return Path(world.gather(str(world.lead(write) or ""))[0])


def _rate(
    path: Path,
    batch: int,
    device: torch.device,
    world: World,
    sharding: Any,
    memory: str,
    quick: bool,
) -> dict[str, float]:
    """Return the slowest rank's median."""
    loader = GearLoader(
        open_dataset(path, verify=False),
        batch_size=batch,
        context_length=CONTEXT,
        device=device,
        placement=PLACEMENTS[memory] if device.type == "cuda" else "auto",  # type: ignore[arg-type]
        world=world,
        sharding=sharding,
    )
    assert isinstance(loader.rows, MemoryRows)
    count, turns, rates = 2 * loader.rows.block_steps, 2 if quick else 5, list[float]()
    seconds = max(world.gather(timed(loader.__next__, count)))
    seconds = max(world.gather(timed(loader.__next__, count)))
    count *= max(1, int((0.05 if quick else 0.4) / (seconds * count)))
    for _ in range(turns):
        world.gather(None)
        rates.append(1 / timed(loader.__next__, count))
    slowest: float = min(world.gather(statistics.median(rates)))
    nbytes = batch * window_bytes(loader.rows.gather.groups, CONTEXT)
    loader.close()
    return {"batches_per_second": slowest, "gb_per_second": slowest * nbytes / 1e9}


def _all_to_all(nbytes: int, device: torch.device, world: World) -> dict[str, Any]:
    """Return NCCL's rate for `nbytes` of each rank; parts that stay on a GPU do not count."""
    sent = torch.ones(nbytes, dtype=torch.uint8, device=device)
    call = partial(dist.all_to_all_single, torch.empty_like(sent), sent)
    seconds = max(world.gather(gpu_seconds(call, calls=20)))
    crossing = nbytes * (world.size - 1)
    name = f"{nbytes >> 20} MiB a rank"
    return {"window": name, "rows": "NCCL all-to-all", "gb_per_second": crossing / seconds / 1e9}
