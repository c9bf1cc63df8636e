"""How long a run stands still when one of its processes is killed.

Each row trains a small model on hopper-like data under ``torchrun`` with two ranks.  Rank 1 is
killed with SIGKILL after a step between two checkpoints; ``torchrun`` starts all again, and the run
goes on from the checkpoint.  Seconds are counted from the kill: until the other rank has its error
(detection), until new processes run (restart), until they begin their first step (start-up:
imports, joining, data, model, checkpoint), until that step is done, and until the step that was
killed is done again (replay).  The ranks write their times to files.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gear_offline.bench.loader import _hopper_like
from gear_offline.core.progress import progress
from gear_offline.errors import GearError

RANKS, STEPS, EVERY, KILL_AT = 2, 60, 20, 35
SECONDS = 300  # for one run
PARTS = ("detection", "restart", "start_up", "first_step", "replay")
RECIPE = """
name: recovery
data: {{path: {data}, verify: false}}
model: {{hidden_size: 128, layers: 3}}
loader: {{batch_size: 64, context_length: 20, padding: left}}
optimizer: {{warmup_steps: 10}}
train: {{steps: {steps}, log_every: 20, checkpoint_every: {every}, device: {device}, threads: 1,
        tensorboard: false, compile: "off", timeout: 120}}
evaluate: {{episodes: 0}}
"""
Mark = dict[str, Any]  # what, rank, step, time, process


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; half a minute a turn on a machine that does nothing else."""
    turns = 1 if quick else 3
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    ways = {"one node": False, "two nodes (c10d)": True}
    results = []
    with (
        _hopper_like(50_000, 100) as (dataset, _),
        progress(turns * len(ways), "recovery", unit="turns") as advance,
    ):
        for name, several in ways.items():
            found = []
            for _ in range(turns):
                found.append(_turn(str(dataset.path), device, several=several))
                advance(1)
            medians = {part: statistics.median(row[part] for row in found) for part in found[0]}
            results.append({"name": f"{name}, {RANKS} ranks on {device}", **medians})
    plan = {"checkpoint_every": EVERY, "killed_after": KILL_AT, "replayed_steps": KILL_AT - EVERY}
    return {"turns": turns, **plan, "results": results}


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a way of starting the ranks; seconds."""
    header = ("seconds", *(part.replace("_", " ") for part in PARTS), "first step again", "all")
    rows: list[tuple[Any, ...]] = [header]
    for row in document["results"]:
        cells = (f"{row[name]:.2f}" for name in (*PARTS, "until_first_step", "until_caught_up"))
        rows.append((row["name"], *cells))
    return rows


def split_times(marks: Sequence[Mark]) -> dict[str, float]:
    """Return the seconds of each part, from what all ranks wrote down.

    Raises
    ------
    GearError
        ``BENCH_RUN`` if a mark is missing.
    """
    killed = _first(marks, "killed", 0.0)
    after = killed["time"]
    noticed = _first(marks, "error", after)["time"]
    begun = _last_rank(marks, "begin", after)
    ready = _last_rank(marks, "ready", after)
    steps = [m for m in marks if m["what"] == "step" and m["time"] > ready]
    again = [m["time"] for m in steps if m["step"] == min(n["step"] for n in steps)]
    caught_up = _last_rank(marks, "step", ready, step=killed["step"])
    times = [after, noticed, begun, ready, max(again, default=ready), caught_up]
    found = {part: b - a for part, a, b in zip(PARTS, times[:-1], times[1:], strict=True)}
    return found | {"until_first_step": times[4] - after, "until_caught_up": times[5] - after}


def _first(marks: Sequence[Mark], what: str, after: float) -> Mark:
    found = [m for m in marks if m["what"] == what and m["time"] > after]
    if not found:
        raise _broken(what)
    return min(found, key=lambda mark: float(mark["time"]))


def _last_rank(marks: Sequence[Mark], what: str, after: float, *, step: int | None = None) -> float:
    """Return when the last of the ranks had done something for the first time after `after`."""
    first: dict[int, float] = {}
    for mark in sorted(marks, key=lambda mark: float(mark["time"])):
        if mark["what"] == what and mark["time"] > after and step in (None, mark["step"]):
            first.setdefault(mark["rank"], mark["time"])
    if len(first) < RANKS:
        raise _broken(what)
    return max(first.values())


def _broken(what: str) -> GearError:
    return GearError("BENCH_RUN", f"no rank has written down {what!r} after the kill")


def _turn(data: str, device: str, *, several: bool) -> dict[str, float]:
    """Train once, with a kill, and return the seconds of its parts."""
    with tempfile.TemporaryDirectory(prefix="gear-offline-bench-") as name:
        folder = Path(name)
        text = RECIPE.format(data=data, steps=STEPS, every=EVERY, device=device)
        (folder / "recovery.yaml").write_text(text)
        with ExitStack() as stack:
            processes = []
            for number, command in enumerate(_commands(folder, several=several)):
                said = stack.enter_context((folder / f"said{number}.txt").open("w"))
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                if several and device == "cuda":
                    environment["CUDA_VISIBLE_DEVICES"] = str(number)
                process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=said
                )
                stack.callback(process.terminate)  # torchrun takes its ranks with it
                processes.append(process)
            codes = [process.wait(SECONDS) for process in processes]
        if any(codes):
            text = (folder / "said0.txt").read_text()[-800:]
            raise GearError("BENCH_RUN", f"torchrun ended with {codes}: {text}")
        lines = [
            json.loads(line)
            for path in folder.glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        return split_times(lines)


def _commands(folder: Path, *, several: bool) -> list[list[str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1"]
    child = ["-m", "gear_offline.bench.recovery_rank", str(folder), str(KILL_AT)]
    if not several:
        return [[*torchrun, "--standalone", "--nproc-per-node", str(RANKS), *child]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ["--nnodes", str(RANKS), "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    return [[*torchrun, *options, *child] for _ in range(RANKS)]
