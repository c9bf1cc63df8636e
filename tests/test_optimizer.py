"""The learning rate as a function of the step, and optimiser state that moves between runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gear_offline.config.sections import OptimizerSettings
from gear_offline.training.optimizer import Optimizer, learning_rate


def rates(schedule: str, *, warmup: int, steps: int) -> list[float]:
    settings = OptimizerSettings.model_validate(
        {"learning_rate": 2.0, "warmup_steps": warmup, "schedule": schedule}
    )
    return [learning_rate(step, settings, steps=steps) for step in range(steps)]


def test_warm_up_is_that_of_the_papers_code() -> None:
    """``LambdaLR(lambda steps: min((steps + 1) / warmup_steps, 1))``."""
    assert rates("constant", warmup=4, steps=6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates("constant", warmup=0, steps=2) == [2.0, 2.0]


def test_falling_schedules_start_full_and_near_zero_at_the_end() -> None:
    assert rates("linear", warmup=2, steps=6) == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    cosine = rates("cosine", warmup=2, steps=6)
    expected = [1 + math.cos(math.pi * k / 4) for k in range(4)]
    assert cosine == pytest.approx([1.0, 2.0, *expected])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_are_positive_and_never_above_the_asked(schedule: str) -> None:
    for warmup in (0, 1, 7, 30):
        found = rates(schedule, warmup=warmup, steps=30)
        assert all(0.0 < rate <= 2.0 for rate in found)
        assert max(found) == pytest.approx(2.0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    found[0].bias.requires_grad_(False)
    return found


def steps_of(net: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        inputs = torch.full((5, 3), float(step))
        optimizer.zero_gradients()
        net(inputs).square().mean().backward()
        optimizer.clip()
        optimizer.update(step)


def test_state_moves_to_another_optimizer_bit_for_bit() -> None:
    settings = OptimizerSettings(warmup_steps=3)
    whole = network()
    steps_of(whole, Optimizer(whole, settings, steps=9), 0, 9)

    first = network()
    optimizer = Optimizer(first, settings, steps=9)
    assert optimizer.state() == {}
    steps_of(first, optimizer, 0, 4)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert "optimizer/exp_avg/0.weight" in saved
    assert not any("0.bias" in name for name in saved), "frozen parameters have no moments"
    second = network()
    second.load_state_dict(first.state_dict())
    resumed = Optimizer(second, settings, steps=9)
    resumed.load_state({**saved, "random/cpu": torch.zeros(1)})
    steps_of(second, resumed, 4, 9)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_state_of_another_model_is_refused() -> None:
    settings = OptimizerSettings()
    net = network()
    optimizer = Optimizer(net, settings, steps=9)
    steps_of(net, optimizer, 0, 1)
    saved = optimizer.state()
    with pytest.raises(KeyError):
        Optimizer(nn.Linear(3, 4), settings, steps=9).load_state(saved)
    del saved["optimizer/exp_avg/0.weight"], saved["optimizer/exp_avg_sq/0.weight"]
    del saved["optimizer/step/0.weight"]
    with pytest.raises(KeyError):
        Optimizer(network(), settings, steps=9).load_state(saved)


@pytest.mark.parametrize("limit", [None, 0.25, 1e9])
def test_clipping(limit: float | None) -> None:
    net = network()
    optimizer = Optimizer(net, OptimizerSettings(clip_norm=limit), steps=9)
    net(torch.full((5, 3), 9.0)).square().mean().backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    assert float(optimizer.clip()) == pytest.approx(norm, rel=1e-5)
    after = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    assert after == pytest.approx(min(norm, limit or math.inf), rel=1e-4)
