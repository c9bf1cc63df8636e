"""The package's GPU classes on the CPU: launches run the kernels' own text, compiled for the CPU.

Blocks and threads are there (``cuda_on_cpu.h``), in any order.  What is left to GPU tests is the
compiler, the memory model, and torch.
"""

from __future__ import annotations

import ctypes
import fcntl
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

from gear_offline.batches.tables.table import Table
from gear_offline.kernels import adamw, gather_gpu, priorities
from gear_offline.kernels.columns import GroupAddresses
from gear_offline.kernels.cuda_module import structure
from gear_offline.kernels.gather_gpu import GpuGather

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror",
         "-pthread", "-Wno-unknown-pragmas", "-Wno-sign-compare")  # fmt: skip
# `make sanitize`: every address that a kernel reads or writes is checked
SANITIZED = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g")


def compile_kernels(folder: Path) -> Kernels:
    """Return all kernels, whose structures are those of the package; skips without a compiler.

    The first process that asks compiles them into `folder`.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    target, source = folder / "kernels.so", ROOT / "tests" / "kernels_on_cpu.cpp"
    more = SANITIZED if os.environ.get("GEAR_OFFLINE_SANITIZE") else ()
    include = f"-I{ROOT / 'kernels' / 'cuda'}"
    with (folder / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            subprocess.run([compiler, *FLAGS, *more, include, source, "-o", target], check=True)
    library = ctypes.CDLL(str(target))
    library.size_of.restype = ctypes.c_longlong
    for number, name in enumerate(("Job", "UpdateJob", "AdamwJobs", "Piece", "Rule", "Tree")):
        assert library.size_of(number) == structure(name).itemsize, name
    return Kernels(library)


class Kernels:
    """Kernels with their blocks and threads, in an order that `seed` draws; `launched` counts."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.seed, self.launched = 0, list[tuple[str, int]]()

    def load(self, source: str, names: Sequence[str], *, device: int) -> dict[str, Any]:
        """Stand in for `gear_offline.kernels.cuda_module.load`."""
        return {name: SimpleNamespace(launch=partial(self._launch, name)) for name in names}

    def _launch(self, name: str, blocks: int, threads: int, structure: Any) -> None:
        self.launched.append((name, blocks))
        self.seed += 1
        function = getattr(self.library, f"launch_{name}")
        numbers = (ctypes.c_uint(number) for number in (blocks, threads, self.seed))
        function(ctypes.c_void_p(structure.ctypes.data), *numbers)


def gpu_gather(
    table: Table, selection: Any = None, *, device: str = "cpu", offsets: Any = None,
    local: Any = None, **options: Any,
) -> GpuGather:  # fmt: skip
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
        keep=rows,
        **options,
    )


@contextmanager
def on_cpu(kernels: Kernels) -> Iterator[torch.device]:
    """Within it kernels run on the CPU; gives the device to name."""
    kernels.seed, load = 0, kernels.load
    processor, stream = SimpleNamespace(multi_processor_count=2), SimpleNamespace(cuda_stream=0)
    kernels.launched.clear()
    with (
        mock.patch.object(adamw, "load", load),
        mock.patch.object(priorities, "load", load),
        mock.patch.object(gather_gpu, "load", load),
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: processor),
        mock.patch.object(torch.cuda, "current_stream", lambda _: stream),
    ):
        yield torch.device("cpu")
