"""Benchmarks: one module each, a peer measured in the same run, one JSON document out."""

from __future__ import annotations

import inspect
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from gear_offline.cli.command import INTERRUPTED_BY_USER
from gear_offline.config.strict_yaml import whole_number
from gear_offline.core.system import usable_cores
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.split_table import SplitTable

BENCHES = {
    "step": "training steps of 1 M to 1.2 B parameters: TFLOP/s, memory, stalls (needs CUDA)",
    "train": "training steps a second, against the released class and the usual way (needs CUDA)",
    "sweep": "several runs on one GPU: steps a second by way of sharing it (needs CUDA)",
    "tasks": "training steps a second on three tasks joined, against one of them",
    "gather": "the GPU engine: GB/s by tier and segment size, one small batch (needs CUDA)",
    "peers": "a table over the GPUs of a node, all reading at once (needs torchrun and CUDA)",
    "traffic": "what crosses nodes under the assignment, simulated, against fixed slots",
    "images": "stacks of frames: GB/s by tier, and how long training waits for them (needs CUDA)",
    "convert": "HDF5 to shards, against reading with h5py and writing the bytes raw",
    "load": "shards to shared host memory, against the same threads reading files into it",
    "exchange": "rows between two ranks: ms a step and MB/s over gloo and, if there, RDMA",
    "recovery": "seconds from a killed process until the run goes on, and their parts",
    "disk": "batches of data four times the memory budget, against reading the files in order",
    "select": "choosing among up to 10^9 items on CPU and GPU, and a batch by each strategy, "
    "against torch.multinomial",
    "save": "seconds of training lost to a checkpoint, against torch.save and torch's async_save",
    "beside": "training steps a second with evaluations beside training, in place and without",
    "loader": "batches a second, against plain NumPy, d3rlpy, TorchRL and the original procedure",
}
MOST = 10**15  # of a size
_PACKAGES = (
    "gear-offline",
    "numpy",
    "torch",
    "cupy-cuda13x",
    "h5py",
    "transformers",
    "d3rlpy",
    "torchrl",
)


def machine() -> dict[str, Any]:
    """Return what a figure depends on: processor, cores, memory, date, versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(UTC).date().isoformat(),
    }


def run_bench(name: str, *, quick: bool = False, sizes: Sequence[str] = ()) -> dict[str, Any]:
    """Run one benchmark and return its JSON document.

    Parameters
    ----------
    sizes
        ``NAME=NUMBER,NUMBER...`` for arguments of the benchmark's `run` besides `quick`.

    Raises
    ------
    InputError
        ``BENCH_NAME`` if there is no benchmark `name`; ``BENCH_SIZE``.
    """
    if name not in BENCHES:
        raise InputError(
            "BENCH_NAME", f"no benchmark {name!r}", remedy=f"choose one of {', '.join(BENCHES)}"
        )
    module = import_module(f"gear_offline.bench.{name}")
    given = _sizes(name, module.run, sizes)
    with redirect_stdout(sys.stderr):  # peers print as they like; stdout is for the result
        try:
            document: dict[str, Any] = module.run(quick=quick, **given)
        except GearError as error:
            if error.exit_code != INTERRUPTED_BY_USER:
                raise
            # its remedy names a run directory that is gone by now
            raise type(error)(
                error.code, "stopped, nothing is kept", where=f"bench {name}"
            ) from error
    command = " ".join(["gear-offline bench", name, *sizes, *(["--quick"] if quick else [])])
    return {"benchmark": name, "command": command, "machine": machine(), **document}


def _sizes(name: str, run: Callable[..., object], texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that `texts` give, whole numbers or lists of them."""
    parameters = inspect.signature(run).parameters
    known = [key for key in parameters if key != "quick"]
    found: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        try:
            if key not in known:
                raise ValueError(key)
            numbers = [whole_number(float(part)) for part in value.split(",") if part]
            if not numbers or not all(type(n) is int and 1 <= n <= MOST for n in numbers):
                raise ValueError(value)
            found[key] = numbers if "Sequence" in str(parameters[key].annotation) else numbers[0]
        except (ValueError, OverflowError) as error:
            remedy = f"give NAME=1e6,1e9 with NAME of {', '.join(known)}"
            raise InputError(
                "BENCH_SIZE",
                f"{text!r} is no size of benchmark {name!r}",
                remedy=remedy if known else "leave it out, the benchmark has no sizes",
            ) from error
    return found


def print_document(document: dict[str, Any]) -> None:
    """Print a benchmark's rows as a table: a header row, then one row a measurement."""
    module = import_module(f"gear_offline.bench.{document['benchmark']}")
    header, *rows = module.table(document)
    columns = [(str(name), [str(row[k]) for row in rows]) for k, name in enumerate(header)]
    title = f"{document['command']}, {document['machine']['cpu']}"
    Console().print(SplitTable(columns=columns, title=title), highlight=False)
