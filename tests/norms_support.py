"""Plain torch in the place of the kernels of `add_norm` and `embed_norm`, launched as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gear_offline.kernels import add_norm as add_module
from gear_offline.kernels import embed_norm as embed_module
from gear_offline.kernels.add_norm import add_norm_reference, kept_elements
from gear_offline.kernels.embed_norm import embed_norm_reference
from tests.attention_support import StandIn


def stand_in_for_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_module, "_add", StandIn(add), raising=False)
    monkeypatch.setattr(add_module, "_add_backward", StandIn(add_backward), raising=False)
    monkeypatch.setattr(embed_module, "_embed", StandIn(embed), raising=False)
    monkeypatch.setattr(embed_module, "_embed_backward", StandIn(embed_backward), raising=False)


def mask_of(rows: Tensor, seeds: Tensor | None, dropped: int) -> Tensor | None:
    if not dropped:
        return None
    assert seeds is not None and seeds.is_contiguous()
    return kept_elements(seeds, dropped / 2**32, rows=rows.shape[1], width=rows.shape[2])


def by_tile(rows: Tensor, some: int) -> Tensor:
    """Sum (N, R, H) over tiles of `some` rows: (N, tiles, H)."""
    blank = -rows.shape[1] % some
    return torch.nn.functional.pad(rows, (0, 0, 0, blank)).unflatten(1, (-1, some)).sum(2)  # type: ignore[no-untyped-call,no-any-return]


def through_norm(above: Tensor, plain: Tensor, scales: Tensor) -> Tensor:
    along = (above * plain).mean(-1, keepdim=True)
    return (above - above.mean(-1, keepdim=True) - plain * along) * scales[..., None]


def add(
    hidden: Tensor, branch: Tensor, bias: Tensor, seeds: Tensor | None, total: Tensor,
    plain: Tensor, scales: Tensor, count: int, epsilon: float, factor: float, dropped: int,
    width: int, rows: int, block: int, num_warps: int,
) -> None:  # fmt: skip
    assert (count, width) == hidden.shape[1:] and block >= width
    mask = mask_of(hidden, seeds, dropped)
    found = add_norm_reference(hidden, branch, bias, epsilon, mask, 1 - 1 / factor)
    total.copy_(found[0])
    plain.copy_(found[1])
    scales.copy_((total.var(-1, unbiased=False) + epsilon).rsqrt())


def add_backward(
    of_total: Tensor | None, of_plain: Tensor, plain: Tensor, scales: Tensor, seeds: Tensor | None,
    of_hidden: Tensor, of_branch: Tensor, sums: Tensor, count: int, factor: float, given: bool,
    dropped: int, width: int, rows: int, block: int, num_warps: int,
) -> None:  # fmt: skip
    assert given == (of_total is not None)
    found = through_norm(of_plain.float(), plain.float(), scales)
    of_hidden.copy_(found if of_total is None else found + of_total)
    mask = mask_of(plain, seeds, dropped)
    branch = of_hidden if mask is None else of_hidden * mask * factor
    of_branch.copy_(branch)
    sums.copy_(by_tile(branch, rows))


def embed(
    tokens: Tensor, table: Tensor, steps: Tensor, weight: Tensor, shift: Tensor,
    seeds: Tensor | None, hidden: Tensor, plain: Tensor, first: Tensor, scales: Tensor, rows: int,
    count: int, timesteps: int, epsilon1: float, epsilon2: float, factor: float, dropped: int,
    width: int, some: int, block: int, num_warps: int,
) -> None:  # fmt: skip
    assert (rows, 3 * count, width) == (scales[0].numel(), *tokens.shape[1:])
    assert timesteps == table.shape[1]
    mask = mask_of(tokens, seeds, dropped)
    both = (epsilon1, epsilon2)
    kept = embed_norm_reference(tokens, table, steps, weight, shift, both, mask, 1 - 1 / factor)
    hidden.copy_(kept[0])
    plain.copy_(kept[1])
    models = torch.arange(len(table))[:, None]
    summed = tokens.float() + table[models, steps].repeat_interleave(3, 1)
    scales[0] = (summed.var(-1, unbiased=False) + epsilon1).rsqrt()
    scales[1] = (hidden.var(-1, unbiased=False) + epsilon2).rsqrt()
    first.copy_((summed - summed.mean(-1, keepdim=True)) * scales[0][..., None])


def embed_backward(
    of_hidden: Tensor | None, of_plain: Tensor, plain: Tensor, first: Tensor, scales: Tensor,
    steps: Tensor, weight: Tensor, seeds: Tensor | None, of_tokens: Tensor, of_table: Tensor,
    sums: Tensor, rows: int, half: int, count: int, timesteps: int, factor: float, given: bool,
    dropped: int, width: int, some: int, block: int, num_warps: int,
) -> None:  # fmt: skip
    assert half == sums[0].numel() and rows == scales[0].numel()
    assert timesteps == of_table.shape[1] and not of_table.any()
    found = through_norm(of_plain.float(), plain.float(), scales[1])
    found = found if of_hidden is None else found + of_hidden
    mask = mask_of(plain, seeds, dropped)
    found = found if mask is None else found * mask * factor
    sums[0] = by_tile(found * first.float(), 3 * some)
    sums[1] = by_tile(found, 3 * some)
    found = through_norm(found * weight[:, None], first.float(), scales[0])
    of_tokens.copy_(found)
    of_step = found.unflatten(1, (count, 3)).sum(2)  # type: ignore[no-untyped-call]
    for model, places in enumerate(steps):
        of_table[model].index_add_(0, places, of_step[model])
