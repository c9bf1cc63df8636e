"""The model that a run trains, as its recipe says: built, shared over the ranks, and copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.distributed.world import World
from gear_offline.models.checks import trainable_parameters
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.models.multitask import ModelTask
from gear_offline.training.parallel import (
    Parallel,
    choose_parallel,
    has_half_gradients,
    shard_model,
    working_copy,
)
from gear_offline.training.precision import resolve_precision


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What the model needs to know of states and actions.

    Attributes
    ----------
    state_dim
        Numbers in an observation.
    frame_shape
        Of an observation that is a frame, (h, w) or (h, w, colours); otherwise empty.
    action_dim
        Numbers in an action, or the number of discrete actions.
    discrete
        Whether actions are integers.
    tasks
        Of a recipe of several tasks; widths above are those of the widest then.
    """

    state_dim: int
    action_dim: int
    discrete: bool
    frame_shape: tuple[int, ...] = ()
    tasks: tuple[ModelTask, ...] = ()


@dataclass(frozen=True)
class TrainingModel:
    """A model ready to be trained.

    Attributes
    ----------
    model
        The parameters, float32, of which a rank may have shards.
    working
        What steps compute with: the model, or a bfloat16 copy.
    half
        Products are in bfloat16.
    autocast
        Type that is left for autocast; ``None``: none.
    remark
        On the types, as a clause to print.
    parallel
        How the ranks share the model.
    """

    model: DecisionTransformer
    working: DecisionTransformer
    half: bool
    autocast: torch.dtype | None
    remark: str
    parallel: Parallel


def recipe_model(recipe: Recipe, sizes: ModelSizes) -> DecisionTransformer:
    """Build the model of a recipe, on torch's default device."""
    return build_model(
        state_dim=sizes.state_dim,
        action_dim=sizes.action_dim,
        discrete=sizes.discrete,
        context_length=recipe.loader.context_length,
        frame_shape=sizes.frame_shape,
        frame_stack=recipe.loader.frame_stack,
        tasks=sizes.tasks,
        **recipe.model.model_dump(),
    )


def make_training_model(
    recipe: Recipe, sizes: ModelSizes, device: torch.device, world: World
) -> TrainingModel:
    """Build the model of a recipe on `device`; the ranks call this together.

    Weights are drawn from torch's random numbers.
    """
    precision, reason = resolve_precision(recipe.train.precision, device)
    half = precision is not None
    model = recipe_model(recipe, sizes)
    trainable_parameters(model)  # freezes what the loss never reaches
    model.encoder.gradient_checkpointing = recipe.train.recompute
    parallel = choose_parallel(recipe, model, world, device, half=half)
    if parallel.sharded:
        narrow = has_half_gradients(recipe, half=half)
        shard_model(model, device, world, precision, parallel, half_gradients=narrow)
    else:
        model.to(device)  # type: ignore[arg-type, unused-ignore]
    model.train()
    working, autocast, remark = working_copy(recipe, model, precision, parallel)
    return TrainingModel(model, working, half, autocast, remark or reason, parallel)
