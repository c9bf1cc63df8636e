"""Several runs of the paper's size on one GPU: steps a second in sum, by way of sharing it.

Each way is measured in processes of its own, one way after another; the base is one run alone, as
`train` does it, which is what running them one after another gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gear_offline.bench.loader import EPISODES, STEPS, _hopper_like
from gear_offline.core.progress import progress, say
from gear_offline.errors import UnavailableError

OPTIONS = ("train.graph=on", "train.compile=on", "train.precision=bf16")
BASE = "one after another"
WAYS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("streams", 16, ()),
    ("stacked", 8, ()),
    ("stacked", 2, ()),
    ("stacked", 4, ()),
    ("stacked", 16, ()),
    ("stacked", 32, ()),
    ("branches", 8, ()),
    ("green", 8, ()),
    ("stacked_2", 16, ()),
    ("streams_plain", 8, ("inductor:combo_kernels=false",)),
)
QUICK_WAYS = 2
NAMES = {
    "serial": BASE,
    "streams": "streams",
    "streams_plain": "streams, without merging small kernels",
    "branches": "branches of one graph",
    "stacked": "stacked weights",
    "stacked_2": "stacked weights, two groups on streams",
    "green": "streams on green contexts",
    "processes": "processes",
    "mps": "processes, multi-process service",
}
LIMIT_SECONDS = 150.0
# The driver's default of 8 queues would make runs beyond the eighth wait for others.
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about five minutes, `quick` one: two ways, up to 8 runs."""
    if not torch.cuda.is_available():
        raise UnavailableError(
            "DEVICE", "this benchmark needs a CUDA device", remedy="run it on a machine with a GPU"
        )
    seconds = 1.5 if quick else 3.0
    steps, episodes = (STEPS // 10, EPISODES // 10) if quick else (STEPS, EPISODES)
    ways = WAYS[:QUICK_WAYS] if quick else WAYS
    found: dict[str, Any] = {}
    more: dict[str, Any] = {"equality": {}, "profile": {}}
    parts = len(ways) + (0 if quick else 4)
    with (
        _hopper_like(steps, episodes) as (dataset, _),
        progress(parts, "sweep", unit="parts") as tick,
    ):
        path = str(dataset.path)
        for way, count, options in ways:
            count = min(count, 8) if quick else count
            found[f"{way} {count}"] = _child(way, count, seconds, path, (*OPTIONS, *options))
            tick(1)
        if not quick:
            found["processes 8"] = _processes(8, seconds, path, {})
            tick(1)
            found["mps 8"] = _mps(8, seconds, path)
            tick(1)
            more["equality"] = _equality(path)
            tick(1)
            more["profile"] = _child("profile", 1, seconds, path, OPTIONS)
            tick(1)
    return {
        "gpu": torch.cuda.get_device_name(),
        "base": BASE,
        "results": results(found),
        "skipped": {name: row["error"] for name, row in found.items() if "error" in row},
        **more,
    }


def results(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each way and number of runs, with its ratio to one run of ``streams``."""
    rows = []
    streams = next((row for name, row in found.items() if name.startswith("streams ")), {})
    base = streams.get("1", {}).get("steps_per_second", float("nan"))
    for name, measured in found.items():
        way, _, count = name.partition(" ")
        many = [(count, measured)] if "steps_per_second" in measured else measured.items()
        for runs, row in many:
            if isinstance(row, Mapping) and "steps_per_second" in row:
                rate = float(row["steps_per_second"])
                rows.append(
                    {
                        "way": "serial" if int(runs) == 1 and way == "streams" else way,
                        "runs": int(runs),
                        "steps_per_second": rate,
                        "ratio": rate / base,
                        "memory_bytes": measured.get("memory_bytes"),
                    }
                )
    return rows


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a way."""
    rows: list[tuple[Any, ...]] = [("", "runs", "steps/s in sum", "x one after another")]
    for row in document["results"]:
        rate, ratio = f"{row['steps_per_second']:,.0f}", f"{row['ratio']:.2f}"
        rows.append((NAMES.get(row["way"], row["way"]), row["runs"], rate, ratio))
    for name, row in document["equality"].items():
        if "error" not in row:
            text = f"{row['together']:.2g} beside others, {row['alone_twice']:.2g} alone twice"
            rows.append((f"difference of weights, {name}", "", text, ""))
    for name, error in document["skipped"].items():
        rows.append((name, "", f"not measured: {error}"[:60], ""))
    return rows


def _command(way: str, count: int, seconds: float, path: str, options: Sequence[str]) -> list[str]:
    words = [way, str(count), str(seconds), path, *options]
    return [sys.executable, "-m", "gear_offline.bench.sweep_ways", *words]


def _start(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **CONNECTIONS, **(environment or {})},
    )


def _finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a child printed last, or its error."""
    try:
        out, errors = child.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        out, errors = child.communicate()
    if child.returncode == 0 and out.strip():
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return found
    lines = errors.strip().splitlines() or [f"exit code {child.returncode}"]
    told = [line for line in lines if "Error" in line] or lines
    say(told[-1])
    return {"error": told[-1]}


def _child(
    way: str, count: int, seconds: float, path: str, options: Sequence[str]
) -> dict[str, Any]:
    return _finish(_start(_command(way, count, seconds, path, options)))


def _equality(path: str) -> dict[str, Any]:
    """Compare weights after training alone and together; three settings at once."""
    cases: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
        "compiled bf16": (OPTIONS, {}),
        "compiled bf16, deterministic": ((*OPTIONS, "deterministic"), DETERMINISTIC),
        "float32, not compiled": (
            ("train.graph=on", "train.compile=off", "train.precision=fp32"),
            {},
        ),
    }
    children = {
        name: _start(_command("equality", 8, 0, path, options), environment)
        for name, (options, environment) in cases.items()
    }
    return {name: _finish(child) for name, child in children.items()}


def _processes(
    count: int, seconds: float, path: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Train in `count` processes at once and add up their rates."""
    command = _command("processes", count, seconds, path, OPTIONS)
    children = [_start(command, environment) for _ in range(count)]
    for child in children:
        assert child.stdout is not None, "a pipe"
        child.stdout.readline()  # ready, or empty if it failed
    for child in children:
        assert child.stdin is not None, "a pipe"
        if child.poll() is None:
            child.stdin.write("\n")
            child.stdin.flush()
    rows = [_finish(child) for child in children]
    failed = [row["error"] for row in rows if "error" in row]
    if failed:
        return {"error": failed[0]}
    return {
        "steps_per_second": sum(row["steps_per_second"] for row in rows),
        "memory_bytes": sum(row["memory_bytes"] for row in rows),
    }


def _mps(count: int, seconds: float, path: str) -> dict[str, Any]:
    """As `_processes`, with a multi-process service of our own."""
    with tempfile.TemporaryDirectory(prefix="gear-offline-mps-") as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        whole = {**os.environ, **environment}
        try:
            started = subprocess.run(
                ["nvidia-cuda-mps-control", "-d"], env=whole, capture_output=True, text=True,
                timeout=20, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": f"no multi-process service: {error}"}
        if started.returncode != 0:
            return {"error": f"no multi-process service: {started.stderr.strip()}"}
        try:
            found = _processes(count, seconds, path, environment)
        finally:
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit\n", env=whole, text=True, timeout=30,
                capture_output=True, check=False,
            )  # fmt: skip
        log = Path(folder) / "control.log"
        if "error" in found and log.exists():
            found["log"] = log.read_text()[-400:]
        return found
