"""Clipping and AdamW over all parameters in two launches, for steps captured as CUDA graphs.

PyTorch's fused AdamW gives a block 65,536 elements, which leaves most of a large GPU idle for a
small model, and clipping takes a dozen launches more.  Here a block takes `CHUNK` elements, the
gradients are scaled as they are read, and what a step leaves in the metrics is written by the way.

Shape legend: P parameters, C chunks, n rows of metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.errors import GearError
from gear_offline.kernels.cuda_module import Parameters, load

THREADS = 256
CHUNK = 1024  # elements: more only leaves multiprocessors idle
BLOCKS_PER_SM = 8
EPSILON = 1e-8  # PyTorch's default

_POINTERS = (
    *("tensors", "chunks", "chunk_count", "partials", "partial_count", "rates", "index"),
    *("row", "window", "loss", "steps", "tensor_count", "ticket"),
)
_NUMBERS = ("beta1", "beta2", "epsilon", "decay", "limit")
JOB = np.dtype([*((n, np.uint64) for n in _POINTERS), *((n, np.float64) for n in _NUMBERS)])
MOST_JOBS = 16
JOBS = np.dtype([("count", np.uint64), ("jobs", JOB, MOST_JOBS)])


def cut(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return (C, 3) int64: tensor, first element and elements of each chunk."""
    rows = [
        (number, begin, min(CHUNK, size - begin))
        for number, size in enumerate(sizes)
        for begin in range(0, size, CHUNK)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def describe(
    *, betas: tuple[float, float], weight_decay: float, clip_norm: float | None, **pointers: int
) -> npt.NDArray[Any]:
    """Return a `JOB` of shape (1,), `AdamwJob` of ``cuda/adamw.cuh``."""
    job = np.zeros(1, JOB)
    job["beta1"], job["beta2"], job["epsilon"] = *betas, EPSILON
    job["decay"] = weight_decay
    job["limit"] = math.inf if clip_norm is None else clip_norm
    for name, value in pointers.items():
        job[name] = value
    return job


def laid_out_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether the elements of two tensors of one shape lie in the same order.

    Strides of dimensions of size 1 mean nothing, and autograd does not keep them.
    """
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in strides)


class DeviceAdamW:
    """AdamW whose state, schedule and step number are in GPU memory.

    Parameters
    ----------
    parameters
        float32, on one GPU.
    shadows
        The same parameters as the model computes with them, bfloat16: each update writes them
        too, and the gradients are theirs.  ``None``: the model computes with the parameters.
    rates
        Learning rate of every step, float32 on that GPU.
    betas, weight_decay, clip_norm
        As `gear_offline.recipe.OptimizerSettings`.

    Attributes
    ----------
    first, second
        Moments, one a parameter, laid out as it.
    steps
        (P,) float32, steps done.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rates: Tensor,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        clip_norm: float | None,
        shadows: Sequence[Tensor] | None = None,
    ) -> None:
        device = rates.device
        self._parameters, self._rates = list(parameters), rates
        self._shadows = None if shadows is None else list(shadows)
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]
        self.steps = torch.zeros(len(self._parameters), device=device)
        chunks = cut([p.numel() for p in parameters])
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._blocks = min(len(chunks), BLOCKS_PER_SM * processors)
        self._chunks = torch.from_numpy(chunks).to(device)
        self._tensors = torch.zeros(len(self._parameters), 5, dtype=torch.int64, device=device)
        self._addresses = torch.zeros_like(self._tensors, device="cpu")
        self._sent = torch.zeros_like(self._addresses)  # what the GPU knows
        self._partials = torch.zeros(self._blocks, dtype=torch.float64, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int64, device=device)
        self._job = describe(
            betas=betas,
            weight_decay=weight_decay,
            clip_norm=clip_norm,
            tensors=self._tensors.data_ptr(),
            chunks=self._chunks.data_ptr(),
            chunk_count=len(chunks),
            partials=self._partials.data_ptr(),
            partial_count=self._blocks,
            rates=rates.data_ptr(),
            steps=self.steps.data_ptr(),
            tensor_count=len(self._parameters),
            ticket=self._ticket.data_ptr(),
        )
        suffix = "" if shadows is None else "_shadowed"
        names = (f"adamw_norm{suffix}", f"adamw_step{suffix}")
        kernels = load("adamw.cu", names, device=device.index or 0)
        self._norm, self._step = (kernels[name] for name in names)

    def enqueue(self, loss: Tensor, *, index: Tensor, row: Tensor, window: Tensor) -> None:
        """Clip, update, write the metrics and count, on torch's current stream.

        While a graph is captured the addresses of gradients cannot be sent to the GPU: call
        `send_addresses` before the first replay.

        Parameters
        ----------
        loss
            Scalar float32 on the GPU.
        index, row
            (1,) int64: the step to do, counted from 0, and its row of `window`; both are advanced.
        window
            (n, 2) float32: loss, and norm of the gradients before clipping.

        Raises
        ------
        GearError
            ``GRADIENT_LAYOUT`` if a gradient is missing, of another type than that of the weights
            the model computes with, or not laid out as its parameter.
        """
        self._prepare(loss, index=index, row=row, window=window)
        parameters = Parameters(self._job.ctypes.data)
        stream = torch.cuda.current_stream(self._rates.device).cuda_stream
        self._norm.launch(self._blocks, THREADS, stream, parameters)
        self._step.launch(self._blocks, THREADS, stream, parameters)

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each parameter by the names of ``torch.optim.AdamW``."""
        parts = zip(self.steps.unbind(), self.first, self.second, strict=True)
        return [{"step": s, "exp_avg": m, "exp_avg_sq": v} for s, m, v in parts]

    def send_addresses(self) -> None:
        """Tell the GPU where parameters, moments and gradients lie."""
        self._tensors.copy_(self._addresses)
        self._sent = self._addresses.clone()

    def _prepare(self, loss: Tensor, *, index: Tensor, row: Tensor, window: Tensor) -> None:
        """Describe the step to come; as `enqueue`."""
        computed = self._parameters if self._shadows is None else self._shadows
        for number, (parameter, used) in enumerate(zip(self._parameters, computed, strict=True)):
            gradient = used.grad
            if (
                gradient is None
                or gradient.dtype != used.dtype
                or not laid_out_alike(gradient, parameter)
                or not laid_out_alike(used, parameter)
            ):
                raise GearError(
                    "GRADIENT_LAYOUT",
                    f"the gradient of parameter {number} of shape {tuple(parameter.shape)} is "
                    "missing or laid out otherwise",
                    remedy="use train.graph=off",
                )
            places = (parameter, self.first[number], self.second[number], gradient, used)
            for column, tensor in enumerate(places):
                self._addresses[number, column] = tensor.data_ptr()
        if not torch.cuda.is_current_stream_capturing() and not torch.equal(
            self._addresses, self._sent
        ):
            self.send_addresses()
        job = self._job
        job["index"], job["row"] = index.data_ptr(), row.data_ptr()
        job["window"], job["loss"] = window.data_ptr(), loss.data_ptr()


@dataclass(frozen=True)
class Update:
    """A step of one model: as the parameters of `DeviceAdamW.enqueue`."""

    adamw: DeviceAdamW
    loss: Tensor
    index: Tensor
    row: Tensor
    window: Tensor


def enqueue_together(updates: Sequence[Update]) -> None:
    """As `DeviceAdamW.enqueue` for each, in two launches for up to `MOST_JOBS` models.

    Parameters
    ----------
    updates
        Of models with parameters of the same sizes, without shadows, on one GPU.
    """
    for first in range(0, len(updates), MOST_JOBS):
        some = updates[first : first + MOST_JOBS]
        jobs = np.zeros(1, JOBS)
        jobs["count"] = len(some)
        for number, update in enumerate(some):
            adamw = update.adamw
            assert adamw._shadows is None and adamw._blocks == some[0].adamw._blocks, "one shape"
            adamw._prepare(update.loss, index=update.index, row=update.row, window=update.window)
            jobs["jobs"][0, number] = adamw._job[0]
        device = some[0].adamw._rates.device
        names = ("adamw_norm_together", "adamw_step_together")
        kernels = load("adamw.cu", names, device=device.index or 0)
        parameters = Parameters(jobs.ctypes.data)
        stream = torch.cuda.current_stream(device).cuda_stream
        for name in names:
            blocks = len(some) * some[0].adamw._blocks
            kernels[name].launch(blocks, THREADS, stream, parameters)
