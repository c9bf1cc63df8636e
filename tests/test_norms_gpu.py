"""Residual sums, embeddings, dropout and norms of stacked models, against plain torch."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gear_offline.kernels.add_norm import (
    add_norm,
    add_norm_gradient,
    add_norm_reference,
    kept_elements,
)
from gear_offline.kernels.embed_norm import embed_norm, embed_norm_gradient, embed_norm_reference
from gear_offline.models import stacked as stacked_module
from tests.gpu_support import INDUCTOR, ON_GPU
from tests.stack_support import compiled_stack

pytestmark = ON_GPU
add_plainly: Any = add_norm_reference  # given lists
embed_plainly: Any = embed_norm_reference
DEVICE = "cuda"
SIZES = [(8, 192, 128), (2, 129, 128), (3, 3, 16), (1, 33, 48), (2, 66, 384), (1, 3, 1024)]
LONGEST, EPSILON = 7, 1e-5
DROPOUT = 0.1


def seeds_of(models: int, dropout: float) -> Tensor | None:
    if dropout == 0.0:
        return None
    torch.manual_seed(1)
    return torch.randint(0, 1 << 62, (models,)).to(DEVICE)


def kept_of(seeds: Tensor | None, rows: int, width: int) -> Tensor | None:
    return None if seeds is None else kept_elements(seeds, DROPOUT, rows=rows, width=width)


def normal(*sizes: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes).to(DEVICE, kind)


def exact(given: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) for x in given]


def off(found: Tensor | None, expected: Tensor | None) -> float:
    """Error as a share of the whole."""
    assert found is not None and expected is not None
    found, expected = found.detach(), expected.detach()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [*SIZES, (17, 1, 112)], ids=str)
def test_sums_and_norms(sizes: tuple[int, int, int], kind: torch.dtype, dropout: float) -> None:
    torch.manual_seed(0)
    models, rows, width = sizes
    given = [
        normal(*sizes).requires_grad_(),
        normal(*sizes, kind=kind).requires_grad_(),
        normal(models, width).requires_grad_(),
    ]
    above = normal(*sizes), normal(*sizes, kind=kind)
    seeds = seeds_of(models, dropout)
    total, plain, _ = add_norm(*given, EPSILON, dropout, seeds)
    torch.autograd.backward([total, plain], list(above))
    precise = exact(given)
    kept = kept_of(seeds, rows, width)
    expected = add_plainly(*precise, EPSILON, kept, dropout)
    torch.autograd.backward(list(expected), [x.double() for x in above])
    rounding = torch.finfo(kind).eps
    assert total.dtype == torch.float32 and plain.dtype == kind
    assert off(total, expected[0]) < 1e-6 and off(plain, expected[1]) < rounding
    for mine, theirs, most in zip(given, precise, (rounding, rounding, rounding), strict=True):
        assert off(mine.grad, theirs.grad) < most
    if seeds is not None and kept is not None:
        lost = total - given[0] == 0
        assert torch.equal(~lost, kept), "the same elements, bit for bit"
        assert given[1].grad is not None
        assert torch.equal(given[1].grad != 0, kept)


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_embeddings(sizes: tuple[int, int, int], kind: torch.dtype, dropout: float) -> None:
    torch.manual_seed(0)
    models, rows, width = sizes
    steps = torch.randint(0, LONGEST, (models, rows // 3)).to(DEVICE)
    learnt = [normal(models, LONGEST, width), normal(models, width), normal(models, width)]
    table, weight, shift = [x.requires_grad_() for x in learnt]
    tokens = normal(*sizes, kind=kind).requires_grad_()
    above = normal(*sizes), normal(*sizes, kind=kind)
    seeds = seeds_of(models, dropout)
    epsilons = [EPSILON, 2 * EPSILON]
    given = [tokens, table, weight, shift]
    hidden, plain, *_ = embed_norm(tokens, table, steps, weight, shift, epsilons, dropout, seeds)
    torch.autograd.backward([hidden, plain], list(above))
    precise = exact(given)
    kept = kept_of(seeds, rows, width)
    expected = embed_plainly(
        precise[0], precise[1], steps, *precise[2:], (EPSILON, 2 * EPSILON), kept, dropout
    )
    torch.autograd.backward(list(expected), [x.double() for x in above])
    rounding = torch.finfo(kind).eps
    assert off(hidden, expected[0]) < 1e-6 and off(plain, expected[1]) < rounding
    for mine, theirs in zip(given, precise, strict=True):
        assert off(mine.grad, theirs.grad) < 2 * rounding


def test_a_sum_that_nobody_wants_has_no_gradient() -> None:
    torch.manual_seed(0)
    given = [
        x.requires_grad_()
        for x in (normal(2, 5, 64), normal(2, 5, 64, kind=torch.float16), normal(2, 64))
    ]
    above = normal(2, 5, 64, kind=torch.float16)
    add_norm(*given, EPSILON)[1].backward(above)
    precise = exact(given)
    add_plainly(*precise, EPSILON)[1].backward(above.double())
    for mine, theirs in zip(given, precise, strict=True):
        assert off(mine.grad, theirs.grad) < 2e-3


def test_what_is_not_a_number_stays_in_its_row() -> None:
    torch.manual_seed(0)
    hidden, branch, bias = normal(2, 5, 64), normal(2, 5, 64, kind=torch.float16), normal(2, 64)
    branch[1, 2, 3] = float("nan")
    total, plain, _ = add_norm(hidden, branch, bias, EPSILON)
    bad = torch.zeros(2, 5, dtype=torch.bool, device=DEVICE)
    bad[1, 2] = True
    assert torch.equal(~plain.isfinite().all(-1), bad)
    assert torch.equal(~total.isfinite().all(-1), bad)


def test_unknown_timesteps_are_not_a_number() -> None:
    torch.manual_seed(0)
    steps = torch.tensor([[0, LONGEST, 2], [-1, 1, LONGEST - 1]], device=DEVICE)
    tokens = normal(2, 9, 32, kind=torch.bfloat16).requires_grad_()
    table = normal(2, LONGEST, 32).requires_grad_()
    weight, shift = normal(2, 32), normal(2, 32)
    _, plain, *_ = embed_norm(tokens, table, steps, weight, shift, [EPSILON, EPSILON])
    known = ((steps >= 0) & (steps < LONGEST)).repeat_interleave(3, 1)
    assert torch.equal(plain.isfinite().all(-1), known)
    plain.backward(torch.ones_like(plain))
    assert table.grad is not None and table.grad[0, 1].eq(0).all()


def test_operators_are_what_they_declare() -> None:
    torch.manual_seed(0)
    seeds = seeds_of(2, DROPOUT)
    wide = normal(2, 6, 32), normal(2, 6, 32, kind=torch.bfloat16)
    narrow = normal(2, 32), normal(2, 32)
    table, steps = normal(2, LONGEST, 32), torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)

    def learning(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach().clone().requires_grad_() for x in tensors)

    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
    )
    given: list[tuple[Any, tuple[Any, ...]]] = [
        (add_norm, (*learning(*wide, narrow[0]), EPSILON, DROPOUT, seeds)),
        (
            embed_norm,
            (*learning(wide[1], table), steps, *learning(*narrow), [1e-5, 1e-5], DROPOUT, seeds),
        ),
    ]
    for operator, arguments in given:
        torch.library.opcheck(operator, arguments, test_utils=tests)
    scales = normal(2, 2, 6)
    gradients: list[tuple[Any, tuple[Any, ...]]] = [
        (add_norm_gradient, (None, wide[1], wide[1], scales[0], DROPOUT, seeds)),
        (
            embed_norm_gradient,
            (wide[0], wide[1], wide[1], wide[1], scales, steps, narrow[0], LONGEST, DROPOUT, seeds),
        ),
    ]
    for operator, arguments in gradients:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@INDUCTOR
def test_stacked_models_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that take the kernels against models that do not."""
    results = []
    for fits in (True, False):
        if not fits:
            monkeypatch.setattr(stacked_module, "supports_norms", lambda *_, **__: False)
        results.append(compiled_stack("mlp.c_proj.bias", count=3, windows=30, width=64))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=4e-3, atol=4e-3)
    for name, plain in results[1][1].items():
        assert off(results[0][1][name], plain) < 0.1, name
