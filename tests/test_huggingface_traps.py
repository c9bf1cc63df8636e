"""The mistakes that users of Decision Transformers made, one test each.

Each docstring names where the mistake was found: a repository and its issue or pull request, or
the class of transformers 5.17 and 5.23 as it behaves.  What the sources get wrong or right
(episode boundaries, truncated tails) is tested with them; here is what the loader, the model and
the policy must agree on.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import DecisionTransformerConfig

from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.decision_transformer import DecisionTransformer, beyond_tanh, build_model
from gear_offline.models.policy import Policy
from gear_offline.models.policy_folder import config_text
from tests.model_support import TOLERANCE, released_model
from tests.support import hopper_columns, make_dataset

LENGTHS = (12, 3, 7, 5)
STATES, ACTIONS, CONTEXT, SCALE = 11, 3, 6, 10.0


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("traps"), LENGTHS)


def make_loader(dataset: Dataset, *, padding: str = "right", size: int = 8) -> GearLoader:
    return GearLoader(
        dataset,
        batch_size=size,
        context_length=CONTEXT,
        returns_scale=SCALE,
        normalize_states=True,
        padding="right" if padding == "right" else "left",
        device="cpu",
    )


def make_model(*, max_timestep: int = 20, action_tanh: bool = True) -> DecisionTransformer:
    torch.manual_seed(0)
    model = build_model(
        state_dim=STATES,
        action_dim=ACTIONS,
        hidden_size=16,
        layers=2,
        heads=2,
        max_timestep=max_timestep,
        action_tanh=action_tanh,
    )
    model.eval()
    return model


def window_at(loader: GearLoader, episode: int, start: int) -> dict[str, npt.NDArray[np.float64]]:
    """The window of one segment, found among the loader's own batches."""
    for step in range(200):
        batch = loader.batch_at(step)
        rows = np.flatnonzero((batch.segments.numpy() == (episode, start)).all(axis=1))
        if rows.size:
            return {name: value[rows[0]].numpy() for name, value in batch.model_inputs().items()}
    raise AssertionError(f"segment ({episode}, {start}) was never drawn")


def padded_batch(loader: GearLoader) -> Batch:
    batch = next(loader)
    assert int((batch.attention_mask == 0).sum()) > 0, "the test needs padding"
    return batch


def test_tokens_are_interleaved_by_step_not_by_kind(dataset: Dataset) -> None:
    """CORL pull request 3: [R.. s.. a..] trains without an error and scores poorly."""
    model = make_model()
    batch = next(make_loader(dataset))
    tokens = model(**batch.model_inputs(), output_hidden_states=True).hidden_states[0]
    time = model.embed_timestep(batch.timesteps)
    parts = (
        model.embed_return(batch.returns_to_go),
        model.embed_state(batch.states),
        model.embed_action(batch.actions),
    )
    for place, part in enumerate(parts):
        expected = model.embed_ln(part + time) + model.encoder.wpe.weight[0]
        assert torch.allclose(tokens[:, place::3], expected, rtol=0, atol=1e-6)


def test_return_to_go_includes_the_own_reward(dataset: Dataset) -> None:
    """d3rlpy issue 401: training left the own reward out and evaluation did not."""
    window = window_at(make_loader(dataset), episode=1, start=0)
    rewards = dataset.read("rewards", LENGTHS[0], LENGTHS[0] + LENGTHS[1]).astype(np.float64)
    expected = [rewards[t:].sum() / SCALE for t in range(LENGTHS[1])]
    np.testing.assert_allclose(window["returns_to_go"][: LENGTHS[1], 0], expected, rtol=1e-6)


def test_return_to_go_spans_the_episode_not_the_window(dataset: Dataset) -> None:
    """The window is cut to K steps, what is asked for is not."""
    window = window_at(make_loader(dataset), episode=0, start=0)
    assert LENGTHS[0] > CONTEXT
    np.testing.assert_allclose(window["returns_to_go"][0, 0] * SCALE, dataset.returns[0], rtol=1e-6)


@pytest.mark.parametrize("episode", range(len(LENGTHS)))
def test_policy_shows_the_model_what_training_showed(dataset: Dataset, episode: int) -> None:
    """transformers issue 31374, kzl/decision-transformer issues 70 and 84, CORL pull request 75.

    Replaying an episode of the data through the policy, with its own return as the target, must
    give the very windows that the loader gives: sign and scale of the returns-to-go, the
    normalisation of states, timesteps, and on which side the padding is.
    """
    loader, model = make_loader(dataset), make_model()
    statistics = dataset.statistics["observations"]
    policy = Policy(
        model,
        state_mean=statistics.mean,
        state_std=statistics.std,
        returns_scale=SCALE,
        context_length=CONTEXT,
    )
    first = int(dataset.episodes.offsets[episode])
    policy.reset([0], [float(dataset.returns[episode])])
    for step in range(LENGTHS[episode]):
        policy.act(dataset.read("observations", first + step, first + step + 1))
        policy._windows[1][0, min(step, CONTEXT - 1)] = torch.from_numpy(
            dataset.read("actions", first + step, first + step + 1)[0]
        )
        begin = max(0, step + 1 - CONTEXT)
        window = window_at(loader, episode, begin)
        seen = step + 1 - begin
        for place, name in enumerate(("states", "actions", "returns_to_go", "timesteps")):
            np.testing.assert_allclose(
                policy._windows[place][0, :seen].numpy(),
                window[name][:seen],
                rtol=1e-6,
                atol=1e-6,
                err_msg=f"{name} at step {step}",
            )
        policy.observe_reward(dataset.read("rewards", first + step, first + step + 1))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_values_in_the_padding_are_harmless(dataset: Dataset, padding: str) -> None:
    """kzl issues 36, 41, 50: state 0, action -10, done 2 in training, other values in playing."""
    model = make_model()
    batch = padded_batch(make_loader(dataset, padding=padding))
    expected = model.loss(batch)
    for tensor, value in ((batch.states, 3.0), (batch.actions, -10.0), (batch.returns_to_go, 9.0)):
        tensor[batch.attention_mask == 0] = value
    assert torch.allclose(model.loss(batch), expected, rtol=0, atol=TOLERANCE)


def test_sides_of_padding_give_one_loss(dataset: Dataset) -> None:
    """The same segments, padded left for the released class and right for ours."""
    model = make_model()
    right, left = (padded_batch(make_loader(dataset, padding=side)) for side in ("right", "left"))
    assert torch.equal(right.segments, left.segments)
    assert torch.allclose(model.loss(right), model.loss(left), rtol=0, atol=TOLERANCE)
    theirs = released_model(model)(**left.model_inputs()).action_preds
    real = left.attention_mask.bool()
    error = torch.mean((theirs[real] - left.actions[real]) ** 2)
    assert torch.allclose(model.loss(right), error, rtol=0, atol=TOLERANCE)


def test_actions_beyond_tanh_are_noticed_and_can_be_reached_without(tmp_path: Path) -> None:
    """Targets outside [-1, 1] can never be met by a tanh; the loss only stalls."""
    columns = hopper_columns(20)
    columns["actions"] *= 2.0
    data = make_dataset(tmp_path, [20], columns=columns)
    statistics = data.statistics["actions"]
    assert beyond_tanh(statistics.min, statistics.max) == [0, 1, 2]
    bounded, free = make_model(), make_model(action_tanh=False)
    for model in (bounded, free):
        model.state_dict()["predict_action.0.bias"].fill_(5.0)
    inputs = next(make_loader(data)).model_inputs()
    assert float(bounded(**inputs).action_preds.detach().max()) <= 1.0
    assert float(free(**inputs).action_preds.detach().max()) > 2.0


def test_timesteps_beyond_the_embedding(dataset: Dataset) -> None:
    """The released class raises IndexError, on a GPU a device assertion that ends the process."""
    batch = next(make_loader(dataset, size=64))
    assert int(batch.timesteps.max()) == max(LENGTHS) - 1
    with pytest.raises(InputError, match="max_timestep"):
        make_model(max_timestep=max(LENGTHS) - 1)(**batch.model_inputs())
    make_model(max_timestep=max(LENGTHS))(**batch.model_inputs())
    # environments may run longer than the data did: the policy stays at the last row
    policy = Policy(
        make_model(max_timestep=2),
        state_mean=None,
        state_std=None,
        returns_scale=1.0,
        context_length=CONTEXT,
    )
    policy.reset([0], [1.0])
    for _ in range(5):
        assert np.isfinite(policy.act(np.zeros((1, STATES)))).all()
        policy.observe_reward([0.0])


def test_position_table_is_one_constant_and_does_not_limit_the_window(dataset: Dataset) -> None:
    """transformers issue 17946: every token gets row 0; order comes from the timesteps."""
    model = make_model()
    assert model.config.n_positions == 1 < CONTEXT
    inputs = next(make_loader(dataset)).model_inputs()
    expected = model(**inputs).action_preds
    released = released_model(model)
    real = inputs["attention_mask"].bool()
    assert torch.allclose(released(**inputs).action_preds[real], expected[real], atol=TOLERANCE)
    later = inputs | {"timesteps": inputs["timesteps"] + 1}
    assert not torch.allclose(model(**later).action_preds, expected)


def test_misspelled_inputs_are_refused(dataset: Dataset) -> None:
    """The released class takes any keyword and ignores it."""
    inputs: dict[str, Tensor] = next(make_loader(dataset)).model_inputs()
    inputs["attention_masks"] = inputs.pop("attention_mask")
    released_model(make_model())(**inputs)
    with pytest.raises(TypeError, match="attention_masks"):
        make_model()(**inputs)


def test_building_and_saving_a_model_prints_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The default token ids 50256 lie outside a vocabulary of one: two warnings a model.

    5.17 builds the default configuration, too, to leave defaults out of the text.
    """
    model = make_model()
    config_text(model)
    loaded = DecisionTransformerConfig.from_dict(json.loads(model.config.to_json_string()))
    for config in (model.config, loaded):  # None would be left out, and become 50256 when loaded
        assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    assert not caplog.records
