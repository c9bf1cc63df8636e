"""The entrance of stacked models: timesteps, two norms and dropout in one pass.

Tokens of a step get its timestep's embedding, are normalised, scaled, shifted and dropped, and
normalised again for the first block; see `gear_offline.kernels.add_norm` for norms and dropout.
The three tokens of a step are done by one program, so that an embedding is read once, and its
gradient is added up before it is written.

Triton comes with CUDA builds of torch; `embed_norm_reference` is the same in plain torch.

Shape legend: N models, S steps each of three rows, H elements of a row, L timesteps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gear_offline.errors import InputError
from gear_offline.kernels.add_norm import block_of, check_rows
from gear_offline.kernels.dropout import dropped_words, in_a_row

try:
    import triton
    import triton.language as tl

    from gear_offline.kernels.add_norm import kept_rows, normalised, through_norm
except ImportError:  # builds of torch for CPUs do not bring it
    triton = None

KINDS = 3  # tokens of a step
ELEMENTS = 1024  # of a program and a kind
WARPS = 4


def embed_norm_reference(
    tokens: Tensor,
    table: Tensor,
    steps: Tensor,
    weight: Tensor,
    shift: Tensor,
    epsilons: tuple[float, float],
    kept: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`embed_norm` in plain torch; `kept`, (N, R, H) bool, as `kept_elements` says it."""
    models = torch.arange(len(table), device=table.device)[:, None]
    when = table[models, steps].repeat_interleave(KINDS, dim=1)
    found = tokens.to(table.dtype) + when
    found = torch.nn.functional.layer_norm(found, found.shape[-1:], eps=epsilons[0])
    found = found * weight[:, None] + shift[:, None]
    if kept is not None:
        found = found * kept / (1 - dropout)
    plain = torch.nn.functional.layer_norm(found, found.shape[-1:], eps=epsilons[1])
    return found, plain.to(tokens.dtype)


@torch.library.custom_op("gear_offline::embed_norm", mutates_args=())
def embed_norm(
    tokens: Tensor,
    table: Tensor,
    steps: Tensor,
    weight: Tensor,
    shift: Tensor,
    epsilons: list[float],
    dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what enters the first block, and that normalised.

    That is ``drop(normalise(tokens + table[steps]) * weight + shift)``.

    Parameters
    ----------
    tokens
        (N, 3S, H), of 16 bits, three for each step.
    table
        (N, L, H) float32, embeddings of timesteps.
    steps
        (N, S) int64; tokens of one that is not in [0, L) become not a number.  Where one comes
        twice, its gradients are added up in any order.
    weight, shift
        (N, H) float32.
    epsilons
        Of the first and of the second norm.
    dropout, seeds
        As for `add_norm`.

    Returns
    -------
    tuple of Tensor
        The result, (N, 3S, H) float32; normalised, dtype of `tokens`; and, without gradients, the
        result of the first norm, dtype of `tokens`, and one over the standard deviation of each
        row for both, (2, N, 3S) float32.

    Raises
    ------
    InputError
        ``MODEL_INPUT`` if shapes or types do not fit, or `seeds` are missing.
    """
    check_rows(tokens, (), (weight, shift), dropout, seeds)
    _check_steps(tokens, table, steps)
    hidden, plain, first, scales = _embed_shape(tokens, table)
    models, count, width = tokens.shape
    block = block_of(width)
    some = ELEMENTS // block
    _embed[(models * -(-count // KINDS // some),)](
        tokens.contiguous(), table.contiguous(), steps.contiguous(), weight.contiguous(),
        shift.contiguous(), in_a_row(seeds), hidden, plain, first, scales, models * count,
        count // KINDS, table.shape[1], epsilons[0], epsilons[1], 1 / (1 - dropout),
        dropped_words(dropout), width, some, block, num_warps=WARPS,
    )  # fmt: skip
    return hidden, plain, first, scales


@torch.library.custom_op("gear_offline::embed_norm_gradient", mutates_args=())
def embed_norm_gradient(
    of_hidden: Tensor | None,
    of_plain: Tensor,
    plain: Tensor,
    first: Tensor,
    scales: Tensor,
    steps: Tensor,
    weight: Tensor,
    timesteps: int,
    dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what follows from the gradients of the result, None for zeros, and of its norm.

    Returns
    -------
    tuple of Tensor
        The gradients of `tokens`, (N, 3S, H), of `table`, (N, L, H) float32, and those of `weight`
        and `shift` as sums over each tile of steps, (2, N, tiles, H) float32.
    """
    of_tokens, of_table, sums = _embed_gradient_shape(
        of_hidden, of_plain, plain, first, scales, steps, weight, timesteps
    )
    models, count, width = plain.shape
    block = block_of(width)
    some = ELEMENTS // block
    _embed_backward[(models * sums.shape[2],)](
        None if of_hidden is None else of_hidden.contiguous(), of_plain.contiguous(), plain, first,
        scales, steps.contiguous(), weight.contiguous(), in_a_row(seeds), of_tokens,
        of_table.zero_(), sums, models * count, models * sums.shape[2] * width, count // KINDS,
        timesteps, 1 / (1 - dropout),
        of_hidden is not None, dropped_words(dropout), width, some, block, num_warps=WARPS,
    )  # fmt: skip
    return of_tokens, of_table, sums


@embed_norm.register_fake
def _embed_shape(tokens: Tensor, table: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plain, first = tokens.new_empty(tokens.shape), tokens.new_empty(tokens.shape)
    scales = table.new_empty(2, *tokens.shape[:2])
    return table.new_empty(tokens.shape), plain, first, scales


@embed_norm_gradient.register_fake
def _embed_gradient_shape(
    of_hidden: Tensor | None,
    of_plain: Tensor,
    plain: Tensor,
    first: Tensor,
    scales: Tensor,
    steps: Tensor,
    weight: Tensor,
    timesteps: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    models, count, width = plain.shape
    tiles = -(-count // KINDS // (ELEMENTS // block_of(width)))
    of_table = scales.new_empty(models, timesteps, width)
    return torch.empty_like(plain), of_table, scales.new_empty(2, models, tiles, width)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, table, steps, weight, _, _, ctx.dropout, seeds = inputs
    ctx.timesteps = table.shape[1]
    ctx.save_for_backward(output[1], output[2], output[3], steps, weight, seeds)
    ctx.mark_non_differentiable(output[2], output[3])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, of_hidden: Tensor | None, of_plain: Tensor | None, _: None, __: None
) -> tuple[Tensor | None, ...]:
    plain, first, scales, steps, weight, seeds = ctx.saved_tensors
    of_plain = torch.zeros_like(plain) if of_plain is None else of_plain
    of_tokens, of_table, sums = embed_norm_gradient(
        of_hidden, of_plain, plain, first, scales, steps, weight, ctx.timesteps, ctx.dropout, seeds
    )
    of_weight, of_shift = sums.sum(2).unbind()
    return of_tokens, of_table, None, of_weight, of_shift, None, None, None


embed_norm.register_autograd(_differentiate, setup_context=_remember)


def _check_steps(tokens: Tensor, table: Tensor, steps: Tensor) -> None:
    """Refuse what the kernels would read as nonsense."""
    models, count, width = tokens.shape
    fits = not count % KINDS and steps.shape == (models, count // KINDS)
    fits = fits and steps.dtype == torch.int64 and table.dtype == torch.float32
    if not fits or table.ndim != 3 or (table.shape[0], table.shape[2]) != (models, width):
        raise InputError(
            "MODEL_INPUT",
            f"tokens, table and steps are {tuple(tokens.shape)}, {tuple(table.shape)} "
            f"{table.dtype}, {tuple(steps.shape)} {steps.dtype}",
            remedy="give (N, 3S, H), (N, L, H) float32 and (N, S) int64",
        )


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _embed(  # type: ignore[no-untyped-def]
        tokens, table, steps, weight, shift, seeds, hidden, plain, first, scales, rows, count,
        timesteps, epsilon1, epsilon2, factor,
        DROPPED: tl.constexpr, H: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(count, SOME)
        model, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        step = tile * SOME + tl.arange(0, SOME)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (step < count) & (column < H)
        at = tl.load(steps + model.to(tl.int64) * count + step, mask=step < count, other=0)
        known = (at >= 0) & (at < timesteps)
        when = tl.load(
            table + (model * timesteps + at) * H + column, mask=inside & known, other=0.0
        )
        when = tl.where(known, when, float("nan"))
        scaled = tl.load(weight + model * H + column, mask=column < H, other=0.0)
        shifted = tl.load(shift + model * H + column, mask=column < H, other=0.0)
        for kind in range(3):
            row = step * 3 + kind
            whole = model.to(tl.int64) * count * 3 + row
            place = whole * H + column
            found = tl.load(tokens + place, mask=inside, other=0.0).to(tl.float32)
            found = tl.where(inside, found + when, 0.0)
            found, scale = normalised(found, inside, epsilon1, H)
            tl.store(first + place, found.to(first.dtype.element_ty), mask=inside)
            tl.store(scales + whole, scale, mask=step < count)
            found = found * scaled + shifted
            if DROPPED > 0:
                stays = kept_rows(tl.load(seeds + model), row, DROPPED, SOME, BLOCK)
                found = tl.where(stays, found * factor, 0.0)
            tl.store(hidden + place, found, mask=inside)
            found, scale = normalised(tl.where(inside, found, 0.0), inside, epsilon2, H)
            tl.store(plain + place, found.to(plain.dtype.element_ty), mask=inside)
            tl.store(scales + rows + whole, scale, mask=step < count)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _embed_backward(  # type: ignore[no-untyped-def]
        of_hidden, of_plain, plain, first, scales, steps, weight, seeds, of_tokens, of_table, sums,
        rows, half, count, timesteps, factor,
        GIVEN: tl.constexpr, DROPPED: tl.constexpr, H: tl.constexpr, SOME: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(count, SOME)
        model, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        step = tile * SOME + tl.arange(0, SOME)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (step < count) & (column < H)
        scaled = tl.load(weight + model * H + column, mask=column < H, other=0.0)
        of_step = tl.zeros((SOME, BLOCK), tl.float32)
        of_weight = tl.zeros((SOME, BLOCK), tl.float32)
        of_shift = tl.zeros((SOME, BLOCK), tl.float32)
        for kind in range(3):
            row = step * 3 + kind
            whole = model.to(tl.int64) * count * 3 + row
            place = whole * H + column
            found = tl.load(of_plain + place, mask=inside, other=0.0).to(tl.float32)
            own = tl.load(plain + place, mask=inside, other=0.0).to(tl.float32)
            scale = tl.load(scales + rows + whole, mask=step < count, other=0.0)
            found = through_norm(found, own, scale, inside, H)
            if GIVEN:
                found += tl.load(of_hidden + place, mask=inside, other=0.0)
            if DROPPED > 0:
                stays = kept_rows(tl.load(seeds + model), row, DROPPED, SOME, BLOCK)
                found = tl.where(stays, found * factor, 0.0)
            own = tl.load(first + place, mask=inside, other=0.0).to(tl.float32)
            of_weight += found * own
            of_shift += found
            scale = tl.load(scales + whole, mask=step < count, other=0.0)
            found = through_norm(found * scaled, own, scale, inside, H)
            tl.store(of_tokens + place, found.to(of_tokens.dtype.element_ty), mask=inside)
            of_step += found
        at = tl.load(steps + model.to(tl.int64) * count + step, mask=step < count, other=-1)
        known = inside & (at >= 0) & (at < timesteps)
        place = (model * timesteps + at) * H + column
        tl.atomic_add(of_table + place, of_step, mask=known, sem="relaxed")
        columns = tl.arange(0, BLOCK)
        mine = sums + (model * tiles + tile).to(tl.int64) * H + columns
        tl.store(mine, tl.sum(of_weight, 0), mask=columns < H)
        tl.store(mine + half, tl.sum(of_shift, 0), mask=columns < H)
