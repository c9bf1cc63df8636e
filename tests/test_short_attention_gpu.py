"""Attention of short windows with dropout on a GPU, against its twins and plain torch."""

# mypy: disable-error-code="no-untyped-call"
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gear_offline.kernels.short_attention import (
    kept_weights,
    packed_attention,
    packed_attention_reference,
    supports_packed,
)
from gear_offline.loaders.batch import join_batches
from gear_offline.models.stacked import StackedModels
from tests.gpu_support import BF16, INDUCTOR, ON_GPU
from tests.model_support import make
from tests.test_stacked_models import make_batch, make_model

pytestmark = ON_GPU
# groups, windows of each, tokens, heads, elements of a head
SIZES = [
    (1, 3, 5, 2, 16),
    (4, 3, 60, 2, 128),
    (2, 2, 64, 1, 64),
    (2, 1, 65, 3, 32),
    (1, 2, 128, 2, 128),
]


def draw_seeds(groups: int) -> Tensor:
    generator = torch.Generator().manual_seed(groups)
    return torch.randint(-(2**63), 2**63 - 1, (groups,), generator=generator).cuda()


def what_stays(seeds: Tensor, dropout: float, windows: int, heads: int, tokens: int) -> Tensor:
    """Read off the kernel which weights it keeps: values of one are the keys' own places."""
    head = max(16, 1 << (tokens - 1).bit_length())
    packed = torch.zeros(windows, tokens, 3, heads, head, device="cuda", dtype=torch.bfloat16)
    packed[:, :, 2, :, :tokens] = torch.eye(tokens, device="cuda")[:, None]
    found: Tensor = packed_attention(packed.flatten(2), heads, 1.0, dropout, seeds)
    return found.view(windows, tokens, heads, head)[..., :tokens].transpose(1, 2) > 0


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("groups", "each", "tokens", "heads", "head"), SIZES)
def test_the_kernel_keeps_what_its_twin_keeps(
    groups: int, each: int, tokens: int, heads: int, head: int, dropout: float
) -> None:
    seeds, windows = draw_seeds(groups), groups * each
    mask = kept_weights(seeds, dropout, windows=windows, heads=heads, tokens=tokens)
    assert torch.equal(what_stays(seeds, dropout, windows, heads, tokens), mask.tril())


@pytest.mark.parametrize(("groups", "each", "tokens", "heads", "head"), SIZES)
def test_values_and_gradients(groups: int, each: int, tokens: int, heads: int, head: int) -> None:
    assert supports_packed(torch.device("cuda"), torch.bfloat16, tokens=tokens, head=head)
    torch.manual_seed(0)
    seeds, windows, scale, dropout = draw_seeds(groups), groups * each, head**-0.5, 0.3
    packed = torch.randn(windows, tokens, 3 * heads * head, device="cuda").bfloat16()
    above = torch.randn(windows, tokens, heads * head, device="cuda").bfloat16()
    mask = kept_weights(seeds, dropout, windows=windows, heads=heads, tokens=tokens)
    mine, plain = packed.clone().requires_grad_(), packed.float().requires_grad_()
    found = packed_attention(mine, heads, scale, dropout, seeds)
    expected = packed_attention_reference(plain, heads, scale, mask, dropout)
    found.backward(above)
    expected.backward(above.float())
    assert mine.grad is not None and plain.grad is not None
    torch.testing.assert_close(found.float(), expected, **BF16)
    torch.testing.assert_close(mine.grad.float(), plain.grad, **BF16)
    for group in range(groups):  # the same bits alone
        own = slice(group * each, (group + 1) * each)
        alone = packed[own].clone().requires_grad_()
        again = packed_attention(alone, heads, scale, dropout, seeds[group : group + 1])
        again.backward(above[own])
        assert alone.grad is not None
        assert torch.equal(again, found[own]) and torch.equal(alone.grad, mine.grad[own])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "each", "tokens", "heads", "head"), SIZES)
def test_a_bias(
    groups: int, each: int, tokens: int, heads: int, head: int, kind: torch.dtype, dropout: float
) -> None:
    torch.manual_seed(0)
    seeds, windows, scale = draw_seeds(groups), groups * each, head**-0.5
    width = heads * head
    packed = torch.randn(windows, tokens, 3 * width, device="cuda").bfloat16()
    bias = torch.randn(groups, 3 * width, device="cuda").to(kind)
    above = torch.randn(windows, tokens, width, device="cuda").bfloat16()
    whole = (packed.view(groups, -1, 3 * width).float() + bias[:, None].float()).bfloat16()
    outside = whole.view_as(packed).requires_grad_()
    mine, added = packed.clone().requires_grad_(), bias.clone().requires_grad_()
    found = packed_attention(mine, heads, scale, dropout, seeds, added)
    expected = packed_attention(outside, heads, scale, dropout, seeds)
    found.backward(above)
    expected.backward(above)
    assert mine.grad is not None and added.grad is not None and outside.grad is not None
    torch.testing.assert_close(found, expected, **BF16)
    torch.testing.assert_close(mine.grad, outside.grad, **BF16)
    # the sum of rows that were rounded, and of the keys' gradients, where only rounding is left
    sums = outside.grad.view(groups, -1, 3 * width).float().sum(1)
    rounding = 2**-7 * outside.grad.float().square().sum((0, 1)).sqrt().max()
    assert added.grad.dtype == kind
    torch.testing.assert_close(added.grad.float(), sums, rtol=3e-2, atol=float(rounding))
    for group in range(groups):  # the same bits alone
        own, one = slice(group * each, (group + 1) * each), slice(group, group + 1)
        alone, its = packed[own].clone().requires_grad_(), bias[one].clone().requires_grad_()
        again = packed_attention(alone, heads, scale, dropout, seeds[one], its)
        again.backward(above[own])
        assert alone.grad is not None and its.grad is not None
        assert torch.equal(again, found[own]) and torch.equal(alone.grad, mine.grad[own])
        torch.testing.assert_close(its.grad, added.grad[one])


@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_is_well_formed(biased: bool) -> None:
    packed = torch.randn(8, 60, 384, device="cuda").bfloat16().requires_grad_()
    bias = torch.randn(4, 384, device="cuda", requires_grad=True) if biased else None
    torch.library.opcheck(packed_attention, (packed, 2, 0.1, 0.1, draw_seeds(4), bias))


def test_replays_of_a_graph_draw_anew() -> None:
    def step() -> tuple[Tensor, Tensor]:
        seeds = torch.randint(0, 2**62, (1,), dtype=torch.int64, device="cuda")
        return seeds, what_stays(seeds, 0.3, 4, 2, 60)

    step()  # compiles the kernel
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seeds, stays = step()
    seen = []
    for _ in range(3):
        graph.replay()
        mask = kept_weights(seeds, 0.3, windows=4, heads=2, tokens=60)
        assert torch.equal(stays, mask.tril())
        seen.append(stays.clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def block() -> Any:
    """A block whose only dropout is that of attention weights."""
    some: Any = make(hidden_size=128, heads=2, dropout=0.2).encoder.h[0]
    some.residual_dropout = 0.0
    some.attn.c_attn.weight.data.mul_(4)  # else all weights are nearly equal
    return some.cuda().train()


def with_gradient(function: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    leaf = hidden.clone().requires_grad_()
    torch.cuda.manual_seed(4)
    with torch.autocast("cuda", torch.bfloat16):
        found = function(leaf)
    found.float().square().mean().backward()
    assert leaf.grad is not None
    return found.detach(), leaf.grad


def test_recomputing_a_block_draws_the_same() -> None:
    some, hidden = block(), torch.randn(16, 60, 128, device="cuda")
    once = with_gradient(some, hidden)
    twice = with_gradient(lambda x: checkpoint(some, x, use_reentrant=False), hidden)
    assert all(torch.equal(one, other) for one, other in zip(once, twice, strict=True))


@INDUCTOR
def test_stacked_models_compiled() -> None:
    """The bias inside of the kernel against float32 without it, losses and gradients."""
    results = [compiled_stack(precision) for precision in (None, torch.bfloat16)]
    torch.testing.assert_close(results[1][0], results[0][0], rtol=2e-3, atol=2e-3)
    for name, plain in results[0][1].items():
        error = float((results[1][1][name] - plain).norm() / plain.norm())
        assert error < 0.06, f"{name}: {error}"


@INDUCTOR
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_gradients_use_the_same_draws(recompute: bool) -> None:
    """Inductor draws seeds of its own, so they are an output here; the gradient tells the draws."""

    def function(packed: Tensor) -> tuple[Tensor, Tensor]:
        seeds = torch.randint(0, 2**62, (1,), dtype=torch.int64, device="cuda")
        return packed_attention(packed * 1.0, 2, 0.1, 0.3, seeds), seeds

    def outer(packed: Tensor) -> Any:
        return checkpoint(function, packed, use_reentrant=False) if recompute else function(packed)

    compiled = torch.compile(outer, dynamic=False)
    packed = torch.randn(8, 60, 384, device="cuda").bfloat16()
    drawn = set()
    for _ in range(2):
        mine, plain = packed.clone().requires_grad_(), packed.float().requires_grad_()
        found, seeds = compiled(mine)
        mask = kept_weights(seeds, 0.3, windows=8, heads=2, tokens=60)
        expected = packed_attention_reference(plain, 2, 0.1, mask, 0.3)
        found.float().sum().backward()
        expected.sum().backward()
        assert mine.grad is not None and plain.grad is not None
        torch.testing.assert_close(found.float(), expected, **BF16)
        torch.testing.assert_close(mine.grad.float(), plain.grad, **BF16)
        drawn.add(int(seeds))
    assert len(drawn) == 2


def compiled_stack(precision: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses and gradients of fresh models whose attention has random biases."""
    batch = join_batches([make_batch(seed, 16) for seed in range(4)]).to("cuda")
    models: list[Any] = [make_model(seed, hidden_size=32) for seed in range(4)]
    for model in models:
        model.to("cuda")
        for block in model.encoder.h:
            torch.nn.init.normal_(block.get_parameter("attn.c_attn.bias"))
    stacked = StackedModels(models, precision=precision)
    losses: Tensor = torch.compile(stacked.losses, dynamic=False)(batch)
    losses.sum().backward()
    found = {name: p.grad for name, p in stacked.named_parameters() if p.grad is not None}
    return losses.detach(), found
