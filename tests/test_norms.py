"""Sums, norms and embeddings of stacked models: references, operators, refusals; on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gear_offline.errors import InputError
from gear_offline.kernels.add_norm import (
    add_norm,
    add_norm_reference,
    kept_elements,
    supports_norms,
)
from gear_offline.kernels.embed_norm import embed_norm, embed_norm_reference
from gear_offline.loaders.batch import join_batches
from gear_offline.models import stacked as stacked_module
from gear_offline.models.stacked import StackedModels
from tests.attention_support import stand_in
from tests.norms_support import stand_in_for_norms
from tests.test_stacked_models import make_batch, make_model

add_plainly: Any = add_norm_reference  # given lists
embed_plainly: Any = embed_norm_reference
LONGEST = 6
HALF = torch.bfloat16


def naive_norm(row: list[float], epsilon: float) -> list[float]:
    mean = sum(row) / len(row)
    spread = sum((x - mean) ** 2 for x in row) / len(row)
    return [(x - mean) / (spread + epsilon) ** 0.5 for x in row]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), steps=st.integers(1, 3), dropout=st.sampled_from([0.0, 0.25]))
def test_references_are_what_loops_say(seed: int, steps: int, dropout: float) -> None:
    torch.manual_seed(seed)
    models, rows, width, epsilon = 2, 3 * steps, 4, 0.01
    hidden, branch = (torch.randn(models, rows, width, dtype=torch.double) for _ in range(2))
    bias, weight = (torch.randn(models, width, dtype=torch.double) for _ in range(2))
    table = torch.randn(models, LONGEST, width, dtype=torch.double)
    when = torch.randint(0, LONGEST, (models, steps))
    kept = torch.rand(models, rows, width) >= dropout if dropout else None
    total, plain = add_plainly(hidden, branch, bias, epsilon, kept, dropout)
    args = (branch, table, when, weight, bias, (epsilon, 2 * epsilon), kept, dropout)
    entered, normed = embed_plainly(*args)
    for n in range(models):
        for r in range(rows):
            stays = (
                [1.0] * width if kept is None else [float(k) / (1 - dropout) for k in kept[n, r]]
            )
            added = [
                float(hidden[n, r, h] + (branch[n, r, h] + bias[n, h]) * stays[h])
                for h in range(width)
            ]
            np.testing.assert_allclose(total[n, r], added)
            np.testing.assert_allclose(plain[n, r], naive_norm(added, epsilon))
            token = [float(branch[n, r, h] + table[n, when[n, r // 3], h]) for h in range(width)]
            scaled = naive_norm(token, epsilon)
            found = [
                (scaled[h] * float(weight[n, h]) + float(bias[n, h])) * stays[h]
                for h in range(width)
            ]
            np.testing.assert_allclose(entered[n, r], found)
            np.testing.assert_allclose(normed[n, r], naive_norm(found, 2 * epsilon))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 99),
    steps=st.integers(1, 15),
    width=st.sampled_from([16, 48, 128]),
    dropout=st.sampled_from([0.0, 0.25]),
    wanted=st.booleans(),
)
def test_operators_have_the_gradients_of_the_references(
    seed: int, steps: int, width: int, dropout: float, wanted: bool
) -> None:
    """Kernels in plain torch: what is around them is tried here."""
    torch.manual_seed(seed)
    sizes = (2, 3 * steps, width)
    seeds = torch.randint(0, 1 << 62, (2, 2))[:, 0] if dropout else None  # not in a row
    kept = None if seeds is None else kept_elements(seeds, dropout, rows=sizes[1], width=width)
    wide = torch.randn(sizes), torch.randn(sizes).to(HALF)
    narrow = torch.randn(2, width), torch.randn(2, width)
    table, when = torch.randn(2, LONGEST, width), torch.randint(0, LONGEST, (2, steps))
    above = torch.randn(sizes), torch.randn(sizes).to(HALF)

    def learning(*tensors: Tensor) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in tensors]

    def compare(found: Any, mine: list[Tensor], expected: Any, theirs: list[Tensor]) -> None:
        for outputs in (found, expected):
            chosen = (0, 1) if wanted else (1,)
            torch.autograd.backward(
                [outputs[i] for i in chosen],
                [above[i].to(outputs[i].dtype) for i in chosen],
            )
        for one, other in zip(mine, theirs, strict=True):
            assert one.grad is not None and other.grad is not None
            # of a bias: sums of 45 rows, whose rounding a small sum has too
            room = 0.06 + 0.01 * float(other.grad.abs().max())
            torch.testing.assert_close(one.grad, other.grad, rtol=0.06, atol=room)

    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_norms(patch)
        mine, theirs = learning(*wide, narrow[0]), learning(*wide, narrow[0])
        found = add_norm(*mine, 0.1, dropout, seeds)
        compare(found, mine, add_plainly(*theirs, 0.1, kept, dropout), theirs)
        mine, theirs = learning(wide[1], table, *narrow), learning(wide[1], table, *narrow)
        found = embed_norm(*mine[:2], when, *mine[2:], [0.1, 0.2], dropout, seeds)
        expected = embed_plainly(*theirs[:2], when, *theirs[2:], (0.1, 0.2), kept, dropout)
        compare(found, mine, expected, theirs)


@pytest.mark.parametrize("deterministic", [False, True])
def test_models_that_take_the_kernels_learn_what_others_do(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Timesteps are looked up outside of the kernel where sums must have an order."""
    stand_in_for_norms(monkeypatch)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    tables = []

    def embed(*arguments: Any) -> Any:
        tables.append(arguments[1].shape[1])
        return embed_norm(*arguments)

    monkeypatch.setattr(stacked_module, "embed_norm", embed)
    batches = [make_batch(seed, 3) for seed in range(3)]
    results = []
    for fits in (False, True):
        monkeypatch.setattr(stacked_module, "supports_norms", lambda *_, f=fits, **__: f)
        models = [make_model(seed, hidden_size=32) for seed in range(3)]
        stacked = StackedModels(models, precision=HALF)
        losses = stacked.losses(join_batches(batches))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        results.append((losses.detach(), dict(stacked.named_parameters())))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=4e-3, atol=4e-3)
    for name, parameter in results[0][1].items():
        other = results[1][1][name]
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None and other.grad is not None:
            error = (parameter.grad - other.grad).norm() / parameter.grad.norm()
            assert error < 0.05, name
    assert tables == [3 * 5 if deterministic else 20], "a row for each step of the batch, or all"


def test_dropout_does_not_depend_on_the_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels draw it from each model's seed and step; here with plain torch in their place."""
    stand_in(monkeypatch)
    stand_in_for_norms(monkeypatch)
    for name in ("supports_norms", "supports_packed", "_has_kernels"):
        monkeypatch.setattr(stacked_module, name, lambda *_, **__: True)
    batches = [make_batch(seed, 4) for seed in range(3)]

    def losses(numbers: list[int], draws: list[list[int]]) -> Tensor:
        models = [make_model(n, hidden_size=32, dropout=0.3) for n in numbers]
        batch = join_batches([batches[n] for n in numbers])
        return StackedModels(models, precision=HALF).losses(batch, torch.tensor(draws)).detach()

    three = losses([0, 1, 2], [[5, 6, 2**63 - 1], [9, 9, 4]])
    for number, draws in enumerate(([[5], [9]], [[6], [9]], [[2**63 - 1], [4]])):
        alone = losses([number], draws)
        torch.testing.assert_close(alone[0], three[number], rtol=1e-3, atol=1e-4)
        seed, step = draws[0][0], draws[1][0]
        for other in ([[seed], [step + 1]], [[seed ^ 1], [step]]):
            assert abs(float(losses([number], other)[0] - alone[0])) > 1e-3


def test_kept_elements_are_drawn_for_each_seed_row_and_element() -> None:
    seeds = torch.tensor([3, 1 << 61, 3])
    kept = kept_elements(seeds, 0.25, rows=200, width=48)
    assert torch.equal(kept[0], kept[2]) and not torch.equal(kept[0], kept[1])
    assert torch.equal(kept[:, :7], kept_elements(seeds, 0.25, rows=7, width=48))
    assert abs(float(kept.float().mean()) - 0.75) < 0.02
    assert len(set(map(tuple, kept[0].tolist()))) > 190
    assert len(set(map(tuple, kept[0].T.tolist()))) == 48
    assert kept_elements(seeds, 0.0, rows=2, width=16).all()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"branch": torch.zeros(2, 3, 24, dtype=HALF)}, "rows"),
        ({"branch": torch.zeros(2, 3, 32)}, "rows"),
        ({"hidden": torch.zeros(2, 4, 32)}, "rows"),
        ({"bias": torch.zeros(3, 32)}, "rows"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": 0.5, "seeds": None}, "seeds are none"),
        ({"dropout": 0.5, "seeds": torch.zeros(3, dtype=torch.int64)}, "seeds are"),
    ],
)
def test_sums_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    fitting = {
        "hidden": torch.zeros(2, 3, 32),
        "branch": torch.zeros(2, 3, 32, dtype=HALF),
        "bias": torch.zeros(2, 32),
        "epsilon": 0.1,
        "dropout": 0.0,
        "seeds": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(InputError, match=what) as caught:
        add_norm(**{**fitting, **changes})
    assert caught.value.code == "MODEL_INPUT"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": torch.zeros(2, 4, 32, dtype=HALF)},
        {"table": torch.zeros(2, LONGEST, 16)},
        {"table": torch.zeros(2, LONGEST, 32, dtype=HALF)},
        {"steps": torch.zeros(2, 2, dtype=torch.int64)},
        {"steps": torch.zeros(2, 1, dtype=torch.int32)},
        {"weight": torch.zeros(2, 16)},
    ],
)
def test_embeddings_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    fitting = {
        "tokens": torch.zeros(2, 3, 32, dtype=HALF),
        "table": torch.zeros(2, LONGEST, 32),
        "steps": torch.zeros(2, 1, dtype=torch.int64),
        "weight": torch.zeros(2, 32),
        "shift": torch.zeros(2, 32),
        "epsilons": [0.1, 0.1],
    }
    with pytest.raises(InputError) as caught:
        embed_norm(**{**fitting, **changes})
    assert caught.value.code == "MODEL_INPUT"


def test_a_cpu_and_float32_take_no_kernels() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not supports_norms(cpu, HALF, width=128)
    assert not supports_norms(gpu, torch.float32, width=128)
    assert not supports_norms(gpu, HALF, width=24)
    assert not supports_norms(gpu, HALF, width=2048)
