"""The MLPs of several models at once: two batched products with a ReLU between them.

Compiled as separate operations, what lies between the products is written by one kernel and read
and written again by another, forward and backward, and read once more for the bias' gradient.
It is the largest tensor of a block.  Here the first product adds the bias and clamps as it writes;
in the backward pass the product that makes that tensor's gradient masks as it writes and leaves
the sums over its rows.

Where I and O are small a program keeps its rows of the result too: each tile of what lies between
goes into the second product as it is written, and in the backward pass into the gradient of the
rows.  For other widths these two products are cuBLAS'; those of the weights' gradients always are.

Triton comes with CUDA builds of torch; `stacked_mlp_reference` is the same in plain torch.

Shape legend: N models, R rows each, I inputs, M elements between the products, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gear_offline.errors import InputError

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
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


class Tiling(NamedTuple):
    """How the programs that keep their rows of the result are cut."""

    rows: int
    columns: int  # of what lies between the products, at a time
    warps: int
    stages: int


# Every program reads all weights of its model from the L2 cache, so it has many rows.  Two of them
# run on each multiprocessor, one computing while the other stores, where there are enough of them:
# that takes few columns at a time.  The fastest of nine on an H200, of 10240 and of 30720 rows.
MANY = 16_384  # rows of all models
FORWARD = (  # of few rows, of many
    Tiling(rows=128, columns=64, warps=8, stages=3),
    Tiling(rows=128, columns=32, warps=4, stages=3),
)
BACKWARD = (
    Tiling(rows=64, columns=64, warps=4, stages=2),
    Tiling(rows=128, columns=32, warps=8, stages=3),
)
WIDEST = 128  # rows of the result that a program keeps in registers


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
    size, outputs = second.shape[1:]
    rows, first, bias, second = (_aligned(x) for x in (rows, first, bias, second))
    inner = rows.new_empty(models, count, size)
    if _whole(width, outputs) and _has_tiles(rows.device):
        found = rows.new_empty(models, count, outputs)
        height, most, warps, stages = _chosen(FORWARD, inner)
        columns = _tile(size, most)
        _forward_whole[(models * -(-count // height),)](
            _tiled(rows, height, width), _tiled(first, width, columns), bias,
            _tiled(second, columns, outputs), _tiled(inner, height, columns),
            _tiled(found, height, outputs), count, width, size, outputs, height, columns,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return found, inner
    _forward[(_programs(inner, TILE_ROWS),)](
        rows, first, bias, inner, count, width, size,
        TILE_ROWS, _tile(size, TILE_COLUMNS), _tile(width, TILE_DEPTH),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return torch.bmm(inner, second), inner


@torch.library.custom_op("gear_offline::stacked_mlp_gradient", mutates_args=())
def stacked_mlp_gradient(
    gradient: Tensor, first: Tensor, second: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what follows from `gradient`, (N, R, O), that of the result.

    Returns
    -------
    tuple of Tensor
        The gradient of the rows, (N, R, I), that before the ReLU, (N, R, M), and the latter's sums
        over each tile of rows, (N, tiles, M) float32.
    """
    models, count, size = inner.shape
    width, outputs = first.shape[1], second.shape[2]
    gradient, first, second, inner = (_aligned(x) for x in (gradient, first, second, inner))
    of_rows, passed, sums = _gradient_shape(gradient, first, second, inner)
    height = _height(inner, width, outputs)
    if _whole(width, outputs) and _has_tiles(inner.device):
        _, most, warps, stages = _chosen(BACKWARD, inner)
        columns = _tile(size, most)
        _backward_whole[(models * -(-count // height),)](
            _tiled(gradient, height, outputs), _tiled(first, width, columns),
            _tiled(second, columns, outputs), _tiled(inner, height, columns),
            _tiled(passed, height, columns), sums, _tiled(of_rows, height, width),
            count, width, size, outputs, height, columns,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return of_rows, passed, sums
    _backward[(_programs(inner, height),)](
        gradient, second, inner, passed, sums, count, outputs, size,
        height, _tile(size, TILE_COLUMNS), _tile(outputs, TILE_DEPTH),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return torch.bmm(passed, first.transpose(1, 2)), passed, sums


@stacked_mlp_parts.register_fake
def _shape(rows: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    models, count, _ = rows.shape
    inner = rows.new_empty(models, count, first.shape[2])
    return rows.new_empty(models, count, second.shape[2]), inner


@stacked_mlp_gradient.register_fake
def _gradient_shape(
    gradient: Tensor, first: Tensor, second: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    models, count, size = inner.shape
    width = first.shape[1]
    tiles = -(-count // _height(inner, width, second.shape[2]))
    sums = inner.new_empty(models, tiles, size, dtype=torch.float32)
    return inner.new_empty(models, count, width), inner.new_empty(inner.shape), sums


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, first, bias, second = inputs
    ctx.kind = bias.dtype
    ctx.save_for_backward(rows, first, second, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else zeros as large as what lies between the products


def _differentiate(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, first, second, inner = ctx.saved_tensors
    of_rows, passed, sums = stacked_mlp_gradient(gradient, first, second, inner)
    return (
        of_rows,
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


def _whole(width: int, outputs: int) -> bool:
    """Whether a program keeps its rows of the result: they fit, and are powers of two wide."""
    return all(size <= WIDEST and not size & (size - 1) for size in (width, outputs))


def _has_tiles(device: torch.device) -> bool:
    """Whether `device` fetches tiles by itself, into shared memory that is large enough."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _chosen(tilings: tuple[Tiling, Tiling], inner: Tensor) -> Tiling:
    return tilings[1] if inner.shape[0] * inner.shape[1] >= MANY else tilings[0]


def _height(inner: Tensor, width: int, outputs: int) -> int:
    """Return the rows that each sum in the backward pass is over; shapes alone decide."""
    if not _whole(width, outputs):
        return TILE_ROWS
    return _chosen(BACKWARD, inner).rows


def _aligned(given: Tensor) -> Tensor:
    """Return `given` as tiles are fetched: contiguous, from an address that 16 divides."""
    given = given.contiguous()
    return given.clone() if given.data_ptr() % 16 else given


def _tiled(whole: Tensor, rows: int, columns: int) -> Any:
    """Describe `whole` as tiles of one model: outside of it are zeros, and nothing is written."""
    _, count, size = whole.shape
    strides = [count * size, size, 1]  # those of `whole` may say anything where there is one
    return TensorDescriptor(whole, list(whole.shape), strides, [1, rows, columns])


def _programs(inner: Tensor, height: int) -> int:
    models, count, size = inner.shape
    return models * -(-count // height) * (size // _tile(size, TILE_COLUMNS))


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

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _forward_whole(  # type: ignore[no-untyped-def]
        rows, first, bias, second, inner, result, count,
        WIDTH: tl.constexpr, M: tl.constexpr, OUTPUTS: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        model, row, _ = _place(count, COLUMNS, ROWS, COLUMNS)
        row *= ROWS
        columns = tl.arange(0, COLUMNS)
        left = rows.load([model, row, 0]).reshape(ROWS, WIDTH)
        biases = bias + model * M + columns
        some = tl.load(biases)
        one = tl.full((ROWS, COLUMNS), 1.0, tl.float32)
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, M, COLUMNS):
            found = tl.dot(left, first.load([model, 0, start]).reshape(WIDTH, COLUMNS))
            # Written as `+`, this product would start from the bias, in registers that the last one
            # of the second map still reads: neither would run while the other does.
            found = tl.fma(found, one, tl.broadcast_to(some.to(tl.float32)[None, :], found.shape))
            # fetched here, so that the next product does not wait for it
            some = tl.load(biases + start + COLUMNS, mask=start + COLUMNS + columns < M, other=0.0)
            # one that is not a number stays so
            found = tl.maximum(found, 0.0, propagate_nan=tl.PropagateNan.ALL)
            rounded = found.to(inner.dtype)
            inner.store([model, row, start], rounded.reshape(1, ROWS, COLUMNS))
            right = second.load([model, start, 0]).reshape(COLUMNS, OUTPUTS)
            total = tl.dot(rounded, right, total)
        result.store([model, row, 0], total.to(result.dtype).reshape(1, ROWS, OUTPUTS))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _backward_whole(  # type: ignore[no-untyped-def]
        gradient, first, second, inner, passed, sums, result, count,
        WIDTH: tl.constexpr, M: tl.constexpr, OUTPUTS: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        model, row, _ = _place(count, COLUMNS, ROWS, COLUMNS)
        row *= ROWS
        left = gradient.load([model, row, 0]).reshape(ROWS, OUTPUTS)
        # Sums over rows by a product with ones: it takes what is rounded from where it lies, while
        # a sum in registers goes across threads, then warps.  Its rows are all the same.
        ones = tl.full((16, ROWS), 1.0, tl.float32).to(passed.dtype)
        once = tl.arange(0, 16)[:, None]
        own = sums + tl.program_id(0).to(tl.int64) * M + once * 0 + tl.arange(0, COLUMNS)[None, :]
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for start in range(0, M, COLUMNS):
            right = second.load([model, start, 0]).reshape(COLUMNS, OUTPUTS)
            found = tl.dot(left, tl.trans(right))
            before = inner.load([model, row, start]).reshape(ROWS, COLUMNS)
            rounded = tl.where(before <= 0.0, 0.0, found.to(passed.dtype))
            passed.store([model, row, start], rounded.reshape(1, ROWS, COLUMNS))
            tl.store(own + start, tl.dot(ones, rounded), mask=once == 0)
            right = first.load([model, 0, start]).reshape(WIDTH, COLUMNS)
            total = tl.dot(rounded, tl.trans(right), total)
        result.store([model, row, 0], total.to(result.dtype).reshape(1, ROWS, WIDTH))
