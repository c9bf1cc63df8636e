"""The MLPs of several models at once on a CPU: the operators, their shapes, and gradients.

The kernels need a GPU (tests/test_stacked_mlp_gpu.py).  Here plain torch stands in for them.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gear_offline.errors import InputError
from gear_offline.kernels import stacked_mlp as module
from gear_offline.kernels.stacked_mlp import (
    BACKWARD,
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
    mask(gradient, second, inner, passed, sums, tiles[0])


def mask(
    gradient: Tensor, second: Tensor, inner: Tensor, passed: Tensor, sums: Tensor, height: int
) -> None:
    whole = torch.bmm(gradient.double(), second.double().mT).where(inner > 0, 0.0)
    passed.copy_(whole)
    parts = whole.split(height, dim=1)
    assert sums.shape[1] == len(parts)
    sums.copy_(torch.stack([part.sum(1) for part in parts], 1))


def check(size: int, width: int, tiles: tuple[int, ...]) -> None:
    LAUNCHES.append(tiles)
    height, columns, depth = tiles
    assert not size % columns and not width % depth
    assert height in (TILE_ROWS, *(tiling.rows for tiling in BACKWARD))
    assert all(tile >= 16 and tile & (tile - 1) == 0 for tile in tiles)


class Tiled(NamedTuple):
    """Stands for a tensor as tiles."""

    whole: Tensor
    tile: tuple[int, int]

    @classmethod
    def of(cls, whole: Tensor, rows: int, columns: int) -> Tiled:
        assert whole.ndim == 3 and whole.is_contiguous() and not whole.data_ptr() % 16
        return cls(whole, (rows, columns))


def forward_whole(
    rows: Tiled, first: Tiled, bias: Tensor, second: Tiled, inner: Tiled, result: Tiled,
    count: int, width: int, size: int, outputs: int, height: int, columns: int, *,
    num_warps: int, num_stages: int,
) -> None:  # fmt: skip
    assert bias.is_contiguous()
    assert (rows.tile, first.tile) == ((height, width), (width, columns))
    check_whole(second, inner, result, (count, size, outputs, height, columns))
    forward(
        rows.whole, first.whole, bias, inner.whole, count, width, size, TILE_ROWS, 16, 16,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    result.whole.copy_(torch.bmm(inner.whole.double(), second.whole.double()))


def backward_whole(
    gradient: Tiled, first: Tiled, second: Tiled, inner: Tiled, passed: Tiled, sums: Tensor,
    result: Tiled, count: int, width: int, size: int, outputs: int, height: int, columns: int, *,
    num_warps: int, num_stages: int,
) -> None:  # fmt: skip
    assert (first.tile, result.tile) == ((width, columns), (height, width))
    assert passed.tile == inner.tile
    check_whole(second, inner, gradient, (count, size, outputs, height, columns))
    LAUNCHES.append((height, columns))
    mask(gradient.whole, second.whole, inner.whole, passed.whole, sums, height)
    result.whole.copy_(torch.bmm(passed.whole.double(), first.whole.double().mT))


def check_whole(second: Tiled, inner: Tiled, result: Tiled, sizes: tuple[int, ...]) -> None:
    count, size, outputs, height, columns = sizes
    assert second.whole.shape[1:] == (size, outputs) and inner.whole.shape[1:] == (count, size)
    assert not size % columns and all(x >= 16 and not x & (x - 1) for x in (height, columns))
    assert (second.tile, inner.tile) == ((columns, outputs), (height, columns))
    assert result.tile == (height, outputs)


class Counted(StandIn):
    """Refuses a launch of no program."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        assert grid[0] > 0
        return self.launch


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_forward", Counted(forward), raising=False)
    monkeypatch.setattr(module, "_backward", Counted(backward), raising=False)
    monkeypatch.setattr(module, "_forward_whole", Counted(forward_whole), raising=False)
    monkeypatch.setattr(module, "_backward_whole", Counted(backward_whole), raising=False)
    monkeypatch.setattr(module, "_tiled", Tiled.of)


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
@pytest.mark.parametrize("has_tiles", [True, False])
@pytest.mark.parametrize("many", [300, 10**9])
@pytest.mark.parametrize(
    ("sizes", "whole"),
    [
        ((1, 1, 16, 16, 16), True),
        ((2, 300, 32, 64, 128), True),
        ((1, 129, 128, 48, 64), True),
        ((3, 130, 48, 144, 32), False),
        ((2, 127, 64, 96, 80), False),
        ((1, 128, 256, 32, 128), False),
    ],
    ids=str,
)
def test_result_and_gradients_are_those_of_plain_torch(
    sizes: tuple[int, ...],
    whole: bool,
    many: int,
    has_tiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is many, and what is few, is cut in another way."""
    monkeypatch.setattr(module, "MANY", many)
    monkeypatch.setattr(module, "_has_tiles", lambda _: has_tiles)
    if not (whole and has_tiles):  # the other kernels are not for such sizes or devices
        monkeypatch.setattr(module, "_forward_whole", None, raising=False)
        monkeypatch.setattr(module, "_backward_whole", None, raising=False)
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
    first, second = given[1].detach(), given[3].detach()
    torch.library.opcheck(stacked_mlp_gradient, (torch.randn(2, 130, 16), first, second, inner))


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
        of_rows, passed, sums = stacked_mlp_gradient(found, first, second, inner)
        assert (of_rows.shape, of_rows.dtype) == (rows.shape, torch.bfloat16)
        assert (passed.shape, passed.dtype) == (inner.shape, torch.bfloat16)
        assert (sums.shape, sums.dtype) == (
            (2, -(-300 // BACKWARD[0].rows), 512),
            torch.float32,
        )
        first, second = rows.new_empty(2, 128, 512), rows.new_empty(2, 512, 256)
        sums = stacked_mlp_gradient(rows.new_empty(2, 300, 256), first, second, inner)[2]
        assert sums.shape == (2, -(-300 // TILE_ROWS), 512)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("outputs", [32, 48])
def test_tensors_may_lie_anywhere(outputs: int) -> None:
    """Views that start within others, and are not contiguous, as the same of their own."""
    given = [x.detach() for x in draw(2, 5, 16, 32, outputs)]
    moved = []
    for x in given:
        flat = torch.cat([x.new_zeros(1), x.mT.flatten()])[1:]
        moved.append(flat.view(x.mT.shape).mT.requires_grad_())
        assert moved[-1].data_ptr() % 16
    own = [x.clone().requires_grad_() for x in given]
    above = torch.randn(2, 5, outputs)
    for some in (moved, own):
        stacked_mlp(some[0], some[1], some[2], some[3]).backward(above)
    for one, other in zip(moved, own, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


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


def test_programs_keep_rows_that_fit() -> None:
    fits = {size for size in range(16, 300, 16) if module._whole(size, 16)}
    assert fits == {16, 32, 64, 128} == {x for x in range(16, 300, 16) if module._whole(128, x)}


@pytest.mark.parametrize(("generation", "fits"), [(8, False), (9, True), (10, True), (12, False)])
def test_tiles_are_fetched_where_shared_memory_is_large(
    generation: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))
    assert module._has_tiles(torch.device("cuda")) is fits


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
