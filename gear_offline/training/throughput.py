"""How much of a chip a training step uses: the model's work, and what the chip could do.

Shape legend: L blocks, h hidden size, K steps of a window, n = 3 B K tokens of a batch of B.
"""

from __future__ import annotations

import torch

from gear_offline.config.recipe import Recipe

FORMULA = "72 L h^2 n + 36 L h K n FLOP a step of n = 3 B K tokens"

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


def step_flops(*, layers: int, width: int, context: int, segments: int) -> float:
    """Return the FLOPs of the blocks of one step, forward and backward.

    Matrix products count 6 for each of a block's 12 h^2 weights and token, attention 12 L h (3K)
    a token, as if nothing was masked.  Embeddings, heads and encoders are left out, and so is
    what is computed twice to save memory.  All tokens count in every block, also those that the
    last one leaves out.
    """
    tokens = 3.0 * segments * context
    return layers * width * tokens * (72.0 * width + 36.0 * context)


def peak_tflops(device: torch.device, *, half: bool) -> float | None:
    """Return what a device's datasheet promises for the products of a run; ``None``: unknown.

    Parameters
    ----------
    half
        Products are in bfloat16; for float32 there is no peak here.
    """
    if device.type != "cuda" or not half:
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(name: str) -> float | None:
    """Return the peak of a GPU by the name that its driver gives it."""
    words = name.replace("-", " ").split()
    for known, peak in PEAK_TFLOPS:
        parts = known.split()
        if all(part in words for part in parts):
            return peak
    return None


class Meter:
    """The rate at which a rank computes the model's FLOPs, by `step_flops`.

    Parameters
    ----------
    flops
        Of a rank's share of a step.
    peak
        TFLOP/s of the chip's datasheet, ``None`` if unknown.
    """

    def __init__(self, flops: float, peak: float | None) -> None:
        self.flops, self.peak = flops, peak
        self._steps, self._seconds = 0, 0.0

    def add(self, steps: int, seconds: float) -> dict[str, float]:
        """Count `steps` that took `seconds`; return what to log of them."""
        self._steps += steps
        self._seconds += seconds
        tflops = steps * self.flops / seconds / 1e12 if seconds else 0.0
        return {"tflops": tflops} | ({} if self.peak is None else {"mfu": tflops / self.peak})

    def summary(self) -> dict[str, float | str | None]:
        """Return the rate over all steps counted, for one rank."""
        tflops = self._steps * self.flops / self._seconds / 1e12 if self._seconds else 0.0
        return {
            "tflops": tflops,
            "mfu": None if self.peak is None else tflops / self.peak,
            "peak_tflops": self.peak,
            "formula": FORMULA,
        }

    def text(self) -> str:
        """Return the rate over all steps counted in words."""
        found = self.summary()["tflops"]
        assert isinstance(found, float)
        counted = "" if self.peak is None else f" ({FORMULA})"
        return speed_text(found, self.peak) + counted


def make_meter(recipe: Recipe, segments: int, device: torch.device, *, half: bool) -> Meter:
    """Return the meter of a rank with `segments` segments of each batch."""
    flops = step_flops(
        layers=recipe.model.layers,
        width=recipe.model.hidden_size,
        context=recipe.loader.context_length,
        segments=segments,
    )
    return Meter(flops, peak_tflops(device, half=half))


def speed_text(tflops: float, peak: float | None) -> str:
    """Return a rate of one device in words, with its share of the peak where that is known."""
    text = f"{tflops:,.3g} TFLOP/s" if tflops < 100 else f"{tflops:,.0f} TFLOP/s"
    if tflops < 0.1:
        text = f"{1000 * tflops:,.3g} GFLOP/s"
    if peak is not None:
        text += f", {tflops / peak:.1%} of the {peak:,.0f} of the chip's datasheet (MFU)"
    return text
