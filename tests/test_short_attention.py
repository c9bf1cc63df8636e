"""Attention of short windows with dropout: what it keeps, and its wiring, on a CPU.

The kernels need a GPU (tests/test_short_attention_gpu.py).  Here plain torch stands in for them,
so that everything around them runs: the operators, their shapes and gradients, and the block.
"""

# mypy: disable-error-code="no-untyped-call"
import math
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gear_offline.kernels import short_attention
from gear_offline.kernels.short_attention import (
    kept_weights,
    packed_attention,
    packed_attention_gradient,
    packed_attention_reference,
    philox4x32,
)
from gear_offline.models import blocks
from tests.model_support import make

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
        word = int(philox4x32(counter, seed)[key % 4])
        assert bool(found[window, head, query, key]) == (word >= 0.4 * 2**32)


def test_words_of_dropout() -> None:
    """Random123's kat_vectors for philox4x32 with 7 rounds."""
    words = philox4x32(([0] * 3, 0, 0, 0), 0)
    assert [[f"{int(w):08x}" for w in word] for word in words] == [
        [hexadecimal] * 3 for hexadecimal in ("5f6fb709", "0d893f64", "4f121f81", "4f730a48")
    ]
    ones = philox4x32((2**32 - 1,) * 4, 2**64 - 1)
    assert [f"{int(word):08x}" for word in ones] == ["5207ddc2", "45165e59", "4d8ee751", "8c52f662"]


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


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put plain torch in the place of the kernels, launched as they are."""
    launched: Any = {"_forward": forward, "_backward": backward}
    for name in launched:  # on any grid
        kernel: Any = defaultdict(partial(launched.get, name))
        monkeypatch.setattr(short_attention, name, kernel, raising=False)


def mask_of(qkv: Tensor, heads: int, seeds: Tensor | None, of_group: int, dropped: int) -> Tensor:
    windows, tokens, _ = qkv.shape
    if not dropped:
        return torch.ones(windows, heads, tokens, tokens, dtype=torch.bool)
    assert seeds is not None and of_group * len(seeds) == windows and seeds.is_contiguous()
    return kept_weights(seeds, dropped / 2**32, windows=windows, heads=heads, tokens=tokens)


def with_bias(qkv: Tensor, bias: Tensor | None, of_group: int, biased: bool) -> Tensor:
    assert biased == (bias is not None)
    if bias is None:
        return qkv
    assert of_group * len(bias) == len(qkv)
    group = torch.arange(len(qkv)) // of_group
    return (qkv + bias[group][:, None]).to(qkv.dtype)


def forward(
    qkv: Tensor, mixed: Tensor, tokens: int, heads: int, scale2: float, seeds: Tensor | None,
    of_group: int, factor: float, bias: Tensor | None, dropped: int, biased: bool, head: int,
    block: int, num_warps: int,
) -> None:  # fmt: skip
    assert (tokens, 3 * heads * head) == qkv.shape[1:] and block >= tokens
    mask = mask_of(qkv, heads, seeds, of_group, dropped)
    scale = scale2 / short_attention.LOG2_E
    whole = with_bias(qkv, bias, of_group, biased)
    mixed.copy_(packed_attention_reference(whole, heads, scale, mask, 1 - 1 / factor))


def backward(
    qkv: Tensor, gradient: Tensor, found: Tensor, tokens: int, heads: int, scale: float,
    seeds: Tensor | None, of_group: int, factor: float, bias: Tensor | None, sums: Tensor | None,
    dropped: int, biased: bool, head: int, block: int, num_warps: int,
) -> None:  # fmt: skip
    precise = torch.promote_types(qkv.dtype, torch.float32)
    whole = with_bias(qkv, bias, of_group, biased).to(precise)
    parts = whole.view(-1, tokens, 3, heads, head).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind()
    above = gradient.to(precise).view(-1, tokens, heads, head).transpose(1, 2)
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    weights = (query @ key.mT * scale).masked_fill(~past, float("-inf")).softmax(-1)
    share = mask_of(qkv, heads, seeds, of_group, dropped) * factor
    of_weights = above @ value.mT * share
    mean = (weights * of_weights).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - mean) * scale
    all_three = torch.stack([of_scores @ key, of_scores.mT @ query, (weights * share).mT @ above])
    packed = all_three.permute(1, 3, 0, 2, 4).reshape(qkv.shape)
    found.copy_(packed)
    assert biased == (sums is not None)
    if sums is not None:
        sums.copy_(packed.sum(1))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


# dropout, seeds, how many biases
CASES = [
    (0.0, None, 0),
    (0.0, SEEDS, 0),
    (DROPOUT, SEEDS[:1], 0),
    (DROPOUT, SEEDS, 0),
    (0.0, None, 2),
    (0.0, None, 8),
    (DROPOUT, SEEDS[:1], 1),
    (DROPOUT, SEEDS, 4),
]


def some_bias(count: int) -> Tensor | None:
    return torch.randn(count, 24, requires_grad=True) if count else None


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("dropout", "seeds", "biases"), CASES)
def test_operators_are_well_formed_and_gradients_use_the_same_draws(
    dropout: float, seeds: Tensor | None, biases: int
) -> None:
    torch.manual_seed(0)
    packed, bias = torch.randn(8, 5, 24, requires_grad=True), some_bias(biases)
    torch.library.opcheck(packed_attention, (packed, 2, SCALE, dropout, seeds, bias))
    plain = None if bias is None else bias.detach()
    arguments = (torch.randn(8, 5, 8), packed.detach(), 2, SCALE, dropout, seeds, plain)
    torch.library.opcheck(packed_attention_gradient, arguments)

    def call(x: Tensor, *more: Tensor) -> Any:
        return packed_attention(x, 2, SCALE, dropout, seeds, *more)

    given = [some.detach().double().requires_grad_() for some in (packed, bias) if some is not None]
    assert torch.autograd.gradcheck(call, given, fast_mode=True)


@pytest.fixture
def block(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A block that takes the packed path on a CPU, with dropout of attention weights only."""
    monkeypatch.setattr(blocks, "supports_packed", lambda *args, **kwargs: True)
    some: Any = make(dropout=DROPOUT).encoder.h[0]
    some.residual_dropout = 0.0
    return some.train()


def test_a_block_draws_a_seed_of_torch_and_none_where_it_only_plays(block: Any) -> None:
    hidden = torch.randn(6, 21, 16, generator=torch.Generator().manual_seed(1))
    packed = block.attn.c_attn(block.ln_1(hidden))
    scale = float(block.attn.scaling)
    torch.manual_seed(5)
    first, second = (block._attend(hidden, None, None, None, None) for _ in range(2))
    torch.manual_seed(5)
    for found in (first, second):
        seeds = torch.randint(0, 2**62, (1,), dtype=torch.int64)
        mask = kept_weights(seeds, DROPOUT, windows=6, heads=2, tokens=21)
        expected = packed_attention_reference(packed, 2, scale, mask, DROPOUT)
        torch.testing.assert_close(found, expected)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    some = block._attend(hidden, None, slice(1, None, 3), None, None)
    torch.testing.assert_close(some, first[:, 1::3])
    before = torch.get_rng_state()
    found = block.eval()._attend(hidden, None, None, None, None)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(found, packed_attention_reference(packed, 2, scale))


def test_recomputing_a_block_draws_the_same(block: Any) -> None:
    gradients: list[Tensor] = []
    for again in (False, True):
        hidden = torch.randn(6, 21, 16, generator=torch.Generator().manual_seed(1))
        hidden.requires_grad_()
        torch.manual_seed(5)
        found = checkpoint(block, hidden, use_reentrant=False) if again else block(hidden)
        found.square().sum().backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)
