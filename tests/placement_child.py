"""One of several ranks with GPUs: from every memory it gets its share of the CPU's batches.

With "nodes" as its second argument each rank poses as a node that holds a part of the rows.
"""

import os
import sys
from itertools import product
from typing import Any

from gear_offline.distributed.world import open_world, rank_device
from gear_offline.loaders.loader import GearLoader
from tests.gpu_support import same, take

OPTIONS: tuple[dict[str, Any], ...] = (
    {"context_length": 6},
    {"context_length": 9, "padding": "left", "selection": "shuffled_epochs"},
    {"context_length": 5, "normalize_states": True, "extra_columns": ["terminals"]},
)


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
                    same(next(gpu), take(cpu.batch_at(step), gpu.slots_at(step)))
                    compared += 1
        world.gather(None)
        if world.is_first:
            print(f"{compared} batches")


if __name__ == "__main__":
    main(*sys.argv[1:])
