"""The model that a run trains, as its recipe says: built, shared over the ranks, its precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from gear_offline.batches.tables.fields import STATES, is_discrete, is_image
from gear_offline.batches.tables.joint import TableData, data_name, parts_of
from gear_offline.config.recipe import Recipe
from gear_offline.core.text import count_text
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.models.base import (
    MODELS,
    Losses,
    ModelFacts,
    ModelSizes,
    SequenceModel,
    calling_model,
    make_model,
    typed_settings,
)
from gear_offline.models.eight_bit import MULTIPLE
from gear_offline.models.encoders import InputColumn
from gear_offline.training.cost import has_half_gradients
from gear_offline.training.parallel import Parallel, choose_parallel, shard_model, take_over
from gear_offline.training.pieces import count_pieces
from gear_offline.training.trial import Trial, try_model


def data_sizes(
    source: TableData, observations: Sequence[str] = (STATES,), *, choices: int | None = None
) -> ModelSizes:
    """Return the sizes that columns show; of discrete actions, by default, those that occur."""
    columns, actions = [source.spec[name] for name in observations], source.spec["actions"]
    discrete, width = is_discrete(actions), prod(actions.shape)
    if discrete and choices is None:
        datasets = [part.dataset.whole or part.dataset for part in parts_of(source)]
        statistics = [dataset.statistics["actions"] for dataset in datasets]
        lowest = min(float(moments.min.min()) for moments in statistics)
        choices = 1 + max(int(moments.max.max()) for moments in statistics)
        if width != 1 or lowest < 0:
            problem = f"integer actions of per-step shape {actions.shape} from {lowest:g} on are "
            problem += "not the numbers of one discrete choice"
            remedy = "store one number from 0 a step, or store continuous actions as float32"
            raise InputError("COLUMN", problem, where=data_name(source), remedy=remedy)
    inputs = list[InputColumn]()
    for column in columns:
        kind: Any = "uint8" if column.dtype == np.uint8 else "float32"
        facts = {"shape": column.shape, "frames": kind} if is_image(column) else {}
        name = column.name if len(columns) > 1 else ""
        inputs.append(InputColumn(**{"name": name, "shape": (prod(column.shape),), **facts}))
    return ModelSizes(
        state_dim=sum(column.size for column in inputs),
        action_dim=choices if discrete and choices else width,
        discrete=discrete,
        columns=tuple(inputs),
    )


@dataclass(frozen=True)
class TrainingModel:
    """A model ready to be trained."""

    model: SequenceModel  # the parameters, float32, of which a rank may have shards
    working: Losses  # what steps compute with: of the model, or of a bfloat16 copy
    trial: Trial
    half: bool  # products are in bfloat16
    autocast: torch.dtype | None  # type that is left for autocast
    remark: str  # on the types, as a clause to print
    parallel: Parallel  # how the ranks share the model


def recipe_model(recipe: Recipe, sizes: ModelSizes) -> SequenceModel:
    """Build the model of a recipe, on torch's default device."""
    facts = ModelFacts(
        **vars(sizes) | {"frame_stack": recipe.loader.frame_stack},
        context_length=recipe.loader.context_length,
        max_timestep=recipe.model.max_timestep or 1,
        goals=recipe.loader.goals is not None,
        chunk=recipe.loader.chunk,
    )
    return make_model(recipe.model.kind, facts, typed_settings(recipe.model))


def make_training_model(
    recipe: Recipe,
    sizes: ModelSizes,
    device: torch.device,
    world: World,
    first_batch: Callable[[], Batch],
    start: SequenceModel | None = None,
) -> TrainingModel:
    """Build the model of a recipe on `device`; the ranks call this together.

    Weights are drawn from torch's random numbers, or are those of `start`.  What is not of the
    package is tried on the `first_batch`.
    """
    precision, reason = resolve_precision(recipe.train.precision, device)
    half = precision is not None
    model = recipe_model(recipe, sizes)
    if start is not None:
        _check_start(model, start)
        try:
            take_over(model.state_dict(), start.state_dict())
        except KeyError as error:
            problem, remedy = str(error.args[0]), "give the recipe the model.* options of that run"
            raise InputError("MODEL", problem, "train.init", remedy) from error
    narrow, trial = has_half_gradients(recipe, half=half), Trial()
    seldom = frozenset[str]()  # parameters that not every rank's windows reach
    moves = type(model).after_step is not SequenceModel.after_step
    if narrow and (moves or any(buffer.is_floating_point() for buffer in model.buffers())):
        narrow, reason = False, f"{reason}; what is not learnt needs float32 weights"
    is_own = recipe.model.kind in MODELS.own
    if not is_own:
        parts = recipe.train.accumulate
        if recipe.train.deterministic == "ranks":
            parts = count_pieces(recipe.loader.batch_size) // world.size
        trial = try_model(
            model,
            first_batch(),
            precision=precision,
            narrow=narrow,
            recompute=recipe.train.recompute,
            parts=parts,
        )
        # what the windows of one rank do not reach those of another may
        unreached = [*map(frozenset[str], world.gather(sorted(trial.unreached)))]
        trial = replace(trial, unreached=frozenset.intersection(*unreached))
        seldom = frozenset.union(*unreached) - trial.unreached
        if trial.leaves_traces and recipe.train.deterministic == "ranks":
            problem = "its losses change buffers (as batch norm does) or what is in Python, which "
            problem += "ranks have each of their own"
            remedy = "change buffers in after_step(), or use train.deterministic=true"
            raise InputError("MODEL", problem, recipe.model.kind, remedy)
        model.sees_timesteps = trial.sees_timesteps
    for name, parameter in model.named_parameters():
        if name in trial.unreached:
            parameter.requires_grad_(False)
    learning = model.learning()  # freezes what the loss never reaches
    if recipe.train.recompute:
        model.recompute()
    parameters = sum(parameter.numel() for parameter in learning)
    parallel = choose_parallel(recipe, parameters, world, device, half=half)
    working = Losses(model)
    if parallel.sharded and seldom:
        problem = f"the windows of some ranks alone reach {min(seldom)}, and shards add up "
        problem += "gradients that all ranks have"
        remedy = "use train.parallel=ddp, or let the losses of any windows reach every parameter"
        raise InputError("MODEL", problem, recipe.model.kind, remedy)
    if parallel.sharded:
        shard_model(working, device, world, precision, parallel, half_gradients=narrow)
    else:
        model.to(device)
    model.train()
    # somebody else's model gives weights in 16 bits states in 32
    autocast = None if is_own and (parallel.sharded or narrow) else precision
    if parallel.sharded and half:  # FSDP casts weights as it collects them
        sums = "bfloat16" if narrow else "float32"
        reason = f"bfloat16 products of float32 shards, {sums} sums of gradients"
    elif narrow:
        with calling_model(model, "copying it", "use train.weights=fp32"):
            working = copy.deepcopy(working)
        working.to(precision)
        for module, copied in zip(model.modules(), working.model.modules(), strict=True):
            copied._buffers = module._buffers  # one state of both
        reason = "bfloat16 weights, float32 updates"
    elif half and recipe.train.weights == "bf16":
        reason += "; bfloat16 gradients would add up micro-batches coarsely"
    if recipe.train.precision == "fp8":
        obstacle = eight_bit_obstacle(recipe, device, world)
        obstacle = obstacle or working.model.use_eight_bits()
        reason += (
            "; blocks multiply in 8 bits" if obstacle is None else f"; not in 8 bits: {obstacle}"
        )
    if trial.unreached:
        count = count_text(len(trial.unreached), "parameter")
        reason += f"; {count} that no loss reaches stay as they are"
    return TrainingModel(model, working, trial, half, autocast, reason, parallel)


def _check_start(model: SequenceModel, start: SequenceModel) -> None:
    """Refuse weights of a model whose inputs or outputs mean something else."""
    own, others = model.facts, start.facts
    for name in ("columns", "action_dim", "discrete", "goals"):
        now, before = getattr(own, name), getattr(others, name)
        if now != before:
            if name == "columns":
                now, before = ("; ".join(c.text for c in columns) for columns in (now, before))
            problem = f"{name} of that model are {before}, here they are {now}"
            remedy = "give the recipe what that run had, columns in their order "
            raise InputError("MODEL", problem, "train.init", f"{remedy}(loader.observations)")
    if model.asks_nothing != start.asks_nothing:
        problem = "of that model and this one, one is asked for returns and the other is not"
        raise InputError("MODEL", problem, "train.init", "use the model.condition that it had")


def eight_bit_obstacle(recipe: Recipe, device: torch.device, world: World) -> str | None:
    """Return the obstacle to products in 8 bits in the recipe's blocks, as a clause, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return "only GPUs from Hopper (H100) on scale them by rows"
    return eight_bit_size_obstacle(recipe, recipe.loader.batch_size // world.size)


def eight_bit_size_obstacle(recipe: Recipe, segments: int) -> str | None:
    """Return the obstacle in the recipe's sizes, of a GPU with so many windows of each batch."""
    width = recipe.model.shape[1]
    if width % MULTIPLE:
        return f"model.hidden_size is {width}, no multiple of {MULTIPLE}"
    steps = segments // recipe.train.accumulate * recipe.loader.context_length
    if steps % MULTIPLE:
        return f"a pass has {steps} steps, no multiple of {MULTIPLE}"
    return None


def resolve_precision(precision: str, device: torch.device) -> tuple[torch.dtype | None, str]:
    """Return the autocast type (None: float32 throughout) and a line that says why.

    On CPUs ``auto`` is float32: without bfloat16 instructions autocast only adds work, and with
    them a recipe should still give the same weights as on the next machine.
    """
    if device.type == "cuda":
        if precision == "fp32":
            return None, "float32"
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "bfloat16 autocast, float32 weights"
        if precision == "bf16":
            return torch.bfloat16, "bfloat16 autocast as the recipe says, emulated by this GPU"
        return None, "float32: this GPU has no bfloat16"
    native = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
    if precision == "bf16":
        remark = "" if native else "; this CPU has no instructions for it and will be slow"
        return torch.bfloat16, f"bfloat16 autocast as the recipe says{remark}"
    return None, "float32" + ("; train.precision=bf16 may be faster on this CPU" if native else "")
