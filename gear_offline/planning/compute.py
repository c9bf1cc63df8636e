"""What a training step costs a GPU: floating-point work, memory traffic, kernels, bytes kept.

A step is the sum of matrix products at the rate at which they run inside such a step, of the
traffic of everything else, and of a least time for each kernel; the constants come from
measurements (data/hardware.yaml, `gear-offline bench plan`).

Shape legend: b segments of a GPU, K steps, n = 3 b K tokens, h width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from gear_offline.compilation import COMPILED_FROM
from gear_offline.models.decision_transformer import build_model
from gear_offline.planning.hardware import Hardware
from gear_offline.preparation import ModelSizes
from gear_offline.recipe import Recipe
from gear_offline.throughput import step_flops as step_flops


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What one way of running a step launches and moves, counted in a profile of the model.

    Attributes
    ----------
    fixed, layer
        Kernels outside the blocks, and of one block forward and backward.
    traffic
        Bytes that everything but matrix products moves, for each token, layer and unit of width.
    kept
        Bytes kept from forward to backward, for each token, layer and unit of width.
    """

    fixed: int
    layer: int
    traffic: float
    kept: float


COMPILED = Kernels(fixed=60, layer=35, traffic=184.0, kept=38.0)
PLAIN = Kernels(fixed=70, layer=70, traffic=420.0, kept=64.0)
DROPOUT_TRAFFIC = 8.0  # bytes more, likewise, with dropout
OPTIMIZER_BYTES = 34  # moved for each parameter: weight, gradient, two moments, and clearing
STATE_BYTES = 16  # kept for each parameter: weight, gradient, two moments
SHADOW_BYTES = 2  # its bfloat16 copy of a step
CONTEXT_BYTES = 1.5e9  # CUDA, libraries, workspaces
RECOMPUTED_KEPT = 4.0  # bytes kept where blocks are computed again


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
    backward_seconds
        The part of it during which gradients can travel.
    memory_bytes
        Weights, gradients, moments, what is kept for the backward pass, CUDA itself.
    compiled, captured
        How steps are run.
    """

    parameters: int
    flops: float
    encoder_flops: float
    compute_seconds: float
    backward_seconds: float
    memory_bytes: float
    compiled: bool
    captured: bool


def model_size(recipe: Recipe, sizes: ModelSizes) -> tuple[int, float]:
    """Return a model's parameters, and the FLOPs of encoding one step's frames, forward.

    The weights are not made, and those of the encoder are not set.
    """
    options = recipe.model.model_dump()
    options["max_timestep"] = options["max_timestep"] or 1000
    with torch.device("meta"):
        model = build_model(
            state_dim=sizes.state_dim,
            action_dim=sizes.action_dim,
            discrete=sizes.discrete,
            context_length=recipe.loader.context_length,
            frame_shape=sizes.frame_shape,
            frame_stack=recipe.loader.frame_stack,
            **options,
        )
    encoding = 0.0
    if model.frame_encoder is not None:
        stack = (recipe.loader.frame_stack,) if recipe.loader.frame_stack > 1 else ()
        encoder = model.frame_encoder.to_empty(device="cpu")
        frames = torch.zeros(1, 1, *stack, *sizes.frame_shape, dtype=torch.uint8)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            encoder(frames)
        encoding = float(counter.get_total_flops())
    return sum(p.numel() for p in model.parameters()), encoding


def step_cost(
    recipe: Recipe, sizes: ModelSizes, hardware: Hardware, *, segments: int, ranks: int
) -> StepCost:
    """Return the cost of a step with `segments` segments on each of `ranks` GPUs."""
    model, train, context = recipe.model, recipe.train, recipe.loader.context_length
    gpu = hardware.gpu
    compiled = train.compile == "on" or (train.compile == "auto" and train.steps >= COMPILED_FROM)
    captured = train.graph != "off" and ranks == 1 and recipe.loader.engine != "off"
    kernels = COMPILED if compiled else PLAIN
    half = train.precision != "fp32"
    tokens, unit = 3.0 * segments * context, model.layers * model.hidden_size
    flops = step_flops(
        layers=model.layers, width=model.hidden_size, context=context, segments=segments
    )
    parameters, encoding = model_size(recipe, sizes)
    encoding *= 3.0 * segments * context  # forward, and twice as much backward
    traffic = kernels.traffic + (DROPOUT_TRAFFIC if model.dropout else 0.0)
    moved = tokens * unit * traffic * (1 if half else 1.5)
    products = flops / (gpu.matrix_rate if half else gpu.matrix_rate_fp32)
    launched = kernels.fixed + model.layers * kernels.layer
    busy = products + encoding / gpu.convolution_rate
    busy += moved / gpu.memory_rate + launched * gpu.kernel
    busy += parameters * OPTIMIZER_BYTES / gpu.memory_rate
    seconds = busy if captured else max(busy, launched * gpu.launch)
    recompute = getattr(train, "recompute", False)
    if recompute:
        seconds += (products + moved / gpu.memory_rate) / 3
    kept = RECOMPUTED_KEPT if recompute else kernels.kept
    accumulate = int(getattr(train, "accumulate", 1))
    return StepCost(
        parameters=parameters,
        flops=flops,
        encoder_flops=encoding,
        compute_seconds=seconds,
        backward_seconds=seconds * 0.6,
        memory_bytes=parameters * (STATE_BYTES + (SHADOW_BYTES if half else 0))
        + tokens * unit * kept * (1 if half else 2) / accumulate
        + CONTEXT_BYTES,
        compiled=compiled,
        captured=captured,
    )
