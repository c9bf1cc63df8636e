"""Frames from data to score: training, checkpoints, acting, and what does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.config.recipe import Recipe
from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import probe
from gear_offline.evaluation.evaluate import check_sizes
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import MemoryRows
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.models.policy import Policy
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.loop import train_run
from gear_offline.runs.prepare import resolve
from gear_offline.training.metrics import read_records
from gear_offline.training.model import sizes_of
from gear_offline.training.policies import load_policy
from tests.image_support import ACTIONS, ENVIRONMENT, SIZE, STEP_LIMIT, band_data
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


def model_of_frames(**options: Any) -> DecisionTransformer:
    sizes: dict[str, Any] = {"state_dim": SIZE * SIZE, "action_dim": ACTIONS, "discrete": True}
    sizes |= {"hidden_size": 8, "layers": 1, "frame_shape": (SIZE, SIZE)}
    return build_model(**sizes, **options)


def policy_of(model: DecisionTransformer, span: int) -> Policy:
    statistics: dict[str, Any] = {"state_mean": None, "state_std": None}
    return Policy(model, **statistics, returns_scale=1.0, context_length=span)


def test_acting_sees_what_training_showed(dataset: Dataset) -> None:
    """Replay episodes: the policy's windows are the features of the loader's windows."""
    torch.manual_seed(0)
    model, span = model_of_frames(frame_stack=3, max_timestep=50), 4
    policy = policy_of(model, span)
    loader = GearLoader(dataset, batch_size=1, context_length=span, frame_stack=3, device="cpu")
    frames = dataset.read("observations", 0, 2 * STEP_LIMIT).reshape(2, STEP_LIMIT, SIZE, SIZE)
    policy.reset([0, 1], [1.0, 2.0])
    policy.act(frames[::-1, 0])  # something else first, to be forgotten
    policy.reset([0, 1], [1.0, 2.0])
    for step in range(STEP_LIMIT):
        policy.act(frames[:, step])
        policy.observe_reward(np.zeros(2))
        start = max(step - span + 1, 0)
        for episode in (0, 1):
            segment = loader.segments_at(0)
            segment.episodes[0], segment.starts[0] = episode, start
            assert isinstance(loader.rows, MemoryRows)
            states = loader.rows.gather.gather(segment).tensors()["states"]
            shown = model.features(states)[0, : step - start + 1]
            seen = policy._windows[0][episode, : step - start + 1]
            torch.testing.assert_close(seen, shown.detach(), atol=1e-6, rtol=1e-5)


def test_policies_refuse_other_frames(dataset: Dataset) -> None:
    model = model_of_frames()
    policy = policy_of(model, 2)
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
