"""Training through the blocks: gradients against the released class, dropout, hooks."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import pytest
import torch

from gear_offline.models.blocks import add_dropped, drop
from gear_offline.models.loss import action_loss
from tests.model_support import (
    TOLERANCE,
    inputs,
    largest_difference,
    make,
    mask,
    released_model,
)


@pytest.mark.parametrize(
    ("kind", "padding"), [("right", "right"), ("left", "left"), ("holes", "any")]
)
def test_gradients_equal_those_of_the_released_class(kind: str, padding: str) -> None:
    ours = make(dropout=0.0)
    theirs = released_model(ours)
    batch = inputs() | {"attention_mask": mask(kind)}
    valid = batch["attention_mask"].bool()
    found = ours(**batch, padding=padding, only_actions=True).action_preds
    action_loss(found, batch["actions"], batch["attention_mask"]).backward()
    expected = theirs(**batch).action_preds[valid]
    torch.mean((expected - batch["actions"][valid]) ** 2).backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert largest_difference(one.grad, other.grad, ...) <= TOLERANCE, name


def test_blocks_run_as_modules() -> None:
    model = make()
    seen: list[object] = []
    for block in model.encoder.h:
        block.register_forward_hook(lambda module, args, output: seen.append(module))
    model(**inputs(), only_actions=True)
    assert seen == list(model.encoder.h)


def test_autocast_to_bfloat16_stays_near() -> None:
    model = make().eval()
    expected = model(**inputs()).action_preds
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(**inputs(), padding="right").action_preds
    assert torch.allclose(found.float(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("via", ["drop", "add_dropped"])
def test_dropout_keeps_the_share_and_the_mean(probability: float, via: str) -> None:
    torch.manual_seed(0)
    count = 400_003
    if via == "drop":
        found = drop(torch.ones(count), probability)
    else:
        found = add_dropped(torch.full((count,), 2.0), torch.ones(count), probability) - 2.0
    deviation = (probability * (1 - probability) / count) ** 0.5
    share = float((found.abs() < 1e-6).double().mean())
    # 5 standard deviations, and the rounding of the probability to 2^-16
    assert abs(share - probability) < 5 * deviation + 2**-16
    assert abs(float(found.double().mean()) - 1.0) < 5 * deviation / (1 - probability) + 1e-6


def test_dropped_places_are_independent_of_their_neighbours() -> None:
    torch.manual_seed(1)
    kept = (drop(torch.ones(400_000), 0.5) > 0).double() - 0.5
    for lag in (1, 2, 3, 4, 8, 128):
        correlation = float((kept[lag:] * kept[:-lag]).mean()) * 4
        assert abs(correlation) < 5 / 400_000**0.5, lag


def test_dropout_follows_the_generator_of_torch() -> None:
    model = make(dropout=0.3).train()
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results.append(model(**inputs()).action_preds)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_dropout_gradient_uses_the_mask_of_the_forward() -> None:
    torch.manual_seed(0)
    values = torch.randn(1000, requires_grad=True)
    residual = torch.zeros(1000, requires_grad=True)
    result = add_dropped(residual, values, 0.25)
    result.sum().backward()
    assert values.grad is not None and residual.grad is not None
    assert torch.equal(values.grad == 0, result == 0)
    assert torch.equal(residual.grad, torch.ones(1000))
