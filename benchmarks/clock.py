"""Seconds from Enter to each phase of a run: first word, first steps, last step, last score.

The paper's recipe on the Hopper episodes of `make demo`, each run a process of its own: first with
empty caches of kernels (as on a new machine), then again, then without its evaluations.  The last
is what the steps alone cost; the rate while evaluations play is compared with its rate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import gear_offline as go

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "XDG_CACHE_HOME")
PHASES = ("imported", "first_steps", "last_step", "last_score", "exit")
RUN = """
import json, sys, time
import gear_offline as go
class Clock(go.Callback):
    def on_begin(self, run): note("imported")
    def on_log(self, run, step, values): note("first_steps"); times["last_step"] = time.time()
    def on_evaluation(self, run, step, record): times["last_score"] = time.time()
times = {}
def note(name): times.setdefault(name, time.time())
go.train(sys.argv[1], json.loads(sys.argv[2]), out=sys.argv[3], callbacks=[Clock()], quiet=True)
print(json.dumps(times))
"""


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure on the GPU, else on the CPU; about six minutes on a GPU with 16 cores."""
    small = quick or not torch.cuda.is_available()
    options: dict[str, Any] = {"train.steps": 40 if small else 100_000}
    options |= {"train.log_every": 10 if small else 100, "evaluate.episodes": 4 if small else 100}
    options |= {"train.evaluate_every": options["train.steps"] // (2 if small else 10)}
    options["train.checkpoint_every"] = options["train.evaluate_every"]
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        data = Path(folder) / "data"
        made: dict[str, Any] = {"steps": 2_000}
        if not small:
            made = {"steps": 200_000, "policy": "ars", "quality": "mixed"}
            made |= {"action_noise": 0.05, "gate": 2000.0}
        go.collect("Hopper-v5", f"{data}.hdf5", quiet=True, **made)
        go.convert(f"{data}.hdf5", data, quiet=True)
        options["data.path"] = str(data)
        caches = {name: str(Path(folder) / name) for name in CACHES}
        ways = {
            "new machine": (options, caches),
            "again": (options, caches),
            "no evaluation": (options | {"evaluate.episodes": 0}, caches),
        }
        rows = [
            {"name": name, **_seconds(way, extra, Path(folder) / name.replace(" ", "-"))}
            for name, (way, extra) in ways.items()
        ]
    alone = rows[-1]
    for row in rows:  # the share of its rate alone at which a run steps
        spans = [r["last_step"] - r["first_steps"] for r in (alone, row)]
        row["rate_of_alone"] = spans[0] / spans[1]
    return {"base": "no evaluation", "options": options, "results": rows}


def _seconds(options: dict[str, Any], caches: dict[str, str], out: Path) -> dict[str, Any]:
    began = time.time()
    command = [sys.executable, "-c", RUN, "paper", json.dumps(options), str(out)]
    environment = {**os.environ, **caches}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    times = json.loads(done.stdout) | {"exit": time.time()}
    return {name: times[name] - began for name in PHASES if name in times}
