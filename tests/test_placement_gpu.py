"""Placement on a GPU: every address is read by a kernel and histories to the episode's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.tables.host_memory import HostBlock
from gear_offline.tables.host_table import host_table
from gear_offline.tables.placement import HBM, HOST, PlacedTable, place_table
from gear_offline.tables.table import Table
from tests.gpu_support import ON_GPU
from tests.support import failing_code, make_dataset
from tests.test_placement import make_table

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


def assert_readable(found: PlacedTable, table: Table) -> None:
    offsets, margin = table.episodes.offsets, table.margin
    for group, source in zip(found.groups, table.groups, strict=True):
        assert source.rows is not None
        for e, length in enumerate(table.episodes.lengths.tolist()):
            expected = source.rows[margin + offsets[e] : margin + offsets[e + 1]]
            there = read_on_gpu(int(group.addresses[e]), length * group.row_bytes)
            assert there == expected.tobytes()


@pytest.mark.parametrize("placement", ["auto", "hbm", "host"])
def test_every_tier_is_read_by_a_kernel(placement: Any) -> None:
    table = make_table(LENGTHS)
    found = place_table(table, device="cuda", placement=placement)
    expected = HOST if placement == "host" else HBM
    assert all((group.tiers == expected).all() for group in found.groups)
    assert_readable(found, table)
    found.close()


def test_both_tiers_in_one_table_from_shared_memory(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    table, block = host_table(dataset, context_length=4)
    weight = [1, 0, 9, 1, 0, 9, 9]
    found = place_table(table, device="cuda:0", hbm_budget=64 * 40, episode_weight=weight)
    assert {HBM, HOST} <= set(found.groups[0].tiers.tolist())
    print(found.reason)
    assert_readable(found, table)
    again = place_table(table, device="cuda", placement="host")  # pinned twice at once
    found.close()
    assert_readable(again, table)
    attached, second = host_table(dataset, context_length=4, share=block.handle())
    other = place_table(attached, device="cuda", placement="host")  # another mapping of the pages
    assert_readable(other, table)
    again.close()
    other.close()
    del again, other
    third = place_table(table, device="cuda", placement="host")  # after everything was let go
    assert_readable(third, table)
    third.close()
    assert second.nbytes == block.nbytes


def test_errors_leave_torch_usable() -> None:
    table = make_table(LENGTHS)
    code = failing_code(lambda: place_table(table, device="cuda", placement="hbm", hbm_budget=100))
    assert code == "HBM_SHORT"
    block = HostBlock.create(1 << 20)
    rows = block.allocate((1 << 20,), np.dtype(np.uint8))
    from gear_offline.tables.pinning import CudaRuntime, Pinned

    runtime = CudaRuntime()
    first = Pinned(rows, runtime)
    assert failing_code(lambda: Pinned(rows, runtime)) == "HOST_PIN"  # twice, by hand
    assert int(torch.ones(1000, device="cuda").sum()) == 1000  # no error is left behind
    torch.cuda.synchronize()
    assert first.address
