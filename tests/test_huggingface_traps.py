"""The mistakes that users of Decision Transformers made, where loader, model and policy must agree.

Each docstring names where the mistake was found: a repository and its issue or pull request, or
the class of transformers 5.17 and 5.23 as it behaves.  Against the released class the model is
compared in test_decision_transformer.py (tokens by step, CORL pull request 3; one row of positions,
transformers issue 17946), windows against plain loops in test_loader.py (a return-to-go has the own
reward, d3rlpy issue 401, and all that comes after the window), actions that a tanh cannot reach in
test_trainer.py, boundaries and truncated tails with each source.  Timesteps beyond the embedding,
where the released class ends a process on a GPU, are refused in test_decision_transformer.py; a
policy stays at the last one: test_policy.py.
"""

# mypy: disable-error-code="no-untyped-call"
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DecisionTransformerConfig

import gear_offline as go
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.hugging_face import to_released
from gear_offline.models.policy import Policy
from tests.model_support import TOLERANCE, make
from tests.support import ArraySource, hopper_columns, iter_episodes, make_dataset

LENGTHS = (12, 3, 7, 5)
STATES, CONTEXT, SCALE = 11, 6, 10.0
RAW = {"returns_scale": 1.0, "normalize_states": False}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("traps"), LENGTHS)


def make_loader(dataset: Dataset, **options: Any) -> GearLoader:
    shape: dict[str, Any] = {"batch_size": 8, "context_length": CONTEXT, "device": "cpu"}
    shape |= {"returns_scale": SCALE, "normalize_states": True}
    return GearLoader(dataset, **shape | options)


def make_model(**changes: Any) -> DecisionTransformer:
    model = make(**{"state_dim": STATES, "context_length": CONTEXT} | changes)
    model.eval()
    return model


def clip(episode: Any) -> Any:
    return {"rewards": np.clip(episode["rewards"], -1.0, 0.5)}


def affine(episode: Any) -> Any:
    return {"rewards": episode["rewards"] / 4 - 3}


def delayed(episode: Any) -> Any:
    return {"rewards": np.append(0 * episode["rewards"][1:], episode["rewards"].sum())}


FRAME = (36, 36)
LARGE = {"dtype": np.float64, "offset": 1.75e9}  # seconds since 1970, metres of UTM
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalised": {"normalize_states": True, "returns_scale": SCALE},
    "left": {"normalize_states": True, "padding": "left", "returns_scale": 7 / 3},
    "discounted": {"gamma": 0.5, "returns_scale": SCALE},
    "without a future": {"gamma": 0.0},
    "large": {"normalize_states": True, **LARGE},
    "large, discounted, edited": {"normalize_states": True, **LARGE, "gamma": 0.5, "map": affine},
    "half": {"normalize_states": True, "dtype": np.float16},
    "raw float64": {"dtype": np.float64, "padding": "left"},
    "numbers": {"dtype": np.int32, "offset": 3, "normalize_states": True},
    "clipped": {"map": clip, "returns_scale": SCALE},
    "affine": {"map": affine},
    "delayed": {"map": delayed, "gamma": 0.5},
    "choices": {"discrete": True},
    "frames": {"discrete": True, "frame_stack": 3},
    "frames, channels first": {"discrete": True, "frame_stack": 3},
    "goals": {"normalize_states": True, "goals": {"future": 1.0}, **LARGE},
}


@pytest.mark.parametrize("kind", KINDS)
def test_policy_shows_the_model_what_training_showed(kind: str, tmp_path: Path) -> None:
    """transformers issue 31374, kzl/decision-transformer issues 70 and 84, CORL pull request 75.

    Replaying an episode of the data through the policy, with its own return as the target, must
    show the model the very windows that the loader gives, bit for bit: the environment's own
    observations, float64, and its own rewards, whatever `convert` and the loader made of them.
    """
    asked = dict(KINDS[kind])
    dtype, offset = asked.pop("dtype", np.float32), asked.pop("offset", 0.0)
    discrete, edit, frames = asked.pop("discrete", False), asked.pop("map", None), "frames" in kind
    rng, steps = np.random.default_rng(3), sum(LENGTHS)
    columns = hopper_columns(steps)
    columns["observations"] = (offset + 9 * rng.normal(size=(steps, STATES))).astype(dtype)
    columns["rewards"] = rng.integers(-9, 9, steps).astype(np.float32) / 4  # exact sums
    if discrete:
        columns |= {"actions": rng.integers(0, 4, (steps, 1))}
    if frames:
        frame = (3, *FRAME) if "first" in kind else FRAME
        columns["observations"] = rng.integers(0, 256, (steps, *frame), np.uint8)
    source = ArraySource(columns, LENGTHS)
    go.convert(source, tmp_path / "data", map=edit, quiet=True)
    dataset = go.open_dataset(tmp_path / "data")
    loader = make_loader(dataset, batch_size=400, **{**RAW, **asked})
    batch, goals = loader.batch_at(0), asked.get("goals")
    real = batch.attention_mask.bool()
    shape: dict[str, Any] = (
        {"frame_shape": dataset.spec["observations"].shape, "frame_stack": 3} if frames else {}
    )
    if frames:
        shape["state_dim"] = int(np.prod(shape["frame_shape"]))
    model = make_model(
        **shape, discrete=discrete, action_dim=4 if discrete else 3, goals=bool(goals)
    )
    folder = Policy(model, **dict(loader.window)).save(tmp_path / "policy")
    policy, seen = go.load_policy(folder, device="cpu"), list[Any]()
    assert policy.window == loader.window
    made: Any = policy.model
    act = made.predict_last_action

    def spy(*inputs: Any) -> Any:
        seen.append([tensor.clone() for tensor in inputs[:5]])
        return act(*inputs)

    made.predict_last_action = spy
    names = {tuple(name): row for row, name in enumerate(batch.segments.tolist())}
    for episode, rows in enumerate(iter_episodes(source)):
        start = int(dataset.episodes.offsets[episode])
        edited = dataset.read("rewards", start, start + LENGTHS[episode]).astype(np.float64)
        discounts = asked.get("gamma", 1.0) ** np.arange(LENGTHS[episode])
        for step in range(LENGTHS[episode]):
            row = names[episode, max(0, step + 1 - CONTEXT)]
            places, last = np.flatnonzero(real[row])[: step + 1], min(step, CONTEXT - 1)
            again = range(step, step)
            if goals:  # each window of the loader has a goal of its own
                goal, again = loader.goals_at(0), range(max(0, step + 1 - CONTEXT), step)
                at = dataset.episodes.offsets[goal.episodes[row]] + goal.starts[row]
                policy.reset([0], columns["observations"][[at]])
            elif step == 0:
                wanted = float((edited * discounts).sum())
                policy.reset([0], wanted)
            for before in again:
                policy.act(rows["observations"][[before]])
                policy.observe_reward([0.0], actions=rows["actions"][[before]])
            given = rows["observations"][[step]]
            policy.act(given if frames else given.astype(np.float64))
            states, actions, returns, timesteps, at_last = seen[-1]
            window = slice(places[0], places[0] + last + 1)
            expected = batch.states[row, window]
            assert int(at_last) == last
            if frames:  # encoded one by one
                torch.testing.assert_close(states[0], model.features(expected[None])[0])
            else:
                assert torch.equal(states[0], expected)
            assert torch.equal(actions[0, :last], batch.actions[row, window][:last])
            if not goals:
                assert torch.equal(timesteps[0], batch.timesteps[row, window])
            if goals:
                assert torch.equal(returns[0], batch["goals"][row].expand(last + 1, -1))
            elif asked.get("gamma") != 0.0:
                assert torch.equal(returns[0], batch["returns_to_go"][row, window])
            else:  # the next reward, which nobody knows
                assert (returns[0] == np.float32(wanted)).all()
            policy.observe_reward(
                rows["rewards"][[step]], actions=rows["actions"][[step]].squeeze()
            )


@pytest.mark.parametrize("padding", ["right", "left"])
def test_values_in_the_padding_are_harmless(dataset: Dataset, padding: str) -> None:
    """kzl issues 36, 41, 50: state 0, action -10, done 2 in training, other values in playing."""
    model, batch = make_model(), next(make_loader(dataset, padding=padding))
    expected, empty = model.loss(batch), batch.attention_mask == 0
    assert empty.any(), "the test needs padding"
    for tensor, value in (
        (batch.states, 3.0),
        (batch.actions, -10.0),
        (batch["returns_to_go"], 9.0),
    ):
        tensor[empty] = value
    assert torch.allclose(model.loss(batch), expected, rtol=0, atol=TOLERANCE)


def test_sides_of_padding_give_one_loss(dataset: Dataset) -> None:
    """The same segments, padded left for the released class and right for ours."""
    model = make_model()
    right, left = (next(make_loader(dataset, padding=side)) for side in ("right", "left"))
    real = left.attention_mask.bool()
    assert torch.equal(right.segments, left.segments) and not real.all()
    assert torch.allclose(model.loss(right), model.loss(left), rtol=0, atol=TOLERANCE)
    theirs = to_released(model)(**left.model_inputs()).action_preds
    error = torch.mean((theirs[real] - left.actions[real]) ** 2)
    assert torch.allclose(model.loss(right), error, rtol=0, atol=TOLERANCE)


def test_misspelled_inputs_are_refused(dataset: Dataset) -> None:
    """The released class takes any keyword and ignores it."""
    inputs = next(make_loader(dataset)).model_inputs()
    inputs["attention_masks"] = inputs.pop("attention_mask")
    to_released(make_model())(**inputs)
    with pytest.raises(TypeError, match="attention_masks"):
        make_model()(**inputs)


def test_building_and_saving_a_model_prints_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The default token ids 50256 lie outside a vocabulary of one: two warnings a model.

    5.17 builds the default configuration, too, to leave defaults out of the text.
    """
    model = make_model()
    model.config_text()
    loaded = DecisionTransformerConfig.from_dict(json.loads(model.config.to_json_string()))
    for config in (model.config, loaded):  # None would be left out, and become 50256 when loaded
        assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    assert not caplog.records
