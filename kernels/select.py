"""Segments and their probabilities from the GPU, without gathering: one launch.

The CPU twin is `Sampler.sample`; both give the same bits.

Shape legend: B slots of a step, T steps of a launch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.kernels.arrays import DeviceArrays
from gear_offline.kernels.cuda_module import Parameters, load
from gear_offline.kernels.draws import Draw
from gear_offline.kernels.gather_gpu import describe_job
from gear_offline.kernels.rules import describe_rule
from gear_offline.kernels.segments import Segments

THREADS = 256
BLOCKS_PER_SM = 8


class DeviceSelect:
    """Draws in any way that the GPU has.

    Parameters
    ----------
    draw
        How; masses move to the GPU.
    offsets
        (E + 1,) int64, first step of each episode, and N.
    device
        The GPU, by its number.
    batch_size
        B, slots of a step.
    """

    def __init__(
        self,
        draw: Draw,
        offsets: npt.NDArray[np.int64],
        *,
        device: torch.device,
        batch_size: int,
    ) -> None:
        self.device, self.batch_size = device, batch_size
        self._arrays = DeviceArrays(device)  # what addresses in the job point to
        self._kernel = load("laws.cu", ("laws_select",), device=device.index or 0)["laws_select"]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_blocks = BLOCKS_PER_SM * processors
        self._job = describe_job([], per_step=batch_size, whole=batch_size, span=1)
        self._job["rule"] = describe_rule(
            draw,
            offsets,
            arrays=self._arrays,
            make_tree=lambda masses: masses.on_device(device).tree,
        )

    def enqueue(self, *, seed: int, first_step: int, names: Tensor, chances: Tensor) -> None:
        """Draw into given memory on the GPU, on torch's current stream, without waiting.

        Parameters
        ----------
        seed, first_step
            As `Sampler.sample`.
        names
            (T, B, 2) int64: episode, start.
        chances
            (T, B) float64, the probability of each.
        """
        assert names.dtype == torch.int64 and names.is_contiguous()
        assert chances.dtype == torch.float64 and chances.is_contiguous()
        count = chances.numel()
        job = self._job.copy()
        job["seed"], job["first_step"], job["segments"] = seed, first_step, count
        job["names"], job["chances"] = names.data_ptr(), chances.data_ptr()
        blocks = min(-(-count // THREADS), self._most_blocks)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._kernel.launch(blocks, THREADS, stream, Parameters(job.ctypes.data))

    def segments(self, *, seed: int, first_step: int, steps: int) -> Segments:
        """Return what `Sampler.sample` of B slots returns; waits for the GPU."""
        shape = (steps, self.batch_size)
        names = torch.empty(*shape, 2, dtype=torch.int64, device=self.device)
        chances = torch.empty(shape, dtype=torch.float64, device=self.device)
        if names.numel():
            self.enqueue(seed=seed, first_step=first_step, names=names, chances=chances)
        named = names.cpu().numpy()
        return Segments(
            episodes=named[..., 0],
            starts=named[..., 1],
            probability=chances.cpu().numpy(),
        )
