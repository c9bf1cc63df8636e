"""Long windows by the GPU's copy engine, which moves large pieces of host memory faster than loads.

On an H200 behind PCIe 5 kernels read host memory at 51 GB/s however long a window is; batched
copies pass that from about half a megabyte a piece (docs/benchmarks/gather.json).  The host must
know the addresses, so that this serves named segments and the loader's blocks of steps, not steps
captured in a graph.

Shape legend: n segments, K steps of a window, W elements of a row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gear_offline.errors import GearError
from gear_offline.kernels.gather import Padding, Windows, filled
from gear_offline.kernels.segments import Segments
from gear_offline.tables.placement import PlacedTable

LEAST_BYTES = 512 << 10  # of a whole window
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: rows are never written again

Uint64Array = npt.NDArray[np.uint64]


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``: order of access, hints of source and target (none), flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class CopyEngine:
    """Many copies in the order of a stream of its own.

    Parameters
    ----------
    device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._driver = ctypes.CDLL("libcuda.so.1")
        # Since CUDA 13; before, its list of parameters was another one.
        self._batch: Any = getattr(self._driver, "cuMemcpyBatchAsync_v2", None)

    def copy(self, targets: Uint64Array, sources: Uint64Array, sizes: Uint64Array) -> None:
        """Copy `sizes` bytes each, all (n,) uint64; addresses that the GPU knows."""
        if not len(sizes):
            return
        handle = ctypes.c_void_p(self.stream.cuda_stream)
        with torch.cuda.device(self.device):
            if self._batch is None:
                self._one_by_one(targets, sources, sizes, handle)
                return
            attributes, first = _Attributes(order=IN_STREAM_ORDER), ctypes.c_size_t(0)
            arrays = [
                ctypes.c_void_p(np.ascontiguousarray(array, np.uint64).ctypes.data)
                for array in (targets, sources, sizes)
            ]
            status = self._batch(
                *arrays,
                ctypes.c_size_t(len(sizes)),
                ctypes.byref(attributes),
                ctypes.byref(first),
                ctypes.c_size_t(1),
                handle,
            )
            self._check(status)

    def _one_by_one(
        self, targets: Uint64Array, sources: Uint64Array, sizes: Uint64Array, handle: Any
    ) -> None:
        triples = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for target, source, size in triples:
            self._check(
                self._driver.cuMemcpyAsync(
                    ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), handle
                )
            )

    def _check(self, status: int) -> None:
        if status:
            raise GearError(
                "COPY_ENGINE",
                f"the CUDA driver refused a copy (CUresult {status})",
                remedy="use loader.engine=off, and report it",
            )


class LongWindows:
    """The groups whose windows are copied, not read by a kernel.

    Parameters
    ----------
    placed
        Where the rows lie.
    span
        K.
    padding
        Side of the padding.

    Attributes
    ----------
    numbers
        Of those groups: final values of `LEAST_BYTES` a window, some of them in host memory.
    """

    def __init__(self, placed: PlacedTable, *, span: int, padding: Padding) -> None:
        self._placed, self._span, self._padding = placed, span, padding
        self.numbers: Sequence[int] = [
            number
            for number, group in enumerate(placed.groups)
            if placed.host_bytes
            and group.group.is_final
            and (span + group.group.history) * group.row_bytes >= LEAST_BYTES
        ]
        self._engine = CopyEngine(placed.device) if self.numbers else None

    def copy(self, windows: Windows, segments: Segments) -> None:
        """Fill those buffers with `segments`, which are in the table, on torch's current stream."""
        if self._engine is None:
            return
        episodes, starts = segments.episodes.reshape(-1), segments.starts.reshape(-1)
        real = np.minimum(self._placed.episodes.lengths[episodes] - starts, self._span)
        if segments.lengths is not None:
            real = np.minimum(real, np.maximum(segments.lengths.reshape(-1), 1))
        current = torch.cuda.current_stream(self._placed.device)
        self._engine.stream.wait_stream(current)
        for number in self.numbers:
            group, buffer = self._placed.groups[number], windows.buffers[number]
            history, flat = group.group.history, buffer.view(-1, *buffer.shape[-2:])
            first, last = filled(
                starts, real, span=self._span, history=history, padding=self._padding
            )
            places = np.arange(len(real)) * (self._span + history) + first
            rows = starts - np.minimum(starts, history)
            self._engine.copy(
                (flat.data_ptr() + places * group.row_bytes).astype(np.uint64),
                (group.addresses[episodes] + rows * group.row_bytes).astype(np.uint64),
                ((last - first) * group.row_bytes).astype(np.uint64),
            )
            # other bytes than those that are copied
            for short in np.flatnonzero(last - first < self._span + history).tolist():
                flat[short, : int(first[short])].zero_()
                flat[short, int(last[short]) :].zero_()
        current.wait_stream(self._engine.stream)
