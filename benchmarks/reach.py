"""Seconds from Enter to a mean return of 3,000 on Hopper, from the data of `make demo`.

The demo's recipe, its 2,000 steps and both models, each seed a process of its own that ends with
the first score of 3,000: a mean over 20 episodes, played after every 500 steps.  ``demo/hopper`` is
taken if it is there; making it, as `make demo` does, is not counted.  Another version of MuJoCo
makes other data: compare seconds of data with the same mean return.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gear_offline as go

RETURN = 3_000
MODELS = ("decision_transformer", "decoupled")
COLLECT = {"policy": "ars", "quality": "mixed", "steps": 200_000, "action_noise": 0.05}
RUN = """
import json, sys, time
import gear_offline as go
class Reach(go.Callback):
    def on_evaluation(self, run, step, record):
        scores.append({"step": step, "return": record["return"], "time": time.time()})
        return record["return"] >= float(sys.argv[3])
scores = []
go.train("demo", json.loads(sys.argv[1]), out=sys.argv[2], callbacks=[Reach()], quiet=True)
print(json.dumps(scores))
"""


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure on the GPU, else on the CPU; ten runs of two to four minutes on two cores."""
    options: dict[str, Any] = {"evaluate.targets": [RETURN], "evaluate.episodes": 20}
    options |= {"train.steps": 20, "evaluate.episodes": 2} if quick else {}
    options["train.evaluate_every"] = 10 if quick else 500
    results = []
    with _data(quick) as data, tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        for model in MODELS:
            for seed in range(1 if quick else 5):
                own: dict[str, Any] = {"model.kind": model, "seed": seed, "data.collect": None}
                own |= {"data.path": str(data), "model.hidden_size": 64, "model.dropout": 0.0}
                own["model.max_timestep"] = 1000
                scores, seconds = _scores(options | own, Path(folder) / f"{model}-{seed}")
                last = scores[-1]
                reached = seconds[-1] if last["return"] >= RETURN else None
                row = {"name": model, "seed": seed, "seconds": reached, "step": last["step"]}
                results.append(row | {"return": last["return"], "all_seconds": seconds})
        dataset = go.open_dataset(data)
        known: dict[str, Any] = {"episodes": len(dataset), "steps": dataset.spec.steps}
        known["mean_return"] = float(dataset.returns.mean())
    return {"base": MODELS[0], "options": options, "data": known, "results": results}


@contextmanager
def _data(quick: bool) -> Iterator[Path]:
    """Yield the demo's dataset, or a small one."""
    demo = Path("demo/hopper")
    if demo.exists() and not quick:
        yield demo.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        file, data = Path(folder) / "hopper.hdf5", Path(folder) / "hopper"
        how: dict[str, Any] = {"steps": 1_000} if quick else COLLECT | {"gate": 2_000}
        go.collect("Hopper-v5", file, quiet=True, **how)
        go.convert(file, data, quiet=True)
        yield data


def _scores(options: dict[str, Any], out: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Return what a run scored, and the seconds from its start to each score."""
    began = time.time()
    command = [sys.executable, "-c", RUN, json.dumps(options), str(out), str(RETURN)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    scores: list[dict[str, Any]] = json.loads(done.stdout)
    return scores, [round(score.pop("time") - began, 1) for score in scores]
