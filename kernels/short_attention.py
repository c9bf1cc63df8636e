"""Causal attention over short windows, straight from and to the packed projections.

Library kernels are made for thousands of tokens.  A window of a Decision Transformer has tens.
There attention is bound by memory: reading tensors more often than needed and putting the three
gradients together again cost most.  Here a program does one head of one window.  It reads queries,
keys and values once from where the projection left them, and writes the gradients to where its
backward wants them.  The bias of the projection can be added on the way in, and its gradient summed
on the way out, which saves two passes over the packed tensors.

Dropout stores no mask.  Forward and backward draw it from Philox 4x32-7, Triton's and, for the
CPU, `kept_weights`.  The key is (low, high 32 bits of the seed), the counter (32 query + key // 4,
window, head, 0).  Word ``key % 4`` is that of one weight, which is kept if the word is at least
``dropout * 2**32``.

Triton comes with CUDA builds of torch; `packed_attention_reference` is the same in plain torch.

Shape legend: B windows in G groups, T tokens, N heads, D elements of a head, H = N D.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
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
ROUNDS = 7  # the fewest with which Philox 4x32 passes BigCrush (Salmon et al. 2011, table 2)


def supports_packed(device: torch.device, dtype: torch.dtype, *, tokens: int, head: int) -> bool:
    """Return true if the kernels take the windows: on CUDA, 16-bit, short, with usual heads."""
    return (
        triton is not None
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and tokens <= MOST_TOKENS
        and head in HEAD_SIZES
    )


def packed_attention_reference(
    qkv: Tensor,
    heads: int,
    scale: float,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """`packed_attention` in plain torch, for any device and size.

    `mask`, (B, N, T, T) bool, is true where a weight stays, as `kept_weights` gives it; those are
    multiplied by ``1 / (1 - dropout)``.  Without it all stay as they are.
    """
    batch, tokens, width = qkv.shape
    if bias is not None:
        grouped = qkv.view(len(bias), -1, tokens, width)
        qkv = (grouped + bias[:, None, None]).to(qkv.dtype).view_as(qkv)
    heads_first = qkv.view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = heads_first.unbind()
    if mask is None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    else:
        scores = query @ key.transpose(2, 3) * scale
        past = torch.ones(tokens, tokens, dtype=torch.bool, device=qkv.device).tril()
        weights = scores.masked_fill(~past, float("-inf")).softmax(-1)
        mixed = (weights * mask / (1 - dropout)) @ value
    return mixed.transpose(1, 2).reshape(batch, tokens, width // 3)


def kept_weights(seeds: Tensor, dropout: float, *, windows: int, heads: int, tokens: int) -> Tensor:
    """Return the attention weights that `packed_attention` keeps, bit for bit, from NumPy.

    (B, N, T, T) bool on the device of `seeds`, (G,) int64, for the weights above the diagonal too.
    """
    count = windows // len(seeds)
    group, head, query, four = np.ogrid[:count, :heads, :tokens, : -(-tokens // 4)]
    counter = (query * (MOST_TOKENS // 4) + four, group, head, 0)
    masks = np.empty((len(seeds), count, heads, tokens, tokens), dtype=np.bool_)
    for index, seed in enumerate(seeds.tolist()):
        stays = np.stack(philox4x32(counter, seed), axis=-1) >= _dropped_words(dropout)
        masks[index] = stays.reshape(count, heads, tokens, -1)[..., :tokens]
    return torch.from_numpy(masks.reshape(windows, heads, tokens, tokens)).to(seeds.device)


@torch.library.custom_op("gear_offline::packed_attention", mutates_args=())
def packed_attention(
    qkv: Tensor,
    heads: int,
    scale: float,
    dropout: float = 0.0,
    seeds: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return causal self-attention, (B, T, H), dtype of `qkv`.

    `qkv` is (B, T, 3H), contiguous: queries, keys and values of all N `heads` side by side.

    `dropout` is the probability of losing an attention weight, in [0, 1); those kept are multiplied
    by ``1 / (1 - dropout)``.  What is lost becomes zero even where it was NaN; PyTorch's dropout, a
    product, leaves NaN there.  It needs `seeds`, (G,) int64; G divides B.  The windows lie in G
    groups, one a seed.  Which weights are kept depends on the seed and on window, head, query and
    key within the group, so that a model among others keeps what it keeps alone.

    `bias`, (G, 3H) contiguous, float32 or dtype of `qkv`, is added to the rows of each group in
    float32, before they are rounded to their dtype again.
    """
    batch, tokens, width = qkv.shape
    mixed = qkv.new_empty(batch, tokens, width // 3)
    head, block = width // 3 // heads, _block(tokens)
    of_group = _windows_of_a_group(qkv, dropout, seeds, bias)
    seeds = None if seeds is None else seeds.contiguous()
    _forward[(batch * heads,)](
        qkv, mixed, tokens, heads, scale * LOG2_E, seeds, of_group, 1 / (1 - dropout),
        bias, _dropped_words(dropout), bias is not None, head, block, num_warps=_warps(block),
    )  # fmt: skip
    return mixed


@torch.library.custom_op("gear_offline::packed_attention_gradient", mutates_args=())
def packed_attention_gradient(
    gradient: Tensor,
    qkv: Tensor,
    heads: int,
    scale: float,
    dropout: float = 0.0,
    seeds: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv` that follows from that of the result, and its sums.

    These are over the tokens of each window, from before they are rounded, (B, 3H) float32: zeros
    for the keys, and (0, 3H) without `bias`.
    """
    batch, tokens, width = qkv.shape
    head, block = width // 3 // heads, _block(tokens)
    of_group = _windows_of_a_group(qkv, dropout, seeds, bias)
    seeds = None if seeds is None else seeds.contiguous()
    of_qkv, sums = _gradient_shape(gradient, qkv, heads, scale, dropout, seeds, bias)
    _backward[(batch * heads,)](
        qkv, gradient.contiguous(), of_qkv, tokens, heads, scale, seeds, of_group,
        1 / (1 - dropout), bias, None if bias is None else sums,
        _dropped_words(dropout), bias is not None, head, block, num_warps=_warps(block),
    )  # fmt: skip
    return of_qkv, sums


@packed_attention.register_fake
def _shape(qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3)


@packed_attention_gradient.register_fake
def _gradient_shape(
    gradient: Tensor,
    qkv: Tensor,
    heads: int,
    scale: float,
    dropout: float = 0.0,
    seeds: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    windows = 0 if bias is None else qkv.shape[0]
    sums = qkv.new_empty(windows, qkv.shape[2], dtype=torch.float32)
    return torch.empty_like(qkv), sums


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, ctx.heads, ctx.scale, ctx.dropout, seeds, bias = inputs
    ctx.save_for_backward(qkv, seeds, bias)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    qkv, seeds, bias = ctx.saved_tensors
    options = (ctx.heads, ctx.scale, ctx.dropout, seeds, bias)
    of_qkv, sums = packed_attention_gradient(gradient, qkv, *options)
    of_bias = None
    if bias is not None:
        of_bias = sums.view(len(bias), -1, sums.shape[1]).sum(1).to(bias.dtype)
    return of_qkv, None, None, None, None, of_bias


packed_attention.register_autograd(_differentiate, setup_context=_remember)


def _windows_of_a_group(qkv: Tensor, dropout: float, seeds: Any, bias: Tensor | None) -> int:
    """Return ``B / G``, 0 without `seeds` and `bias`; the kernels would read others as nonsense."""
    windows, _, width = qkv.shape
    assert 0.0 <= dropout < 1.0 and (dropout == 0.0 or seeds is not None), "dropout needs seeds"
    groups = [len(each) for each in (seeds, bias) if each is not None]
    if not groups:
        return 0
    assert min(groups) == max(groups) > 0 and windows % groups[0] == 0, "groups of equal size"
    assert seeds is None or (seeds.ndim == 1 and seeds.dtype == torch.int64)
    if bias is not None:
        assert bias.shape[1:] == (width,) and bias.is_contiguous()
        assert bias.dtype in (torch.float32, qkv.dtype)
    return windows // groups[0]


def _dropped_words(dropout: float) -> int:
    """Return the number of the ``2**32`` words that drop a weight."""
    return min(round(dropout * 2**32), 2**32 - 1)


def philox4x32(counter: tuple[Any, ...], seed: int) -> list[npt.NDArray[np.uint64]]:
    """Return the four words, below 2^32, of Philox 4x32-7 for each counter of four words."""
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = (np.asarray(word, dtype=np.uint64) for word in counter)
    for number in range(ROUNDS):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        keys = (seed + 0x9E3779B9 * number, (seed >> 32) + 0xBB67AE85 * number)
        first, second = (np.uint64(key & 0xFFFFFFFF) for key in keys)
        a, b = right >> np.uint64(32) ^ b ^ first, right & low
        c, d = left >> np.uint64(32) ^ d ^ second, left & low
    return list(np.broadcast_arrays(a, b, c, d))


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
    def _store_sum(base, values, D: tl.constexpr):  # type: ignore[no-untyped-def]
        """Store the sum over rows, (D,); rows beyond the window are zero in all gradients."""
        tl.store(base + tl.arange(0, D), tl.sum(values, 0))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_bias(rows, bias, D: tl.constexpr):  # type: ignore[no-untyped-def]
        """Add (D,) to (BLOCK, D) in float32; no token sees the rows beyond the window."""
        added = tl.load(bias + tl.arange(0, D)).to(tl.float32)
        return (rows.to(tl.float32) + added[None, :]).to(rows.dtype)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _weights(query, key, scale2, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Softmax of the dot products, (BLOCK, BLOCK) float32; `scale2` is the scale in bits."""
        scores = tl.dot(query, tl.trans(key)) * scale2
        # Tokens beyond the window are later than all of it, so causality hides them.
        positions = tl.arange(0, BLOCK)
        scores = tl.where(positions[:, None] >= positions[None, :], scores, float("-inf"))
        shares = tl.exp2(scores - tl.max(scores, 1)[:, None])
        return shares / tl.sum(shares, 1)[:, None]

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _draw_mask(seeds, window, of_group, head, DROPPED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the kept weights, (BLOCK, BLOCK) bool: four neighbours share a block of words."""
        seed = tl.load(seeds + window // of_group)
        fours = tl.arange(0, BLOCK)[:, None] * 32 + tl.arange(0, BLOCK // 4)[None, :]
        a, b, c, d = tl.philox(seed, fours, window % of_group, head, 0, n_rounds=7)
        # Words become bits before they are put side by side: that is less to move.
        even = tl.join(a >= DROPPED, c >= DROPPED)
        odd = tl.join(b >= DROPPED, d >= DROPPED)
        return tl.reshape(tl.join(even, odd), (BLOCK, BLOCK))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _forward(  # type: ignore[no-untyped-def]
        qkv, mixed, tokens, heads, scale2, seeds, of_group, factor, bias,
        DROPPED: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        window, head = tl.program_id(0) // heads, tl.program_id(0) % heads
        width = heads * D
        base = qkv + window.to(tl.int64) * tokens * 3 * width + head * D
        query = _load(base, tokens, 3 * width, D, BLOCK)
        key = _load(base + width, tokens, 3 * width, D, BLOCK)
        value = _load(base + 2 * width, tokens, 3 * width, D, BLOCK)
        if BIASED:
            group_bias = bias + window // of_group * 3 * width + head * D
            query, key = _add_bias(query, group_bias, D), _add_bias(key, group_bias + width, D)
            value = _add_bias(value, group_bias + 2 * width, D)
        weights = _weights(query, key, scale2, BLOCK)
        if DROPPED > 0:
            stays = _draw_mask(seeds, window, of_group, head, DROPPED, BLOCK)
            weights = tl.where(stays, weights * factor, 0.0)
        result = tl.dot(weights.to(value.dtype), value)
        offset = window.to(tl.int64) * tokens * width + head * D
        _store(mixed + offset, result, tokens, width, D, BLOCK)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _backward(  # type: ignore[no-untyped-def]
        qkv, gradient, qkv_gradient, tokens, heads, scale, seeds, of_group, factor, bias, sums,
        DROPPED: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        window, head = tl.program_id(0) // heads, tl.program_id(0) % heads
        width = heads * D
        offset = window.to(tl.int64) * tokens * 3 * width + head * D
        query = _load(qkv + offset, tokens, 3 * width, D, BLOCK)
        key = _load(qkv + offset + width, tokens, 3 * width, D, BLOCK)
        value = _load(qkv + offset + 2 * width, tokens, 3 * width, D, BLOCK)
        if BIASED:
            group_bias = bias + window // of_group * 3 * width + head * D
            query, key = _add_bias(query, group_bias, D), _add_bias(key, group_bias + width, D)
            value = _add_bias(value, group_bias + 2 * width, D)
            sums += window.to(tl.int64) * 3 * width + head * D
        above = _load(
            gradient + window.to(tl.int64) * tokens * width + head * D, tokens, width, D, BLOCK
        )
        weights = _weights(query, key, scale * 1.4426950408889634, BLOCK)
        of_weights = tl.dot(above, tl.trans(value))
        dropped = weights
        if DROPPED > 0:
            stays = _draw_mask(seeds, window, of_group, head, DROPPED, BLOCK)
            dropped = tl.where(stays, weights * factor, 0.0)
            of_weights = tl.where(stays, of_weights * factor, 0.0)
        of_value = tl.dot(tl.trans(dropped.to(value.dtype)), above)
        _store(qkv_gradient + offset + 2 * width, of_value, tokens, 3 * width, D, BLOCK)
        if BIASED:
            _store_sum(sums + 2 * width, of_value, D)
        mean = tl.sum(weights * of_weights, 1)
        of_scores = (weights * (of_weights - mean[:, None]) * scale).to(query.dtype)
        of_query = tl.dot(of_scores, key)
        _store(qkv_gradient + offset, of_query, tokens, 3 * width, D, BLOCK)
        if BIASED:
            _store_sum(sums, of_query, D)
        of_key = tl.dot(tl.trans(of_scores), query)
        _store(qkv_gradient + offset + width, of_key, tokens, 3 * width, D, BLOCK)
        if BIASED:  # no softmax sees what is the same for all keys
            tl.store(sums + width + tl.arange(0, D), tl.zeros((D,), tl.float32))
