"""The MLPs of several models at once on a GPU, against plain torch in float32."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gear_offline.kernels import stacked_mlp as module
from gear_offline.kernels.stacked_mlp import (
    BACKWARD,
    TILE_ROWS,
    stacked_mlp,
    stacked_mlp_gradient,
    stacked_mlp_parts,
    stacked_mlp_reference,
)
from gear_offline.models import stacked as stacked_module
from tests.gpu_support import INDUCTOR, ON_GPU
from tests.stack_support import compiled_stack

pytestmark = ON_GPU
# models, rows of each, inputs, elements between the products, outputs; those of the first group
# keep rows of the result in a program
SIZES = [
    (8, 3840, 128, 512, 128),
    (8, 1280, 128, 512, 128),
    (1, 129, 128, 512, 64),
    (3, 127, 64, 48, 128),
    (2, 300, 32, 144, 16),
    (3, 1, 16, 16, 16),
    #
    (2, 300, 48, 144, 80),
    (1, 129, 256, 64, 192),
    (8, 1280, 256, 1024, 256),
    (1, 1, 96, 32, 96),
]


def draw(
    sizes: tuple[int, ...], kind: torch.dtype = torch.bfloat16, of_bias: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """Return rows, maps and bias, and a gradient of the result; sums are about one."""
    models, rows, width, size, outputs = sizes
    torch.manual_seed(0)
    given = [
        torch.randn(models, rows, width, device="cuda").to(kind),
        (torch.randn(models, width, size, device="cuda") * width**-0.5).to(kind),
        torch.randn(models, size, device="cuda").to(of_bias),
        (torch.randn(models, size, outputs, device="cuda") * size**-0.5).to(kind),
    ]
    above = torch.randn(models, rows, outputs, device="cuda").to(kind)
    return [x.requires_grad_() for x in given], above


def off(found: Tensor, expected: Tensor) -> float:
    """Error as a share of the whole."""
    found, expected = found.detach(), expected.detach()
    return float((found.float() - expected).norm() / expected.norm())


def alike(given: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in given]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_result_and_gradients(sizes: tuple[int, ...], kind: torch.dtype) -> None:
    of_bias = torch.float32 if sizes[0] > 1 else kind
    given, above = draw(sizes, kind, of_bias)
    found, inner = stacked_mlp_parts(*given)
    found.backward(above)
    plain = [x.detach().double().requires_grad_() for x in given]
    before = torch.bmm(plain[0], plain[1]) + plain[2][:, None]
    # what is clamped is decided by sums in float32: those next to zero may go either way
    expected = torch.bmm(before * (inner > 0), plain[3])
    expected.backward(above.double())
    rounding = torch.finfo(kind).eps
    assert off(inner, before.detach().relu()) < rounding
    assert off(found, expected.detach()) < rounding
    for mine, theirs in zip(given, plain, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert mine.grad.dtype == mine.dtype
        assert off(mine.grad, theirs.grad) < rounding
    for model in range(sizes[0]):  # nothing of the neighbours
        alone = alike([x[model : model + 1] for x in given])
        again = stacked_mlp(*alone)
        again.backward(above[model : model + 1])
        torch.testing.assert_close(again[0], found[model], rtol=4 * rounding, atol=4 * rounding)
        for mine, its in zip(given, alone, strict=True):
            assert mine.grad is not None and its.grad is not None
            assert off(its.grad[0], mine.grad[model].float()) < rounding


@pytest.mark.parametrize("width", [32, 48])
def test_one_that_is_not_a_number_stays_so(width: int) -> None:
    given, above = draw((3, 200, width, 48, 16))
    with torch.no_grad():
        given[0][1, 130, 5] = float("nan")
    found = stacked_mlp(*given)
    found.backward(above)
    broken = torch.zeros(3, 200, dtype=torch.bool)
    broken[1, 130] = True
    assert torch.equal(found.isnan().all(2).cpu(), broken)
    assert torch.equal(found.isnan().any(2).cpu(), broken)
    of_rows, of_first, of_bias, of_second = (x.grad for x in given)
    assert of_rows is not None and of_bias is not None
    assert of_rows.isfinite().all() and of_bias.isfinite().all()  # as in plain torch
    for x in (of_first, of_second):
        assert x is not None
        assert x.isfinite().flatten(1).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("width", [32, 48])
def test_rows_past_the_last_count_nowhere(width: int) -> None:
    """Weights that are infinite: what stands for absent rows must not meet them."""
    given, above = draw((2, 130, width, 64, 16))
    with torch.no_grad():
        given[3][1, 7] = float("inf")
        given[2][1, 7] = -1e4  # clamped in every row
    parts = [x.detach() for x in given]
    inner = stacked_mlp_parts(*given)[1]
    _, passed, sums = stacked_mlp_gradient(above, parts[1], parts[3], inner)
    assert passed.isfinite().all() and sums.isfinite().all()
    torch.testing.assert_close(sums.sum(1), passed.float().sum(1), rtol=1e-4, atol=1e-3)
    for tile in range(sums.shape[1]):
        height = BACKWARD[0].rows if width == 32 else TILE_ROWS
        part = passed[:, tile * height : (tile + 1) * height].float().sum(1)
        torch.testing.assert_close(sums[:, tile], part, rtol=1e-4, atol=1e-3)


def test_older_devices_take_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    given, above = draw((2, 300, 64, 144, 128))
    results = []
    for has_tiles in (True, False):
        monkeypatch.setattr(module, "_has_tiles", lambda _, has=has_tiles: has)
        some = alike(given)
        found = stacked_mlp(*some)
        found.backward(above)
        results.append([found, *(x.grad for x in some)])
    for one, other in zip(*results, strict=True):
        assert one is not None and other is not None
        assert off(one, other.float()) < 2**-7


@pytest.mark.parametrize("width", [32, 48])
def test_tensors_may_lie_anywhere(width: int) -> None:
    given, above = draw((2, 130, width, 48, 16))
    moved = [torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape) for x in given]
    assert all(x.data_ptr() % 16 for x in moved)
    parts = stacked_mlp_parts(*given)
    for one, other in zip(parts, stacked_mlp_parts(*moved), strict=True):
        assert torch.equal(one, other)
    inner = parts[1]
    expected = stacked_mlp_gradient(above, given[1].detach(), given[3].detach(), inner)
    for one, other in zip(
        expected, stacked_mlp_gradient(above, moved[1], moved[3], inner), strict=True
    ):
        assert torch.equal(one, other)


def test_the_operators_are_well_formed() -> None:
    for width in (128, 48):
        given, above = draw((2, 300, width, 512, 128))
        torch.library.opcheck(stacked_mlp_parts, tuple(given))
        inner = stacked_mlp_parts(*given)[1]
        maps = given[1].detach(), given[3].detach()
        torch.library.opcheck(stacked_mlp_gradient, (above, *maps, inner))


@INDUCTOR
def test_compiled() -> None:
    def act(rows: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
        return stacked_mlp(rows * 1.0, first, bias, second).mT * 2.0

    given, above = draw((2, 300, 128, 512, 128))
    mine, plain = alike(given), alike(given)
    torch.compile(act)(*mine).backward(above.mT)
    act(*plain).backward(above.mT)
    for one, other in zip(mine, plain, strict=True):
        assert one.grad is not None and other.grad is not None
        assert off(one.grad, other.grad.float()) < 2**-8


def test_replays_of_a_graph_read_new_rows() -> None:
    given, _ = draw((2, 300, 128, 512, 128))
    with torch.no_grad():
        stacked_mlp(*given)  # compiles the kernel
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            stacked_mlp(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = stacked_mlp(*given)
        for factor in (1.0, 0.5):
            given[0].mul_(factor)
            graph.replay()
            assert off(found, stacked_mlp_reference(*(x.float() for x in given))) < 2**-7


@INDUCTOR
def test_stacked_models_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that take the kernels against models that do not."""
    results = []
    for fits in (True, False):
        if not fits:
            monkeypatch.setattr(stacked_module, "supports_stacked", lambda *_, **__: False)
        results.append(compiled_stack("mlp.c_fc.bias", count=3, windows=30, width=64))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=4e-3, atol=4e-3)
    for name, plain in results[1][1].items():
        assert off(results[0][1][name], plain) < 0.1, name
