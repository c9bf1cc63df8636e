"""Segments and their probabilities from the GPU, without gathering: one launch.

The reference is `Sampler.sample`: the same bits.

Shape legend: B slots of a step, T steps of a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gear_offline.core.types import Int64Array
from gear_offline.kernels.cuda_module import DeviceArrays, Parameters, load
from gear_offline.kernels.draws import Draw, PriorityTree, describe_sampling
from gear_offline.kernels.gather_gpu import describe_job
from gear_offline.kernels.segments import Segments

THREADS = 256
BLOCKS_PER_SM = 8


class DeviceSelect:
    """Draws from episodes at (E + 1,) `offsets` in any way that the GPU has; masses move there."""

    def __init__(
        self, draw: Draw, offsets: Int64Array, *, device: torch.device, global_batch: int
    ) -> None:
        self.device, self.global_batch = device, global_batch
        self._arrays = DeviceArrays(device)  # what addresses in the job point to
        self._kernel = load("sample.cu", ("sample_alone",), device=device.index or 0)[
            "sample_alone"
        ]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_blocks = BLOCKS_PER_SM * processors
        self._job = describe_job([], rank_batch=global_batch, global_batch=global_batch, span=1)
        self._job["sampling"] = describe_sampling(draw, offsets, arrays=self._arrays)
        self._has_chances = isinstance(draw, PriorityTree)

    def enqueue(
        self, *, seed: int, first_step: int, names: Tensor, chances: Tensor | None = None
    ) -> None:
        """Draw (T, B, 2) int64 names, on torch's current stream, without waiting.

        With (T, B) float64 `chances` the probability of each, too; of a tree only.
        """
        assert names.dtype == torch.int64 and names.is_contiguous()
        job, count = self._job.copy(), names.numel() // 2
        job["seed"], job["first_step"], job["segments"] = seed, first_step, count
        job["names"] = names.data_ptr()
        if chances is not None:
            assert self._has_chances and chances.dtype == torch.float64 and chances.is_contiguous()
            job["chances"] = chances.data_ptr()
        blocks = min(-(-count // THREADS), self._most_blocks)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._kernel.launch(blocks, THREADS, stream, Parameters(job.ctypes.data))

    def segments(self, *, seed: int, first_step: int, steps: int) -> Segments:
        """Return what `Sampler.sample` of B slots returns, by priorities; waits for the GPU."""
        shape = (steps, self.global_batch)
        names = torch.empty(*shape, 2, dtype=torch.int64, device=self.device)
        chances = torch.empty(shape, dtype=torch.float64, device=self.device)
        if names.numel():
            self.enqueue(seed=seed, first_step=first_step, names=names, chances=chances)
        named = names.cpu().numpy()
        return Segments(
            episodes=named[..., 0], starts=named[..., 1], probability=chances.cpu().numpy()
        )
