"""Plain torch in the place of the kernels of `gear_offline.kernels.short_attention`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gear_offline.kernels import short_attention
from gear_offline.kernels.short_attention import kept_weights, packed_attention_reference


class StandIn:
    """A kernel in plain torch, launched as the kernel is."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self.launch


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_attention, "_forward", StandIn(forward), raising=False)
    monkeypatch.setattr(short_attention, "_backward", StandIn(backward), raising=False)


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
