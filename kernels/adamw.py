"""Clipping and AdamW over all parameters in two launches, for steps captured as CUDA graphs.

PyTorch's fused AdamW gives a block 65,536 elements, which leaves most of a large GPU idle for a
small model, and clipping takes a dozen launches more.  Together they take 103 us of a 504 us step
of the paper's model on an H200, 6.5 us here.  A block takes `PIECE` elements at once and scales
gradients as it reads them.  Step number, learning rate and metrics row stay on the GPU.

Shape legend: P parameters, C pieces of them, n rows of metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gear_offline.core.types import Int64Array
from gear_offline.errors import GearError
from gear_offline.kernels.cuda_module import load, structure

# As in cuda/adamw.cu.
THREADS = 256
PIECE = 1024  # elements: four a thread
MOST_PARTIALS = 512  # sums of the norm: two a thread
KINDS = ("constant", "linear", "cosine")
JOBS = structure("AdamwJobs")
JOB, MOST_JOBS = JOBS["jobs"].base, JOBS["jobs"].shape[0]
COLUMNS = tuple(structure("Piece").fields or ())  # of a piece

LEAST_GROUP = 4  # pieces a sum is over: as many as a block reads at once
STEP_BLOCKS_PER_SM = 6  # that are there at once, with 40 registers a thread
EPSILON = 1e-8  # PyTorch's default


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step; the kernel computes the same.

    It rises to `peak` over `warmup` steps, as in the paper's code: step 0 already moves, with
    ``1 / warmup`` of it.  Then it stays, or falls to zero at `steps`.
    """

    peak: float
    warmup: int = 0
    steps: int = 1
    kind: Literal["constant", "linear", "cosine"] = "constant"

    def rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        remaining = max(0.0, (self.steps - step) / max(1, self.steps - self.warmup))
        if self.kind == "linear":
            return self.peak * remaining
        return self.peak * 0.5 * (1.0 - math.cos(math.pi * remaining))


class DeviceAdamW:
    """AdamW of a model, or of a group of its parameters, whose state is in GPU memory.

    `parameters` are float32, on one GPU.  `shadows` are the same ones as the model computes with
    them, bfloat16: each update writes them too, and the gradients are theirs.  Without them the
    model computes with the parameters.  Options are those of a recipe's ``optimizer``.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        schedule: Schedule,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        clip_norm: float | None,
        shadows: Sequence[Tensor] | None = None,
    ) -> None:
        self._device = device = parameters[0].device
        self._parameters = list(parameters)
        self._shadows = None if shadows is None else list(shadows)
        self.first = [torch.zeros_like(parameter) for parameter in self._parameters]  # moments
        self.second = [torch.zeros_like(parameter) for parameter in self._parameters]
        self.steps = torch.zeros(len(self._parameters), device=device)  # (P,) done
        cuts = cut([p.numel() for p in parameters])
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        # Pieces that a partial sum of the norm covers, and the number of sums: alike on every GPU.
        group = max(LEAST_GROUP, -(-len(cuts) // MOST_PARTIALS))
        partials = -(-len(cuts) // group)
        self._norm_blocks = 1 + partials  # the first prepares the step
        self._cuts = torch.from_numpy(cuts).to(device)
        self._addresses = torch.zeros(len(self._parameters), len(COLUMNS), dtype=torch.int64)
        self._sent = torch.zeros_like(self._addresses)  # what the GPU knows
        self._pieces = torch.zeros(len(cuts), len(COLUMNS), dtype=torch.int64, device=device)
        self._partials = torch.zeros(partials, dtype=torch.float64, device=device)
        self._rule = torch.zeros(structure("Rule").itemsize, dtype=torch.uint8, device=device)
        self._squares = torch.zeros(1, dtype=torch.float64, device=device)
        self._job = np.zeros(1, JOB)
        for name, value in {
            "pieces": self._pieces.data_ptr(),
            "piece_count": len(cuts),
            "group": group,
            "partials": self._partials.data_ptr(),
            "partial_count": partials,
            "rule": self._rule.data_ptr(),
            "counts": self.steps.data_ptr(),
            "tensor_count": len(self._parameters),
            "kind": KINDS.index(schedule.kind),
            "warmup": schedule.warmup,
            "steps": schedule.steps,
            "rate": schedule.peak,
            "beta1": betas[0],
            "beta2": betas[1],
            "epsilon": EPSILON,
            "decay": weight_decay,
            "limit": math.inf if clip_norm is None else clip_norm,
        }.items():
            self._job[name] = value
        suffix = "" if shadows is None else "_shadowed"
        names = (f"adamw_norm{suffix}", f"adamw_step{suffix}")
        self._norm, self._step = load("adamw.cu", names, device=device.index or 0).values()

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each parameter by the names of ``torch.optim.AdamW``."""
        moments = zip(self.steps.unbind(), self.first, self.second, strict=True)
        return [{"step": s, "exp_avg": m, "exp_avg_sq": v} for s, m, v in moments]

    def send_addresses(self) -> None:
        """Write the table of pieces: where parameters, moments and gradients lie."""
        addresses = self._addresses.to(self._device)
        torch.index_select(addresses, 0, self._cuts[:, 0], out=self._pieces)
        gradient_bytes = 4 if self._shadows is None else 2
        for column, width in enumerate((gradient_bytes, 0, 4, 4, 4, 2)):
            self._pieces[:, column].add_(self._cuts[:, 1], alpha=width)
        self._pieces[:, COLUMNS.index("count")] = self._cuts[:, 2]
        self._sent = self._addresses.clone()

    def _prepare(self, update: Update) -> None:
        """Describe the step to come."""
        computed = self._parameters if self._shadows is None else self._shadows
        for number, (parameter, used) in enumerate(zip(self._parameters, computed, strict=True)):
            gradient = used.grad
            if (
                gradient is None
                or gradient.dtype != used.dtype
                or not laid_out_alike(gradient, parameter)
                or not laid_out_alike(used, parameter)
            ):
                problem = f"the gradient of parameter {number} of shape {tuple(parameter.shape)} "
                problem += "is missing or laid out otherwise"
                raise GearError("MODEL", problem, remedy="use train.graph=off")
            moments = (self.first[number].data_ptr(), self.second[number].data_ptr())
            places = (gradient.data_ptr(), 0, parameter.data_ptr(), *moments, used.data_ptr())
            for column, address in enumerate(places):
                self._addresses[number, column] = address
        if not torch.cuda.is_current_stream_capturing() and not torch.equal(
            self._addresses, self._sent
        ):
            self.send_addresses()
        job, groups = self._job, update.groups
        job["index"], job["row"] = update.index.data_ptr(), update.row.data_ptr()
        job["window"], job["window_rows"] = update.window.data_ptr(), len(update.window)
        job["loss"], job["squares"] = update.loss.data_ptr(), groups[0]._squares.data_ptr()
        job["is_last"] = self is groups[-1]


@dataclass(frozen=True)
class Update:
    """A step of one model, whose groups of parameters are clipped and updated each on its own."""

    groups: Sequence[DeviceAdamW]
    loss: Tensor  # scalar float32
    index: Tensor  # (1,) int64: the step to do, counted from 0; it is advanced
    row: Tensor  # (1,) int64: of `window`; it is advanced
    # (n, 2) float32: loss and norm of all gradients before clipping, in no row that is not there
    window: Tensor


def enqueue_together(updates: Sequence[Update]) -> None:
    """Clip, update, write the metrics and count, on torch's current stream.

    These are two launches a group, for up to `MOST_JOBS` models.  The models have parameters of the
    same sizes in the same groups, all shadows or none, and are on one GPU.  While a graph is
    captured the addresses of gradients cannot be sent to the GPU: call
    `DeviceAdamW.send_addresses` before the first replay.
    """
    for begin in range(0, len(updates), MOST_JOBS):
        chunk = updates[begin : begin + MOST_JOBS]
        launches = []
        for place, first in enumerate(chunk[0].groups):
            jobs = np.zeros(1, JOBS)
            jobs["count"] = count = len(chunk)
            for number, update in enumerate(chunk):
                adamw = update.groups[place]
                assert (adamw._shadows is None) == (first._shadows is None), "of one kind"
                assert len(adamw._cuts) == len(first._cuts), "of one shape"
                adamw._prepare(update)
                jobs["jobs"][0, number] = adamw._job[0]
            blocks = step_blocks(len(first._cuts), first._processors, models=count)
            first._norm.launch(count * first._norm_blocks, THREADS, jobs)
            launches.append((first, count * blocks, jobs))
        for first, blocks, jobs in launches:  # the last one ends the step that the others read
            first._step.launch(blocks, THREADS, jobs)


def cut(sizes: Sequence[int]) -> Int64Array:
    """Return (C, 3) int64: tensor, first element and elements of each piece of these tensors."""
    rows = [
        (number, begin, min(PIECE, size - begin))
        for number, size in enumerate(sizes)
        for begin in range(0, size, PIECE)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def step_blocks(pieces: int, processors: int, *, models: int) -> int:
    """Return the blocks that update one of `models` models, all of which run at once.

    Each has as many pieces as the others, or one less.
    """
    most = max(1, STEP_BLOCKS_PER_SM * processors // models)
    turns = max(1, -(-pieces // most))
    return -(-pieces // turns)


def laid_out_alike(tensor: Tensor, other: Tensor) -> bool:
    """Return true if the elements of two tensors of one shape lie in the same order.

    Strides of dimensions of size 1 mean nothing, and autograd does not keep them.
    """
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or first == second for size, first, second in strides)
