"""Segments and their probabilities from the GPU, without gathering: one launch.

The CPU twin is `Selection.select_many`; both give the same bits.

Shape legend: B slots of a step, T steps of a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gear_offline.kernels.arrays import DeviceArrays
from gear_offline.kernels.cuda_module import Parameters, load
from gear_offline.kernels.job import describe_job
from gear_offline.kernels.rules import D3RLPY, MIN_DT, describe_rule, law_number
from gear_offline.sampling.prioritized import numbered
from gear_offline.sampling.selection import Segments, Selection, check_range

THREADS = 256
BLOCKS_PER_SM = 8


class DeviceSelect:
    """Draws from any law that the kernels know.

    Parameters
    ----------
    selection
        The law; masses of a prioritised one move to the GPU.
    device
        The GPU.
    batch_size
        B, slots of a step.
    context_length
        K; of laws that depend on it, the one that they were made for.

    Raises
    ------
    UnavailableError
        ``ENGINE_SELECTION``, ``CUPY_MISSING``, ``CUPY_BROKEN``, ``GPU_TOO_OLD``.
    InputError
        ``SELECTION_BATCH``
    """

    def __init__(
        self,
        selection: Selection,
        *,
        device: torch.device,
        batch_size: int,
        context_length: int | None = None,
    ) -> None:
        self.device = device = numbered(device)
        self.batch_size = batch_size
        made_for: int = getattr(selection, "context_length", 1)
        span = made_for if context_length is None else context_length
        law = law_number(selection)
        if law == MIN_DT:  # raises where there are too few episodes
            selection.select(seed=0, step=0, count=batch_size)
        self._arrays = DeviceArrays(device)  # what addresses in the job point to
        self._cuts = law == D3RLPY
        self._kernel = load("laws.cu", ("laws_select",), device=device.index or 0)["laws_select"]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_blocks = BLOCKS_PER_SM * processors
        self._job = describe_job([], per_step=batch_size, whole=batch_size, span=span)
        self._job["rule"] = describe_rule(
            selection,
            arrays=self._arrays,
            make_tree=lambda prioritized: prioritized.on_device(device).tree,
            context_length=span,
        )

    def enqueue(
        self, *, seed: int, first_step: int, names: Tensor, chances: Tensor, lengths: Tensor | None
    ) -> None:
        """Draw into given memory on the GPU, on torch's current stream, without waiting.

        Parameters
        ----------
        seed, first_step
            As `Selection.select_many`.
        names
            (T, B, 2) int64: episode, start.
        chances
            (T, B) float64, the probability of each.
        lengths
            (T, B) int64, the steps of each window; may be None.
        """
        assert names.dtype == torch.int64 and names.is_contiguous()
        assert chances.dtype == torch.float64 and chances.is_contiguous()
        count = chances.numel()
        job = self._job.copy()
        job["seed"], job["first_step"], job["segments"] = seed, first_step, count
        job["names"], job["chances"] = names.data_ptr(), chances.data_ptr()
        job["mask"] = 0 if lengths is None else lengths.data_ptr()
        blocks = min(-(-count // THREADS), self._most_blocks)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._kernel.launch(blocks, THREADS, stream, Parameters(job.ctypes.data))

    def segments(self, *, seed: int, first_step: int, steps: int) -> Segments:
        """Return what `Selection.select_many` of B slots returns; waits for the GPU."""
        check_range(seed=seed, first_step=first_step, steps=steps, count=self.batch_size)
        shape = (steps, self.batch_size)
        names = torch.empty(*shape, 2, dtype=torch.int64, device=self.device)
        chances = torch.empty(shape, dtype=torch.float64, device=self.device)
        lengths = torch.empty(shape, dtype=torch.int64, device=self.device)
        if names.numel():
            self.enqueue(
                seed=seed, first_step=first_step, names=names, chances=chances, lengths=lengths
            )
        found = names.cpu().numpy()
        return Segments(
            episodes=found[..., 0],
            starts=found[..., 1],
            probability=chances.cpu().numpy(),
            lengths=lengths.cpu().numpy() if self._cuts else None,
        )
