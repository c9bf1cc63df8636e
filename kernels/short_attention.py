"""Causal attention over short windows, straight from and to the packed projections.

Library kernels are made for thousands of tokens.  A window of a Decision Transformer has tens:
there attention is bound by memory, and what costs is reading tensors more often than needed and
putting the three gradients together again.  Here a program does one head of one window: queries,
keys and values are read once from where the projection left them, and the gradients are written
to where its backward wants them.

Triton comes with CUDA builds of torch; `packed_attention_reference` is the same in plain torch.

Shape legend: B windows, T tokens, N heads, D elements of a head, H = N D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs do not bring it
    triton = None

MOST_TOKENS = 128
HEAD_SIZES = (16, 32, 64, 128)
LOG2_E = 1.4426950408889634


def supports_packed(device: torch.device, dtype: torch.dtype, *, tokens: int, head: int) -> bool:
    """Whether the kernels take such windows: on CUDA, 16-bit, short, with usual heads."""
    return (
        triton is not None
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and tokens <= MOST_TOKENS
        and head in HEAD_SIZES
    )


def packed_attention_reference(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """`packed_attention` in plain torch, for any device and size."""
    batch, tokens, width = qkv.shape
    parts = qkv.view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind()
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return mixed.transpose(1, 2).reshape(batch, tokens, width // 3)


@torch.library.custom_op("gear_offline::packed_attention", mutates_args=())
def packed_attention(qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Causal self-attention.

    Parameters
    ----------
    qkv
        (B, T, 3H), contiguous: queries, keys and values of all heads side by side, as a
        projection makes them.
    heads
        N
    scale
        Factor on the dot products.

    Returns
    -------
    Tensor
        (B, T, H), dtype of `qkv`.
    """
    batch, tokens, width = qkv.shape
    mixed = qkv.new_empty(batch, tokens, width // 3)
    head, block = width // 3 // heads, _block(tokens)
    _forward[(batch * heads,)](
        qkv, mixed, tokens, heads, scale * LOG2_E, head, block, num_warps=_warps(block)
    )
    return mixed


@torch.library.custom_op("gear_offline::packed_attention_gradient", mutates_args=())
def packed_attention_gradient(gradient: Tensor, qkv: Tensor, heads: int, scale: float) -> Tensor:
    """Return the gradient of `qkv`, (B, T, 3H), from that of the result, (B, T, H)."""
    batch, tokens, width = qkv.shape
    found = torch.empty_like(qkv)
    head, block = width // 3 // heads, _block(tokens)
    _backward[(batch * heads,)](
        qkv, gradient.contiguous(), found, tokens, heads, scale, head, block,
        num_warps=_warps(block),
    )  # fmt: skip
    return found


@packed_attention.register_fake
def _shape(qkv: Tensor, heads: int, scale: float) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3)


@packed_attention_gradient.register_fake
def _gradient_shape(gradient: Tensor, qkv: Tensor, heads: int, scale: float) -> Tensor:
    return torch.empty_like(qkv)


def _remember(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    qkv, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(qkv)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (qkv,) = ctx.saved_tensors
    return packed_attention_gradient(gradient, qkv, ctx.heads, ctx.scale), None, None


packed_attention.register_autograd(_differentiate, setup_context=_remember)


def _block(tokens: int) -> int:
    return max(16, 1 << (tokens - 1).bit_length())


def _warps(block: int) -> int:
    return 8 if block > 64 else 4


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _load(base, tokens, stride, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load the rows of one head of one window, (BLOCK, D); zeros beyond its tokens."""
        rows = tl.arange(0, BLOCK)[:, None]
        return tl.load(
            base + rows * stride + tl.arange(0, D)[None, :], mask=rows < tokens, other=0.0
        )

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _store(base, values, tokens, stride, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.arange(0, BLOCK)[:, None]
        places = base + rows * stride + tl.arange(0, D)[None, :]
        tl.store(places, values.to(base.dtype.element_ty), mask=rows < tokens)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _weights(query, key, scale2, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Softmax of the dot products, (BLOCK, BLOCK) float32; `scale2` is the scale in bits."""
        scores = tl.dot(query, tl.trans(key)) * scale2
        # Tokens beyond the window are later than all of it, so causality hides them.
        place = tl.arange(0, BLOCK)
        scores = tl.where(place[:, None] >= place[None, :], scores, float("-inf"))
        shares = tl.exp2(scores - tl.max(scores, 1)[:, None])
        return shares / tl.sum(shares, 1)[:, None]

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _forward(qkv, mixed, tokens, heads, scale2, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        window, head = tl.program_id(0) // heads, tl.program_id(0) % heads
        width = heads * D
        base = qkv + window.to(tl.int64) * tokens * 3 * width + head * D
        query = _load(base, tokens, 3 * width, D, BLOCK)
        key = _load(base + width, tokens, 3 * width, D, BLOCK)
        value = _load(base + 2 * width, tokens, 3 * width, D, BLOCK)
        weights = _weights(query, key, scale2, BLOCK)
        found = tl.dot(weights.to(value.dtype), value)
        place = window.to(tl.int64) * tokens * width + head * D
        _store(mixed + place, found, tokens, width, D, BLOCK)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _backward(qkv, gradient, found, tokens, heads, scale, D: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        window, head = tl.program_id(0) // heads, tl.program_id(0) % heads
        width = heads * D
        place = window.to(tl.int64) * tokens * 3 * width + head * D
        query = _load(qkv + place, tokens, 3 * width, D, BLOCK)
        key = _load(qkv + place + width, tokens, 3 * width, D, BLOCK)
        value = _load(qkv + place + 2 * width, tokens, 3 * width, D, BLOCK)
        above = _load(
            gradient + window.to(tl.int64) * tokens * width + head * D, tokens, width, D, BLOCK
        )
        weights = _weights(query, key, scale * 1.4426950408889634, BLOCK)
        of_weights = tl.dot(above, tl.trans(value))
        of_value = tl.dot(tl.trans(weights.to(value.dtype)), above)
        _store(found + place + 2 * width, of_value, tokens, 3 * width, D, BLOCK)
        mean = tl.sum(weights * of_weights, 1)
        of_scores = (weights * (of_weights - mean[:, None]) * scale).to(query.dtype)
        _store(found + place, tl.dot(of_scores, key), tokens, 3 * width, D, BLOCK)
        of_key = tl.dot(tl.trans(of_scores), query)
        _store(found + place + width, of_key, tokens, 3 * width, D, BLOCK)
