"""Try each road of rows between nodes on your hosts, and print a page that you can mail.

On every host, with the same free port, and NUMBER 0 on HOST, 1 on the next:

    torchrun --nnodes 2 --node-rank NUMBER --master-addr HOST --master-port 29400 \
        --nproc-per-node gpu examples/two_hosts.py > two-hosts.txt   # without GPUs 1

Every process poses as a node, writes the same made data, and keeps its share.  By each road 200
batches are compared, row by row, with those of a loader that has all rows; then 500 are timed.
The page of the first process has everything; send it with the output of `nvidia-smi topo -m` and
`ibv_devinfo` to the project's issues.  Nothing is sent by itself.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gear_offline as go
from gear_offline.core.system import machine
from gear_offline.distributed.world import open_world, rank_device, resolve_device

ROADS = ("nccl", "rdma", "gloo", "peer")
WINDOWS = {"1 KiB": (11, 1024), "64 KiB": (816, 256)}  # numbers of a state, segments of a rank


def episodes(state_dim: int) -> Iterator[dict[str, Any]]:
    """Yield 96 made episodes, the same on every host."""
    generator = np.random.default_rng(0)
    for length in generator.integers(50, 250, 96):
        yield {
            "observations": generator.standard_normal((length, state_dim), np.float32),
            "actions": generator.standard_normal((length, 3), np.float32),
            "rewards": generator.standard_normal(length, np.float32),
        }


def try_road(dataset: go.Dataset, road: str, batch: int, device: torch.device, world: Any) -> str:
    """Compare and time batches by a road; return a line: their rate, or the error."""
    options: dict[str, Any] = {"batch_size": batch * world.size, "context_length": 20, "seed": 1}
    spread: dict[str, Any] = {"sharding": "shard", "exchange": road}
    try:
        alone = go.GearLoader(dataset, device="cpu", world=None, **options)
        loader = go.GearLoader(dataset, device=device, world=world, **spread, **options)
        for step in range(200):
            slots = loader.slots_at(step)
            mine, expected = next(loader), next(alone)
            for name in ("segments", "states", "actions", "returns_to_go", "attention_mask"):
                if not torch.equal(getattr(mine, name).cpu(), getattr(expected, name)[slots]):
                    return f"WRONG {name} at step {step} of rank {world.rank}"
        seconds = []
        for _ in range(5):
            world.gather(None)
            begin = time.perf_counter()
            for _ in range(100):
                last = next(loader)
            last.segments.sum().item()
            seconds.append((time.perf_counter() - begin) / 100)
        loader.close()
        return f"right, {1 / sorted(seconds)[2]:,.0f} batches/s"
    except go.GearError as error:
        return f"{error.code}: {error.problem}"


def main() -> None:
    """Try all roads with all windows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("--roads", default=",".join(ROADS))
    roads = parser.parse_args().roads.split(",")
    os.environ["GROUP_RANK"] = os.environ["RANK"]  # each process is a node of its own
    device = rank_device(resolve_device("auto"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = []
    with open_world(device, timeout=120) as world, tempfile.TemporaryDirectory() as folder:
        here = f"{platform.node()}: {name}, torch {torch.__version__}, {platform.platform()}"
        lines += [f"rank {rank}, {facts}" for rank, facts in enumerate(world.gather(here))]
        for window, (state_dim, batch) in WINDOWS.items():
            path = Path(folder) / str(state_dim)
            go.convert(go.from_episodes(episodes(state_dim)), path, shard_bytes=1 << 16, quiet=True)
            dataset = go.open_dataset(path)
            for road in roads:
                told = world.gather(try_road(dataset, road, batch, device, world))
                each = [f"rank {rank} {text}" for rank, text in enumerate(told)]
                lines.append(
                    f"{window}, {road}: {told[0] if len({*told}) == 1 else '; '.join(each)}"
                )
                if world.is_first:
                    print(lines[-1], file=sys.stderr, flush=True)
        if world.is_first:
            lines.insert(0, f"gear_offline {go.__version__}, {machine()}")
            print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
