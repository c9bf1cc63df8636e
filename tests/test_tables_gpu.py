"""Placement on a GPU: host memory that several tables pin, and errors that leave no trace."""

import os
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.batches.tables.device import DeviceMemory
from gear_offline.batches.tables.placement import HOST, PlacedTable, place_table
from gear_offline.batches.tables.shared import share_table
from gear_offline.batches.tables.table import Table, TableOptions
from gear_offline.distributed.world import open_world, rank_device
from gear_offline.loaders.loader import GearLoader
from tests.gpu_support import ON_GPU, ON_TWO_GPUS, same, take
from tests.placement_support import make_table
from tests.ranks_support import launch
from tests.support import failing_code, make_dataset

pytestmark = ON_GPU
LENGTHS = [5, 30, 1, 7, 55, 20, 3]
COPY = r"""
extern "C" __global__ void copy(const unsigned char* from, unsigned char* to, long long count) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i];
}
"""


def place(table: Table, **options: Any) -> PlacedTable:
    return place_table(table, DeviceMemory(torch.device("cuda")), **options)


def assert_readable(placed: PlacedTable, table: Table) -> None:
    """Read every episode's bytes with a kernel."""
    cupy: Any = pytest.importorskip("cupy", reason="needs CuPy to run a kernel")
    kernel, offsets = cupy.RawKernel(COPY, "copy"), table.episodes.offsets + table.margin
    for addressed, source in zip(placed.groups, table.groups, strict=True):
        for episode, address in enumerate(addressed.addresses.tolist()):
            rows = source.rows[offsets[episode] : offsets[episode + 1]]
            found = cupy.zeros(rows.nbytes, cupy.uint8)
            arguments = (cupy.uint64(address), found, cupy.int64(rows.nbytes))
            kernel((rows.nbytes // 256 + 1,), (256,), arguments)
            assert bytes(cupy.asnumpy(found).tobytes()) == rows.tobytes()


def test_shared_memory_is_pinned_by_several_tables_at_once(tmp_path: Path) -> None:
    dataset, options = make_dataset(tmp_path, LENGTHS), TableOptions(context_length=4)
    table, memory = share_table(dataset, options)
    placed = place(table, hbm_budget=64 * 40, episode_weight=[1, 0, 9, 1, 0, 9, 9])
    assert set(placed.owners.tolist()) == {0, HOST}
    assert_readable(placed, table)
    again = place(table, placement="host")  # pinned twice at once
    del placed
    assert_readable(again, table)
    attached, _ = share_table(dataset, options, handle=memory.handle())
    other = place(attached, placement="host")  # another mapping of the pages
    assert_readable(other, table)
    del again, other
    third = place(table, placement="host")  # after everything was let go
    assert_readable(third, table)


def test_errors_leave_torch_usable() -> None:
    table = make_table(LENGTHS)
    assert failing_code(lambda: place(table, placement="hbm", hbm_budget=100)) == "MEMORY"
    first = place(table, placement="host")
    halves = tuple(
        replace(group, rows=group.rows[: len(group.rows) // 2]) for group in table.groups
    )
    half = Table(episodes=table.episodes, margin=table.margin, groups=halves)
    code = failing_code(lambda: place(half, placement="host"))
    assert code == "MEMORY", "registered already, as another size"
    assert int(torch.ones(1000, device="cuda").sum()) == 1000  # no error is left behind
    del first


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=ON_TWO_GPUS) for n in ("gpus", "nodes")])
def test_ranks_get_the_batches_of_a_cpu_from_every_memory(tmp_path: Path, ranks: str) -> None:
    data = make_dataset(tmp_path, [30, 7, 44, 12, 5, 61], shard_bytes=3000).path
    done = launch(2, "-m", "tests.test_tables_gpu", str(data), ranks, timeout=150)
    assert int(done.stdout.split()[-2]) >= 40 * 3 * 2, "batches were compared"


OPTIONS: tuple[dict[str, Any], ...] = (
    {"context_length": 6},
    {"context_length": 9, "padding": "left", "selection": "shuffled_epochs"},
    {"context_length": 5, "normalize_states": True, "extra_columns": ["terminals"]},
    {"context_length": 3, "chunk": 20},  # every node holds all rows
)


def main(path: str, ranks: str) -> None:
    """One of several ranks: from every memory it gets its share of the CPU's batches.

    With "nodes" each rank poses as a node that holds a part of the rows.
    """
    if ranks == "nodes":
        os.environ["GROUP_RANK"] = os.environ["RANK"]
    places = ("auto", "hbm", "host") if ranks == "nodes" else ("hbm", "peer", "host")
    device, compared = rank_device("cuda"), 0
    with open_world(device, timeout=60) as world:
        for options, place in product(OPTIONS[: None if ranks == "gpus" else -1], places):
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
