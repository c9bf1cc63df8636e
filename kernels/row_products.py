"""Sums over rows of a step, many in one launch: gradients of weights, biases and norms.

A weight's gradient is a product of two tall matrices of 16-bit numbers, summed over all rows of a
batch.  A small model has a dozen of them, none of which fills a GPU, and as many sums of columns.
Here all are cut into tiles of one size and ranges of rows, which one launch computes side by side.
A second one adds up the ranges in a fixed order, in float32: the same bits every time.

Triton comes with CUDA builds of torch; elsewhere the operator is plain torch.

Shape legend: G groups, R rows of each, M and N columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs do not bring it
    triton = None

LEAST_CAPABILITY = (8, 0)  # of a GPU: the first with products of bfloat16
ALIGNED = 64  # elements: results begin at cache lines
LOADED = 8  # 16-bit numbers of a load
MOST_TENSORS = 400  # their addresses are parameters, 4 KiB at most
# The fastest of 19 for the paper's model on an H200: 31 us; cuBLAS takes 87 for the products alone.
TILE = 64  # columns of left and of right
ROWS = 64  # that are loaded at once
PROGRAMS = 2  # of a multiprocessor, that products are cut into
COLUMN_ROWS = 256  # of a program that sums columns
PIECE = 256  # elements that a program of the second launch adds up


class Job(NamedTuple):
    """One sum over rows of `right`, (G, R, N), and `left`, (G, R, M), which are tensors' numbers.

    A product, ``is_product``, is (G, M, N), or (G, N, M) if transposed.  Otherwise left and right
    are multiplied element by element, (G, N).  `place` says where in the result it begins, and
    `sums_place` where the sums of `right`, (G, N), do; -1: they are not wanted.
    """

    is_product: int
    left: int
    right: int
    groups: int
    is_transposed: int
    place: int
    sums_place: int


def is_supported(device: torch.device) -> bool:
    """Return true if the kernels run there."""
    return (
        triton is not None
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    )


@torch.library.custom_op("gear_offline::row_products", mutates_args=())
def row_products(tensors: list[Tensor], jobs: list[int], size: int) -> Tensor:
    """Return the results of jobs, (size,) float32; what no job writes is undefined.

    `jobs` are the fields of `Job`, one job after another; places are multiples of `ALIGNED`.
    Tensors are (G, R, columns) in any shape that has these elements in this order.  Those of
    products, and `right` of others, are of one 16-bit type; `left` of others is float32, and their
    columns are a multiple of `LOADED`.
    """
    if not is_supported(tensors[0].device):
        return row_products_reference(tensors, jobs, size)
    tensors = [tensor.contiguous() for tensor in tensors]
    tensors = [tensor.clone() if tensor.data_ptr() % 16 else tensor for tensor in tensors]
    shapes = tuple((tensor.numel() // tensor.shape[-1], tensor.shape[-1]) for tensor in tensors)
    plan = _plan(tuple(jobs), shapes, size, tensors[0].device)
    out = tensors[0].new_empty(plan.elements, dtype=torch.float32)
    half = next(tensor.dtype for tensor in tensors if tensor.dtype != torch.float32)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    _compute[(len(plan.work),)](
        plan.work, addresses, out, len(tensors),
        tl.bfloat16 if half == torch.bfloat16 else tl.float16, plan.kinds, FIELDS, TILE, ROWS,
        num_warps=4, num_stages=3, maxnreg=128,
    )  # fmt: skip
    if len(plan.pieces):
        _add_up[(len(plan.pieces),)](plan.pieces, out, plan.splits, PIECE, num_warps=4)
    return out[:size]


@row_products.register_fake
def _shape(tensors: list[Tensor], jobs: list[int], size: int) -> Tensor:
    return tensors[0].new_empty(size, dtype=torch.float32)


def row_products_reference(tensors: Sequence[Tensor], jobs: Sequence[int], size: int) -> Tensor:
    """`row_products` in plain torch, for any device."""
    out = tensors[0].new_zeros(size, dtype=torch.float32)
    for job in split_jobs(jobs):
        left, right = (
            tensors[number].reshape(job.groups, -1, tensors[number].shape[-1]).float()
            for number in (job.left, job.right)
        )
        result = left.transpose(1, 2) @ right if job.is_product else (left * right).sum(1)
        result = result.transpose(1, 2) if job.is_transposed else result
        out[job.place : job.place + result.numel()] = result.flatten()
        if job.sums_place >= 0:
            sums = right.sum(1).flatten()
            out[job.sums_place : job.sums_place + len(sums)] = sums
    return out


def split_jobs(jobs: Sequence[int]) -> Iterator[Job]:
    """Yield the jobs that `row_products` takes as numbers."""
    for first in range(0, len(jobs), len(Job._fields)):
        yield Job(*jobs[first : first + len(Job._fields)])


class Plan(NamedTuple):
    """The programs of both launches; tables on the GPU."""

    work: Tensor  # (programs, FIELDS) int64
    pieces: Tensor  # (programs, 5) int64
    elements: int  # of results, and after them of partial sums
    splits: int  # the most ranges of a sum, rounded up to a power of two
    kinds: int  # a bit for each kind of work that there is


PRODUCT, SUMMED_PRODUCT, ODD_PRODUCT, COLUMNS = range(4)  # kinds of work
FIELDS = 14


@cache  # also because graphs that were captured go on reading the tables
def _plan(
    jobs: tuple[int, ...], shapes: tuple[tuple[int, int], ...], size: int, device: torch.device
) -> Plan:
    """Cut jobs into tiles and ranges of rows; `shapes` are (G * R, columns) of each tensor."""
    work: list[list[int]] = []
    pieces: list[list[int]] = []
    elements, most_splits = align(size), 1
    each = sorted(split_jobs(jobs), key=lambda job: -job.is_product)  # the longest first
    tiles = [-(-columns // TILE) for _, columns in shapes]
    total = sum(shapes[j.right][0] * tiles[j.left] * tiles[j.right] for j in each if j.is_product)
    programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    most_rows = max(4 * ROWS, total // programs)

    def split(place: int, count: int, splits: int) -> tuple[int, int]:
        """Return where the sums of the first range go, and how far after them the next ones."""
        nonlocal elements, most_splits
        if place < 0 or splits == 1:
            return place, 0
        first, stride = elements, align(count)
        elements, most_splits = first + splits * stride, max(most_splits, splits)
        for begin in range(0, count, PIECE):
            length = min(PIECE, count - begin)
            pieces.append([first + begin, stride, splits, place + begin, length])
        return first, stride

    for job in each:
        (rows, wide), columns = shapes[job.left], shapes[job.right][1]
        rows //= job.groups
        height = wide if job.is_product else 1  # of the result
        is_odd = job.is_product and (wide % LOADED or columns % LOADED)
        ranges = max(1, round(rows / (most_rows if job.is_product else COLUMN_ROWS)))
        step = -(-rows // (ranges * ROWS)) * ROWS
        starts = range(0, rows, step)
        place, stride = split(job.place, job.groups * height * columns, len(starts))
        sums_place, sums_stride = split(job.sums_place, job.groups * columns, len(starts))
        for group in range(job.groups):
            for m in range(0, height, TILE):
                is_summed = sums_place >= 0 and m == 0
                kind = SUMMED_PRODUCT if is_summed else PRODUCT
                kind = (ODD_PRODUCT if is_odd else kind) if job.is_product else COLUMNS
                for n in range(0, columns, TILE):
                    for number, begin in enumerate(starts):
                        target = place + number * stride + group * height * columns
                        sums = sums_place + number * sums_stride + group * columns
                        work.append([
                            kind, job.left, group * rows * wide, wide,
                            job.right, group * rows * columns, columns,
                            begin, min(rows, begin + step), m, n, job.is_transposed,
                            target, sums if is_summed else -1,
                        ])  # fmt: skip
    return Plan(
        torch.tensor(work).to(device),
        torch.tensor(pieces, dtype=torch.int64).to(device),
        elements,
        1 << (most_splits - 1).bit_length(),
        sum(1 << kind for kind in {fields[0] for fields in work}),
    )


def align(elements: int) -> int:
    """Return where results may begin after so many elements."""
    return -(-elements // ALIGNED) * ALIGNED


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _operand(  # type: ignore[no-untyped-def]
        addresses, work, COUNT: tl.constexpr, DTYPE: tl.constexpr, ODD: tl.constexpr,
    ):  # fmt: skip
        """Return a pointer to the first row of a group, and the width of rows."""
        index, address = tl.load(work), addresses[0]
        for number in tl.static_range(1, COUNT):  # a table in memory would have to be written
            address = tl.where(index == number, addresses[number], address)
        offset, width = tl.load(work + 1), tl.load(work + 2).to(tl.int32)
        base = address.to(tl.pointer_type(DTYPE))
        if not ODD:
            base, offset = tl.multiple_of(base, 16), tl.multiple_of(offset, 8)
            width = tl.multiple_of(width, 8)
        return base + offset, width

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _store_sums(out, place, n, columns, sums):  # type: ignore[no-untyped-def]
        """Store the sums over rows of (ROWS, TILE), if they are wanted."""
        wanted = tl.where(place >= 0, columns, 0)
        tl.store(out + place + n, tl.sum(sums, 0), mask=n < wanted)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _multiply(  # type: ignore[no-untyped-def]
        addresses, work, out, COUNT: tl.constexpr, HALF: tl.constexpr, SUMS: tl.constexpr,
        ODD: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """Compute a tile of a product over a range of rows, and maybe the sums of its right."""
        left, wide = _operand(addresses, work + 1, COUNT, HALF, ODD)
        right, columns = _operand(addresses, work + 4, COUNT, HALF, ODD)
        begin, end = tl.load(work + 7), tl.load(work + 8).to(tl.int32)
        m = tl.multiple_of(tl.load(work + 9).to(tl.int32), TILE) + tl.arange(0, TILE)
        n = tl.multiple_of(tl.load(work + 10).to(tl.int32), TILE) + tl.arange(0, TILE)
        rows = tl.arange(0, ROWS)
        left += begin * wide
        right += begin * columns
        lefts = rows[:, None] * wide + m[None, :]
        rights = rows[:, None] * columns + n[None, :]
        result = tl.zeros((TILE, TILE), tl.float32)
        sums = tl.zeros((ROWS, TILE), tl.float32)
        for first in range(begin.to(tl.int32), end, ROWS):
            inside = (first + rows)[:, None] < end
            x = tl.load(left + lefts, mask=inside & (m < wide)[None, :], other=0.0)
            y = tl.load(right + rights, mask=inside & (n < columns)[None, :], other=0.0)
            result = tl.dot(tl.trans(x), y, result)
            if SUMS:
                sums += y.to(tl.float32)
            left += ROWS * wide
            right += ROWS * columns
        place = tl.load(work + 12)
        if not ODD:
            place = tl.multiple_of(place, 8)
        inside = (m < wide)[:, None] & (n < columns)[None, :]
        if tl.load(work + 11) == 1:
            tl.store(out + place + n[None, :] * wide + m[:, None], result, mask=inside)
        else:
            tl.store(out + place + m[:, None] * columns + n[None, :], result, mask=inside)
        if SUMS:
            _store_sums(out, tl.load(work + 13), n, columns, sums)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_columns(  # type: ignore[no-untyped-def]
        addresses, work, out, COUNT: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
        ROWS: tl.constexpr,
    ):  # fmt: skip
        """Sum columns of right, and of left times right, over a range of rows."""
        left, _ = _operand(addresses, work + 1, COUNT, tl.float32, False)
        right, columns = _operand(addresses, work + 4, COUNT, HALF, False)
        begin, end = tl.load(work + 7).to(tl.int32), tl.load(work + 8).to(tl.int32)
        n = tl.multiple_of(tl.load(work + 10).to(tl.int32), TILE) + tl.arange(0, TILE)
        rows = tl.arange(0, ROWS)
        sums = tl.zeros((ROWS, TILE), tl.float32)
        products = tl.zeros((ROWS, TILE), tl.float32)
        for first in range(begin, end, ROWS):
            inside = ((first + rows)[:, None] < end) & (n < columns)[None, :]
            places = (first + rows)[:, None] * columns + n[None, :]
            y = tl.load(right + places, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(left + places, mask=inside, other=0.0)
            sums += y
            products += x * y
        _store_sums(out, tl.load(work + 12), n, columns, products)
        _store_sums(out, tl.load(work + 13), n, columns, sums)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _compute(  # type: ignore[no-untyped-def]
        work, addresses, out, COUNT: tl.constexpr, HALF: tl.constexpr, KINDS: tl.constexpr,
        FIELDS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """Do one program's work: a branch for each kind that there is."""
        work += tl.program_id(0) * FIELDS
        kind = tl.load(work)
        if KINDS & 1:  # noqa: SIM102
            if kind == 0:
                _multiply(addresses, work, out, COUNT, HALF, False, False, TILE, ROWS)
        if KINDS & 2:  # noqa: SIM102
            if kind == 1:
                _multiply(addresses, work, out, COUNT, HALF, True, False, TILE, ROWS)
        if KINDS & 4:  # noqa: SIM102
            if kind == 2:
                _multiply(addresses, work, out, COUNT, HALF, True, True, TILE, ROWS)
        if KINDS & 8:  # noqa: SIM102
            if kind == 3:
                _add_columns(addresses, work, out, COUNT, HALF, TILE, ROWS)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_up(pieces, out, SPLITS: tl.constexpr, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Add up the partial sums of some elements."""
        piece = pieces + tl.program_id(0) * 5
        source = out + tl.multiple_of(tl.load(piece), 64)
        stride, count = tl.multiple_of(tl.load(piece + 1), 64), tl.load(piece + 2)
        target, size = out + tl.multiple_of(tl.load(piece + 3), 64), tl.load(piece + 4)
        split, element = tl.arange(0, SPLITS)[:, None], tl.arange(0, PIECE)[None, :]
        inside = (split < count) & (element < size)
        values = tl.load(source + split * stride + element, mask=inside, other=0.0)
        element = tl.arange(0, PIECE)
        tl.store(target + element, tl.sum(values, 0), mask=element < size)
