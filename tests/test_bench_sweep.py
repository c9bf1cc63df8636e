"""The benchmark of sweeps without a GPU: its peer model, its table, its refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gear_offline.bench import sweep
from gear_offline.bench.stacked_model import StackedModels, StackedTraining
from gear_offline.data_parallel import GradientPass
from gear_offline.errors import UnavailableError
from gear_offline.loaders.batch import Batch
from gear_offline.models.checks import trainable_parameters
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.models.loss import action_loss
from gear_offline.parallel import Parallel
from gear_offline.world import World

MODELS, BATCH, STEPS, STATES, ACTIONS = 3, 4, 5, 6, 2


def model(seed: int) -> DecisionTransformer:
    torch.manual_seed(seed)
    built = build_model(
        state_dim=STATES,
        action_dim=ACTIONS,
        hidden_size=8,
        heads=2,
        layers=2,
        dropout=0.0,
        max_timestep=20,
        context_length=STEPS,
    )
    trainable_parameters(built)
    built.train()
    return built


def test_stacked_models_have_the_losses_and_gradients_of_each() -> None:
    """The peer does the same work: otherwise its rate would say nothing."""
    models = [model(seed) for seed in range(MODELS)]
    torch.manual_seed(99)
    shape = (MODELS, BATCH, STEPS)
    states, actions = torch.randn(*shape, STATES), torch.rand(*shape, ACTIONS)
    returns, timesteps = torch.randn(*shape, 1), torch.randint(0, 20, shape)
    mask = (torch.arange(STEPS) < torch.randint(1, STEPS + 1, (MODELS, BATCH, 1))).long()
    stacked = StackedModels(models)
    losses = stacked.loss(states, actions, returns, timesteps, mask)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    for n, one in enumerate(models):
        output = one(
            states=states[n],
            actions=actions[n],
            returns_to_go=returns[n],
            timesteps=timesteps[n],
            attention_mask=mask[n],
            padding="right",
            only_actions=True,
        )
        loss = action_loss(output.action_preds, actions[n], mask[n])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(losses[n], loss, rtol=1e-5, atol=1e-6)
        for name, parameter in one.named_parameters():
            if parameter.grad is None:
                continue
            together: Any = getattr(stacked, name.replace(".", "_")).grad
            torch.testing.assert_close(together[n], parameter.grad, rtol=1e-4, atol=1e-5)


def test_stacked_models_train_through_the_same_pass() -> None:
    models = [model(seed) for seed in range(MODELS)]
    torch.manual_seed(5)
    shape = (MODELS * BATCH, STEPS)
    batch = Batch(
        states=torch.randn(*shape, STATES),
        actions=torch.rand(*shape, ACTIONS),
        rewards=torch.randn(*shape, 1),
        returns_to_go=torch.randn(*shape, 1),
        timesteps=torch.randint(0, 20, shape),
        attention_mask=torch.ones(shape, dtype=torch.int64),
        segments=torch.zeros(shape[0], 2, dtype=torch.int64),
        padding="right",
        extras={},
    )
    whole: Any = StackedTraining(models)
    total = GradientPass(whole, World(), parallel=Parallel("alone"))(batch)
    expected = 0.0
    for number, one in enumerate(models):
        part = slice(number * BATCH, (number + 1) * BATCH)
        inputs = {name: value[part] for name, value in batch.model_inputs().items()}
        output = one(**inputs, padding="right", only_actions=True)
        expected += float(action_loss(output.action_preds, batch.actions[part], None).detach())
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert all(parameter.grad is not None for parameter in whole.parameters())


def test_the_table_has_ratios_to_one_run_after_another() -> None:
    found: dict[str, Any] = {
        "streams 4": {
            "1": {"steps_per_second": 1000.0},
            "2": {"steps_per_second": 1500.0},
            "memory_bytes": 7,
        },
        "batched 8": {"steps_per_second": 2000.0, "memory_bytes": 1},
        "green 8": {"error": "no green contexts"},
    }
    rows = sweep.results(found)
    assert [(row["way"], row["runs"], row["ratio"]) for row in rows] == [
        ("serial", 1, 1.0),
        ("streams", 2, 1.5),
        ("batched", 8, 2.0),
    ]
    equality = {"float32": {"together": 0.0, "alone_twice": 0.0}, "other": {"error": "lost"}}
    document = {"results": rows, "equality": equality, "skipped": {"green 8": "no green contexts"}}
    lines = sweep.table(document)
    assert lines[1] == ("one after another", 1, "1,000", "1.00")
    assert lines[-2][0] == "difference of weights, float32"
    assert lines[-1][2] == "not measured: no green contexts"


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError):
        sweep.run(quick=True)
