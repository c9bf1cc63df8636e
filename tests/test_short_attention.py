"""Attention of short windows with dropout: what it keeps, and its wiring, on a CPU.

The kernels need a GPU (tests/test_short_attention_gpu.py).  Here plain torch stands in for them,
so that everything around them runs: the operators, their shapes and gradients, and the block.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gear_offline.errors import InputError
from gear_offline.kernels import short_attention
from gear_offline.kernels.short_attention import (
    kept_weights,
    packed_attention,
    packed_attention_gradient,
    packed_attention_reference,
)
from gear_offline.models import blocks
from tests.model_support import make
from tests.test_philox import oracle

DROPOUT, SCALE = 0.1, 0.3
SEEDS = torch.tensor([3, 2**62 - 5, 4, -(2**63)])  # two of them neighbours


def kept(seeds: Tensor = SEEDS, dropout: float = DROPOUT, windows: int = 64) -> Tensor:
    return kept_weights(seeds, dropout, windows=windows, heads=2, tokens=60)


def test_kept_weights_are_those_of_the_definition() -> None:
    found = kept_weights(SEEDS, 0.4, windows=8, heads=3, tokens=7)
    assert found.shape == (8, 3, 7, 7) and found.dtype == torch.bool
    for place in torch.cartesian_prod(*(torch.arange(size) for size in found.shape))[::11]:
        window, head, query, key = place.tolist()
        seed = int(SEEDS[window // 2]) % 2**64
        counter = (query * 32 + key // 4, window % 2, head, 0)
        word = oracle(counter, (seed % 2**32, seed // 2**32), 7)[key % 4]
        assert bool(found[window, head, query, key]) == (word >= 0.4 * 2**32)


@pytest.mark.parametrize("dropout", [0.0, 0.02, 0.1, 0.5, 0.9])
def test_rate_of_dropout(dropout: float) -> None:
    found = ~kept(dropout=dropout)
    sigma = (dropout * (1 - dropout)) ** 0.5
    assert abs(float(found.double().mean()) - dropout) <= 4 * sigma / found.numel() ** 0.5
    for one in (found.flatten(1), found.transpose(0, 1).flatten(1)):  # each window, each head
        off = one.double().mean(1) - dropout
        assert float(off.abs().max()) <= 4.5 * sigma / one.shape[1] ** 0.5


def correlation(one: Tensor, other: Tensor) -> float:
    """Correlation in standard deviations of that of independent masks."""
    pair = torch.stack([one.flatten(), other.flatten()]).double()
    return abs(float(torch.corrcoef(pair)[0, 1])) * math.sqrt(pair.shape[1])


def test_draws_are_independent() -> None:
    found = kept()
    groups = found.view(4, 16, 2, 60, 60)
    for step in (1, 2, 3, 4, 5, 32):
        assert correlation(found[..., step:], found[..., :-step]) < 4.5, f"keys {step} apart"
        assert correlation(found[..., step:, :], found[..., :-step, :]) < 4.5, f"queries {step}"
    assert correlation(found[:, 0], found[:, 1]) < 4.5, "heads"
    for step in (1, 2, 15):
        assert correlation(groups[:, step:], groups[:, :-step]) < 4.5, f"windows {step} apart"
    for one in range(4):
        for other in range(one):
            assert correlation(groups[one], groups[other]) < 4.5, f"seeds {one} and {other}"
    assert correlation(found, found) > 100  # the measure sees what is there


def test_a_model_among_others_keeps_what_it_keeps_alone() -> None:
    together = kept().view(4, 16, 2, 60, 60)
    for seed, found in zip(SEEDS, together, strict=True):
        assert torch.equal(kept(seed[None], windows=16), found)
    few = kept_weights(SEEDS, DROPOUT, windows=8, heads=1, tokens=33).view(4, 2, 1, 33, 33)
    assert torch.equal(few, together[:, :2, :1, :33, :33])  # nor does it depend on the sizes


def test_reference_with_a_mask() -> None:
    torch.manual_seed(0)
    packed = torch.randn(4, 9, 24, dtype=torch.float64)
    whole = torch.ones(4, 2, 9, 9, dtype=torch.bool)
    torch.testing.assert_close(
        packed_attention_reference(packed, 2, SCALE, whole, 0.0),
        packed_attention_reference(packed, 2, SCALE),
    )
    mask = kept_weights(SEEDS, 0.5, windows=4, heads=2, tokens=9)
    found = packed_attention_reference(packed, 2, SCALE, mask, 0.5)
    query, key, value = (part.view(4, 9, 2, 4) for part in packed.chunk(3, -1))
    for window, head, token in ((0, 0, 0), (1, 1, 4), (3, 0, 8)):
        seen = slice(0, token + 1)
        scores = key[window, seen, head] @ query[window, token, head] * SCALE
        weights = scores.softmax(0) * mask[window, head, token, seen] * 2
        expected = weights @ value[window, seen, head]
        torch.testing.assert_close(found[window, token, 4 * head : 4 * head + 4], expected)


class StandIn:
    """A kernel in plain torch, launched as the kernel is."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self.launch


def mask_of(qkv: Tensor, heads: int, seeds: Tensor | None, of_seed: int, dropped: int) -> Tensor:
    windows, tokens, _ = qkv.shape
    if not dropped:
        return torch.ones(windows, heads, tokens, tokens, dtype=torch.bool)
    assert seeds is not None and of_seed * len(seeds) == windows
    return kept_weights(seeds, dropped / 2**32, windows=windows, heads=heads, tokens=tokens)


def forward(
    qkv: Tensor, mixed: Tensor, tokens: int, heads: int, scale2: float, seeds: Tensor | None,
    of_seed: int, factor: float, dropped: int, head: int, block: int, num_warps: int,
) -> None:  # fmt: skip
    assert (tokens, 3 * heads * head) == qkv.shape[1:] and block >= tokens
    mask = mask_of(qkv, heads, seeds, of_seed, dropped)
    scale = scale2 / short_attention.LOG2_E
    mixed.copy_(packed_attention_reference(qkv, heads, scale, mask, 1 - 1 / factor))


def backward(
    qkv: Tensor, gradient: Tensor, found: Tensor, tokens: int, heads: int, scale: float,
    seeds: Tensor | None, of_seed: int, factor: float, dropped: int, head: int, block: int,
    num_warps: int,
) -> None:  # fmt: skip
    parts = qkv.view(-1, tokens, 3, heads, head).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind()
    above = gradient.view(-1, tokens, heads, head).transpose(1, 2)
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    weights = (query @ key.mT * scale).masked_fill(~past, float("-inf")).softmax(-1)
    share = mask_of(qkv, heads, seeds, of_seed, dropped) * factor
    of_weights = above @ value.mT * share
    mean = (weights * of_weights).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - mean) * scale
    all_three = torch.stack([of_scores @ key, of_scores.mT @ query, (weights * share).mT @ above])
    found.copy_(all_three.permute(1, 3, 0, 2, 4).reshape(qkv.shape))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_attention, "_forward", StandIn(forward), raising=False)
    monkeypatch.setattr(short_attention, "_backward", StandIn(backward), raising=False)


CASES = [(0.0, None), (0.0, SEEDS), (DROPOUT, SEEDS[:1]), (DROPOUT, SEEDS)]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("dropout", "seeds"), CASES)
def test_operators_are_well_formed(dropout: float, seeds: Tensor | None) -> None:
    torch.manual_seed(0)
    packed = torch.randn(8, 5, 24, requires_grad=True)
    torch.library.opcheck(packed_attention, (packed, 2, SCALE, dropout, seeds))
    arguments = (torch.randn(8, 5, 8), packed.detach(), 2, SCALE, dropout, seeds)
    torch.library.opcheck(packed_attention_gradient, arguments)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("dropout", "seeds"), CASES)
def test_gradients_use_the_same_draws(dropout: float, seeds: Tensor | None) -> None:
    torch.manual_seed(0)
    packed = torch.randn(8, 5, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: packed_attention(x, 2, SCALE, dropout, seeds), packed, fast_mode=True
    )


def test_shapes_without_values() -> None:
    with FakeTensorMode():
        packed = torch.empty(8, 60, 384, dtype=torch.bfloat16, requires_grad=True)
        found = packed_attention(packed, 2, SCALE, DROPOUT, torch.empty(4, dtype=torch.int64))
        assert found.shape == (8, 60, 128) and found.dtype == torch.bfloat16
        found.sum().backward()
        assert packed.grad is not None and packed.grad.shape == packed.shape


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("dropout", "seeds", "words"),
    [
        (0.1, None, "without seeds"),
        (1.0, SEEDS, r"dropout is 1\.0"),
        (-0.1, SEEDS, r"dropout is -0\.1"),
        (0.1, SEEDS[:3], r"seeds are \(3,\) torch\.int64 for 8 windows"),
        (0.1, SEEDS[:0], r"seeds are \(0,\)"),
        (0.1, SEEDS[0], r"seeds are \(\)"),
        (0.1, SEEDS.int(), r"torch\.int32"),
    ],
)
def test_senseless_dropout_is_refused(dropout: float, seeds: Tensor | None, words: str) -> None:
    packed = torch.randn(8, 5, 24)
    for call in (
        lambda: packed_attention(packed, 2, SCALE, dropout, seeds),
        lambda: packed_attention_gradient(packed[..., :8], packed, 2, SCALE, dropout, seeds),
    ):
        with pytest.raises(InputError, match=words) as caught:
            call()
        assert caught.value.code == "MODEL_INPUT"


@pytest.fixture
def block(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A block that takes the packed path on a CPU, with dropout of attention weights only."""
    monkeypatch.setattr(blocks, "supports_packed", lambda *args, **kwargs: True)
    some: Any = make(dropout=DROPOUT).encoder.h[0]
    some.attn.resid_dropout.p = some.mlp.dropout.p = 0.0
    return some.train()


def test_a_block_draws_a_seed_of_torch(block: Any) -> None:
    hidden = torch.randn(6, 21, 16, generator=torch.Generator().manual_seed(1))
    packed = block.attn.c_attn(block.ln_1(hidden))
    scale = float(block.attn.scaling)
    torch.manual_seed(5)
    first, second = (block._attend(hidden, None, False, None)[0] for _ in range(2))
    torch.manual_seed(5)
    for found in (first, second):
        seeds = torch.randint(0, 2**62, (1,), dtype=torch.int64)
        mask = kept_weights(seeds, DROPOUT, windows=6, heads=2, tokens=21)
        expected = packed_attention_reference(packed, 2, scale, mask, DROPOUT)
        torch.testing.assert_close(found, expected)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    some, _ = block._attend(hidden, None, False, slice(1, None, 3))
    torch.testing.assert_close(some, first[:, 1::3])


def test_a_block_that_only_plays_draws_nothing(block: Any) -> None:
    hidden = torch.randn(6, 21, 16, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    found = block.eval()._attend(hidden, None, False, None)[0]
    assert torch.equal(torch.get_rng_state(), before)
    packed = block.attn.c_attn(block.ln_1(hidden))
    expected = packed_attention_reference(packed, 2, float(block.attn.scaling))
    torch.testing.assert_close(found, expected)


def test_recomputing_a_block_draws_the_same(block: Any) -> None:
    gradients: list[Tensor] = []
    for again in (False, True):
        hidden = torch.randn(6, 21, 16, generator=torch.Generator().manual_seed(1))
        hidden.requires_grad_()
        torch.manual_seed(5)
        found = checkpoint(block, hidden, use_reentrant=False) if again else block(hidden)
        found[0].square().sum().backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)
