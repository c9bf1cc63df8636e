"""Frames from data to score: training, checkpoints, acting, and what does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gear_offline.config.recipe import Recipe
from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import probe
from gear_offline.evaluation.evaluate import check_sizes
from gear_offline.models.policy import Policy
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.loop import train_run
from gear_offline.runs.prepare import resolve
from gear_offline.training.metrics import read_records
from gear_offline.training.model import sizes_of
from gear_offline.training.policies import load_policy
from tests.image_support import ENVIRONMENT, SIZE, STEP_LIMIT, band_data
from tests.model_support import make
from tests.support import one_error
from tests.training_support import tiny_recipe

RECIPE = """
loader.frame_stack=2 loader.normalize_states=false loader.returns_scale=1 loader.batch_size=16
model.hidden_size=16 optimizer.learning_rate=5e-3 train.steps=60 train.checkpoint_every=30
train.evaluate_every=60 evaluate.targets=[7]
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return band_data(tmp_path_factory.mktemp("bands"))


def recipe_for(dataset: Dataset, *overrides: str) -> Recipe:
    return tiny_recipe(dataset.path, *RECIPE.split(), *overrides)


@pytest.mark.parametrize("encoder", ["cnn", "patch"])
def test_what_the_earlier_frame_shows_is_learnt(
    dataset: Dataset, encoder: str, tmp_path: Path
) -> None:
    recipe = recipe_for(dataset, f"model.encoder={encoder}")
    train_run(recipe, out=tmp_path / "run", quiet=True)
    losses = [r["loss"] for r in read_records(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] > 0.8 and losses[-1] < 0.1, "a single frame leaves a loss of ln 3"
    policy = load_policy(tmp_path / "run", device="cpu")
    assert policy.model.config.frame_encoder == encoder
    played = evaluate(tmp_path / "run", targets=[7.0], episodes=4, quiet=True)
    assert played.mean_return is not None and played.mean_return > STEP_LIMIT - 1


def test_policies_refuse_other_frames(dataset: Dataset) -> None:
    model = make(state_dim=SIZE * SIZE, frame_shape=(SIZE, SIZE), discrete=True)
    statistics: dict[str, Any] = {"state_mean": None, "state_std": None}
    policy = Policy(model, **statistics, returns_scale=1.0, context_length=2)
    policy.reset([0], [1.0])
    wrong: list[Any] = [np.zeros((1, SIZE, SIZE), np.float32), np.zeros((1, 4, 4), np.uint8)]
    for frames in wrong:
        with one_error("MODEL"):
            policy.act(frames)
    check_sizes(probe(ENVIRONMENT), sizes_of(model), whose="the model")
    with pytest.raises(InputError, match="has frames of 4 and 2 discrete actions"):
        check_sizes(probe("CartPole-v1"), sizes_of(model), whose="the model")


def test_recipes_that_do_not_fit_frames(dataset: Dataset) -> None:
    for code, override in (
        ("LOADER_OPTION", "loader.normalize_states=true"),
        ("ENVIRONMENT", "evaluate.environment=CartPole-v1"),
    ):
        with one_error(code) as caught:
            resolve(recipe_for(dataset, override), dataset, quiet=True)
        assert override.partition("=")[0] in str(caught.value), "as the recipe names it"
    resolved, sizes = resolve(recipe_for(dataset), dataset, quiet=True)
    assert sizes.frame_shape == (SIZE, SIZE) and sizes.state_dim == SIZE * SIZE
    assert resolved.loader.frame_stack == 2 and not resolved.model.action_tanh
