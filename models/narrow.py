"""Linear maps with a few inputs or outputs, as products that a GPU is fast at.

Products of 16-bit numbers take slow kernels where a width is no multiple of 8.  On an H200, 11
states and 3 actions took 41 of the 456 us of a step of the paper's model.  Here matrices are padded
with zeros where they are used; the weights stay as they are.

Shape legend: N models or nothing, R rows, H outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

LOADED = 8  # 16-bit numbers of a load


def compute_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of `values` computes."""
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype


def half_type(weight: Tensor) -> torch.dtype | None:
    """Return the 16-bit type that a product with `weight` is in on a GPU; None: another one."""
    dtype = compute_dtype(weight)
    on_gpu = weight.device.type == "cuda"
    return dtype if on_gpu and dtype in (torch.bfloat16, torch.float16) else None


def joint_maps(
    inputs: Sequence[Tensor], maps: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> Tensor:
    """Apply a linear map to each of some inputs, all as one product in `dtype`.

    Its matrix has zeros where an input does not belong to a map, and a row for the biases, whose
    gradients then come of the product too.  These are two rows, so that they keep 16 bits and more.

    Inputs are (N, R, width), each of its own width; maps are weight (N, H, width), as linear layers
    store it, and bias (N, H).  The result is (N, R, maps, H).
    """
    biases = torch.stack([bias for _, bias in maps], dim=-2)  # (N, maps, H)
    lower = lower_half(biases)
    wide = sum(rows.shape[-1] for rows in inputs)
    blank = -(wide + 2) % LOADED
    blocks, before = [], 0
    for weight, _ in maps:
        after = wide - before - weight.shape[-1]
        blocks.append(F.pad(weight, (before, after)))
        before += weight.shape[-1]
    matrix = torch.stack(blocks, dim=-3)  # (N, maps, H, wide)
    matrix = torch.cat((matrix, (biases - lower).unsqueeze(-1), lower.unsqueeze(-1)), dim=-1)
    matrix = F.pad(matrix, (0, blank)).flatten(-3, -2)
    ones = inputs[0].new_ones(*inputs[0].shape[:-1], 2)
    rows = F.pad(torch.cat((*inputs, ones), dim=-1), (0, blank))
    product = torch.matmul(rows.to(dtype), matrix.to(dtype).transpose(-1, -2))
    return product.view(*product.shape[:-1], *biases.shape[-2:])


def narrow_linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``F.linear`` of a few outputs: as many are computed as loads are wide."""
    blank = -weight.shape[0] % LOADED
    product = F.linear(rows, F.pad(weight, (0, 0, 0, blank)), F.pad(bias, (0, blank)))
    return product[..., : weight.shape[0]]


def lower_half(values: Tensor) -> Tensor:
    """Return the rest of float32 values beyond their first 8 bits, detached; of others zeros.

    It works on bits: compilers drop a rounding to 16 bits and back.
    """
    values = values.detach()
    if values.dtype != torch.float32:
        return torch.zeros_like(values)
    return values - (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
