"""The GPU's part in an assignment by owner: it draws global batches and names a rank's segments.

`gear_offline.distributed.sharding.Assigner` is the reference.

Shape legend: E episodes, W ranks, B segments of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.core.types import Int64Array
from gear_offline.kernels.cuda_module import DeviceArrays, load, structure

JOB = structure("AssignJob")
MOST_NODES = 32  # as cuda/assign.cu
MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Owners:
    """Who holds what, and which of them asks."""

    homes: Int64Array  # (E,) the node of each episode
    nodes: tuple[int, ...]  # (W,) that of each rank
    rank: int


class GpuAssigner:
    """Names a rank's segments, B of each step, that the GPU draws as the `job` of a gather says."""

    def __init__(self, job: npt.NDArray[Any], owners: Owners, device: torch.device) -> None:
        batch, ranks = int(job["global_batch"][0]), np.bincount(owners.nodes)
        node, share = owners.nodes[owners.rank], batch // len(owners.nodes)
        self._arrays, self._device, self._share = DeviceArrays(device), device, share
        self._threads = min(-(-batch // 32) * 32, MOST_THREADS)
        self._job = np.zeros(1, JOB)
        for name in ("seed", "global_batch", "sampling"):
            self._job[name] = job[name]
        for name, value in {
            "homes": self._arrays.keep(owners.homes),
            "shares": self._arrays.keep(ranks * share),
            "nodes": len(ranks),
            "node": node,
            "turn": owners.nodes[: owners.rank].count(node),
            "ranks": ranks[node],
            "rank_batch": share,
        }.items():
            self._job[name] = np.uint64(value)
        self._kernel = load("assign.cu", ["assign"], device=device.index or 0)["assign"]

    def names(self, steps: int) -> Tensor:
        """Return room for names, (steps, B, 4) int64, as `GpuGather.name` writes them."""
        return torch.empty((steps, self._share, 4), dtype=torch.int64, device=self._device)

    def enqueue(self, names: Tensor, *, first_step: int = 0, counter: int = 0) -> None:
        """Name the segments of consecutive steps from `first_step`, plus what lies at `counter`."""
        job = self._job.copy()
        job["first_step"], job["counter"], job["names"] = first_step, counter, names.data_ptr()
        self._kernel.launch(len(names), self._threads, job)
