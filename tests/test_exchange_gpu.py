"""The exchange on GPUs: the collective transport over NCCL, and GPU memory as a dma-buf."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch

from gear_offline.distributed.exchange.gpu_memory import export_dma_buf
from tests import exchange_plays as plays
from tests.exchange_team import ReadRow, Team, World
from tests.test_exchange import right

RANKS = 2
ROWS = 48
SMALL = World(
    lengths=(5, 1, 9, 4, 7, 3, 8),
    row_bytes=(16, 3),
    holdings=(((0, 1), (4, 6)), ((2, 3), (5,))),
)
# reader, owner, episode, start, steps, row
READS: list[ReadRow] = [
    (0, 1, 2, 3, 6, 0), (0, 1, 5, 1, 2, 20), (1, 0, 0, 4, 1, 3), (1, 0, 6, 2, 5, 9),
    (0, 0, 1, 0, 1, 47), (1, 1, 3, 0, 4, 20), (1, 0, 4, 1, 3, 30),
]  # fmt: skip

pytestmark = [pytest.mark.gpu]
DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="run on a machine with two GPUs")
@pytest.mark.parametrize("mixed", [False, True])
def test_rows_over_nccl(mixed: bool) -> None:
    steps = [READS, [], READS[::2], READS[1::2]]
    with Team(RANKS, "nccl") as team:
        found = team.run(plays.run_steps_on_gpu, SMALL, steps, ROWS, 2, mixed)
        right(team, found, SMALL, steps, ROWS)
        host = team.run(plays.run_steps, SMALL, steps, ROWS, 2)
        right(team, host, SMALL, steps, ROWS)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="run on a machine with two GPUs")
@pytest.mark.parametrize("role", ["killed", "left", "stopped"])
def test_a_rank_that_is_gone_is_named_over_nccl(role: str) -> None:
    seconds = 6.0
    with Team(RANKS, "nccl") as team:
        for rank in range(RANKS):
            arguments = (SMALL, [READS, READS], ROWS, seconds, role, 1)
            team.start(plays.faulty, *arguments, rank=rank)
        ((error, elapsed),) = team.answers([0])
        assert error.code in ("EXCHANGE_PEER", "EXCHANGE_TIMEOUT"), error
        assert "rank 1" in error.text
        assert elapsed < seconds + 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="run on a machine with a CUDA device")
def test_gpu_memory_is_exported_as_a_dma_buf() -> None:
    memory = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")[1000:]
    supported = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(supported), DMA_BUF_SUPPORTED, 0)
    if not supported.value:
        pytest.skip("the driver exports no dma-buf: it needs the open kernel module")
    found = export_dma_buf(memory.data_ptr(), memory.numel())
    assert found.offset == memory.data_ptr() % mmap.PAGESIZE
    os.fstat(found.descriptor)
    found.close()
    with pytest.raises(OSError):
        os.fstat(found.descriptor)
