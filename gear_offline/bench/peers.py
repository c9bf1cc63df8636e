"""A table over the GPUs of a node, read by all of them at once; start it with ``torchrun``.

    torchrun --nproc-per-node 4 -m gear_offline bench peers

Every GPU gathers random segments from the whole table, of which it holds its part; times are CUDA
events, the GPUs start together, and the figure of a GPU is the median of the turns.  The peer is a
copy of whole parts from the next GPU, all at once.  What was gathered is compared with the table.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gear_offline.bench.gather import EPISODE_STEPS, SEGMENTS, event_seconds
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.distributed.assignment import Assigner
from gear_offline.distributed.world import World, open_world, rank_device
from gear_offline.errors import UnavailableError
from gear_offline.kernels.columns import ColumnGroup, Field
from gear_offline.sampling import make_sampler
from gear_offline.tables.table import Table

SIZES = (880, 4096, 65536)
LAUNCH_BYTES = 1 << 30


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about a minute."""
    if not torch.cuda.is_available() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UnavailableError(
            "DEVICE",
            "this benchmark needs several CUDA devices, one a process",
            remedy="torchrun --nproc-per-node 4 -m gear_offline bench peers",
        )
    device = rank_device("cuda")
    with open_world(device) as world:
        table_bytes = (1 if quick else 8) << 30
        # The same numbers in every process: a word says where it stands.
        memory = np.arange(table_bytes // 4, dtype=np.uint32).view(np.float32)
        rows = [_row(world, device, memory, size, 3 if quick else 9) for size in SIZES]
        return {
            "gpu": torch.cuda.get_device_name(),
            "gpus": world.size,
            "table_bytes": table_bytes,
            "results": rows,
            "assignment_microseconds": _assignment(device),
        }


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a segment size."""
    rows: list[tuple[Any, ...]] = [
        ("segment", "GB/s of each GPU", "all", "copy from the next GPU", "x copy")
    ]
    for row in document["results"]:
        speeds = row["gigabytes_per_second"]
        cells = (min(speeds), sum(speeds), min(row["copy_gigabytes_per_second"]), row["ratio"])
        rows.append((f"{row['segment_bytes']:,} B", *(f"{cell:.2f}" for cell in cells)))
    for name, value in document["assignment_microseconds"].items():
        rows.append((f"assignment, {name}: us", f"{value:.0f}", "", "", ""))
    return rows


def _row(world: World, device: torch.device, memory: Any, size: int, turns: int) -> dict[str, Any]:
    from gear_offline.kernels.gather_gpu import GpuGather
    from gear_offline.tables.placement import Ranks, place_table

    span, row_bytes = SEGMENTS[size]
    width = row_bytes // 4
    rows = memory[: len(memory) // width * width].reshape(-1, width)
    lengths = np.full((len(rows) - 2 * span) // EPISODE_STEPS, EPISODE_STEPS, np.int64)
    field = Field(name="states", dtype=np.dtype(np.float32), shape=(width,))
    group = ColumnGroup(fields=(field,), rows=rows[: int(lengths.sum()) + 2 * span])
    source = Table(episodes=EpisodeIndex(lengths), groups=(group,), margin=span)
    ranks = Ranks(rank=world.rank, nodes=tuple(world.nodes), gather=world.gather)
    placed = place_table(source, device=device, placement="peer", ranks=ranks)
    law = make_sampler("uniform_steps", placed.episodes)
    count = max(LAUNCH_BYTES // size, 1)
    engine = GpuGather(
        placed.groups,
        placed.episodes.offsets,
        device=placed.device,
        draw=law.gpu,
        seed=world.rank,
        batch_size=count,
        context_length=span,
        reads_host=placed.host_bytes > 0,
    )
    fill = engine.static()
    fill.enqueue()
    _check(fill.windows, rows, span, lengths)
    dist.barrier()
    seconds = event_seconds(fill.enqueue, turns=turns, calls=2)
    speed = count * size / seconds / 1e9
    copy = _copy(world, device, turns)
    speeds, copies = world.gather(speed), world.gather(copy)
    return {
        "segment_bytes": size,
        "reason": placed.reason,
        "gigabytes_per_second": speeds,
        "copy_gigabytes_per_second": copies,
        "ratio": min(speeds) / min(copies),
    }


def _check(windows: Any, rows: Any, span: int, lengths: Any) -> None:
    """Compare the first windows with the table, word by word."""
    some = 2000
    episodes, starts = windows.segments[:some].cpu().numpy().T
    found = windows.buffers[0][:some].cpu().numpy().view(np.uint32)
    real = np.minimum(lengths[episodes] - starts, span)
    first = span + episodes * EPISODE_STEPS + starts
    for number in range(len(real)):
        expected = rows[first[number] : first[number] + real[number]].view(np.uint32)
        assert (found[number, : real[number]] == expected).all(), "a window is not the table's"
        assert not found[number, real[number] :].any(), "padding is not zero"


def _copy(world: World, device: torch.device, turns: int) -> float:
    """GB/s of copies from the next GPU's memory, by the copy engine, all GPUs at once."""
    from gear_offline.tables.device import DeviceMemory

    memory = DeviceMemory(device)
    size = LAUNCH_BYTES // 2
    _, handle = memory.allocate_shared(size)
    handles = world.gather(handle)
    address = memory.open_shared(handles[(world.rank + 1) % world.size])
    theirs = torch.as_tensor(
        _Raw(address, size), device=torch.device("cuda", (world.rank + 1) % world.size)
    )
    mine = torch.empty(size, dtype=torch.uint8, device=device)
    dist.barrier()
    seconds = event_seconds(lambda: mine.copy_(theirs, non_blocking=True), turns=turns, calls=2)
    return size / seconds / 1e9


class _Raw:
    """Device memory as torch takes it over."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _assignment(device: torch.device) -> dict[str, float]:
    """Microseconds of assigning global batches on the GPU, in a captured graph."""
    found = {}
    for ranks, share in ((8, 1024), (64, 1024), (1024, 1024)):
        assigner = Assigner(torch.arange(ranks) // 8, device=device)
        homes = torch.randint(0, ranks, (ranks * share,), device=device)
        nodes = homes // 8
        assigner.assign(homes, nodes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assigner.assign(homes, nodes)
        seconds = event_seconds(graph.replay, turns=9, calls=5)
        found[f"{ranks} ranks x {share}"] = seconds * 1e6
    return found
