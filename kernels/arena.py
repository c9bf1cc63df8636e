"""Output memory for gathers: fresh to its user, without a page fault for every batch.

A new block of megabytes costs more in page faults than the gather that fills it.  So blocks are
lent: a block goes back to the arena when the last tensor over it is gone, and only then.  A batch
stays valid for as long as somebody holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
SPARE_BLOCKS = 4  # free blocks kept at most; each has the size of one gather's output

UInt8Array = npt.NDArray[np.uint8]


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view of a block; it dies with the storages of the tensors made from it."""


class Arena:
    """Lends blocks of bytes as tensors.

    Parameters
    ----------
    pin
        Take page-locked memory from torch instead, whose allocator has the same property and
        also waits for copies on a CUDA stream.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self.pin = pin
        self._free: list[UInt8Array] = []

    def blocks(self, ends: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return bytes ``[begin, end)`` of a block, of unspecified content, for each of `ends`.

        Begins are multiples of 64, and so are addresses.  A tensor is a storage of its own, as
        saving by torch asks for where dtypes differ; it keeps the whole block.
        """
        nbytes = max(end for _, end in ends)
        if self.pin:
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            return [pinned[begin:end] for begin, end in ends]
        try:
            owner = self._free.pop()  # one step, so that threads need no lock
        except IndexError:
            owner = _aligned(nbytes)
        if not nbytes <= owner.size <= 2 * nbytes:
            owner = _aligned(nbytes)
        lent = owner[:nbytes].view(_Lent)
        weakref.finalize(lent, _give_back, self._free, owner).atexit = False
        return [torch.from_numpy(lent[begin:end]) for begin, end in ends]


def _give_back(free: list[UInt8Array], block: UInt8Array) -> None:
    free.append(block)
    del free[:-SPARE_BLOCKS]


def _aligned(nbytes: int) -> UInt8Array:
    spare = np.empty(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
    begin = -spare.ctypes.data % ALIGNMENT_BYTES
    return spare[begin : begin + nbytes]


def carve(arena: Arena, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Return one tensor of unspecified content per (shape, dtype), all in one block."""
    ends, total = [], 0
    for shape, dtype in parts:
        begin = total
        total = begin + prod(shape) * dtype.itemsize
        ends.append((begin, total))
        total += -total % ALIGNMENT_BYTES
    return [
        block.view(dtype).view(shape)
        for block, (shape, dtype) in zip(arena.blocks(ends), parts, strict=True)
    ]
