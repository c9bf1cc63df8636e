"""Several models as one against each of them alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.kernels.adamw import laid_out_alike
from gear_offline.loaders.batch import Batch, join_batches
from gear_offline.models import stacked as stacked_module
from gear_offline.models.decision_transformer import (
    DecisionTransformer,
    build_model,
    trainable_parameters,
)
from gear_offline.models.stacked import StackedModels
from tests.test_short_attention import stand_in

STEPS, STATES, ACTIONS, LONGEST = 5, 6, 2, 20


def make_model(seed: int, **options: Any) -> DecisionTransformer:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"state_dim": STATES, "action_dim": ACTIONS, "hidden_size": 8}
    sizes |= {"heads": 2, "layers": 2, "dropout": 0.0}
    sizes |= {"max_timestep": LONGEST, "context_length": STEPS}
    built = build_model(**{**sizes, **options})
    trainable_parameters(built)
    built.train()
    return built


def make_batch(seed: int, size: int, *, rewards: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    real = torch.randint(1, STEPS + 1, (size, 1), generator=generator)
    returns: Any = torch.randn(size, STEPS, 1, generator=generator) if rewards else None
    return Batch(
        states=torch.randn(size, STEPS, STATES, generator=generator),
        actions=torch.rand(size, STEPS, ACTIONS, generator=generator),
        rewards=returns,
        returns_to_go=returns,
        timesteps=torch.randint(0, LONGEST, (size, STEPS), generator=generator),
        attention_mask=(torch.arange(STEPS) < real).long(),
        segments=torch.zeros(size, 2, dtype=torch.int64),
        padding="right",
        extras={"goals": torch.randn(size, 1, STATES, generator=generator)},
    )


@settings(max_examples=8, deadline=None)
@given(
    count=st.integers(1, 4),
    size=st.integers(1, 5),
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2]),
    activation=st.sampled_from(["relu", "gelu_new"]),
    tanh=st.booleans(),
    condition=st.sampled_from(["returns", "rewards", "goals"]),
)
def test_losses_and_gradients_are_those_of_each_alone(
    count: int, size: int, layers: int, heads: int, activation: str, tanh: bool, condition: str
) -> None:
    options = {"layers": layers, "heads": heads, "activation": activation, "action_tanh": tanh}
    goals = condition == "goals"
    options |= {"goals": True} if goals else {"condition": condition}
    models = [make_model(seed, **options) for seed in range(count)]
    alone = [make_model(seed, **options) for seed in range(count)]
    batches = [make_batch(seed, size, rewards=not goals) for seed in range(count)]
    stacked = StackedModels(models)
    losses = stacked.losses(join_batches(batches))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    stacked.hand_out_gradients()
    for loss, model, other, batch in zip(losses, models, alone, batches, strict=True):
        expected = other.loss(batch)
        expected.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs), name
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                assert laid_out_alike(mine.grad, mine), "the optimiser on the GPU asks for it"
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_packed_attention_takes_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of 16-bit numbers on a GPU, with plain torch in the place of the kernels."""
    stand_in(monkeypatch)
    batches = [make_batch(seed, 3) for seed in range(3)]
    results = []
    for packed in (False, True):
        monkeypatch.setattr(stacked_module, "supports_packed", lambda *_, p=packed, **__: p)
        models: list[Any] = [make_model(seed) for seed in range(3)]
        for model in models:
            for block in model.encoder.h:
                torch.nn.init.normal_(block.attn.c_attn.bias)
        stacked = StackedModels(models)
        losses = stacked.losses(join_batches(batches))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        results.append((losses.detach(), [p.grad for p in stacked.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_dropout_drops_and_differs_between_models() -> None:
    models = [make_model(0, dropout=0.5) for _ in range(2)]
    batch = make_batch(0, 4)
    stacked = StackedModels(models)
    torch.manual_seed(1)
    first = stacked.losses(join_batches([batch, batch])).detach()
    torch.manual_seed(1)
    assert torch.equal(stacked.losses(join_batches([batch, batch])).detach(), first)
    assert first[0] != first[1]
    plain = make_model(0, dropout=0.0).loss(batch).detach()
    assert first[0] != plain


def test_timesteps_beyond_the_embedding_are_refused() -> None:
    models = [make_model(seed) for seed in range(2)]
    batches = [make_batch(seed, 3) for seed in range(2)]
    batches[0].timesteps[1, 2] = LONGEST  # it would read the row of another model
    with pytest.raises(InputError, match=str(LONGEST)):
        StackedModels(models).losses(join_batches(batches))
