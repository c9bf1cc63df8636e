"""The loss: only real steps count, and the mean is over them."""

# mypy: disable-error-code="no-untyped-call"
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.models.loss import action_loss


@given(
    windows=st.integers(1, 4),
    steps=st.integers(1, 6),
    elements=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_squared_error_equals_a_plain_loop(
    windows: int, steps: int, elements: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    predicted = rng.normal(size=(windows, steps, elements)).astype(np.float32)
    wanted = rng.normal(size=(windows, steps, elements)).astype(np.float32)
    real = rng.integers(0, 2, size=(windows, steps))
    real[0, 0] = 1
    errors = [
        (float(predicted[b, k, a]) - float(wanted[b, k, a])) ** 2
        for b in range(windows)
        for k in range(steps)
        for a in range(elements)
        if real[b, k]
    ]
    found = action_loss(
        torch.from_numpy(predicted), torch.from_numpy(wanted), torch.from_numpy(real)
    )
    assert float(found) == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_cross_entropy_equals_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, 5)).astype(np.float32)
    wanted = rng.integers(0, 5, size=(3, 4))
    real = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    errors = [
        math.log(sum(math.exp(float(x)) for x in logits[b, k])) - float(logits[b, k, wanted[b, k]])
        for b in range(3)
        for k in range(4)
        if real[b, k]
    ]
    found = action_loss(torch.from_numpy(logits), torch.from_numpy(wanted), torch.from_numpy(real))
    assert float(found) == pytest.approx(sum(errors) / len(errors), rel=1e-5)


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


def test_no_mask_means_that_all_steps_are_real() -> None:
    predictions, actions = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
    assert float(action_loss(predictions, actions, None)) == 1.0
    assert float(action_loss(predictions, actions, None, valid_steps=3)) == 2.0


def test_no_real_step_gives_zero() -> None:
    empty = torch.zeros(2, 3, dtype=torch.long)
    assert float(action_loss(torch.ones(2, 3, 4), torch.zeros(2, 3, 4), empty)) == 0.0


def test_half_precision_predictions_are_summed_in_float32() -> None:
    predictions = torch.full((64, 64, 4), 0.1, dtype=torch.bfloat16)
    loss = action_loss(predictions, torch.zeros(64, 64, 4), None)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)) ** 2)
