"""Batches for a mesh of data-parallel and tensor-parallel ranks.

    torchrun --nproc-per-node 4 examples/model_parallel.py data/hopper-medium --tp 2 --steps 10

Only the first rank of each tensor-parallel group reads data; the others hold no table and get the
batch from there.  What the last stage of a pipeline needs (actions and mask, for the loss) it can
get in the same way.  Each rank prints a line of JSON: the bytes it has read, and a digest of the
batches it worked on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gear_offline import GearLoader
from gear_offline.distributed.world import data_world
from gear_offline.loaders.batch import Batch


def read_bytes() -> int:
    """Return the bytes that this process has read from files so far."""
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(words["rchar"])


def of_the_group(batch: Batch, mesh: DeviceMesh, *, segments: int) -> dict[str, Tensor]:
    """Return the model inputs of the rank that reads, on every rank of its tensor-parallel group.

    Parameters
    ----------
    batch
        That of this rank; of `segments` segments where data are read, of none elsewhere, so that
        it tells dtypes and the other sizes on every rank.
    """
    group = mesh.get_group("tp")
    first = dist.get_global_rank(group, 0)
    found = {}
    for name, tensor in batch.model_inputs().items():
        if dist.get_rank() != first:
            tensor = tensor.new_empty(segments, *tensor.shape[1:])
        found[name] = tensor.contiguous()
        dist.broadcast(found[name], src=first, group=group)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    shape = (dist.get_world_size() // arguments.tp, arguments.tp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    world = data_world(mesh, "dp")
    before = read_bytes()
    loader = GearLoader(arguments.data, batch_size=arguments.batch_size, world=world, device=device)
    digest = hashlib.sha256()
    for _ in range(arguments.steps):
        batch = next(loader)
        inputs = of_the_group(batch, mesh, segments=arguments.batch_size // world.size)
        for name in sorted(inputs):
            digest.update(inputs[name].cpu().numpy().tobytes())
    line = {
        "rank": dist.get_rank(),
        "feeds": world.feeds,
        "bytes_read": read_bytes() - before,
        "segments_read": len(batch.segments),
        "position": loader.state_dict()["step"],
        "digest": digest.hexdigest(),
    }
    sys.stdout.write(json.dumps(line) + "\n")  # whole: the ranks share it
    sys.stdout.flush()
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
