"""Many small sums over rows in one launch: weight gradients, and the sums of biases and norms.

A weight's gradient is a product of two tall matrices of 16-bit numbers, summed over all rows of a
batch.  A small model has a dozen of them, none of which fills a GPU, and as many sums of columns.
Here all are cut into tiles of one size and ranges of rows, which one launch computes side by side.
A second one adds up the ranges in a fixed order, in float32: the same bits every time.

Triton comes with CUDA builds of torch; elsewhere the operator is plain torch.

Shape legend: G groups, R rows of each, M and N columns, J jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs do not bring it
    triton = None

ALIGNED = 64  # elements: results begin at cache lines
LOADED = 8  # 16-bit numbers of a load
MOST_TENSORS = 400  # their addresses are parameters, 4 KiB at most


class Job(NamedTuple):
    """One sum over rows of `right`, (G, R, N), and maybe `left`, (G, R, M), tensors by number.

    A product, ``is_product``, is (G, M, N), or (G, N, M) if transposed.  Otherwise left and right
    are multiplied element by element, (G, N).  `place` and `sums_place` say where in the result
    these lie, and the sums of `right`, (G, N); -1: they are not wanted.
    """

    is_product: int
    left: int
    right: int
    groups: int
    is_transposed: int
    place: int
    sums_place: int


WIDTH = len(Job._fields)


class Tiling(NamedTuple):
    """Sizes of a program's work."""

    tile: int = 128  # columns of left and of right
    rows: int = 64  # that are loaded at once
    stages: int = 3
    warps: int = 8
    registers: int = 128  # of a thread: then two programs share a multiprocessor
    programs: int = 2  # a multiprocessor, that products are cut into
    column_rows: int = 256  # of a sum of columns
    piece: int = 256  # elements that a program of the second launch adds up


TILING = Tiling()


def is_supported(device: torch.device) -> bool:
    """Return true if the kernels run there."""
    return triton is not None and device.type == "cuda"


@torch.library.custom_op("gear_offline::row_products", mutates_args=())
def row_products(tensors: list[Tensor], jobs: list[int], size: int) -> Tensor:
    """Return the results of jobs, (size,) float32; what no job writes is undefined.

    `jobs` are the fields of `Job`, one job after another.  Tensors are (G, R, columns) in any shape
    that has these elements in this order; those of products, and `right` of others, are of one
    16-bit type, `left` of others is float32.
    """
    if not is_supported(tensors[0].device):
        return row_products_reference(tensors, jobs, size)
    tensors = [tensor.contiguous() for tensor in tensors]
    out = tensors[0].new_empty(size, dtype=torch.float32)
    facts = tuple((tensor.shape[-1], tensor.numel()) for tensor in tensors)
    odd = tuple(n for n, tensor in enumerate(tensors) if tensor.data_ptr() % 16)
    run(_plan(tuple(jobs), facts, odd, tensors[0].device, TILING), tensors, out)
    return out


@row_products.register_fake
def _shape(tensors: list[Tensor], jobs: list[int], size: int) -> Tensor:
    return tensors[0].new_empty(size, dtype=torch.float32)


def row_products_reference(tensors: Sequence[Tensor], jobs: Sequence[int], size: int) -> Tensor:
    """`row_products` in plain torch, for any device."""
    out = tensors[0].new_zeros(size, dtype=torch.float32)

    def put(place: int, values: Tensor) -> None:
        out[place : place + values.numel()] = values.flatten()

    for job in split_jobs(jobs):
        right = tensors[job.right]
        right = right.reshape(job.groups, -1, right.shape[-1]).float()
        if job.place >= 0:
            left = tensors[job.left]
            left = left.reshape(job.groups, -1, left.shape[-1]).float()
            if job.is_product:
                product = left.transpose(1, 2) @ right
                put(job.place, product.transpose(1, 2) if job.is_transposed else product)
            else:
                put(job.place, (left * right).sum(1))
        if job.sums_place >= 0:
            put(job.sums_place, right.sum(1))
    return out


def split_jobs(jobs: Sequence[int]) -> Iterator[Job]:
    """Yield the jobs that `row_products` takes as numbers."""
    for first in range(0, len(jobs), WIDTH):
        yield Job(*jobs[first : first + WIDTH])


@dataclass(frozen=True)
class Plan:
    """What the programs of both launches do; tables on the GPU."""

    work: Tensor  # (programs, FIELDS) int64
    pieces: Tensor  # (programs, 5) int64
    slabs: int  # elements
    most_splits: int
    kinds: frozenset[int]
    tiling: Tiling


# kinds of a program's work
PRODUCT, PRODUCT_AND_SUMS, ODD_PRODUCT, COLUMNS = range(4)
FIELDS = 16


@lru_cache(maxsize=64)
def _plan(
    jobs: tuple[int, ...],
    facts: tuple[tuple[int, int], ...],
    odd: tuple[int, ...],
    device: torch.device,
    tiling: Tiling,
) -> Plan:
    """Cut jobs into tiles and ranges of rows; `facts` are columns and elements of each tensor."""
    tile, processors = tiling.tile, torch.cuda.get_device_properties(device).multi_processor_count
    work: list[list[int]] = []
    pieces: list[list[int]] = []
    slabs, most = 0, 1
    each = list(split_jobs(jobs))
    heavy = sum(
        -(-facts[j.left][0] // tile) * -(-facts[j.right][0] // tile)
        * facts[j.right][1] // facts[j.right][0]
        for j in each if j.is_product
    )  # fmt: skip
    share = max(4 * tiling.rows, heavy // (tiling.programs * processors))

    def cut(rows: int, most_rows: int) -> list[tuple[int, int]]:
        count = max(1, round(rows / most_rows))
        step = -(-rows // (count * tiling.rows)) * tiling.rows
        return [(first, min(rows, first + step)) for first in range(0, rows, step)]

    def reserve(place: int, elements: int, splits: int) -> tuple[int, int, int]:
        """Return where partial sums go: if not to the result, first place, and stride."""
        nonlocal slabs, most
        if place < 0 or splits == 1:
            return 0, place, 0
        stride, first = -(-elements // ALIGNED) * ALIGNED, slabs
        slabs, most = slabs + splits * stride, max(most, splits)
        for begin in range(0, elements, tiling.piece):
            count = min(tiling.piece, elements - begin)
            pieces.append([first + begin, stride, splits, place + begin, count])
        return 1, first, stride

    for job in sorted(each, key=lambda job: -job.is_product):
        columns, elements = facts[job.right]
        rows = elements // columns // job.groups
        wide = facts[job.left][0] if job.is_product else 1
        is_odd = job.is_product and (
            wide % LOADED or columns % LOADED or job.left in odd or job.right in odd
        )
        most_rows = share if job.is_product else tiling.column_rows
        ranges = cut(rows, min(share, 4 * tiling.rows) if is_odd else most_rows)
        size = job.groups * columns
        apart, place, stride = reserve(job.place, size * wide, len(ranges))
        sums_apart, sums_place, sums_stride = reserve(job.sums_place, size, len(ranges))
        for group in range(job.groups):
            for m in range(0, wide, tile):
                for n in range(0, columns, tile):
                    for number, (begin, end) in enumerate(ranges):
                        sums = sums_place if m == 0 else -1
                        kind = COLUMNS if not job.is_product else PRODUCT
                        if job.is_product and sums >= 0:
                            kind = PRODUCT_AND_SUMS
                        if is_odd:
                            kind = ODD_PRODUCT
                        target = place
                        if place >= 0:
                            target = place + number * stride + group * columns * wide
                        if sums >= 0:
                            sums = sums + number * sums_stride + group * columns
                        left_width = facts[job.left][0]
                        work.append([
                            kind, job.left, group * rows * left_width, left_width,
                            job.right, group * rows * columns, columns,
                            begin, end, m, n, job.is_transposed, apart, target, sums_apart, sums,
                        ])  # fmt: skip
    table = torch.tensor(work, dtype=torch.int64)
    blank = torch.zeros(0, 5, dtype=torch.int64)
    return Plan(
        table.to(device),
        (torch.tensor(pieces, dtype=torch.int64) if pieces else blank).to(device),
        slabs,
        most,
        frozenset(table[:, 0].tolist()),
        tiling,
    )


def run(plan: Plan, tensors: Sequence[Tensor], out: Tensor) -> None:
    """Launch both kernels on torch's current stream."""
    slabs = out.new_empty(max(1, plan.slabs))
    addresses = tuple(tensor.data_ptr() for tensor in (*tensors, out, slabs))
    assert len(addresses) <= MOST_TENSORS
    half = next(t.dtype for t in tensors if t.dtype != torch.float32)
    kinds, tiling = plan.kinds, plan.tiling
    _compute[(len(plan.work),)](
        plan.work, addresses, len(addresses),
        tl.bfloat16 if half == torch.bfloat16 else tl.float16,
        PRODUCT in kinds, PRODUCT_AND_SUMS in kinds, ODD_PRODUCT in kinds, COLUMNS in kinds,
        FIELDS, tiling.tile, tiling.rows, num_warps=tiling.warps, num_stages=tiling.stages,
        maxnreg=tiling.registers or None,
    )  # fmt: skip
    if len(plan.pieces):
        splits = 1 << (plan.most_splits - 1).bit_length()
        _add_up[(len(plan.pieces),)](plan.pieces, out, slabs, splits, tiling.piece, num_warps=4)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _address(addresses, index, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return one of some addresses: a table of them in memory would have to be written."""
        found = addresses[0]
        for number in tl.static_range(1, COUNT):
            found = tl.where(index == number, addresses[number], found)
        return found

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _operand(  # type: ignore[no-untyped-def]
        addresses, work, first, COUNT: tl.constexpr, DTYPE: tl.constexpr, ODD: tl.constexpr,
    ):  # fmt: skip
        """Return a pointer to the first row of a group, and the width of rows."""
        address = _address(addresses, tl.load(work + first), COUNT)
        offset, width = tl.load(work + first + 1), tl.load(work + first + 2).to(tl.int32)
        base = address.to(tl.pointer_type(DTYPE))
        if not ODD:
            base, offset = tl.multiple_of(base, 16), tl.multiple_of(offset, 8)
            width = tl.multiple_of(width, 8)
        return base + offset, width

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _target(addresses, work, first, COUNT: tl.constexpr, ODD: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return a pointer to where results go: to the last but one or the last address."""
        apart, offset = tl.load(work + first), tl.load(work + first + 1)
        if not ODD:
            offset = tl.multiple_of(offset, 8)
        address = tl.where(apart == 1, addresses[COUNT - 1], addresses[COUNT - 2])
        return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + offset

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _multiply(  # type: ignore[no-untyped-def]
        addresses, work, COUNT: tl.constexpr, HALF: tl.constexpr, SUMS: tl.constexpr,
        ODD: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        """Compute a tile of a product over a range of rows, and maybe the sums of its right."""
        left, wide = _operand(addresses, work, 1, COUNT, HALF, ODD)
        right, columns = _operand(addresses, work, 4, COUNT, HALF, ODD)
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
        target = _target(addresses, work, 12, COUNT, ODD)
        inside = (m < wide)[:, None] & (n < columns)[None, :]
        if tl.load(work + 11) == 1:
            tl.store(target + n[None, :] * wide + m[:, None], result, mask=inside)
        else:
            tl.store(target + m[:, None] * columns + n[None, :], result, mask=inside)
        if SUMS:
            total = tl.sum(sums, 0)
            wanted = tl.where(tl.load(work + 15) >= 0, columns, 0)
            target = _target(addresses, work, 14, COUNT, True)
            tl.store(target + n, total, mask=n < wanted)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_columns(  # type: ignore[no-untyped-def]
        addresses, work, COUNT: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
        ROWS: tl.constexpr,
    ):  # fmt: skip
        """Sum columns of right, and of left times right, over a range of rows."""
        left, _ = _operand(addresses, work, 1, COUNT, tl.float32, False)
        right, columns = _operand(addresses, work, 4, COUNT, HALF, False)
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
        target = _target(addresses, work, 12, COUNT, True)
        tl.store(target + n, tl.sum(products, 0), mask=n < columns)
        wanted = tl.where(tl.load(work + 15) >= 0, columns, 0)
        target = _target(addresses, work, 14, COUNT, True)
        tl.store(target + n, tl.sum(sums, 0), mask=n < wanted)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _compute(  # type: ignore[no-untyped-def]
        work, addresses, COUNT: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr,
        SUMMED: tl.constexpr, ODD: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr,
        TILE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        work += tl.program_id(0) * FIELDS
        kind = tl.load(work)
        if PLAIN:  # noqa: SIM102
            if kind == 0:
                _multiply(addresses, work, COUNT, HALF, False, False, TILE, ROWS)
        if SUMMED:  # noqa: SIM102
            if kind == 1:
                _multiply(addresses, work, COUNT, HALF, True, False, TILE, ROWS)
        if ODD:  # noqa: SIM102
            if kind == 2:
                _multiply(addresses, work, COUNT, HALF, True, True, TILE, ROWS)
        if COLUMNS:  # noqa: SIM102
            if kind == 3:
                _add_columns(addresses, work, COUNT, HALF, TILE, ROWS)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_up(pieces, out, slabs, SPLITS: tl.constexpr, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Add up the partial sums of some elements."""
        piece = pieces + tl.program_id(0) * 5
        source, stride = tl.load(piece), tl.load(piece + 1)
        count, place, size = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
        source, stride = tl.multiple_of(source, 64), tl.multiple_of(stride, 64)
        place = tl.multiple_of(place, 64)
        split, element = tl.arange(0, SPLITS), tl.arange(0, PIECE)
        inside = element < size
        places = slabs + source + split[:, None] * stride + element[None, :]
        values = tl.load(places, mask=(split < count)[:, None] & inside[None, :], other=0.0)
        tl.store(out + place + element, tl.sum(values, 0), mask=inside)
