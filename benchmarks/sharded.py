"""Batches a second with the rows spread over nodes, against the same ranks with all rows each.

    torchrun --nproc-per-node 4 -m benchmarks sharded      each rank poses as a node

Windows of several sizes, in host and in GPU memory, and NCCL's all-to-all alone.  Rows of other
nodes in GPU memory come by NCCL, where a segment goes to the rank that holds it, or are read in
place.  GB/s are those of all ranks together; of what crosses, those of a GPU, counted from the
segments, and by the GPU's own counters of NVLink where they can be read.
"""

from __future__ import annotations

import importlib
import os
import statistics
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import (
    CONTEXT,
    gpu_seconds,
    hopper_like,
    timed,
    write_rows,
)
from gear_offline.batches.tables.table import TableOptions
from gear_offline.config.sections import Road, Sharding
from gear_offline.core.text import say
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.distributed.sharding import choose_share
from gear_offline.distributed.world import World, open_world
from gear_offline.errors import UnavailableError
from gear_offline.loaders import rows as loader_rows
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import window_bytes
from gear_offline.training.graph import capture

# batch size, numbers of a state and steps of the data; None: Hopper's
WINDOWS = {
    "1 KiB": (1024, None),
    "4 KiB": (1024, (48, 800_000)),
    "64 KiB": (512, (816, 160_000)),
    "160 KiB": (256, (2_048, 160_000)),
    "1 MiB": (128, (13_104, 24_000)),
}
PLACEMENTS = {"host": "host", "GPU": "hbm"}
ROADS: dict[str, tuple[Sharding, Road]] = {
    "each holds all": ("replicate", "auto"),
    "spread, exchanged": ("shard", "nccl"),
    "spread, in place": ("shard", "peer"),
}
ALL_LINKS = 0xFFFFFFFF
CAPTURED = 50  # batches in a graph
TURN_SECONDS = 0.4
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
                for rows_are, (sharding, road) in ROADS.items():
                    if memory == "host" and road == "peer":
                        continue
                    road = road if device.type == "cuda" else "auto"
                    how: dict[str, Any] = {"sharding": sharding, "exchange": road}
                    try:
                        rate = _rate(path, batch, device, world, memory, quick, **how)
                    except UnavailableError as error:  # on all ranks: they do not map each other
                        say(f"{rows_are}: {error}", quiet=not world.is_first)
                        continue
                    whole = whole or rate["batches_per_second"]
                    rate["ratio"] = rate["batches_per_second"] / whole
                    row = {"window": name, "batch": batch, "memory": memory, "rows": rows_are}
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
    memory: str,
    quick: bool,
    **how: Any,
) -> dict[str, float]:
    """Return the slowest rank's median, and what crosses on this one."""
    dataset = open_dataset(path, verify=False)
    loader = GearLoader(
        dataset,
        batch_size=batch,
        context_length=CONTEXT,
        device=device,
        placement=PLACEMENTS[memory] if device.type == "cuda" else "auto",  # type: ignore[arg-type]
        world=world,
        **how,
    )
    assert isinstance(loader.rows, loader_rows.MemoryRows)
    count, turns, rates = 2 * loader.rows.block_steps, 2 if quick else 5, list[float]()
    seconds = max(world.gather(timed(loader.__next__, count)))
    seconds = max(world.gather(timed(loader.__next__, count)))
    count *= max(1, int((0.05 if quick else TURN_SECONDS) / (seconds * count)))
    before = _received(device)
    for _ in range(turns):
        world.gather(None)
        rates.append(1 / timed(loader.__next__, count))
    after = _received(device)
    slowest: float = min(world.gather(statistics.median(rates)))
    window = window_bytes(loader.rows.gather.groups, CONTEXT)
    found = {"batches_per_second": slowest}
    found["gb_per_second"] = slowest * batch * window / 1e9
    engine = loader.engine
    if engine is not None and engine.draws:  # the GPU's own time, nothing waits for Python
        static = loader.static_batch()

        def enqueue(count: int = CAPTURED) -> None:
            for _ in range(count):
                static.enqueue()

        enqueue(1)
        graph = capture(enqueue)
        seconds = max(world.gather(gpu_seconds(graph.replay))) / CAPTURED
        found["captured_gb_per_second"] = batch * window / seconds / 1e9
        graph.reset()
    if how["sharding"] == "shard":
        options = TableOptions(context_length=CONTEXT)
        share = choose_share(dataset, loader.selection, world, options, "shard")
        assert share is not None
        batches = [loader.batch_at(loader.step + n).segments[:, 0].cpu() for n in range(50)]
        far = float(np.mean(share.nodes[torch.cat(batches).numpy()] != world.node))
        row_bytes = sum(group.row_bytes for group in loader.rows.gather.groups)
        crossing = far * loader.rank_batch * CONTEXT * row_bytes
        found |= {"crosses": far, "crossing_gb_per_second": slowest * crossing / 1e9}
        if before is not None and after is not None and crossing:
            found["nvlink_to_counted"] = (after - before) / (turns * count) / crossing
    loader.close()
    return found


def _received(device: torch.device) -> int | None:
    """Return the bytes of data that a GPU has received over NVLink; None where nobody says."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
        field = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS)
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    except Exception:  # it is not installed, or does not allow it
        return None
    return int(value.value.ullVal) * 1024 if value.nvmlReturn == 0 else None


def _all_to_all(nbytes: int, device: torch.device, world: World) -> dict[str, Any]:
    """Return NCCL's rate for `nbytes` of each rank; parts that stay on a GPU do not count."""
    sent = torch.ones(nbytes, dtype=torch.uint8, device=device)
    call = partial(dist.all_to_all_single, torch.empty_like(sent), sent)
    seconds = max(world.gather(gpu_seconds(call, calls=20)))
    crossing = nbytes * (world.size - 1)
    name = f"{nbytes >> 20} MiB a rank"
    return {"window": name, "rows": "NCCL all-to-all", "gb_per_second": crossing / seconds / 1e9}
