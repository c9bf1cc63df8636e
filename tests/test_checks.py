"""Checks of data and model before training."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import numpy as np
import pytest
import torch

from gear_offline.errors import InputError
from gear_offline.models.decision_transformer import (
    beyond_tanh,
    check_timesteps,
    trainable_parameters,
)
from gear_offline.models.loss import action_loss
from tests.model_support import inputs, make


def test_longest_episode_is_checked_by_number() -> None:
    check_timesteps(999, 1000)
    check_timesteps(torch.zeros(0, dtype=torch.long), 1000)
    with pytest.raises(InputError, match="1000 has no embedding"):
        check_timesteps(1000, 1000)


def test_trainable_parameters_are_those_with_a_gradient() -> None:
    model = make()
    kept = trainable_parameters(model)
    batch = inputs()
    action_loss(model(**batch, only_actions=True).action_preds, batch["actions"], None).backward()
    assert kept and all(p.grad is not None for p in kept)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        "predict_state.weight",
        "predict_state.bias",
        "predict_return.weight",
        "predict_return.bias",
        "encoder.wte.weight",
    }
    assert len(kept) + len(frozen) == len(list(model.parameters()))


def test_actions_that_a_tanh_cannot_reach_are_found() -> None:
    rounded = float(np.float32(1.0) + np.float32(1e-7))
    assert beyond_tanh([-1.0, -0.5, -1.0], [1.0, 0.2, rounded]) == []
    assert beyond_tanh([-1.0, -2.0, 0.0], [1.5, 0.2, 0.0]) == [0, 1]
    assert beyond_tanh(-3.0, 3.0) == [0]
