"""The package's GPU classes on the CPU: launches call the kernels' own text, compiled for the CPU.

`compile_kernels` leaves out how threads share the work: one call does all blocks.
`compile_threads` has blocks and threads too (``cuda_on_cpu.h``).  What is left to the GPU tests is
the compiler, the memory model, and torch.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from gear_offline.kernels import adamw, gather_gpu, priorities, select
from gear_offline.kernels.columns import GroupAddresses
from gear_offline.kernels.draws import SAMPLING, TREE
from gear_offline.kernels.gather_gpu import JOB, GpuGather
from gear_offline.kernels.priorities import IMPORTANCE, UPDATE
from gear_offline.tables.table import Table

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror")
CUDA_FLAGS = ("-pthread", "-Wno-unknown-pragmas", "-Wno-sign-compare")
# `make sanitize`: every address that a kernel reads or writes is checked
SANITIZED = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g")


def compile_threads(folder: Path, name: str) -> ThreadedKernels:
    """Return the kernels of ``tests/NAME_in_threads.cpp``; skips the test without a compiler."""
    more = SANITIZED if os.environ.get("GEAR_OFFLINE_SANITIZE") else ()
    return ThreadedKernels(_compile(folder, f"{name}_in_threads", (*FLAGS, *CUDA_FLAGS, *more)))


def _compile(folder: Path, name: str, flags: Sequence[str]) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    target = folder / f"{name}.so"
    source = str(ROOT / "tests" / f"{name}.cpp")
    include = f"-I{ROOT / 'kernels' / 'cuda'}"
    subprocess.run([compiler, *flags, include, source, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def compile_kernels(folder: Path) -> Any:
    """Return the library of all kernels; its structures are those of the package."""
    library = _compile(folder, "sample_on_cpu", FLAGS)
    library.size_of.restype = ctypes.c_longlong
    sizes = [library.size_of(number) for number in range(5)]
    assert sizes == [d.itemsize for d in (JOB, SAMPLING, UPDATE, IMPORTANCE, TREE)]
    return library


class _Kernel:
    """A function of the library in the place of a kernel; one call does all blocks."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def launch(self, blocks: int, threads: int, stream: int, parameters: Any) -> None:
        assert blocks > 0 and threads > 0
        self._function(_job_of(parameters))


def _job_of(parameters: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.cast(parameters.pointer, ctypes.POINTER(ctypes.c_void_p))[0])


class ThreadedKernels:
    """Kernels with their blocks and threads, in an order that `seed` draws; `launched` counts."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.seed, self.launched = 0, list[tuple[str, int]]()

    def load(self, source: str, names: tuple[str, ...], *, device: int) -> dict[str, Any]:
        """Stand in for `gear_offline.kernels.cuda_module.load`."""
        return {name: SimpleNamespace(launch=partial(self._launch, name)) for name in names}

    def _launch(self, name: str, blocks: int, threads: int, stream: int, parameters: Any) -> None:
        self.launched.append((name, blocks))
        self.seed += 1
        function = getattr(self._library, f"launch_{name}")
        numbers = (ctypes.c_uint(number) for number in (blocks, threads, self.seed))
        function(_job_of(parameters), *numbers)


class _Processor:
    multi_processor_count = 2


class _Stream:
    cuda_stream = 0


def gpu_gather(
    table: Table,
    selection: Any = None,
    *,
    device: str = "cpu",
    offsets: Any = None,
    local: Any = None,
    **options: Any,
) -> GpuGather:
    """Return a gather over the rows of a table where they are: in host memory, pinned for CUDA.

    `offsets` and `local` (E,) are for a table of some episodes of a dataset.
    """
    offsets = table.episodes.offsets if offsets is None else offsets
    firsts = table.first_rows(local)
    rows = [torch.from_numpy(group.rows.view(np.uint8)) for group in table.groups]
    if device != "cpu":
        rows = [each.pin_memory() for each in rows]
    groups = [
        GroupAddresses(
            group=group,
            addresses=each.data_ptr() + firsts * group.row_bytes,
            row_zero=each.data_ptr(),
        )
        for group, each in zip(table.groups, rows, strict=True)
    ]
    return GpuGather(
        groups,
        offsets,
        device=torch.device(device),
        draw=None if selection is None else selection.gpu,
        drawn_from=None if selection is None else selection.index.offsets,
        keep=rows,
        **options,
    )


@contextmanager
def on_cpu(library: Any) -> Iterator[torch.device]:
    """Within it kernels run on the CPU; gives the device to name."""

    def load(source: str, names: tuple[str, ...], *, device: int) -> dict[str, Any]:
        return {name: _Kernel(getattr(library, f"run_{name}")) for name in names}

    if isinstance(library, ThreadedKernels):
        load = library.load
    with (
        mock.patch.object(adamw, "load", load),
        mock.patch.object(priorities, "load", load),
        mock.patch.object(select, "load", load),
        mock.patch.object(gather_gpu, "load", load),
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: _Processor),
        mock.patch.object(torch.cuda, "current_stream", lambda _: _Stream),
    ):
        yield torch.device("cpu")
