"""Several runs of the paper's size on one GPU: steps a second in sum, by way of sharing it.

"alone" is one run as `train` does it, which is what running them one after another gives;
"stacked" are models with stacked weights, as a sweep trains equal shapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import hopper_like, need_cuda, timed
from benchmarks.train import paper_learner
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.training.stack import make_step

OPTIONS = ("train.graph=on", "train.compile=on", "train.precision=bf16")
CHUNK = 50  # steps of a run that are launched together
Advance = Callable[[int], None]


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about three minutes, `quick` one."""
    need_cuda()
    # The driver's default of 8 queues would make runs beyond the eighth wait for others.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    rows = []
    with hopper_like(quick=quick) as data:
        cases = [("alone", 1), ("stacked", 8)]
        if not quick:
            cases += [("stacked", 2), ("stacked", 16), ("stacked", 32)]
        for way, count in cases:
            advance = {"alone": _alone, "stacked": _stacked}[way](data.dataset, count)
            rate = count * _steps_per_second(advance)
            rows.append({"way": way, "runs": count, "steps_per_second": rate})
            del advance
            torch.cuda.empty_cache()
    for row in rows:
        row["ratio"] = row["steps_per_second"] / rows[0]["steps_per_second"]  # type: ignore[operator]
    return {"results": rows}


def _steps_per_second(advance: Advance, seconds: float = 1.0) -> float:
    advance(CHUNK)
    steps = max(1, int(seconds / timed(lambda: advance(CHUNK)))) * CHUNK
    return sorted(steps / timed(lambda: advance(steps)) for _ in range(3))[1]


def _alone(dataset: Dataset, count: int) -> Advance:
    step = make_step([paper_learner(dataset, OPTIONS)])

    def advance(steps: int) -> None:
        for _ in range(steps):
            step.run()

    return advance


def _stacked(dataset: Dataset, count: int) -> Advance:
    stack = make_step([paper_learner(dataset, OPTIONS, seed=seed) for seed in range(count)])

    def advance(steps: int) -> None:
        for _ in range(steps):
            stack.run()

    return advance
