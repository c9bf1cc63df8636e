"""Placement on a GPU: every address is read by a kernel and leads to the episode's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.tables.device import DeviceMemory
from gear_offline.tables.placement import HBM, HOST, PlacedTable, place_table
from gear_offline.tables.shared import share_table
from gear_offline.tables.table import Table, TableOptions
from tests.gpu_support import ON_GPU
from tests.placement_support import make_table
from tests.support import failing_code, make_dataset

pytestmark = ON_GPU
LENGTHS = [5, 30, 1, 7, 55, 20, 3]
COPY = r"""
extern "C" __global__ void copy(const unsigned char* from, unsigned char* to, long long count) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i];
}
"""


def read_on_gpu(address: int, nbytes: int) -> bytes:
    """Read device-visible memory with a kernel."""
    cupy: Any = pytest.importorskip("cupy", reason="needs CuPy to run a kernel")
    out = cupy.zeros(nbytes, cupy.uint8)
    kernel = cupy.RawKernel(COPY, "copy")
    kernel((nbytes // 256 + 1,), (256,), (cupy.uint64(address), out, cupy.int64(nbytes)))
    return bytes(cupy.asnumpy(out).tobytes())


def gpu() -> DeviceMemory:
    return DeviceMemory(torch.device("cuda"))


def assert_readable(placed: PlacedTable, table: Table) -> None:
    offsets, margin = table.episodes.offsets, table.margin
    for addressed, source in zip(placed.groups, table.groups, strict=True):
        for episode, length in enumerate(table.episodes.lengths.tolist()):
            expected = source.rows[margin + offsets[episode] : margin + offsets[episode + 1]]
            address = int(addressed.addresses[episode])
            assert read_on_gpu(address, length * source.row_bytes) == expected.tobytes()


@pytest.mark.parametrize("placement", ["auto", "hbm", "host"])
def test_every_tier_is_read_by_a_kernel(placement: Any) -> None:
    table = make_table(LENGTHS)
    placed = place_table(table, gpu(), placement=placement)
    assert (placed.tiers == (HOST if placement == "host" else HBM)).all()
    assert_readable(placed, table)
    placed.close()


def test_both_tiers_in_one_table_from_shared_memory(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    table, memory = share_table(dataset, TableOptions(context_length=4))
    weight = [1, 0, 9, 1, 0, 9, 9]
    placed = place_table(table, gpu(), hbm_budget=64 * 40, episode_weight=weight)
    assert {HBM, HOST} <= set(placed.tiers.tolist())
    assert_readable(placed, table)
    again = place_table(table, gpu(), placement="host")  # pinned twice at once
    placed.close()
    assert_readable(again, table)
    attached, _ = share_table(dataset, TableOptions(context_length=4), handle=memory.handle())
    other = place_table(attached, gpu(), placement="host")  # another mapping of the pages
    assert_readable(other, table)
    again.close()
    other.close()
    del again, other
    third = place_table(table, gpu(), placement="host")  # after everything was let go
    assert_readable(third, table)
    third.close()


def test_errors_leave_torch_usable() -> None:
    table = make_table(LENGTHS)
    code = failing_code(lambda: place_table(table, gpu(), placement="hbm", hbm_budget=100))
    assert code == "MEMORY"
    first = place_table(table, gpu(), placement="host")
    half = Table(
        episodes=table.episodes,
        margin=table.margin,
        groups=tuple(
            type(g)(fields=g.fields, rows=g.rows[: len(g.rows) // 2]) for g in table.groups
        ),
    )
    code = failing_code(lambda: place_table(half, gpu(), placement="host"))
    assert code == "MEMORY", "registered already, as another size"
    assert int(torch.ones(1000, device="cuda").sum()) == 1000  # no error is left behind
    torch.cuda.synchronize()
    first.close()
