"""Rows in host memory or on a GPU, of NumPy arrays and torch tensors alike, without loading torch.

Shape legend: n rows, W bytes of a row.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError

Int64Array = npt.NDArray[np.int64]


class RowMemory:
    """Rows as bytes; keeps the memory alive.

    Parameters
    ----------
    rows
        ``(n, ...)`` C-contiguous NumPy array or torch tensor.
    row_bytes
        Bytes of one row, W.
    where
        What the caller calls it, for errors.
    writable
        Whether it will be written to.

    Attributes
    ----------
    bytes
        (n, W) uint8: a NumPy array over host memory, a torch tensor on a GPU.
    address, nbytes, count
        First byte, size, and rows.
    device
        ``"cpu"``, or e.g. ``"cuda:0"``.

    Raises
    ------
    InputError
        ``EXCHANGE_BUFFER``
    """

    def __init__(
        self, rows: Any, *, row_bytes: int, where: str = "", writable: bool = False
    ) -> None:
        problem = ""
        torch = sys.modules.get("torch")
        if isinstance(rows, np.ndarray):
            if not rows.flags.c_contiguous:
                problem = "it is not C-contiguous"
            elif writable and not rows.flags.writeable:
                problem = "it is read-only"
            else:
                self.bytes: Any = rows.reshape(-1).view(np.uint8)
                self.device, self.address = "cpu", int(rows.ctypes.data)
        elif torch is not None and isinstance(rows, torch.Tensor):
            if not rows.is_contiguous():
                problem = "it is not contiguous"
            else:
                flat = rows.detach().reshape(-1).view(torch.uint8)
                self.bytes = flat if rows.is_cuda else flat.numpy()
                self.device, self.address = str(rows.device), int(rows.data_ptr())
        else:
            problem = f"{type(rows).__name__} is neither an array nor a tensor"
        if not problem and (not rows.ndim or self.bytes.shape[0] != rows.shape[0] * row_bytes):
            problem = f"shape {tuple(rows.shape)} of {rows.dtype} is not rows of {row_bytes} bytes"
        if problem:
            raise InputError(
                "EXCHANGE_BUFFER",
                problem,
                where=where,
                remedy="give C-contiguous rows with the bytes of the table's store",
            )
        self.count = int(rows.shape[0])
        self.nbytes = self.count * row_bytes
        self.row_bytes = row_bytes
        self.bytes = self.bytes.reshape(self.count, row_bytes)
        self.owner = rows

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


def run_indices(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return (sum of counts,) int64: ``firsts[i], firsts[i] + 1, ...``, counts[i] of each."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    shifts = np.repeat(firsts - (ends - counts), counts)
    return np.asarray(shifts + np.arange(total, dtype=np.int64))


def take_rows(source: RowMemory, indices: Int64Array, out: Any) -> None:
    """Copy rows of `source` into `out`, (len(indices), W) uint8 of NumPy or torch, any device."""
    if isinstance(out, np.ndarray) and not source.on_gpu:
        np.take(source.bytes, indices, axis=0, out=out, mode="clip")  # checked by the caller
        return
    import torch

    rows = torch.as_tensor(source.bytes)
    found = rows.index_select(0, torch.as_tensor(indices, device=rows.device))
    torch.as_tensor(out).copy_(found)


def put_rows(target: RowMemory, indices: Int64Array, rows: Any) -> None:
    """Copy (len(indices), W) uint8 rows of NumPy or torch, any device, into `target`."""
    if isinstance(rows, np.ndarray) and not target.on_gpu:
        target.bytes[indices] = rows
        return
    import torch

    into = torch.as_tensor(target.bytes)
    into.index_copy_(
        0, torch.as_tensor(indices, device=into.device), torch.as_tensor(rows).to(into.device)
    )
