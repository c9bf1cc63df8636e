"""A linear map and a ReLU as one matrix product.

Compiled as two operations the product writes its result, and another kernel reads it and writes it
again; cuBLAS can add the bias and clamp as it writes.  What is kept for the backward pass is the
result alone, which also says where it was clamped.

Shape legend: M rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("gear_offline::relu_linear", mutates_args=())
def relu_linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``relu(rows @ weight + bias)``: (M, I), (I, O) and (O,) of one dtype -> (M, O)."""
    return torch._addmm_activation(bias, rows, weight, use_gelu=False)


@relu_linear.register_fake
def _shape(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    rows, weight, _ = inputs
    ctx.save_for_backward(rows, weight, output)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, weight, output = ctx.saved_tensors
    passed = gradient.where(output > 0, 0.0)
    return passed @ weight.t(), rows.t() @ passed, passed.sum(0)


relu_linear.register_autograd(_differentiate, setup_context=_remember)
