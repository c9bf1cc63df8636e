"""The MLPs of several models at once: two batched products with a ReLU between them.

Compiled as separate operations, what lies between the products is written by one kernel and read
and written again by another, forward and backward, and read once more for the bias' gradient.
It is the largest tensor of a block.  Here the first product adds the bias and clamps as it writes;
in the backward pass the product that makes that tensor's gradient masks as it writes and leaves
the sums over its rows.  The other products are cuBLAS'.

Triton comes with CUDA builds of torch; `stacked_mlp_reference` is the same in plain torch.

Shape legend: N models, R rows each, I inputs, M elements between the products, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gear_offline.errors import InputError

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs do not bring it
    triton = None

# One program does one tile of what lies between the products.  Tiles of columns and of the sum
# are at most this wide and divide what they tile, so that no load needs a mask but that of rows.
# Sums 128 long are fetched whole, in two parts, before the first is needed, and registers and
# shared memory are left for a second program, whose loads run while this one stores.
TILE_ROWS = 128
TILE_COLUMNS = 128
TILE_DEPTH = 64
WARPS = 8
STAGES = 3
SMALLEST = 16  # tile of a product on tensor cores


def supports_stacked(device: torch.device, dtype: torch.dtype, *, width: int, inner: int) -> bool:
    """Whether the kernels take such MLPs, `width` = I = O and `inner` = M: on CUDA and 16-bit."""
    return (
        triton is not None
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and not width % SMALLEST
        and not inner % SMALLEST
    )


def stacked_mlp_reference(rows: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """`stacked_mlp` in plain torch, for any device and size."""
    inner = torch.bmm(rows, first) + bias[:, None].to(rows.dtype)
    return torch.bmm(inner.relu(), second)


def stacked_mlp(rows: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """Return ``relu(rows @ first + bias) @ second`` of each model.

    Parameters
    ----------
    rows
        (N, R, I), of 16 bits.
    first
        (N, I, M), dtype of `rows`.
    bias
        (N, M), float32 or dtype of `rows`; it is added in float32, before the product is rounded.
    second
        (N, M, O), dtype of `rows`.

    Returns
    -------
    Tensor
        (N, R, O), dtype of `rows`.

    Raises
    ------
    InputError
        ``MODEL_INPUT`` if shapes or types do not fit, or I, M or O is not a multiple of 16.
    """
    found: Tensor = stacked_mlp_parts(rows, first, bias, second)[0]
    return found


@torch.library.custom_op("gear_offline::stacked_mlp_parts", mutates_args=())
def stacked_mlp_parts(
    rows: Tensor, first: Tensor, bias: Tensor, second: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `stacked_mlp` does and, (N, R, M), what lies between the products.

    Gradients flow through the first of the two alone.
    """
    _check(rows, first, bias, second)
    models, count, width = rows.shape
    size = first.shape[2]
    inner = rows.new_empty(models, count, size)
    _forward[(_programs(inner),)](
        rows.contiguous(), first.contiguous(), bias.contiguous(), inner, count, width, size,
        TILE_ROWS, _tile(size, TILE_COLUMNS), _tile(width, TILE_DEPTH),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return torch.bmm(inner, second), inner


@torch.library.custom_op("gear_offline::stacked_mlp_gradient", mutates_args=())
def stacked_mlp_gradient(gradient: Tensor, second: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return what follows from `gradient`, (N, R, O), that of the result.

    Returns
    -------
    tuple of Tensor
        The gradient before the ReLU, (N, R, M), and its sums over each tile of rows,
        (N, tiles, M) float32.
    """
    count, size = inner.shape[1:]
    width = second.shape[2]
    passed, sums = _gradient_shape(gradient, second, inner)
    _backward[(_programs(inner),)](
        gradient.contiguous(), second.contiguous(), inner, passed, sums, count, width, size,
        TILE_ROWS, _tile(size, TILE_COLUMNS), _tile(width, TILE_DEPTH),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return passed, sums


@stacked_mlp_parts.register_fake
def _shape(rows: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    models, count, _ = rows.shape
    inner = rows.new_empty(models, count, first.shape[2])
    return rows.new_empty(models, count, second.shape[2]), inner


@stacked_mlp_gradient.register_fake
def _gradient_shape(gradient: Tensor, second: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    models, count, size = inner.shape
    tiles = -(-count // TILE_ROWS)
    return torch.empty_like(inner), inner.new_empty(models, tiles, size, dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, first, bias, second = inputs
    ctx.kind = bias.dtype
    ctx.save_for_backward(rows, first, second, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else zeros as large as what lies between the products


def _differentiate(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, first, second, inner = ctx.saved_tensors
    passed, sums = stacked_mlp_gradient(gradient, second, inner)
    return (
        torch.bmm(passed, first.transpose(1, 2)),
        torch.bmm(rows.transpose(1, 2), passed),
        sums.sum(1).to(ctx.kind),
        torch.bmm(inner.transpose(1, 2), gradient),
    )


stacked_mlp_parts.register_autograd(_differentiate, setup_context=_remember)


def _check(rows: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> None:
    """Refuse what the kernels would read as nonsense."""
    fits = rows.ndim == first.ndim == second.ndim == 3 and rows.shape[1] > 0
    fits = fits and first.shape == (len(rows), rows.shape[2], second.shape[1])
    fits = fits and len(second) == len(rows) and bias.shape == (len(rows), second.shape[1])
    fits = fits and rows.dtype == first.dtype == second.dtype
    fits = fits and bias.dtype in (torch.float32, rows.dtype)
    if not fits or any(size % SMALLEST for size in (*first.shape[1:], second.shape[2])):
        given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (rows, first, bias, second))
        raise InputError(
            "MODEL_INPUT",
            f"rows, first map, bias and second map are {given}",
            remedy="give (N, R, I), (N, I, M), (N, M), (N, M, O) of one type (a bias may be "
            f"float32), with some rows and I, M, O multiples of {SMALLEST}",
        )


def _tile(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`."""
    return min(size & -size, most)


def _programs(inner: Tensor) -> int:
    models, count, size = inner.shape
    return models * -(-count // TILE_ROWS) * (size // _tile(size, TILE_COLUMNS))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _place(count, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Model, tile of rows and first column of this program.

        Neighbours share rows, and then the weights of a model: both are read from the L2 cache.
        """
        across: tl.constexpr = M // COLUMNS
        tiles = tl.cdiv(count, ROWS)
        whole = tl.program_id(0) // across
        return whole // tiles, whole % tiles, tl.program_id(0) % across * COLUMNS

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _forward(  # type: ignore[no-untyped-def]
        rows, first, bias, inner, count, WIDTH: tl.constexpr, M: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        model, tile, column = _place(count, M, ROWS, COLUMNS)
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        columns = column + tl.arange(0, COLUMNS)[None, :]
        depth = tl.arange(0, DEPTH)
        mine = rows + (model.to(tl.int64) * count + row) * WIDTH + depth[None, :]
        weight = first + model.to(tl.int64) * WIDTH * M + depth[:, None] * M + columns
        found = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, WIDTH, DEPTH):
            left = tl.load(mine + start, mask=row < count, other=0.0)
            found = tl.dot(left, tl.load(weight + start * M), found)
        found += tl.load(bias + model * M + columns).to(tl.float32)
        # one that is not a number stays so
        found = tl.maximum(found, 0.0, propagate_nan=tl.PropagateNan.ALL)
        place = inner + (model.to(tl.int64) * count + row) * M + columns
        tl.store(place, found.to(inner.dtype.element_ty), mask=row < count)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _backward(  # type: ignore[no-untyped-def]
        gradient, second, inner, passed, sums, count, WIDTH: tl.constexpr, M: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        model, tile, column = _place(count, M, ROWS, COLUMNS)
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        columns = column + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)[None, :]
        place = (model.to(tl.int64) * count + row) * M + columns[None, :]
        mine = gradient + (model.to(tl.int64) * count + row) * WIDTH + depth
        weight = second + (model.to(tl.int64) * M + columns[:, None]) * WIDTH + depth
        found = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, WIDTH, DEPTH):
            left = tl.load(mine + start, mask=row < count, other=0.0)
            found = tl.dot(left, tl.trans(tl.load(weight + start)), found)
        before = tl.load(inner + place, mask=row < count, other=0.0)
        # Loaded last and compared with what is rounded: else Triton moves it to where the product
        # left its result, and sums over rows there, across threads (seen in its code for sm_90).
        rounded = tl.where(before <= 0.0, 0.0, found.to(passed.dtype.element_ty))
        tl.store(passed + place, rounded, mask=row < count)
        tiles = tl.cdiv(count, ROWS)
        own = sums + (model * tiles + tile).to(tl.int64) * M + columns
        tl.store(own, tl.sum(rounded.to(tl.float32), 0))
