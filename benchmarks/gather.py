"""The GPU engine's rates: windows from GPU memory, pinned host memory and other GPUs.

Each figure is a batch that the engine selects and gathers, in place, by CUDA events; bytes are
those of the columns, each counted once (16 bytes a step of timesteps and mask come on top).  Peers
of the same run: one large pinned copy (the bus), and `torch.index_select` of whole segments.  Under
torchrun the ranks of a node read a table that is spread over their GPUs, all at once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    CONTEXT,
    captured_seconds,
    gpu_seconds,
    hopper_like,
    need_cuda,
    write_rows,
)
from gear_offline.core.progress import Progress
from gear_offline.distributed.world import World, open_world, rank_device
from gear_offline.loaders.loader import GearLoader

# bytes of a window: its steps, and float32 states of a step; 2 actions, reward, returns besides
WINDOWS = {256: (4, 12), 880: (5, 40), 2048: (4, 124), 4096: (4, 252), 1 << 20: (4, (1 << 16) - 4)}
LAUNCH_BYTES = 1 << 30
STRATEGIES = ("uniform_steps", "return_weighted", "shuffled_epochs", "prioritized")


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about two minutes, with 1 GiB of rows (`quick`: a quarter)."""
    need_cuda()
    device = rank_device("cuda")
    with open_world(device) as world:
        rows = _windows(device, world, quick=quick)
        if world.size == 1:
            rows += _small_batches(quick=quick) + _histories(quick=quick)
    return {"gpus": world.size, "results": rows}


def _windows(device: torch.device, world: World, *, quick: bool) -> list[dict[str, Any]]:
    tiers = ("host", "hbm") if world.size == 1 else ("peer",)
    nbytes = (1 << 28) if quick else (1 << 30)
    bus = None if world.size > 1 else _bus()
    rows = []
    quiet = not world.is_first
    with Progress("gather", total=len(WINDOWS), unit="sizes", quiet=quiet) as progress:
        for size, (span, states) in WINDOWS.items():
            with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
                path = Path(folder) / "dataset"
                if world.is_first:
                    sizes: Any = {"actions": 2, "episode_steps": 1000, "shard_bytes": 64 << 20}
                    write_rows(path, nbytes // (size // span), (states,), **sizes)
                path = Path(world.gather(str(path))[0])
                for tier in tiers:
                    count = LAUNCH_BYTES // size
                    loader = GearLoader(
                        path,
                        batch_size=count * world.size,
                        context_length=span,
                        device=device,
                        engine="on",
                        placement=tier,  # type: ignore[arg-type]
                        world=world if world.size > 1 else None,
                    )
                    seconds = gpu_seconds(loader.static_batch().enqueue)
                    speeds = world.gather(count * size / seconds / 1e9)
                    peer = bus if tier == "host" else _index_select(size)
                    rows.append(
                        {
                            "what": tier,
                            "window_bytes": size,
                            "gigabytes_per_second": min(speeds),
                            "million_segments_per_second": count / seconds / 1e6,
                            "peer_gigabytes_per_second": None if tier == "peer" else peer,
                        }
                    )
                    loader.close()
                    del loader
                    torch.cuda.empty_cache()
                world.gather(None)
            progress.advance()
    return rows


def _small_batches(*, quick: bool) -> list[dict[str, Any]]:
    """One batch of 64 windows of 20 hopper records inside a CUDA graph, by strategy."""
    rows = []
    with hopper_like(quick=quick) as data:
        for tier, strategy in [("host", STRATEGIES[0]), *(("hbm", name) for name in STRATEGIES)]:
            loader = GearLoader(
                data.dataset,
                batch_size=64,
                context_length=CONTEXT,
                selection=strategy,
                device="cuda",
                engine="on",
                placement=tier,  # type: ignore[arg-type]
            )
            seconds = captured_seconds(loader.static_batch().enqueue)
            rows.append(
                {"what": f"{strategy}, B=64, {tier}, in a graph", "microseconds": seconds * 1e6}
            )
            loader.close()
    return rows


def _histories(*, quick: bool) -> list[dict[str, Any]]:
    """Windows over the ends of episodes of 20 steps: one GiB of them, and one batch of 64."""
    rows, row_bytes = list[dict[str, Any]](), 4 * (11 + 3 + 2) + 8  # and timesteps, a column here
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        path, steps = Path(folder) / "dataset", ((1 << 28) if quick else (1 << 30)) // row_bytes
        sizes: Any = {"actions": 3, "episode_steps": 20, "shard_bytes": 64 << 20, "histories": 64}
        write_rows(path, steps, (11,), **sizes)
        for tier in ("host", "hbm"):
            for span in (1024, 4096):
                size = span * row_bytes
                for count in (LAUNCH_BYTES // size, 64):
                    options: Any = {"batch_size": count, "context_length": span, "span": "history"}
                    options |= {"device": "cuda", "engine": "on", "placement": tier}
                    with GearLoader(path, **options) as loader:
                        seconds = gpu_seconds(loader.static_batch().enqueue)
                    what, rate = f"history, K={span:,}, B={count:,}, {tier}", count * size / seconds
                    rows.append({"what": what, "gigabytes_per_second": rate / 1e9})
                    del loader
                    torch.cuda.empty_cache()
    return rows


def _index_select(size: int) -> float:
    """GB/s of `torch.index_select` of whole, aligned segments out of GPU memory."""
    source = torch.empty(LAUNCH_BYTES // size, size // 4, device="cuda")
    index = torch.randint(len(source), (len(source),), device="cuda")
    out = torch.empty_like(source)
    return LAUNCH_BYTES / gpu_seconds(lambda: torch.index_select(source, 0, index, out=out)) / 1e9


def _bus() -> float:
    pinned = torch.empty(LAUNCH_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(LAUNCH_BYTES, dtype=torch.uint8, device="cuda")
    return LAUNCH_BYTES / gpu_seconds(lambda: target.copy_(pinned, non_blocking=True)) / 1e9
