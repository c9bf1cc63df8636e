"""Residual sum, dropout and norm between the products of stacked models, in one pass.

Compiled, these operations draw four random words an element and use one.  Here a program does some
rows: it reads each tensor once, draws dropout as it goes, in the forward and in the backward pass,
and leaves sums over its rows for the gradient of the bias.  The norm has no weight and bias of its
own: the map after it takes these in.

Dropout stores no mask.  It is drawn from Philox 4x32-7: key = (low, high 32 bits of the model's
seed), counter = (row * P / 4 + element // 4, 0, 0, 0) where P is the next power of two of H, and
word ``element % 4`` is that of one element, which is kept if it is at least ``dropout * 2**32``.

Triton comes with CUDA builds of torch; `add_norm_reference` is the same in plain torch.

Shape legend: N models, R rows each, H elements of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gear_offline.errors import InputError
from gear_offline.kernels.dropout import check_dropout, dropped_words, in_a_row, kept_numbers

try:
    import triton
    import triton.language as tl

    from gear_offline.kernels.dropout import kept
except ImportError:  # builds of torch for CPUs do not bring it
    triton = None

NARROWEST, WIDEST = 16, 1024
ELEMENTS = 4096  # of a program; the fastest of six on an H200, as the warps
FORWARD_WARPS, BACKWARD_WARPS = 8, 4


def supports_norms(device: torch.device, dtype: torch.dtype, *, width: int) -> bool:
    """Whether the kernels take rows of this width: on CUDA, and 16-bit."""
    return (
        triton is not None
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and not width % NARROWEST
        and width <= WIDEST
    )


def kept_elements(seeds: Tensor, dropout: float, *, rows: int, width: int) -> Tensor:
    """Say which elements the kernels keep, bit for bit, from NumPy.

    Parameters
    ----------
    seeds
        (N,) int64
    dropout
        Probability of losing an element, in [0, 1).
    rows, width
        R and H.

    Returns
    -------
    Tensor
        (N, R, H) bool on the device of `seeds`.
    """
    block = block_of(width)
    place = np.arange(rows)[:, None] * (block // 4) + np.arange(block // 4)
    found = np.empty((len(seeds), rows, width), dtype=np.bool_)
    for model, seed in enumerate(seeds.tolist()):
        stays = kept_numbers((place, 0, 0, 0), seed, dropout).reshape(rows, block)
        found[model] = stays[:, :width]
    return torch.from_numpy(found).to(seeds.device)


def add_norm_reference(
    hidden: Tensor,
    branch: Tensor,
    bias: Tensor,
    epsilon: float,
    kept: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`add_norm` in plain torch; `kept`, (N, R, H) bool, as `kept_elements` says it."""
    added = branch.to(hidden.dtype) + bias[:, None]
    if kept is not None:
        added = added * kept / (1 - dropout)
    total = hidden + added
    plain = torch.nn.functional.layer_norm(total, total.shape[-1:], eps=epsilon)
    return total, plain.to(branch.dtype)


@torch.library.custom_op("gear_offline::add_norm", mutates_args=())
def add_norm(
    hidden: Tensor,
    branch: Tensor,
    bias: Tensor,
    epsilon: float,
    dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``hidden + drop(branch + bias)`` and that normalised.

    Parameters
    ----------
    hidden
        (N, R, H) float32.
    branch
        (N, R, H), of 16 bits.
    bias
        (N, H) float32, added to `branch` in float32.
    epsilon
        Of the norm.
    dropout
        Probability of losing an element, in [0, 1); those kept are multiplied by
        ``1 / (1 - dropout)``.  What is lost becomes zero even where it was NaN; PyTorch's dropout,
        a product, leaves NaN there.
    seeds
        (N,) int64, needed for dropout.

    Returns
    -------
    tuple of Tensor
        The sum, (N, R, H) float32; normalised, dtype of `branch`; and, without a gradient, one
        over the standard deviation of each row, (N, R) float32.

    Raises
    ------
    InputError
        ``MODEL_INPUT`` if shapes or types do not fit, or `seeds` are missing.
    """
    check_rows(branch, (hidden,), (bias,), dropout, seeds)
    total, plain, scales = _add_shape(hidden, branch)
    count, width = hidden.shape[1:]
    block = block_of(width)
    rows = ELEMENTS // block
    _add[(len(hidden) * -(-count // rows),)](
        hidden.contiguous(), branch.contiguous(), bias.contiguous(), in_a_row(seeds), total, plain,
        scales, count, epsilon, 1 / (1 - dropout),
        dropped_words(dropout), width, rows, block, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return total, plain, scales


@torch.library.custom_op("gear_offline::add_norm_gradient", mutates_args=())
def add_norm_gradient(
    of_total: Tensor | None,
    of_plain: Tensor,
    plain: Tensor,
    scales: Tensor,
    dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what follows from the gradients of the sum, None for zeros, and of the norm.

    Returns
    -------
    tuple of Tensor
        The gradients of `hidden`, float32, and of `branch`, both (N, R, H), and the sums of the
        latter over each tile of rows, (N, tiles, H) float32.
    """
    of_hidden, of_branch, sums = _add_gradient_shape(of_total, of_plain, plain, scales)
    models, count, width = plain.shape
    block = block_of(width)
    rows = ELEMENTS // block
    _add_backward[(models * sums.shape[1],)](
        None if of_total is None else of_total.contiguous(), of_plain.contiguous(), plain, scales,
        in_a_row(seeds), of_hidden, of_branch, sums, count, 1 / (1 - dropout),
        of_total is not None, dropped_words(dropout), width, rows, block, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return of_hidden, of_branch, sums


@add_norm.register_fake
def _add_shape(hidden: Tensor, branch: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    scales = hidden.new_empty(hidden.shape[:2], dtype=torch.float32)
    return hidden.new_empty(hidden.shape), branch.new_empty(branch.shape), scales


@add_norm_gradient.register_fake
def _add_gradient_shape(
    of_total: Tensor | None, of_plain: Tensor, plain: Tensor, scales: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    models, count, width = plain.shape
    tiles = -(-count // (ELEMENTS // block_of(width)))
    sums = scales.new_empty(models, tiles, width)
    return scales.new_empty(plain.shape), torch.empty_like(plain), sums


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, ctx.dropout, seeds = inputs
    ctx.save_for_backward(output[1], output[2], seeds)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # nobody may want the sum: no zeros as large as it


def _differentiate(
    ctx: Any, of_total: Tensor | None, of_plain: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    plain, scales, seeds = ctx.saved_tensors
    of_plain = torch.zeros_like(plain) if of_plain is None else of_plain
    of_hidden, of_branch, sums = add_norm_gradient(
        of_total, of_plain, plain, scales, ctx.dropout, seeds
    )
    return of_hidden, of_branch, sums.sum(1), None, None, None


add_norm.register_autograd(_differentiate, setup_context=_remember)


def check_rows(
    rows: Tensor,
    alike: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    dropout: float,
    seeds: Tensor | None,
) -> None:
    """Refuse what the kernels would read as nonsense.

    Parameters
    ----------
    rows
        (N, R, H), of 16 bits.
    alike, shared
        What must be of its shape, and (N, H) float32.
    dropout, seeds
        As for `add_norm`.

    Raises
    ------
    InputError
        ``MODEL_INPUT``
    """
    fits = rows.ndim == 3 and rows.numel() > 0 and rows.element_size() == 2
    fits = fits and all(x.shape == rows.shape for x in alike)
    sides = (len(rows), rows.shape[-1])
    fits = fits and all(x.shape == sides and x.dtype == torch.float32 for x in shared)
    width = rows.shape[-1]
    if not fits or width % NARROWEST or width > WIDEST:
        given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (rows, *alike, *shared))
        raise InputError(
            "MODEL_INPUT",
            f"rows and what belongs to them are {given}",
            remedy=f"give (N, R, H) of 16 bits and (N, H) float32, H a multiple of {NARROWEST} up "
            f"to {WIDEST}",
        )
    check_dropout(dropout)
    known = seeds is not None and seeds.shape == (len(rows),) and seeds.dtype == torch.int64
    if dropout > 0.0 and not known:
        given = "none" if seeds is None else f"{tuple(seeds.shape)} {seeds.dtype}"
        raise InputError(
            "MODEL_INPUT",
            f"seeds are {given} for {len(rows)} models",
            remedy="give (N,) int64",
        )


def block_of(width: int) -> int:
    """Return the next power of two."""
    return 1 << (width - 1).bit_length()


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kept_rows(seed, row, DROPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Say which elements of some rows, (ROWS, 1), stay: (ROWS, BLOCK) bool."""
        fours = row * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
        return kept(seed, fours, 0, 0, DROPPED, ROWS, BLOCK)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def normalised(rows, inside, epsilon, H: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return rows less their mean over their deviation, and one over that, (ROWS, 1)."""
        rows = tl.where(inside, rows - tl.sum(rows, 1)[:, None] / H, 0.0)
        scale = tl.rsqrt(tl.sum(rows * rows, 1)[:, None] / H + epsilon)
        return rows * scale, scale

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def through_norm(above, plain, scale, inside, H: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the gradient before a norm whose result was `plain`."""
        mean = tl.sum(above, 1)[:, None] / H
        along = tl.sum(above * plain, 1)[:, None] / H
        return tl.where(inside, (above - mean - plain * along) * scale, 0.0)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add(  # type: ignore[no-untyped-def]
        hidden, branch, bias, seeds, total, plain, scales, count, epsilon, factor,
        DROPPED: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(count, ROWS)
        model, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < count) & (column < H)
        place = (model.to(tl.int64) * count + row) * H + column
        found = tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
        found += tl.load(bias + model * H + column, mask=column < H, other=0.0)
        if DROPPED > 0:
            stays = kept_rows(tl.load(seeds + model), row, DROPPED, ROWS, BLOCK)
            found = tl.where(stays, found * factor, 0.0)
        found = tl.where(inside, found + tl.load(hidden + place, mask=inside, other=0.0), 0.0)
        tl.store(total + place, found, mask=inside)
        found, scale = normalised(found, inside, epsilon, H)
        tl.store(plain + place, found.to(plain.dtype.element_ty), mask=inside)
        tl.store(scales + model.to(tl.int64) * count + row, scale, mask=row < count)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_backward(  # type: ignore[no-untyped-def]
        of_total, of_plain, plain, scales, seeds, of_hidden, of_branch, sums, count, factor,
        GIVEN: tl.constexpr, DROPPED: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(count, ROWS)
        model, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < count) & (column < H)
        place = (model.to(tl.int64) * count + row) * H + column
        above = tl.load(of_plain + place, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(plain + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + model.to(tl.int64) * count + row, mask=row < count, other=0.0)
        found = through_norm(above, own, scale, inside, H)
        if GIVEN:
            found += tl.load(of_total + place, mask=inside, other=0.0)
        tl.store(of_hidden + place, found, mask=inside)
        if DROPPED > 0:
            stays = kept_rows(tl.load(seeds + model), row, DROPPED, ROWS, BLOCK)
            found = tl.where(stays, found * factor, 0.0)
        tl.store(of_branch + place, found.to(of_branch.dtype.element_ty), mask=inside)
        columns = tl.arange(0, BLOCK)
        mine = sums + (model * tiles + tile).to(tl.int64) * H + columns
        tl.store(mine, tl.sum(found, 0), mask=columns < H)
