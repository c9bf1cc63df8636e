"""A linear map whose three products are of 8-bit numbers, on GPUs that have them.

Each row of an operand is divided by a power of two and rounded to float8 e4m3 (4 bits of precision,
largest number 448).  Powers of two let the backward pass move 8-bit numbers to another scale
without a second rounding, so rows and gradients are quantised once.  The weights' gradients are
sums over rows, which cannot take the rows' scales out, so the scales of both operands go into one.
The forward pass keeps its rows in 8 bits.

Rows of deep blocks are nearly the same vector: rounding them whole loses what tells them apart.  So
a mean c is taken off first: ``rows @ weight`` is ``(rows - c) @ weight + c @ weight``.  The last
term joins the bias; its weights' gradient is c times the bias's.  Any c is right, so every
`STRIDE`th row suffices for it; rows far smaller than c would lose bits.

``torch._scaled_mm`` sums in float32.  Its fast sums keep fewer bits: over 30,720 rows they shrank
gradients of weights by up to 28 %, so these have slow ones.

Shape legend: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gear_offline.models.narrow import compute_dtype

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = 448.0  # of its numbers
SMALLEST = 1e-15  # of a row's largest number: the product of two scales is a float32 too
MULTIPLE = 16  # of each size of a product
STRIDE = 17  # prime, so that tokens of every kind are among the rows


def eight_bit_linear(rows: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply ``rows @ weight + bias`` with 8-bit products, forward and backward.

    (..., I), (I, O) as GPT-2's maps store it, and (O,), all floating -> (..., O) of the 16-bit type
    `dtype`.  M, I and O are multiples of `MULTIPLE`.
    """
    function: Any = _EightBitProduct.apply
    product: Tensor = function(rows.flatten(0, -2), weight, bias, dtype)
    return product.view(*rows.shape[:-1], -1)


class EightBitLinear(nn.Linear):
    """A linear map that multiplies in 8 bits while training, where the rows allow it."""

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training or rows.shape[:-1].numel() % MULTIPLE:
            return super().forward(rows)
        bias = self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
        return eight_bit_linear(rows, self.weight.t(), bias, compute_dtype(rows))


class _EightBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        mean = rows[::STRIDE].mean(0, dtype=torch.float32)
        narrow, scale = quantize(rows - mean)
        ctx.save_for_backward(narrow, scale, mean, weight)
        ctx.rows_kind, ctx.bias_kind = rows.dtype, bias.dtype
        by_output, scales = quantize(weight.t())  # (O, I)
        bias = (bias + (mean[:, None] * weight).sum(0)).to(dtype)
        return _product(narrow, by_output, scale, scales.t(), dtype, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        narrow, scale, mean, weight = ctx.saved_tensors
        dtype = gradient.dtype
        back, back_scale = quantize(gradient)  # (M, O)
        by_input, scales = quantize(weight)  # (I, O)
        rows = _product(back, by_input, back_scale, scales.t(), dtype)
        row_scales = scale * back_scale
        largest = row_scales.max()
        shifted = (back.float() * (row_scales / largest)).to(EIGHT_BITS)
        turned = shifted.t().contiguous()  # (O, M)
        ones = torch.ones_like(largest)
        weights = _product(narrow.t().contiguous(), turned, ones, largest, dtype, fast=False)
        biases = gradient.sum(0, dtype=torch.float32)
        weights = weights + mean[:, None] * biases
        return rows.to(ctx.rows_kind), weights.to(weight.dtype), biases.to(ctx.bias_kind), None


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row by a power of two and round it to 8 bits.

    Returns the numbers, (A, B) float8, and the scales that give `values` back, (A, 1) float32.
    """
    largest = values.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST)
    scale = torch.exp2(torch.ceil(torch.log2(largest / LARGEST)))
    return (values * (1.0 / scale)).to(EIGHT_BITS).contiguous(), scale


def _product(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = True,
) -> Tensor:
    """Multiply (A, C) by the transpose of (B, C): (A, B).

    Scales are (A, 1) and (1, B), or scalars.  `fast` sums keep about 14 bits.
    """
    if left.device.type != "cuda":  # the definition, for tests
        product = left.float() @ right.float().t() * (left_scale * right_scale)
        return (product if bias is None else product + bias.float()).to(dtype)
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scale,
        scale_b=right_scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
