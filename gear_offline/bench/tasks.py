"""Training steps a second on three tasks joined, against one of them alone.

Random data of the shapes of Hopper, Walker2d and HalfCheetah, the paper's model, and batches of
two sizes; on a GPU each step is one compiled CUDA graph in bfloat16.  "one" is the widest task
through the same code.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.convert import convert
from gear_offline.core.progress import progress
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.runs.preparation import prepare_dataset, resolve
from gear_offline.training.learner import Learner

SIZES = {"hopper": (11, 3), "walker2d": (17, 6), "halfcheetah": (17, 6)}  # states, actions
ALONE = "walker2d"
EPISODE = 1000
WARM_UP, STEPS = 300, 2000
QUICK = 20


def run(
    *, quick: bool = False, batches: Sequence[int] = (64, 512), episodes: int = 300
) -> dict[str, Any]:
    """Measure; about a minute on a GPU, most of it compiling.

    Parameters
    ----------
    batches
        Segments in a batch.
    episodes
        Of each task, 1,000 steps long.
    """
    cuda = torch.cuda.is_available()
    steps = QUICK if quick else STEPS
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="gear-offline-bench-") as folder,
        progress(2 * len(batches), "tasks", unit="rows") as advance,
    ):
        parts = {name: _data(Path(folder), name, episodes) for name in SIZES}
        for batch in batches:
            for label, names in (("one", [ALONE]), ("three", list(SIZES))):
                chosen = {name: parts[name] for name in names}
                learner = _learner(chosen, batch, steps, cuda=cuda)
                rate = _rate(learner, steps, cuda=cuda)
                rows.append({"tasks": label, "batch_size": batch, "steps_per_second": rate})
                learner.close()
                advance(1)
    device = torch.cuda.get_device_name() if cuda else "cpu"
    return {"device": device, "results": rows}


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a measurement."""
    rows: list[tuple[Any, ...]] = [("tasks", "batch", "steps/s")]
    for row in document["results"]:
        rows.append((row["tasks"], row["batch_size"], f"{row['steps_per_second']:,.4g}"))
    return rows


def _data(folder: Path, name: str, episodes: int) -> Dataset:
    states, actions = SIZES[name]
    generator, steps = np.random.default_rng(states), episodes * EPISODE
    timeouts = np.zeros(steps, bool)
    timeouts[EPISODE - 1 :: EPISODE] = True
    source = folder / f"{name}.hdf5"
    with h5py.File(source, "w") as file:
        file["observations"] = generator.normal(size=(steps, states)).astype(np.float32)
        file["actions"] = generator.uniform(-1, 1, size=(steps, actions)).astype(np.float32)
        file["rewards"] = generator.normal(1.0, 0.5, size=steps).astype(np.float32)
        file["terminals"] = np.zeros(steps, bool)
        file["timeouts"] = timeouts
    convert(source, folder / name, quiet=True)
    return open_dataset(folder / name)


def _learner(parts: Mapping[str, Dataset], batch: int, steps: int, *, cuda: bool) -> Learner:
    overrides = [f"loader.batch_size={batch}", "evaluate.episodes=0", "name=bench-tasks"]
    overrides += [f"train.steps={10 * (WARM_UP + steps)}", "optimizer.warmup_steps=100"]
    if cuda:
        overrides += ["train.device=cuda", "train.graph=on", "train.compile=on"]
    settings = load_recipe("paper", [*overrides, "train.log_every=1000"]).to_dict()
    settings["data"]["tasks"] = {name: {"path": str(part.path)} for name, part in parts.items()}
    recipe = Recipe.parse(settings)
    dataset = prepare_dataset(recipe, quiet=True)
    resolved, sizes = resolve(recipe, dataset, quiet=True)
    return Learner(resolved, sizes, dataset, torch.device("cuda" if cuda else "cpu"))


def _rate(learner: Learner, steps: int, *, cuda: bool) -> float:
    def advance(count: int) -> None:
        for _ in range(count):
            if learner.unreported == learner.recipe.train.log_every:
                learner.report()
            learner.advance()
        if cuda:
            torch.cuda.synchronize()

    advance(WARM_UP if cuda else 1)
    began = time.perf_counter()
    advance(steps)
    return steps / (time.perf_counter() - began)
