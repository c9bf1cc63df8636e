"""Frames: encoders against plain layers, in the model and its files; from data to score."""

# mypy: disable-error-code="no-untyped-call"

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gear_offline.artifacts.json_lines import read_records
from gear_offline.artifacts.trained import load_policy
from gear_offline.config.recipe import Recipe
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import probe
from gear_offline.evaluation.play import check_sizes
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.models.encoders import FrameEncoder
from gear_offline.models.hugging_face import to_released
from gear_offline.models.policy import Policy
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.loop import train_run
from gear_offline.runs.resolve import resolve
from tests.image_support import ENVIRONMENT, SIZE, STEP_LIMIT, band_data
from tests.model_support import assert_same_state, make
from tests.support import one_error
from tests.training_support import tiny_recipe

BATCH, STEPS, STACK = 2, 3, 4


def frames(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def stacked(single: Tensor, stack: int) -> Tensor:
    """(B, K + stack - 1, *frame) to the view that the loader gives, (B, K, stack, *frame)."""
    return single.unfold(1, stack, 1).movedim(-1, 2)


def test_cnn_is_the_networks_layers_on_scaled_pixels() -> None:
    torch.manual_seed(0)
    encoder: Any = FrameEncoder("cnn", frame_shape=(84, 84), frame_stack=STACK, features=16)
    assert encoder.linear.in_features == 3136
    states = stacked(frames(BATCH, STEPS + STACK - 1, 84, 84), STACK)
    found = encoder(states)
    assert found.shape == (BATCH, STEPS, 16) and found.dtype == torch.float32
    plain = states.reshape(-1, STACK, 84, 84).float() / 255
    for layer in encoder.convolutions:  # the paper's network, written out
        plain = layer(plain).relu()
    plain = encoder.linear(plain.permute(0, 2, 3, 1).flatten(1)).tanh()
    torch.testing.assert_close(found.flatten(0, 1), plain, atol=2e-6, rtol=1e-5)
    assert found.abs().max() < 1 and found.std() > 0.01
    torch.testing.assert_close(encoder(states.contiguous()), found)


@pytest.mark.parametrize(
    ("kind", "frame", "stack"),
    [
        ("cnn", (36, 40), 1),
        ("cnn", (40, 36, 3), 2),
        ("cnn", (3, 40, 36), 2),
        ("patch", (84, 84), 4),
        ("patch", (6, 9, 3), 1),
        ("patch", (6, 9, 3), 2),
    ],
)
def test_every_pixel_of_every_frame_counts(kind: str, frame: tuple[int, ...], stack: int) -> None:
    torch.manual_seed(1)
    encoder = FrameEncoder(kind, frame_shape=frame, frame_stack=stack, features=8).double()
    shape = (1, 2, *frame) if stack == 1 else (1, 2, stack, *frame)
    states = frames(*shape)
    before = encoder(states)
    assert before.shape == (1, 2, 8) and before.dtype == torch.float64
    assert not torch.equal(before[0, 0], before[0, 1])
    places = [(0,) * len(shape[2:]), tuple(size // 2 for size in shape[2:])]
    for place in places:  # each stack and colour is seen, and the other step is not touched
        changed = states.clone()
        changed[(0, 1, *place)] ^= 255
        after = encoder(changed)
        assert torch.equal(after[0, 0], before[0, 0])
        assert not torch.equal(after[0, 1], before[0, 1])


@pytest.mark.parametrize("stack", [1, 2])
def test_colours_may_come_first_and_pixels_be_floats(stack: int) -> None:
    torch.manual_seed(1)
    encoder = FrameEncoder("patch", frame_shape=(24, 18, 3), frame_stack=stack, features=8)
    other = FrameEncoder("patch", frame_shape=(3, 24, 18), frame_stack=stack, features=8)
    other.load_state_dict(encoder.state_dict())
    states = frames(1, 2, *[stack] * (stack > 1), 24, 18, 3)
    assert torch.equal(other(states.movedim(-1, -3)), encoder(states))
    torch.testing.assert_close(encoder(states / 255), encoder(states))


@pytest.mark.parametrize("kind", ["cnn", "patch"])
def test_learns_in_bfloat16_and_without_graph_breaks(kind: str) -> None:
    torch.manual_seed(0)
    encoder = FrameEncoder(kind, frame_shape=(84, 84), frame_stack=2, features=8)
    states = stacked(frames(1, 3, 84, 84), 2)
    expected = encoder(states)
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(states), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = encoder(states)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.03, rtol=0.05)
    half.float().square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def model_of_frames(**changes: Any) -> DecisionTransformer:
    torch.manual_seed(0)
    frame: dict[str, Any] = {"state_dim": 84 * 84, "frame_shape": (84, 84), "frame_stack": STACK}
    sizes = {"action_dim": 6, "hidden_size": 16, "layers": 1, "max_timestep": 50}
    return build_model(**{**frame, **sizes, "discrete": True, **changes})


def inputs() -> dict[str, Tensor]:
    count = BATCH * STEPS
    return {
        "states": stacked(frames(BATCH, STEPS + STACK - 1, 84, 84), STACK),
        "actions": torch.arange(count).view(BATCH, STEPS) % 6,
        "returns_to_go": torch.linspace(-1, 1, count).view(BATCH, STEPS, 1),
        "timesteps": torch.arange(STEPS).expand(BATCH, STEPS),
        "attention_mask": torch.ones(BATCH, STEPS, dtype=torch.int64),
    }


@pytest.mark.parametrize("encoder", ["cnn", "patch", "none"])
def test_files_keep_the_encoder(encoder: str, tmp_path: Path) -> None:
    model, given = model_of_frames(encoder=encoder).eval(), inputs()
    model.save_pretrained(tmp_path / "weights")
    again = DecisionTransformer.from_pretrained(tmp_path / "weights").eval()
    assert_same_state(again, model)
    assert torch.equal(again(**given).action_preds, model(**given).action_preds)
    assert again.config.frame_shape == (84, 84) and again.config.frame_stack == STACK
    assert again.config.state_dim == (STACK * 84 * 84 if encoder == "none" else 16)


def test_the_released_class_takes_the_features_as_states() -> None:
    model, given = model_of_frames().eval(), inputs()
    expected = model(**given).action_preds
    released = to_released(model)
    features = given | {"states": model.features(given["states"])}
    one_hot = nn.functional.one_hot(given["actions"], 6).float()
    found = released(**(features | {"actions": one_hot})).action_preds
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(**features).action_preds, expected)


def test_auto_and_what_is_refused() -> None:
    assert model_of_frames().config.frame_encoder == "cnn"
    plain = build_model(state_dim=5, action_dim=2, hidden_size=8, layers=1)
    assert plain.frame_encoder is None and "frame_encoder" not in plain.config.to_dict()
    for changes, said in (
        ({"frame_shape": (), "encoder": "cnn", "state_dim": 5}, "needs frames"),
        ({"frame_shape": (20, 84), "state_dim": 20 * 84}, "too small for the cnn"),
        ({"frame_shape": (20, 31), "state_dim": 20 * 31}, "too small for the cnn"),
        ({"frame_shape": (7, 13), "state_dim": 91, "encoder": "patch"}, "no patches"),
        ({"frame_shape": (83, 41), "state_dim": 83 * 41, "encoder": "patch"}, "no patches"),
        ({"frame_shape": (84, 84), "state_dim": 84}, "do not make a state of 84"),
        ({"encoder": "vit"}, "Input should be 'auto', .*model.encoder"),
        ({"frame_stack": 0}, "greater than or equal to 1"),
    ):
        with one_error("MODEL", said) as caught:
            model_of_frames(**changes)
        if named := re.search(r"model\.encoder=(\w+)", caught.value.remedy):  # advice that works
            model_of_frames(**{**changes, "encoder": named[1]})


# from data to score ----------------------------------------------------------------------------


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
    check_sizes(probe(ENVIRONMENT), model.facts.sizes, whose="the model")
    with pytest.raises(InputError, match=r"has 1 frame of 4 and 2 discrete actions"):
        check_sizes(probe("CartPole-v1"), model.facts.sizes, whose="the model")


def test_recipes_that_do_not_fit_frames(dataset: Dataset) -> None:
    for code, override in (
        ("LOADER_OPTION", "loader.normalize_states=true"),
        ("ENVIRONMENT", "evaluate.environment=CartPole-v1"),
    ):
        with one_error(code) as caught:
            resolve(recipe_for(dataset, override), dataset, quiet=True)
        assert override.partition("=")[0] in str(caught.value), "as the recipe names it"
    resolved, sizes = resolve(recipe_for(dataset), dataset, quiet=True)
    assert sizes.columns[0].shape == (SIZE, SIZE) and sizes.state_dim == SIZE * SIZE
    assert resolved.loader.frame_stack == 2 and not resolved.model.action_tanh
