"""What tests of comparing strategies by training share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gear_offline.analysis.candidates import parse_candidates
from gear_offline.analysis.plan import TrainingPlan, make_plan
from gear_offline.analysis.train import train_strategies
from gear_offline.config.recipe import Recipe
from gear_offline.dataset.dataset import open_dataset
from gear_offline.runs.preparation import resolve
from tests.training_support import tiny_recipe

NAMES = "top_k:k=2,uniform_episodes"
SEEDS = 2


def recipe_of(data: Path, *overrides: str) -> Recipe:
    return tiny_recipe(data, "evaluate.targets=[3,1]", "train.evaluate_every=8", *overrides)


def run(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"seeds": SEEDS, "jobs": 0, "quiet": True} | options
    return train_strategies(recipe, parse_candidates(NAMES, recipe), out=out, **settings)


def plan_of(data: Path, out: Path, *overrides: str, seeds: int = 2) -> TrainingPlan:
    recipe, _ = resolve(recipe_of(data, *overrides), open_dataset(data), quiet=True)
    return make_plan(recipe, parse_candidates(NAMES, recipe), seeds=seeds, out=out)
