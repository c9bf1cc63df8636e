"""The MLPs of several models at once on a CPU: the operators, their shapes, and gradients.

The kernels need a GPU (tests/test_stacked_mlp_gpu.py).  Here plain torch stands in for them.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gear_offline.errors import InputError
from gear_offline.kernels import stacked_mlp as module
from gear_offline.kernels.stacked_mlp import (
    TILE_ROWS,
    stacked_mlp,
    stacked_mlp_gradient,
    stacked_mlp_parts,
    stacked_mlp_reference,
    supports_stacked,
)
from gear_offline.loaders.batch import join_batches
from gear_offline.models import stacked as stacked_module
from gear_offline.models.stacked import StackedModels
from tests.attention_support import StandIn
from tests.test_stacked_models import make_batch, make_model

LAUNCHES: list[tuple[int, ...]] = []


def forward(
    rows: Tensor, first: Tensor, bias: Tensor, inner: Tensor, count: int, width: int, size: int,
    *tiles: int, num_warps: int, num_stages: int,
) -> None:  # fmt: skip
    assert all(x.is_contiguous() for x in (rows, first, bias, inner))
    assert (count, width, size) == (*rows.shape[1:], first.shape[2])
    check(size, width, tiles)
    inner.copy_((torch.bmm(rows.double(), first.double()) + bias[:, None]).relu())


def backward(
    gradient: Tensor, second: Tensor, inner: Tensor, passed: Tensor, sums: Tensor, count: int,
    width: int, size: int, *tiles: int, num_warps: int, num_stages: int,
) -> None:  # fmt: skip
    assert all(x.is_contiguous() for x in (gradient, second, inner, passed, sums))
    assert (count, width, size) == (*gradient.shape[1:], second.shape[1])
    check(size, width, tiles)
    whole = torch.bmm(gradient.double(), second.double().mT).where(inner > 0, 0.0)
    passed.copy_(whole)
    parts = whole.split(tiles[0], dim=1)
    assert sums.shape[1] == len(parts)
    sums.copy_(torch.stack([part.sum(1) for part in parts], 1))


def check(size: int, width: int, tiles: tuple[int, ...]) -> None:
    LAUNCHES.append(tiles)
    height, columns, depth = tiles
    assert not size % columns and not width % depth and height == TILE_ROWS
    assert all(tile >= 16 and tile & (tile - 1) == 0 for tile in tiles)


class Counted(StandIn):
    """Refuses a launch of no program."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        assert grid[0] > 0
        return self.launch


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_forward", Counted(forward), raising=False)
    monkeypatch.setattr(module, "_backward", Counted(backward), raising=False)


def draw(
    models: int, rows: int, width: int, size: int, outputs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, requires_grad=True)

    return (
        some(models, rows, width),
        some(models, width, size),
        some(models, size),
        some(models, size, outputs),
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    "sizes", [(1, 1, 16, 16, 16), (3, 130, 48, 144, 32), (2, 300, 32, 64, 128)], ids=str
)
def test_result_and_gradients_are_those_of_plain_torch(sizes: tuple[int, ...]) -> None:
    models, rows, width, size, outputs = sizes
    given = draw(models, rows, width, size, outputs)
    plain = [x.detach().double().requires_grad_() for x in given]
    above = torch.randn(models, outputs, rows).mT  # not contiguous
    found = stacked_mlp(*given)
    found.backward(above)
    expected = stacked_mlp_reference(*plain)
    expected.backward(above.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(given, plain, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("stand_ins")
def test_the_operators_are_well_formed() -> None:
    given = draw(2, 130, 32, 48, 16)
    torch.library.opcheck(stacked_mlp_parts, given)
    inner = torch.rand(2, 130, 48).relu()
    torch.library.opcheck(stacked_mlp_gradient, (torch.randn(2, 130, 16), given[3].detach(), inner))


@pytest.mark.usefixtures("stand_ins")
def test_what_lies_between_takes_no_gradient() -> None:
    found, inner = stacked_mlp_parts(*draw(2, 5, 16, 32, 16))
    assert found.requires_grad and not inner.requires_grad


def test_shapes_of_what_is_not_computed() -> None:
    with FakeTensorMode():
        rows = torch.empty(2, 300, 128, dtype=torch.bfloat16)
        first, second = rows.new_empty(2, 128, 512), rows.new_empty(2, 512, 64)
        found, inner = stacked_mlp_parts(rows, first, torch.empty(2, 512), second)
        assert (found.shape, found.dtype) == ((2, 300, 64), torch.bfloat16)
        assert (inner.shape, inner.dtype) == ((2, 300, 512), torch.bfloat16)
        passed, sums = stacked_mlp_gradient(found, second, inner)
        assert (passed.shape, passed.dtype) == (inner.shape, torch.bfloat16)
        assert (sums.shape, sums.dtype) == ((2, -(-300 // TILE_ROWS), 512), torch.float32)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("place", "other", "words"),
    [
        (0, torch.zeros(2, 0, 32), r"\(2, 0, 32\)"),
        (0, torch.zeros(3, 8, 32), r"\(3, 8, 32\)"),
        (0, torch.zeros(2, 8, 32).half(), r"torch\.float16"),
        (0, torch.zeros(2, 32), r"\(2, 32\)"),
        (1, torch.zeros(2, 48, 32), r"\(2, 48, 32\)"),
        (2, torch.zeros(2, 32), r"\(2, 32\)"),
        (2, torch.zeros(2, 48).long(), r"torch\.int64"),
        (3, torch.zeros(2, 48, 24), r"multiples of 16"),
        (3, torch.zeros(1, 48, 16), r"\(1, 48, 16\)"),
    ],
)
def test_what_does_not_fit_is_refused(place: int, other: Tensor, words: str) -> None:
    given = list(draw(2, 8, 32, 48, 16))
    stacked_mlp(*given)
    given[place] = other
    with pytest.raises(InputError, match=words) as caught:
        stacked_mlp(*given)
    assert caught.value.code == "MODEL_INPUT"


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 300), most=st.sampled_from([64, 128]))
def test_tiles_divide_what_they_tile(size: int, most: int) -> None:
    divisors = [1 << power for power in range(most.bit_length()) if size * 16 % (1 << power) == 0]
    assert module._tile(size * 16, most) == max(divisors)


def test_only_16_bits_on_cuda_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "triton", object())
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert supports_stacked(cuda, torch.bfloat16, width=128, inner=512)
    assert supports_stacked(cuda, torch.float16, width=48, inner=144)
    assert not supports_stacked(cuda, torch.float32, width=128, inner=512)
    assert not supports_stacked(cpu, torch.bfloat16, width=128, inner=512)
    assert not supports_stacked(cuda, torch.bfloat16, width=120, inner=512)
    assert not supports_stacked(cuda, torch.bfloat16, width=128, inner=520)
    monkeypatch.setattr(module, "triton", None)
    assert not supports_stacked(cuda, torch.bfloat16, width=128, inner=512)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
def test_stacked_models_use_it(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = join_batches([make_batch(seed, 3) for seed in range(3)])
    results = []
    for fits in (False, True):
        monkeypatch.setattr(stacked_module, "supports_stacked", lambda *_, f=fits, **__: f)
        models = [make_model(seed, hidden_size=16, activation=activation) for seed in range(3)]
        for model in models:
            for block in model.encoder.h:
                torch.nn.init.normal_(block.mlp.c_fc.bias)
        LAUNCHES.clear()
        stacked = StackedModels(models)
        losses = stacked.losses(batch)
        losses.sum().backward()
        assert len(LAUNCHES) == (4 if fits and activation == "relu" else 0)
        results.append((losses.detach(), [p.grad for p in stacked.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
