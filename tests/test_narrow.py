"""Padded products of a few inputs or outputs: the maps they stand for, and their gradients."""

# mypy: disable-error-code="no-untyped-call"
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gear_offline.models import decision_transformer as model_module
from gear_offline.models import narrow
from gear_offline.models.narrow import joint_maps, lower_half, narrow_linear
from tests.model_support import inputs, make

MANTISSA = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


def maps_of(widths: list[int], models: list[int], kind: torch.dtype = torch.float32) -> Any:
    source = torch.Generator().manual_seed(0)
    shapes = [((*models, 6, width), (*models, 6)) for width in widths]
    return [
        tuple(torch.randn(shape, generator=source).to(kind).requires_grad_() for shape in pair)
        for pair in shapes
    ]


@settings(max_examples=30, deadline=None)
@given(
    widths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    stacked=st.booleans(),
    half=st.booleans(),
)
def test_one_product_does_what_each_map_does(widths: list[int], stacked: bool, half: bool) -> None:
    """Of weights in 16 bits too, whose biases have no lower half."""
    models, kind = [2] * stacked, torch.bfloat16 if half else torch.float32
    maps, alone = (maps_of(widths, models, kind) for _ in range(2))
    rows = [torch.randn(*models, 5, width) for width in widths]
    found = joint_maps(rows, maps, torch.float32)
    pairs = zip(rows, alone, strict=True)
    each = [x @ w.float().mT + b.float().unsqueeze(-2) for x, (w, b) in pairs]
    expected = torch.stack(each, dim=-2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    above = torch.randn_like(found)
    hooked: list[Any] = [weight for weight, _ in maps]
    for weight in hooked:  # else autograd copies them one by one: a launch each
        weight.register_hook(lambda gradient: contiguous.append(gradient.is_contiguous()))
    contiguous: list[bool] = []
    found.backward(above)
    assert len(contiguous) == len(maps) and (stacked or all(contiguous))
    expected.backward(above)
    for mine, theirs in zip(maps, alone, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-2 if half else 1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", list(MANTISSA))
def test_widths_are_whole_loads_and_biases_keep_16_bits(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_to: list[Tensor] = []

    def product(rows: Tensor, matrix: Tensor) -> Tensor:
        given_to[:] = [rows, matrix]
        return torch.bmm(rows.double(), matrix.double())

    monkeypatch.setattr(torch, "matmul", product)
    maps = maps_of([1, 11, 3], [2])
    for _, bias in maps:
        torch.nn.init.uniform_(bias, 1.0, 2.0)
    found = joint_maps([torch.zeros(2, 3, width) for width in (1, 11, 3)], maps, kind)
    assert given_to[0].shape[-1] == given_to[1].shape[-2] == 24
    assert given_to[0].dtype == given_to[1].dtype == kind
    expected = torch.stack([bias.double() for _, bias in maps], dim=1)[:, None].expand_as(found)
    most = 0.0 if kind == torch.float32 else 2.0**-16
    torch.testing.assert_close(found, expected, rtol=0.0, atol=most)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_halves_of_a_bias_are_halves_when_compiled() -> None:
    """Inductor drops a rounding to bfloat16 that is undone, so halves are not made by one."""

    @torch.compile(dynamic=False)
    def halves(values: Tensor) -> tuple[Tensor, Tensor]:
        rest = lower_half(values)
        return (values - rest).bfloat16(), rest.bfloat16()

    values = torch.rand(2, 3, 8) + 1
    first, second = halves(values)
    assert second.ne(0).any()
    assert float((first.double() + second.double() - values).abs().max()) <= 2.0**-16


@pytest.mark.parametrize("outputs", [1, 3, 8])
def test_outputs_are_padded_and_cut(outputs: int) -> None:
    rows, weight, bias = torch.randn(2, 5, 4), torch.randn(outputs, 4), torch.randn(outputs)
    torch.testing.assert_close(narrow_linear(rows, weight, bias), F.linear(rows, weight, bias))


def with_gradients(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    output = model(**batch, padding="right", only_actions=True).action_preds
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("changes", [{}, {"action_tanh": False, "state_dim": 11}])
def test_a_model_computes_the_same_with_padded_products(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = inputs()
    batch["states"] = torch.randn(*batch["states"].shape[:2], changes.get("state_dim", 5))
    plain = with_gradients(make(dropout=0.0, **changes), batch)
    calls: list[str] = []
    for name in ("joint_maps", "narrow_linear"):
        original = getattr(narrow, name)

        def counted(*given: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*given)

        monkeypatch.setattr(model_module, name, counted)
    monkeypatch.setattr(model_module, "half_type", lambda weight: torch.float32)
    model = make(dropout=0.0, **changes)
    for one, other in zip(with_gradients(model, batch), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert calls == ["joint_maps", "narrow_linear"]
    assert model.embed_state.weight.shape == (16, changes.get("state_dim", 5)), "as outside"
