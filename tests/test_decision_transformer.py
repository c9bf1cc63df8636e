"""The model and its loss against the released class and plain loops."""

# mypy: disable-error-code="no-untyped-call"
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DecisionTransformerConfig, DecisionTransformerModel

from gear_offline.errors import InputError
from gear_offline.models.blocks import drop
from gear_offline.models.decision_transformer import (
    DecisionTransformer,
    beyond_tanh,
    trainable_parameters,
)
from gear_offline.models.hugging_face import from_released, to_released
from gear_offline.models.loss import segment_losses, step_losses
from tests.model_support import (
    ACTIONS,
    STATES,
    STEPS,
    TOLERANCE,
    WINDOWS,
    action_loss,
    assert_same_state,
    inputs,
    largest_difference,
    load_completely,
    make,
    mask,
)
from tests.support import one_error


def test_files_and_initial_values_are_those_of_the_released_class(tmp_path: Path) -> None:
    """Names, shapes and weights, bit for bit, in both directions."""
    ours = make()
    torch.manual_seed(0)
    theirs = DecisionTransformerModel(DecisionTransformerConfig.from_dict(ours.config.to_dict()))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_same_state(ours, theirs)
    ours.save_pretrained(tmp_path / "ours")
    assert_same_state(load_completely(DecisionTransformerModel, tmp_path / "ours"), ours)
    config = DecisionTransformerConfig(
        state_dim=4, act_dim=2, hidden_size=8, max_ep_len=9, bos_token_id=None, eos_token_id=None
    )
    theirs = DecisionTransformerModel(config)
    theirs.save_pretrained(tmp_path / "theirs")
    for ours in (DecisionTransformer.from_pretrained(tmp_path / "theirs"), from_released(theirs)):
        assert not ours.discrete
        assert_same_state(ours, theirs)


PREDICTIONS = ("state_preds", "action_preds", "return_preds")


@pytest.mark.parametrize("kind", ["none", "full", "right", "left", "holes"])
@given(
    goals=st.booleans(),
    heads=st.sampled_from([1, 2, 4]),
    steps=st.integers(1, 12),
    activation=st.sampled_from(["relu", "gelu_new"]),
    tanh=st.booleans(),
    scaled=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_values_and_gradients_equal_those_of_the_released_class(
    kind: str, goals: bool, heads: int, steps: int, activation: str,
    tanh: bool, scaled: bool,
) -> None:  # fmt: skip
    """On valid steps.  Of goals: the class with a wider map of its first token, told each step."""
    made = make(heads=heads, activation=activation, action_tanh=tanh, goals=goals, dropout=0.0)
    torch.manual_seed(0)
    config = made.config.model_copy(update={"scale_attn_by_inverse_layer_idx": scaled})
    ours = DecisionTransformer(config)
    theirs, batch = to_released(ours), inputs(steps)
    if goals:
        batch["goals"] = batch["states"].flip(0)[:, :1]
        batch["returns_to_go"] = batch["goals"].expand(-1, steps, -1)
    batch["attention_mask"] = mask(kind, steps)
    valid, padding = batch["attention_mask"].bool(), "right" if kind == "right" else "any"
    given_batch = {k: v for k, v in batch.items() if kind != "none" or k != "attention_mask"}
    found, expected = ours(**given_batch, padding=padding), theirs(**given_batch)
    for name in PREDICTIONS:
        assert largest_difference(found[name], expected[name], valid) <= TOLERANCE, name
    actions_only = ours(**given_batch, padding=padding, only_actions=True)
    assert list(actions_only.keys()) == ["action_preds"]
    predicted = actions_only.action_preds
    assert largest_difference(predicted, expected.action_preds, valid) <= TOLERANCE
    action_loss(predicted, batch["actions"], batch["attention_mask"]).backward()
    torch.mean((expected.action_preds[valid] - batch["actions"][valid]) ** 2).backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert largest_difference(one.grad, other.grad) <= TOLERANCE, name
    if kind == "right":  # what lies in the padding must not matter
        for name, value in (("states", 1e3), ("actions", -10.0), ("returns_to_go", 1e3)):
            batch[name] = batch[name].clone()
            batch[name][~valid] = value
        disturbed = ours(**batch, padding="right")
        assert all(torch.equal(found[name][valid], disturbed[name][valid]) for name in PREDICTIONS)


def test_fully_padded_windows_are_finite_in_value_and_gradient() -> None:
    model = make()
    batch = inputs()
    batch["attention_mask"] = torch.zeros_like(batch["attention_mask"])
    output = model(**batch)
    action_loss(output.action_preds, batch["actions"], batch["attention_mask"]).backward()
    assert torch.isfinite(output.action_preds).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_prediction_does_not_see_the_future_nor_its_own_action() -> None:
    model = make().eval()
    batch = inputs()
    before = model(**batch).action_preds
    changed = {name: value.clone() for name, value in batch.items()}
    changed["actions"][:, 3:] += 5.0
    for name in ("states", "returns_to_go"):
        changed[name][:, 4:] += 5.0
    after = model(**changed).action_preds
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    three = model(**batch)
    assert list(three) == [*PREDICTIONS], "as code of the released class expects"
    assert [three[place].shape[-1] for place in range(3)] == [STATES, ACTIONS, 1]
    assert torch.equal(three[1], before)


def test_discrete_actions_are_one_hot_vectors_for_the_released_class() -> None:
    model = make(discrete=True).eval()
    assert not model.config.action_tanh
    batch = inputs()
    numbers = torch.randint(0, ACTIONS, (WINDOWS, STEPS))
    vectors = torch.nn.functional.one_hot(numbers, ACTIONS).float()
    with torch.no_grad():
        found = model(**(batch | {"actions": numbers})).action_preds
        expected = to_released(model)(**(batch | {"actions": vectors})).action_preds
        as_vectors = model(**(batch | {"actions": vectors})).action_preds
    assert float((found - expected).abs().max()) <= TOLERANCE
    assert float((as_vectors - expected).abs().max()) <= TOLERANCE


def test_floating_actions_are_no_targets_of_a_discrete_model() -> None:
    def batch_of(actions: Tensor) -> Any:
        given = {"attention_mask": torch.ones((WINDOWS, STEPS)), "padding": "right"}
        model_inputs: Any = partial(dict, inputs(), actions=actions)
        return SimpleNamespace(actions=actions, model_inputs=model_inputs, **given)

    model = make(discrete=True)
    numbers = torch.zeros((WINDOWS, STEPS), dtype=torch.long)
    assert torch.isfinite(model.loss(batch_of(numbers)))
    one_hot = torch.nn.functional.one_hot(numbers, ACTIONS)
    for actions in (one_hot.float(), numbers.float(), one_hot):
        with one_error("MODEL", "the model's are discrete"):
            model.loss(batch_of(actions))


def test_missing_inputs_what_has_no_embedding_and_impossible_sizes_are_refused() -> None:
    for missing in ("states", "actions", "returns_to_go", "timesteps"):
        with pytest.raises(InputError, match="all needed"):
            make()(**{name: value for name, value in inputs().items() if name != missing})
    for timestep in (50, -1):
        batch = inputs()
        batch["timesteps"][2, 3] = timestep
        with one_error("MODEL", str(timestep)):
            make()(**batch)
    sizes = {"heads": 3, "layers": 0, "max_timestep": 0, "dropout": 1.0}
    for option, value in sizes.items():
        with one_error("MODEL") as caught:
            make(**{option: value})
        assert caught.value.where == f"model.{option}"


def test_trainable_parameters_are_those_with_a_gradient() -> None:
    model = make()
    kept = trainable_parameters(model)
    batch = inputs()
    action_loss(model(**batch, only_actions=True).action_preds, batch["actions"], None).backward()
    assert kept and all(p.grad is not None for p in kept)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    heads = [f"predict_{of}.{part}" for of in ("state", "return") for part in ("weight", "bias")]
    assert frozen == {*heads, "encoder.wte.weight"}
    assert len(kept) + len(frozen) == len(list(model.parameters()))


def test_actions_that_a_tanh_cannot_reach_are_found() -> None:
    rounded = float(np.float32(1.0) + np.float32(1e-7))
    assert beyond_tanh([-1.0, -0.5, -1.0], [1.0, 0.2, rounded]) == []
    assert beyond_tanh([-1.0, -2.0, 0.0], [1.5, 0.2, 0.0]) == [0, 1]


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_keeps_the_share_and_the_mean(probability: float) -> None:
    torch.manual_seed(0)
    count = 400_003
    found = drop(torch.ones(count), probability)
    deviation = (probability * (1 - probability) / count) ** 0.5
    share = float((found.abs() < 1e-6).double().mean())
    # 5 standard deviations, and the rounding of the probability to 2^-16
    assert abs(share - probability) < 5 * deviation + 2**-16
    assert abs(float(found.double().mean()) - 1.0) < 5 * deviation / (1 - probability) + 1e-6


def test_dropped_places_are_independent_and_those_of_the_gradient() -> None:
    torch.manual_seed(1)
    kept = (drop(torch.ones(400_000), 0.5) > 0).double() - 0.5
    for lag in (1, 2, 3, 4, 8, 128):
        correlation = float((kept[lag:] * kept[:-lag]).mean()) * 4
        assert abs(correlation) < 5 / 400_000**0.5, lag
    values = torch.randn(1000, requires_grad=True)
    result = drop(values, 0.25)
    result.sum().backward()
    assert values.grad is not None and torch.equal(values.grad == 0, result == 0)


@given(
    windows=st.integers(1, 4),
    steps=st.integers(1, 6),
    elements=st.integers(1, 3),
    discrete=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_the_loss_equals_a_plain_loop(
    windows: int, steps: int, elements: int, discrete: bool, seed: int
) -> None:
    """Squared errors of vectors, cross entropy of numbers, of a batch and of each segment."""
    rng = np.random.default_rng(seed)
    predicted: Any = rng.normal(size=(windows, steps, elements)).astype(np.float32)
    wanted: Any = rng.normal(size=(windows, steps, elements)).astype(np.float32)
    if discrete:
        wanted = rng.integers(0, elements, size=(windows, steps))
    real: Any = rng.integers(0, 2, size=(windows, steps))
    errors: list[list[float]] = [[] for _ in range(windows)]
    for b, k in zip(*real.nonzero(), strict=True):
        if discrete:
            total = sum(math.exp(float(x)) for x in predicted[b, k])
            errors[b].append(math.log(total) - float(predicted[b, k, wanted[b, k]]))
        else:
            errors[b] += ((predicted[b, k].astype(np.float64) - wanted[b, k]) ** 2).tolist()
    predicted, wanted, real = map(torch.from_numpy, (predicted, wanted, real))
    each = segment_losses(step_losses(predicted, wanted), real).tolist()
    whole = float(action_loss(predicted, wanted, real)), [e for row in errors for e in row]
    for found, some in (whole, *zip(each, errors, strict=True)):
        assert found == pytest.approx(sum(some) / max(len(some), 1), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_padded_predictions_reach_neither_value_nor_gradient(bad: float) -> None:
    predictions = torch.full((1, 2, 2), 0.5)
    predictions[0, 1] = bad
    predictions.requires_grad_(True)
    loss = action_loss(predictions, torch.zeros(1, 2, 2), torch.tensor([[1, 0]]))
    loss.backward()
    assert predictions.grad is not None
    assert float(loss.detach()) == 0.25
    assert torch.equal(predictions.grad[0, 0], torch.tensor([0.5, 0.5]))


def test_half_precision_predictions_are_summed_in_float32() -> None:
    predictions = torch.full((64, 64, 4), 0.1, dtype=torch.bfloat16)
    loss = action_loss(predictions, torch.zeros(64, 64, 4), None)  # all steps are real
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)) ** 2)
