"""Training steps a second with evaluations beside training, in place of it, and without any.

The paper's recipe trains on random data of hopper's shape and is evaluated four times; steps a
second are those of the summary: from the first step to the last, evaluations in place included,
the wait for results after the last step apart.  The order of the ways changes from turn to turn.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from gear_offline.bench.loader import EPISODES, STEPS, _hopper_like
from gear_offline.config.recipe import load_recipe
from gear_offline.core.progress import progress
from gear_offline.evaluation.episode_runner import make_environment
from gear_offline.runs.trainer import train

ENVIRONMENT = "Hopper-v5"
WAYS = {
    "none": ("evaluate.episodes=0",),
    "beside training": ("evaluate.beside=on",),
    "in place of training": ("evaluate.beside=off",),
}
BASE = "none"
STEPS_ON = {"cuda": 40_000, "cpu": 1_200}


def run(*, quick: bool = False, turns: int | None = None) -> dict[str, Any]:
    """Measure on the GPU, else on the CPU with one thread; a minute a turn.

    Parameters
    ----------
    turns
        Runs of each way; default: 3, or 1 if `quick`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = STEPS_ON[device] // (4 if quick else 1)
    turns = turns or (1 if quick else 3)
    make_environment(ENVIRONMENT).close()  # its error, before anything else
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with (
        _hopper_like(STEPS // 10, EPISODES // 10) as (dataset, _),
        tempfile.TemporaryDirectory(prefix="gear-offline-bench-") as temporary,
        progress(turns * len(WAYS), "beside", unit="runs") as advance,
    ):
        for turn in range(turns):
            for name in list(WAYS)[turn % 3 :] + list(WAYS)[: turn % 3]:
                out = Path(temporary) / f"{turn}-{name.split()[0]}"
                options = (*_options(str(dataset.path), device, steps), *WAYS[name])
                train(load_recipe("paper", options), out=out, quiet=True)
                found[name].append(json.loads((out / "summary.json").read_text()))
                advance(1)
    rates = {name: [run["steps_per_second"] for run in runs] for name, runs in found.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "environment": ENVIRONMENT,
        "steps": steps,
        "base": BASE,
        "results": [
            {
                "name": name,
                "steps_per_second": medians[name],
                "steps_per_second_all": rates[name],
                "slower": 1 - medians[name] / medians[BASE],
                "evaluation": found[name][-1]["evaluation"],
            }
            for name in WAYS
        ],
    }


def _options(data: str, device: str, steps: int) -> tuple[str, ...]:
    return (
        *("name=beside", f"data.path={data}", f"train.device={device}", "train.threads=1"),
        *(f"train.steps={steps}", f"train.evaluate_every={steps // 4}", "train.compile=off"),
        f"optimizer.warmup_steps={steps // 4}",  # the recipe's 10,000 are more than a CPU's steps
        *("train.tensorboard=false", "train.log_every=1000", f"train.checkpoint_every={steps}"),
        *(f"evaluate.environment={ENVIRONMENT}", "evaluate.episodes=20"),
        *("evaluate.targets=[3600, 1800]", "evaluate.environments=20"),
    )


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a way of evaluating."""
    rows: list[tuple[Any, ...]] = [
        ("evaluations", "steps/s", "slower", "results late by steps (mean)", "and at most seconds")
    ]
    for row in document["results"]:
        late, seconds = (
            row["evaluation"][key] for key in ("staleness_steps_mean", "staleness_seconds_max")
        )
        rows.append(
            (
                row["name"],
                f"{row['steps_per_second']:,.0f}",
                f"{row['slower']:.1%}",
                "-" if late is None else f"{late:,.0f}",
                "-" if seconds is None else f"{seconds:.1f}",
            )
        )
    return rows
