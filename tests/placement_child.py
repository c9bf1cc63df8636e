"""One of several ranks with GPUs: from every memory it gets its share of the CPU's batches.

With "nodes" as its second argument each rank poses as a node that holds a part of the rows.
"""

import os
import sys
from itertools import product
from typing import Any

import torch

from gear_offline.distributed.world import open_world, rank_device
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader

OPTIONS: tuple[dict[str, Any], ...] = (
    {"context_length": 6},
    {"context_length": 9, "padding": "left", "selection": "shuffled_epochs"},
    {"context_length": 5, "normalize_states": True, "extra_columns": ["terminals"]},
)


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return batch.model_inputs() | dict(batch.extras) | {"segments": batch.segments}


def main(path: str, ranks: str) -> None:
    if ranks == "nodes":
        os.environ["GROUP_RANK"] = os.environ["RANK"]
    places = ("hbm", "host") if ranks == "nodes" else ("hbm", "peer", "host")
    device, compared = rank_device("cuda"), 0
    with open_world(device, timeout=60) as world:
        for options, place in product(OPTIONS, places):
            options |= {"batch_size": 32 * world.size, "seed": 7}
            cpu = GearLoader(path, device="cpu", world=None, **options)
            rows: dict[str, Any] = {"sharding": "shard" if ranks == "nodes" else "replicate"}
            with GearLoader(
                path, device=device, placement=place, world=world, **rows, **options
            ) as gpu:
                for step in range(40):
                    slots = torch.from_numpy(gpu.slots_at(step))
                    expected, found = tensors(cpu.batch_at(step)), tensors(next(gpu))
                    assert expected.keys() == found.keys()
                    for name, tensor in expected.items():
                        assert torch.equal(tensor[slots], found[name].cpu()), (name, place, options)
                        compared += 1
        world.gather(None)
        if world.is_first:
            print(f"{compared} tensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
