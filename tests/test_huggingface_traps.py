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

from gear_offline.dataset.dataset import Dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.policy import Policy
from gear_offline.models.policy_folder import config_text
from tests.image_support import image_columns
from tests.model_support import TOLERANCE, make, released_model
from tests.support import make_dataset

LENGTHS = (12, 3, 7, 5)
STATES, CONTEXT, SCALE = 11, 6, 10.0


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


@pytest.mark.parametrize("frames", [False, True])
@pytest.mark.parametrize("episode", range(len(LENGTHS)))
def test_policy_shows_the_model_what_training_showed(
    dataset: Dataset, tmp_path: Path, episode: int, frames: bool
) -> None:
    """transformers issue 31374, kzl/decision-transformer issues 70 and 84, CORL pull request 75.

    Replaying an episode of the data through the policy, with its own return as the target, must
    show the model the very windows that the loader gives: sign and scale of the returns-to-go, the
    normalisation of states, timesteps, stacks of frames, and on which side the padding is.
    """
    frame: dict[str, Any] = {"frame_shape": (36, 36), "frame_stack": 3, "discrete": True}
    model = make_model(**frame, state_dim=36 * 36, action_dim=4) if frames else make_model()
    for weight in model.parameters():
        weight.data *= 5  # as drawn, actions hang too little on what is shown
    options, scales = dict[str, Any](), dict[str, Any](state_mean=None, state_std=None)
    if frames:
        dataset = make_dataset(tmp_path, LENGTHS, columns=image_columns(sum(LENGTHS), (36, 36)))
        options = {"frame_stack": 3, "normalize_states": False}
    else:
        moments = dataset.statistics["observations"]
        scales = {"state_mean": moments.mean, "state_std": moments.std}
    batch = make_loader(dataset, batch_size=400, **options).batch_at(0)
    rows = {tuple(name): row for row, name in enumerate(batch.segments.tolist())}
    policy = Policy(model, context_length=CONTEXT, returns_scale=SCALE, **scales)
    policy.reset([0], [1.0])
    policy.act(dataset[episode]["observations"][-1:])  # of an episode before, to be forgotten
    policy.reset([0], [float(dataset.returns[episode])])
    for step, seen in enumerate(dataset[episode]["observations"]):
        acted = policy.act(seen[None])
        row, last = rows[episode, max(0, step + 1 - CONTEXT)], min(step, CONTEXT - 1)
        window = (slice(row, row + 1), slice(last + 1))
        shown = {name: value[window] for name, value in batch.model_inputs().items()}
        expected = model(**shown).action_preds[0, last].detach().numpy()
        expected = expected.argmax() if frames else expected
        np.testing.assert_allclose(acted[0], expected, rtol=0, atol=TOLERANCE)
        done = {name: dataset[episode][name][[step]] for name in ("rewards", "actions")}
        policy.observe_reward(**done)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_values_in_the_padding_are_harmless(dataset: Dataset, padding: str) -> None:
    """kzl issues 36, 41, 50: state 0, action -10, done 2 in training, other values in playing."""
    model, batch = make_model(), next(make_loader(dataset, padding=padding))
    expected, empty = model.loss(batch), batch.attention_mask == 0
    assert empty.any(), "the test needs padding"
    for tensor, value in ((batch.states, 3.0), (batch.actions, -10.0), (batch.returns_to_go, 9.0)):
        tensor[empty] = value
    assert torch.allclose(model.loss(batch), expected, rtol=0, atol=TOLERANCE)


def test_sides_of_padding_give_one_loss(dataset: Dataset) -> None:
    """The same segments, padded left for the released class and right for ours."""
    model = make_model()
    right, left = (next(make_loader(dataset, padding=side)) for side in ("right", "left"))
    real = left.attention_mask.bool()
    assert torch.equal(right.segments, left.segments) and not real.all()
    assert torch.allclose(model.loss(right), model.loss(left), rtol=0, atol=TOLERANCE)
    theirs = released_model(model)(**left.model_inputs()).action_preds
    error = torch.mean((theirs[real] - left.actions[real]) ** 2)
    assert torch.allclose(model.loss(right), error, rtol=0, atol=TOLERANCE)


def test_misspelled_inputs_are_refused(dataset: Dataset) -> None:
    """The released class takes any keyword and ignores it."""
    inputs = next(make_loader(dataset)).model_inputs()
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
