"""The cost of a training step on a GPU: floating-point work, memory traffic, kernels, bytes kept.

A step's time is the sum of three.  Its matrix products run at the rate that they reach inside such
a step.  The rest moves memory, and each kernel takes a least time.  The constants were measured
(`python -m benchmarks step`), as those of hardware.yaml.

Shape legend: b segments of a GPU, K steps, n = 3 b K tokens, h width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from gear_offline.analysis.planning.hardware import Cluster
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import TransformerSettings
from gear_offline.kernels.short_attention import HEAD_SIZES, MOST_TOKENS
from gear_offline.models.base import ModelSizes, weightless
from gear_offline.training.cost import (
    CONTEXT_BYTES,
    USABLE,
    has_half_gradients,
    is_compiled,
    memory_bytes,
    recipe_flops,
)
from gear_offline.training.gradients import BLOCKWISE_FROM
from gear_offline.training.graph import capture_obstacle
from gear_offline.training.model import eight_bit_size_obstacle, recipe_model

# Kernels outside the blocks, and of one block forward and backward; bytes that everything but
# matrix products moves, for each token, layer and unit of width.
FUSED = (45, 33, 128.0)  # compiled, attention of short windows
COMPILED = (45, 33, 184.0)
PLAIN = (70, 70, 420.0)
# What rounding for products in 8 bits adds to a block: kernels, and bytes as above.  Fitted with
# `matrix_rate_fp8` to dt_1b, dt_87m and dt_15m, of 512 and of 64 windows.
EIGHT_BITS = (40, 110.0)
OPTIMIZER_BYTES = 34  # moved for each parameter: weight, gradient, two moments, and clearing
CAST_BYTES = 53  # moved for each parameter where autocast casts weights, and gradients back
DRAW_SECONDS = 9e-9  # for each weight of a new model


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The cost of one step on one GPU."""

    parameters: int
    flops: float  # the blocks' products and attention: 6 L 12 h^2 n + 12 L h (3K) n
    flops_guessed: bool  # the model says nothing of them: each weight once a step of a window
    encoder_flops: float  # of encoding frames
    compute_seconds: float  # forward, backward, clipping and update
    travelling_bytes: float  # gradients in an all-reduce; with `sharded` also weights
    memory_bytes: float  # weights, gradients, moments, what is kept for the backward pass
    begin_seconds: float  # making the model and compiling it
    compiled: bool
    eight_bits: bool  # the blocks' linear maps multiply in 8 bits
    captured: bool  # a step is one CUDA graph
    sharded: bool
    reshard: bool  # shards' weights are collected for each pass


def step_cost(
    recipe: Recipe, sizes: ModelSizes, cluster: Cluster, *, segments: int, learns: bool = False
) -> StepCost:
    """Return a step's cost with `segments` of a GPU; `learns`: the sampler learns from losses."""
    model, train, context = recipe.model, recipe.train, recipe.loader.context_length
    gpu, start, half = cluster.hardware.gpu, cluster.hardware.start, train.precision != "fp32"
    ranks = cluster.nodes * cluster.gpus
    compiled = is_compiled(train)
    sharded = ranks > 1 and train.parallel == "fsdp"
    makes = recipe.loader.engine != "off"  # the GPU its batches
    facts: Any = {"sharded": sharded, "learns": learns, "gathers": makes, "draws": makes}
    captured = capture_obstacle(train, ranks=ranks, **facts) is None
    fixed, layer, traffic = _kernels(recipe, compiled=compiled, half=half)
    layers, width, of_step = model.shape
    tokens, unit = float(of_step * segments * context), layers * width
    parameters, encoding, model_flops, has_maps = model_size(recipe, sizes, segments)
    known_flops = recipe_flops(recipe, segments) or model_flops
    flops = known_flops or 6.0 * parameters * segments * context
    encoding *= 3.0 * segments * context  # forward, and twice as much backward
    narrow = has_half_gradients(recipe, half=half)
    casts = half and not narrow  # autocast keeps a bfloat16 copy of the weights
    products = flops / (gpu.matrix_rate if half else gpu.matrix_rate_fp32)
    rate = gpu.matrix_rate_fp8 if train.precision == "fp8" and has_maps and layers else None
    eight_bits = rate is not None and eight_bit_size_obstacle(recipe, segments) is None
    if rate is not None and eight_bits:
        of_maps = 72.0 * width * unit * tokens
        products += of_maps * (1 / rate - 1 / gpu.matrix_rate)
        layer, traffic = layer + EIGHT_BITS[0], traffic + EIGHT_BITS[1]
    moving = tokens * unit * traffic * (1 if half else 1.5) / gpu.memory_rate
    launched = (fixed + layers * layer) * train.accumulate
    busy = products + moving + encoding / gpu.convolution_rate + launched * gpu.kernel
    busy += parameters / (ranks if sharded else 1) * OPTIMIZER_BYTES / gpu.memory_rate
    busy += parameters * CAST_BYTES * casts * train.accumulate / gpu.memory_rate
    if train.recompute:
        busy += (products + moving) / 3
    travelling, reshard = 2.0 if narrow else 4.0, False  # bytes a parameter
    memory = partial(memory_bytes, recipe, parameters, segments=segments, half=half)
    peak_bytes = memory()
    if sharded:
        gathered = memory(shards=ranks, reshard=False)
        reshard = train.reshard == "on"
        reshard |= train.reshard == "auto" and gathered + CONTEXT_BYTES > USABLE * gpu.memory
        peak_bytes = memory(shards=ranks) if reshard else gathered
        weights = (2 if reshard else 1) * (2 if half else 4)
        travelling = (travelling + weights) / 2  # an all-reduce sends everything twice
    compiling = start.compile_deep if layers >= BLOCKWISE_FROM else start.compile
    beginning = compiling if compiled else start.graph if captured else 0.0
    return StepCost(
        parameters=parameters,
        flops=flops,
        flops_guessed=known_flops is None,
        encoder_flops=encoding,
        compute_seconds=busy if captured else max(busy, gpu.host_step + launched * gpu.launch),
        travelling_bytes=parameters * travelling,
        memory_bytes=peak_bytes,
        begin_seconds=parameters * DRAW_SECONDS + beginning,
        compiled=compiled,
        eight_bits=eight_bits,
        captured=captured,
        sharded=sharded,
        reshard=reshard,
    )


def model_size(
    recipe: Recipe, sizes: ModelSizes, segments: int
) -> tuple[int, float, float | None, bool]:
    """Return a model's parameters, the FLOPs of encoding one step's frames, forward, its own of a
    training step of so many windows, and whether it has maps that could multiply in 8 bits."""
    recipe = recipe.settle({"model.max_timestep": recipe.model.max_timestep or 1000})
    with weightless():  # no weights are made
        model = recipe_model(recipe, sizes)
    encoding = 0.0
    if isinstance(encoder := getattr(model, "frame_encoder", None), torch.nn.Module):
        encoder.to_empty(device="cpu")
        columns = model.facts.columns
        states = {c.name: torch.zeros(1, 1, *[c.stack] * (c.stack > 1), *c.shape) for c in columns}
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            encoder(states if len(columns) > 1 else states[""])
        encoding = float(counter.get_total_flops())
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, encoding, model.flops(segments), model.use_eight_bits() is None


def _kernels(recipe: Recipe, *, compiled: bool, half: bool) -> tuple[int, int, float]:
    if not compiled:
        return PLAIN
    model, loader = recipe.model, recipe.loader
    short = (
        half and model.shape[2] * loader.context_length <= MOST_TOKENS and loader.padding == "right"
    )
    is_fast = (
        isinstance(model, TransformerSettings) and model.hidden_size // model.heads in HEAD_SIZES
    )
    return FUSED if short and is_fast else COMPILED
