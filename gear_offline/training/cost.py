"""The cost of a training step: the model's FLOPs, the share of a chip that they use, GPU memory.

Shape legend: L blocks, h hidden size, K steps of a window, n = 3 B K tokens of a batch of B.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import TrainSettings
from gear_offline.core.system import usable_cores
from gear_offline.models.base import SequenceModel

# Dense bfloat16 products, TFLOP/s, from NVIDIA's datasheets (halved where those count sparsity),
# by how the chip names itself; the first name that fits is taken.
PEAK_TFLOPS = (
    ("B200", 2250.0),  # HGX B200 datasheet
    ("GH200", 989.0),  # Grace Hopper superchip datasheet
    ("H200 NVL", 835.5),  # H200 datasheet
    ("H200", 989.0),  # H200 datasheet, SXM
    ("H100 NVL", 835.5),  # H100 NVL datasheet
    ("H100 PCIe", 756.5),  # H100 datasheet
    ("H100", 989.0),  # H100 datasheet, SXM
    ("A100", 312.0),  # A100 datasheet
    ("A10", 125.0),  # A10 datasheet
    ("A40", 149.7),  # A40 datasheet
    ("A30", 165.0),  # A30 datasheet
    ("L40S", 362.0),  # L40S datasheet
    ("L40", 181.0),  # L40 datasheet
    ("L4", 121.0),  # L4 datasheet
)

# Bytes a parameter: weight, gradient and two moments, in float32; or float32 weight and moments
# with weight and gradient of the step in bfloat16.
STATE_BYTES = 16
CAST_BYTES = 2  # a parameter: autocast's copy of the weight
# Bytes a token, block and unit of width from the forward to the backward pass, with bfloat16
# products: measured at 87 M and 1.2 B parameters, within 15 % (tests/test_planning.py).
KEPT_COMPILED, KEPT_EAGER = 28.5, 64.0
COMPILED_FROM = 20_000  # steps: fewer do not earn back half a minute of compiling
MOST_THREADS, ONE_THREAD_FLOPS = 8, 5e9  # of a step on a CPU: below it one thread
CONTEXT_BYTES = 3 << 29  # CUDA itself, libraries, workspaces
USABLE = 0.9  # of free memory: allocators lose some in between


def step_flops(*, layers: int, width: int, context: int, segments: int, tokens: int = 3) -> float:
    """Return the FLOPs of the blocks of one step, forward and backward, of so many `tokens` a step.

    Matrix products count 6 for each of a block's 12 h^2 weights and token, attention 12 L h (3K)
    a token, as if nothing was masked.  Embeddings, heads and encoders are left out, and so is
    what is computed twice to save memory.  All tokens count in every block, also those that the
    last one leaves out.
    """
    rows = float(tokens) * segments * context
    return layers * width * rows * (72.0 * width + 12.0 * tokens * context)


def recipe_flops(recipe: Recipe, segments: int) -> float | None:
    """Return the FLOPs of a step of so many windows, as far as the model's options tell them."""
    layers, width, tokens = recipe.model.shape
    shape: Any = {"layers": layers, "width": width, "tokens": tokens}
    context = recipe.loader.context_length
    return step_flops(**shape, context=context, segments=segments) if layers else None


def is_compiled(train: TrainSettings) -> bool:
    """Return true if a run's steps are compiled."""
    pays = train.steps >= COMPILED_FROM and not train.deterministic  # it times kernels
    return train.compile == "on" or (train.compile == "auto" and pays)


def cpu_threads(recipe: Recipe) -> int:
    """Return the CPU threads of a recipe that leaves them open: OMP_NUM_THREADS, where it is set.

    More than 8 gain a quarter on 16 cores, and beside two busy ones cost 60 times as much; a small
    step gains nothing by a second one.
    """
    flops = recipe_flops(recipe, recipe.loader.batch_size) or 0.0
    if recipe.train.deterministic == "ranks":
        return 1  # on any number of ranks, for which torchrun sets the variable
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    most = 1 if flops < ONE_THREAD_FLOPS else MOST_THREADS
    return min(most, torch.get_num_threads(), usable_cores())


def has_half_gradients(recipe: Recipe, *, half: bool) -> bool:
    """Return true if gradients are in 16 bits where products are (`half`), ranks' sums included.

    Those of micro-batches are not: they would add up coarsely.
    """
    return half and recipe.train.weights == "bf16" and recipe.train.accumulate == 1


def memory_bytes(
    recipe: Recipe,
    parameters: int,
    *,
    segments: int,
    half: bool,
    shards: int = 1,
    reshard: bool = True,
) -> int:
    """Estimate the bytes that training keeps in a GPU's memory, without `CONTEXT_BYTES`.

    `segments` are the GPU's share of a batch, `half` says that products are in bfloat16.  A model
    may be sharded over `shards` ranks, and with `reshard` weights are collected for each pass, not
    kept between them.
    """
    train, narrow = recipe.train, has_half_gradients(recipe, half=half)
    state = -(-parameters * STATE_BYTES // shards)
    if shards > 1 and not reshard:
        state += parameters * (2 if half else 4)
    elif shards == 1 and half and not narrow:
        state += parameters * CAST_BYTES
    layers, width, tokens = recipe.model.shape
    block = (KEPT_COMPILED if is_compiled(train) else KEPT_EAGER) * (1 if half else 2)
    each = layers * block
    if train.recompute:  # the blocks' inputs, and one block in full
        each = layers * (2 if narrow else 4) + block
    rows = tokens * segments * recipe.loader.context_length / train.accumulate
    return state + int(rows * width * each)


def peak_tflops(device: torch.device, *, half: bool) -> float | None:
    """Return the bfloat16 peak of a device's datasheet; None: unknown."""
    if device.type != "cuda" or not half:
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(name: str) -> float | None:
    """Return the peak of a GPU by the name that its driver gives it."""
    words = name.replace("-", " ").split()
    for known, peak in PEAK_TFLOPS:
        if all(part in words for part in known.split()):
            return peak
    return None


class Meter:
    """The rate at which a rank with `segments` of each batch computes the model's FLOPs."""

    def __init__(
        self,
        recipe: Recipe,
        model: SequenceModel,
        segments: int,
        device: torch.device,
        *,
        half: bool,
    ) -> None:
        own = model.flops(segments)
        self.flops = recipe_flops(recipe, segments) if own is None else own
        self._formula = model.formula
        self.peak = peak_tflops(device, half=half)
        self._steps, self._seconds = 0, 0.0

    def add(self, steps: int, seconds: float) -> dict[str, float]:
        """Count `steps` that took `seconds`; return what to log of them."""
        self._steps += steps
        self._seconds += seconds
        if (tflops := self._rate(steps, seconds)) is None:
            return {}
        return {"tflops": tflops} | ({} if self.peak is None else {"mfu": tflops / self.peak})

    def summary(self) -> dict[str, float | str | None]:
        """Return the rate over all steps counted, for one rank."""
        tflops = self._rate(self._steps, self._seconds)
        mfu = None if self.peak is None or tflops is None else tflops / self.peak
        return {"tflops": tflops, "mfu": mfu, "peak_tflops": self.peak, "formula": self._formula}

    def text(self) -> str:
        """Return the rate over all steps counted in words; empty where it is not known."""
        tflops = self._rate(self._steps, self._seconds)
        if tflops is None:
            return ""
        if tflops < 0.1:
            return f"{1000 * tflops:,.3g} GFLOP/s"
        text = f"{tflops:,.3g} TFLOP/s" if tflops < 100 else f"{tflops:,.0f} TFLOP/s"
        if self.peak is None:
            return text
        share = f"{tflops / self.peak:.1%} of the {self.peak:,.0f} of the chip's datasheet"
        return f"{text}, {share} (MFU) ({self._formula or 'as the model says'})"

    def _rate(self, steps: int, seconds: float) -> float | None:
        if self.flops is None:
            return None
        return steps * self.flops / seconds / 1e12 if seconds else 0.0
