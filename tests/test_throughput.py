"""What is said of a step's speed: the formula, the datasheets' peaks, the means."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gear_offline.training.throughput import (
    FORMULA,
    PEAK_TFLOPS,
    Meter,
    named_peak,
    peak_tflops,
    speed_text,
    step_flops,
)
from tests.model_support import make


@pytest.mark.parametrize(("layers", "width", "context"), [(1, 16, 4), (3, 32, 7)])
def test_the_formula_counts_what_torch_counts(layers: int, width: int, context: int) -> None:
    """All tokens through all blocks, forward and backward, attention unmasked."""
    segments = 2
    model = make(layers=layers, hidden_size=width, dropout=0.0)
    tokens = torch.randn(segments, 3 * context, width, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        hidden = tokens
        for block in model.encoder.h:
            # attention in the open: FLOPs of fused kernels on a CPU are not counted
            hidden, _ = block(hidden, None, True)
        hidden.sum().backward()
    found = step_flops(layers=layers, width=width, context=context, segments=segments)
    assert counter.get_total_flops() == pytest.approx(found, rel=1e-12)


def test_the_two_ways_to_write_it() -> None:
    layers, width, context, segments = 24, 2048, 20, 512
    tokens = 3 * context * segments
    found = step_flops(layers=layers, width=width, context=context, segments=segments)
    assert found == 6 * layers * 12 * width**2 * tokens + 12 * layers * width * 3 * context * tokens


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert named_peak(name) == peak
    assert len({known for known, _ in PEAK_TFLOPS}) == len(PEAK_TFLOPS)


def test_a_cpu_has_no_peak() -> None:
    assert peak_tflops(torch.device("cpu"), half=True) is None


def test_the_meter_means_over_steps_not_over_lines() -> None:
    meter = Meter(2e12, 8.0)
    assert meter.add(1, 1.0) == {"tflops": 2.0, "mfu": 0.25}
    assert meter.add(3, 1.0) == {"tflops": 6.0, "mfu": 0.75}
    assert meter.summary() == {"tflops": 4.0, "mfu": 0.5, "peak_tflops": 8.0, "formula": FORMULA}
    assert "50.0%" in meter.text() and FORMULA in meter.text()
    unknown = Meter(2e12, None)
    assert unknown.add(2, 1.0) == {"tflops": 4.0}
    assert unknown.summary()["mfu"] is None and "%" not in unknown.text()


def test_words() -> None:
    assert speed_text(0.00123456, None) == "1.23 GFLOP/s"
    assert speed_text(612.4, 989.0).startswith("612 TFLOP/s, 61.9% of the 989")
