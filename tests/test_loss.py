"""The loss: only real steps count, and the mean is over them."""

# mypy: disable-error-code="no-untyped-call"
import math
from typing import Any

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
    discrete=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_the_loss_equals_a_plain_loop(
    windows: int, steps: int, elements: int, discrete: bool, seed: int
) -> None:
    """Squared errors of vectors, cross entropy of numbers; zero where no step is real."""
    rng = np.random.default_rng(seed)
    predicted = rng.normal(size=(windows, steps, elements)).astype(np.float32)
    wanted: Any = rng.normal(size=(windows, steps, elements)).astype(np.float32)
    if discrete:
        wanted = rng.integers(0, elements, size=(windows, steps))
    real = rng.integers(0, 2, size=(windows, steps))
    errors = []
    for b, k in zip(*real.nonzero(), strict=True):
        if discrete:
            total = sum(math.exp(float(x)) for x in predicted[b, k])
            errors.append(math.log(total) - float(predicted[b, k, wanted[b, k]]))
        else:
            errors += ((predicted[b, k].astype(np.float64) - wanted[b, k]) ** 2).tolist()
    found = action_loss(*map(torch.from_numpy, (predicted, wanted, real)))
    assert float(found) == pytest.approx(sum(errors) / max(len(errors), 1), rel=1e-5, abs=1e-6)


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


def test_half_precision_predictions_are_summed_in_float32() -> None:
    predictions = torch.full((64, 64, 4), 0.1, dtype=torch.bfloat16)
    loss = action_loss(predictions, torch.zeros(64, 64, 4), None)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)) ** 2)
