"""Datasets of several tasks, and recipes and learners over them, that tests share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gear_offline.batches.tables.joint import JointDataset, Part, join_datasets
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.runs.data import prepare_dataset
from gear_offline.runs.resolve import resolve
from gear_offline.training.learner import Learner
from gear_offline.training.stack import make_step
from tests.support import hopper_columns, last_words, make_dataset

SIZES = {"hop": (11, 3), "walk": (17, 6), "point": (2, 1)}
LENGTHS = {"hop": [9, 30, 4, 17], "walk": [5, 8, 40, 21], "point": [3, 12, 6]}
SCALES = {"hop": 10.0, "walk": 3.0, "point": 0.5}


def make_parts(folder: Path, names: Sequence[str] = tuple(SIZES)) -> dict[str, Dataset]:
    """Return a dataset a task, of different widths, in several shards each."""
    found = {}
    for seed, name in enumerate(names):
        states, actions = SIZES[name]
        found[name] = make_dataset(
            folder / name,
            LENGTHS[name],
            seed=seed,
            state_dim=states,
            action_dim=actions,
            shard_bytes=3000,
            environment_id=None,
        )
    return found


def make_discrete(folder: Path, counts: dict[str, int]) -> dict[str, Dataset]:
    """Return a dataset a task with so many discrete actions, all of which occur."""
    found = {}
    for seed, (name, count) in enumerate(counts.items()):
        lengths = [20, 7, 13]
        columns = hopper_columns(sum(lengths), seed=seed, state_dim=3 + seed)
        columns["actions"] = np.arange(sum(lengths)) % count
        columns["terminals"][np.cumsum(lengths) - 1] = True
        found[name] = make_dataset(folder / name, lengths, columns=columns, environment_id=None)
    return found


def join(parts: dict[str, Dataset]) -> JointDataset:
    """Return the joint table, each task with its own scale of returns."""
    tasks = [Part(name=n, dataset=d, returns_scale=SCALES.get(n, 1.0)) for n, d in parts.items()]
    return join_datasets(tasks)


def tasks_recipe(parts: dict[str, Dataset], *overrides: str, **of_task: Any) -> Recipe:
    """Return a recipe over datasets that trains in a second and plays nothing."""
    tasks = {
        name: {"path": str(part.path), "returns_scale": SCALES.get(name, 1.0), **of_task}
        for name, part in parts.items()
    }
    small = load_recipe(
        "paper",
        last_words(
            *("name=several", "loader.batch_size=12", "loader.context_length=4"),
            *("model.hidden_size=16", "model.layers=1", "model.max_timestep=null"),
            *("optimizer.learning_rate=3e-3", "optimizer.warmup_steps=3", "train.steps=20"),
            *("train.device=cpu", "train.threads=1", "train.log_every=5"),
            *("train.checkpoint_every=10", "train.trackers=[]", "evaluate.episodes=0"),
            *overrides,
        ),
    ).to_dict()
    small["data"]["tasks"] = tasks
    return Recipe.parse(small)


def advance(learner: Any, steps: int = 1) -> None:
    """Do steps of a learner, whose first call makes what does them."""
    if not hasattr(learner, "stepper"):
        learner.stepper = make_step([learner])
    for _ in range(steps):
        learner.stepper.run()


def make_learner(recipe: Recipe, device: str = "cpu") -> Learner:
    """Return the learner that training a recipe of one process would make."""
    dataset = prepare_dataset(recipe, quiet=True)
    resolved, sizes = resolve(recipe, dataset, quiet=True)
    torch.manual_seed(recipe.seed)
    return Learner(resolved, sizes, dataset, torch.device(device))
