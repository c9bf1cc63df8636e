"""8-bit products: what they round, and how far they are from products in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gear_offline as go
from gear_offline.models.eight_bit import eight_bit_linear, quantize
from tests.gpu_support import ON_GPU

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def sample(seed: int, rows: int, inputs: int, outputs: int) -> list[Tensor]:
    """Rows, weight, bias and the gradient of the result; rows differ in size by 2^16."""
    draws = torch.Generator().manual_seed(seed)
    shapes = ((rows, inputs), (inputs, outputs), (outputs,), (rows, outputs))
    values, weight, bias, gradient = (torch.randn(shape, generator=draws) for shape in shapes)
    sizes = 2.0 ** torch.randint(-8, 8, (rows, 1), generator=draws)
    return [values * sizes, weight / inputs**0.5, bias, gradient * sizes.roll(1, 0)]


def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to 4 bits of precision, with exponents as far down as a row of float8 reaches."""
    largest = np.abs(values).max(-1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / 448.0))
    exponent = np.floor(np.log2(np.maximum(np.abs(values / scale), 2.0**-6)))
    unit = 2.0 ** (exponent - 3)
    return np.asarray(np.round(values / scale / unit) * unit * scale)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), rows=st.integers(1, 40), width=st.integers(1, 40))
def test_rows_are_rounded_to_four_bits(seed: int, rows: int, width: int) -> None:
    values = sample(seed, rows, width, 1)[0]
    narrow, scale = quantize(values)
    expected = rounded(values.double().numpy())
    np.testing.assert_array_equal((narrow.double() * scale.double()).numpy(), expected)


def products(device: str, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Multiply in 8 bits and in float64: the result, and gradients of rows, weight and bias."""
    found: list[list[Tensor]] = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in tensors[:3]]
        rows, weight, bias = leaves
        above = tensors[3].to(device, torch.bfloat16).to(dtype)
        in_eight = dtype == torch.bfloat16
        result = eight_bit_linear(rows, weight, bias, dtype) if in_eight else rows @ weight + bias
        gradients = torch.autograd.grad(result, leaves, above)
        found.append([tensor.detach().cpu().double() for tensor in (result, *gradients)])
    return found[0], found[1]


def error_of(values: Tensor, exact: Tensor) -> float:
    return float((values - exact).norm() / exact.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_products_have_four_bits(device: str) -> None:
    """Even where gradients differ in size by 2^16 from row to row."""
    rows, weight, bias, above = sample(0, 512, 48, 32)
    even = 7 * nn.functional.normalize(rows)
    for values, exact in zip(*products(device, [even, weight, bias, above]), strict=True):
        assert error_of(values, exact) < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_rows_far_from_zero_keep_what_tells_them_apart(device: str) -> None:
    """As in deep blocks, whose rows are a mean to 99 % of their square."""
    _, weight, bias, _ = sample(0, 512, 64, 32)
    draws = torch.Generator().manual_seed(1)
    rows = torch.randn(512, 64, generator=draws) + 10 * torch.randn(64, generator=draws)
    above = torch.randn(512, 32, generator=draws)
    (result, _, weights, _), (exact, _, gradient, _) = products(device, [rows, weight, bias, above])
    assert error_of(result - result.mean(0), exact - exact.mean(0)) < 0.06
    assert error_of(weights, gradient) < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_sums_over_many_rows_do_not_shrink(device: str) -> None:
    rows, weight, bias, _ = sample(0, 1 << 15, 32, 32)
    even = nn.functional.normalize(rows)
    weights, gradient = (found[2] for found in products(device, [even, weight, bias, even]))
    assert error_of(weights.diagonal(), gradient.diagonal()) < 0.01


def test_rows_of_zeros_and_infinite_gradients() -> None:
    rows, weight, bias, above = (tensor.requires_grad_() for tensor in sample(1, 16, 16, 16))
    blank = torch.zeros_like(rows, requires_grad=True)
    result = eight_bit_linear(blank, weight, bias, torch.float32)
    torch.testing.assert_close(result, bias.expand_as(result))
    for gradient in torch.autograd.grad(result, (blank, weight, bias), torch.zeros_like(above)):
        assert not gradient.any()
    result = eight_bit_linear(rows, weight, bias, torch.float32)
    above = torch.full_like(above, torch.inf)
    assert not torch.autograd.grad(result, weight, above)[0].isfinite().any()


class Maps(go.SequenceModel):
    """Blocks of somebody else: one that fits, one without a bias, one of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 16)
        layers = nn.Linear(32, 16), nn.Linear(32, 16, bias=False), nn.Linear(31, 16)
        self.blocks = nn.ModuleList([nn.Sequential(layer) for layer in layers])


def test_linear_maps_of_other_peoples_blocks_multiply_in_8_bits_while_training() -> None:
    torch.manual_seed(0)
    model, rows = Maps(), nn.functional.normalize(sample(2, 32, 32, 16)[0])
    layers = [block[0] for block in model.blocks]
    before = [layer(rows[:, : layer.in_features]) for layer in layers]
    assert model.use_eight_bits() is None
    for number, layer in enumerate(layers):
        inputs = rows[:, : layer.in_features]
        result = layer(inputs.view(2, 16, -1)).flatten(0, 1)
        is_plain = layer.in_features == 31
        assert torch.equal(result, before[number]) == is_plain
        if not is_plain:
            assert error_of(result.detach(), before[number].detach()) < 0.05
            result.sum().backward()
            assert layer.weight.grad.abs().sum() > 0
        few = nn.functional.linear(inputs[:5], layer.weight, layer.bias)
        assert torch.equal(layer(inputs[:5]), few), "no multiple of 16"
        assert torch.equal(layer.eval()(inputs), before[number])
    assert type(model.head) is nn.Linear
    model.blocks = model.blocks[2:]
    assert "multiples of 16" in str(model.use_eight_bits())
