"""What a training step costs a GPU: floating-point work, memory traffic, kernels, bytes kept.

A step is the sum of matrix products at the rate at which they run inside such a step, of the
traffic of everything else, and of a least time for each kernel; the constants come from
measurements (hardware.yaml beside this file, `gear-offline bench step`).

Shape legend: b segments of a GPU, K steps, n = 3 b K tokens, h width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from gear_offline.config.recipe import Recipe
from gear_offline.kernels.short_attention import HEAD_SIZES, MOST_TOKENS
from gear_offline.planning.hardware import Hardware
from gear_offline.runs.preparation import ModelSizes
from gear_offline.training.compilation import BLOCKWISE_FROM, is_compiled
from gear_offline.training.parallel import gathered_bytes, has_half_gradients
from gear_offline.training.throughput import step_flops as step_flops
from gear_offline.training.training_memory import (
    FULL_BYTES,
    SHADOW_BYTES,
    USABLE,
    shard_bytes,
    state_bytes,
)
from gear_offline.training.training_model import recipe_model


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What one way of running a step launches and moves.

    Attributes
    ----------
    fixed, layer
        Kernels outside the blocks, and of one block forward and backward.
    traffic
        Bytes that everything but matrix products moves, for each token, layer and unit of width.
    """

    fixed: int
    layer: int
    traffic: float


FUSED = Kernels(fixed=45, layer=33, traffic=128.0)  # compiled, attention of short windows
COMPILED = Kernels(fixed=45, layer=33, traffic=184.0)
PLAIN = Kernels(fixed=70, layer=70, traffic=420.0)
OPTIMIZER_BYTES = 34  # moved for each parameter: weight, gradient, two moments, and clearing
CAST_BYTES = 53  # moved for each parameter where autocast casts weights, and gradients back
KEPT_BYTES = 28.5  # from forward to backward, for each token, layer and unit of width
KEPT_RECOMPUTED = 2.0  # where blocks are computed again: their inputs
KEPT_PLAIN = 64.0  # without compiling
DRAW_SECONDS = 9e-9  # for each weight of a new model


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Of one GPU and one step.

    Attributes
    ----------
    parameters
        Of the model.
    flops
        6 L 12 h^2 n + 12 L h (3K) n: the blocks' products and attention, forward and backward.
    encoder_flops
        Of encoding frames, forward and backward.
    compute_seconds
        Forward, backward, clipping and update.
    travelling_bytes
        Gradients that every GPU sends and receives in an all-reduce; with `sharded` also weights.
    memory_bytes
        Weights, gradients, moments, what is kept for the backward pass.
    begin_seconds
        Making the model and compiling it.
    compiled, captured, sharded, reshard
        How steps are run; `reshard`: shards' weights are collected for each pass.
    """

    parameters: int
    flops: float
    encoder_flops: float
    compute_seconds: float
    travelling_bytes: float
    memory_bytes: float
    begin_seconds: float
    compiled: bool
    captured: bool
    sharded: bool
    reshard: bool


def model_size(recipe: Recipe, sizes: ModelSizes) -> tuple[int, float]:
    """Return a model's parameters, and the FLOPs of encoding one step's frames, forward.

    The weights are not made, and those of the encoder are not set.
    """
    recipe = recipe.replace(model__max_timestep=recipe.model.max_timestep or 1000)
    with torch.device("meta"):
        model = recipe_model(recipe, sizes)
    encoding = 0.0
    if model.frame_encoder is not None:
        stack = (recipe.loader.frame_stack,) if recipe.loader.frame_stack > 1 else ()
        encoder = model.frame_encoder.to_empty(device="cpu")
        frames = torch.zeros(1, 1, *stack, *sizes.frame_shape, dtype=torch.uint8)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            encoder(frames)
        encoding = float(counter.get_total_flops())
    return sum(p.numel() for p in model.parameters()), encoding


def _is_captured(recipe: Recipe, *, sharded: bool, nodes: int, tells: bool) -> bool:
    """Return whether training's steps are CUDA graphs; not where ranks tell each other losses."""
    train = recipe.train
    asked = train.graph == "on" or (train.graph == "auto" and nodes == 1)
    whole = train.accumulate == 1 and not train.recompute
    return asked and whole and not sharded and not tells and recipe.loader.engine != "off"


def step_cost(
    recipe: Recipe,
    sizes: ModelSizes,
    hardware: Hardware,
    *,
    segments: int,
    ranks: int,
    nodes: int = 1,
    learns: bool = False,
) -> StepCost:
    """Return the cost of a step with `segments` segments on each of `ranks` GPUs of `nodes`.

    `learns`: the selection learns from losses.
    """
    model, train, context = recipe.model, recipe.train, recipe.loader.context_length
    gpu, half = hardware.gpu, train.precision != "fp32"
    compiled = is_compiled(train)
    sharded = ranks > 1 and train.parallel == "fsdp"
    captured = _is_captured(recipe, sharded=sharded, nodes=nodes, tells=learns and ranks > 1)
    kernels = _kernels(recipe, compiled=compiled, half=half)
    tokens, unit = 3.0 * segments * context, model.layers * model.hidden_size
    flops = step_flops(
        layers=model.layers, width=model.hidden_size, context=context, segments=segments
    )
    parameters, encoding = model_size(recipe, sizes)
    encoding *= 3.0 * segments * context  # forward, and twice as much backward
    narrow = has_half_gradients(recipe, half=half)
    casts = half and not narrow  # autocast keeps a bfloat16 copy of the weights
    products = flops / (gpu.matrix_rate if half else gpu.matrix_rate_fp32)
    moving = tokens * unit * kernels.traffic * (1 if half else 1.5) / gpu.memory_rate
    launched = (kernels.fixed + model.layers * kernels.layer) * train.accumulate
    busy = products + moving + encoding / gpu.convolution_rate + launched * gpu.kernel
    parts = ranks if sharded else 1
    busy += parameters / parts * OPTIMIZER_BYTES / gpu.memory_rate
    busy += parameters * CAST_BYTES * casts * train.accumulate / gpu.memory_rate
    if train.recompute:
        busy += (products + moving) / 3
    kept = _kept_bytes(recipe, tokens / train.accumulate, compiled=compiled, half=half)
    state = state_bytes(parameters, half=casts)
    travelling, reshard = float(SHADOW_BYTES if narrow else FULL_BYTES), False
    if sharded:
        reshard = _reshards(recipe, parameters, gpu.memory, ranks=ranks)
        state = shard_bytes(parameters, ranks=ranks, half=half, gathered=not reshard)
        weights = (2 if reshard else 1) * (SHADOW_BYTES if half else FULL_BYTES)
        travelling = (travelling + weights) / 2  # an all-reduce sends everything twice
    start = hardware.start
    compiling = start.compile_deep if model.layers >= BLOCKWISE_FROM else start.compile
    return StepCost(
        parameters=parameters,
        flops=flops,
        encoder_flops=encoding,
        compute_seconds=busy if captured else max(busy, gpu.host_step + launched * gpu.launch),
        travelling_bytes=parameters * travelling,
        memory_bytes=state + kept,
        begin_seconds=parameters * DRAW_SECONDS
        + (compiling if compiled else start.graph if captured else 0.0),
        compiled=compiled,
        captured=captured,
        sharded=sharded,
        reshard=reshard,
    )


def _reshards(recipe: Recipe, parameters: int, memory: float, *, ranks: int) -> bool:
    """Return whether shards' weights are freed between the passes, by the formula of training."""
    if recipe.train.reshard != "auto":
        return recipe.train.reshard == "on"
    half = recipe.train.precision != "fp32"
    return gathered_bytes(recipe, parameters, ranks=ranks, half=half) > USABLE * memory


def _kernels(recipe: Recipe, *, compiled: bool, half: bool) -> Kernels:
    """Return what a step launches; with or without dropout, attention's kernel is the same."""
    if not compiled:
        return PLAIN
    model, loader = recipe.model, recipe.loader
    short = half and 3 * loader.context_length <= MOST_TOKENS and loader.padding == "right"
    return FUSED if short and model.hidden_size // model.heads in HEAD_SIZES else COMPILED


def _kept_bytes(recipe: Recipe, tokens: float, *, compiled: bool, half: bool) -> float:
    """Return what a micro-batch keeps for its backward pass."""
    model = recipe.model
    each = (KEPT_BYTES if compiled else KEPT_PLAIN) * (1 if half else 2)
    layers = model.layers * each
    if recipe.train.recompute:
        layers = model.layers * KEPT_RECOMPUTED + each
    return tokens * model.hidden_size * layers
