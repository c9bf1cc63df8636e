"""The model that a run trains, as its recipe says: built, shared over the ranks, its precision."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gear_offline.config.recipe import Recipe
from gear_offline.core.parts import calling_part
from gear_offline.core.text import count_text
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.goals import GOALS
from gear_offline.models.base import (
    MODELS,
    Losses,
    ModelFacts,
    ModelSizes,
    PlayedWindow,
    SequenceModel,
    make_model,
    total_loss,
    typed_settings,
)
from gear_offline.models.eight_bit import MULTIPLE
from gear_offline.models.encoders import InputColumn
from gear_offline.tables.fields import STATES, is_image
from gear_offline.tables.joint import TableData, data_name, parts_of
from gear_offline.training.cost import has_half_gradients
from gear_offline.training.parallel import Parallel, choose_parallel, shard_model, take_over


def data_sizes(
    source: TableData, observations: Sequence[str] = (STATES,), *, choices: int | None = None
) -> ModelSizes:
    """Return the sizes that columns show; of discrete actions, by default, those that occur."""
    columns, actions = [source.spec[name] for name in observations], source.spec["actions"]
    discrete, width = actions.dtype.kind in "iub", prod(actions.shape)
    if discrete and choices is None:
        statistics = [part.dataset.statistics["actions"] for part in parts_of(source)]
        lowest = min(float(moments.min.min()) for moments in statistics)
        choices = 1 + max(int(moments.max.max()) for moments in statistics)
        if width != 1 or lowest < 0:
            what = f"integer actions of per-step shape {actions.shape} from {lowest:g} on are not "
            what += "the numbers of one discrete choice"
            remedy = "store one number from 0 a step, or store continuous actions as float32"
            raise InputError("COLUMN", what, where=data_name(source), remedy=remedy)
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


def sizes_of(model: SequenceModel) -> ModelSizes:
    """Return the sizes of a model of one task."""
    facts, plain = model.facts, {"stack": 1, "encoder": "none"}  # the data do not say these
    return ModelSizes(
        state_dim=facts.state_dim,
        action_dim=facts.action_dim,
        discrete=facts.discrete,
        columns=tuple(column.model_copy(update=plain) for column in facts.columns),
    )


@dataclass(frozen=True)
class TrainingModel:
    """A model ready to be trained."""

    model: SequenceModel  # the parameters, float32, of which a rank may have shards
    working: Losses  # what steps compute with: of the model, or of a bfloat16 copy
    names: tuple[str, ...]  # of its losses, if they are several
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
    )
    return make_model(recipe.model.kind, facts, typed_settings(recipe.model))


def make_training_model(
    recipe: Recipe,
    sizes: ModelSizes,
    device: torch.device,
    world: World,
    start: Mapping[str, Tensor] | None = None,
    rewards: bool = True,
) -> TrainingModel:
    """Build the model of a recipe on `device`; the ranks call this together.

    Weights are drawn from torch's random numbers, or are those of `start`.  `rewards`: windows have
    them, and returns-to-go.
    """
    precision, reason = resolve_precision(recipe.train.precision, device)
    half = precision is not None
    model = recipe_model(recipe, sizes)
    if start is not None:
        try:
            take_over(model.state_dict(), start)
        except KeyError as error:
            what, remedy = str(error.args[0]), "give the recipe the model.* options of that run"
            raise InputError("MODEL", what, "train.init", remedy) from error
    names, frozen = tuple[str, ...](), 0
    if recipe.model.kind not in MODELS.own:
        names, frozen = try_model(model.to(device), device, precision, rewards=rewards)
    learning = model.learning()  # freezes what the loss never reaches
    if recipe.train.recompute:
        model.recompute()
    parameters = sum(parameter.numel() for parameter in learning)
    parallel = choose_parallel(recipe, parameters, world, device, half=half)
    narrow = has_half_gradients(recipe, half=half)
    if narrow and any(buffer.is_floating_point() for buffer in model.buffers()):
        narrow, reason = False, f"{reason}; its buffers need float32 weights"
    working = Losses(model)
    if parallel.sharded:
        shard_model(working, device, world, precision, parallel, half_gradients=narrow)
    else:
        model.to(device)
    model.train()
    autocast = precision
    if parallel.sharded and half:  # FSDP casts weights as it collects them
        sums = "bfloat16" if narrow else "float32"
        reason = f"bfloat16 products of float32 shards, {sums} sums of gradients"
    elif narrow:
        working, autocast = copy.deepcopy(working), None
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
    if frozen:
        reason += f"; {count_text(frozen, 'parameter')} that no loss reaches stay as they are"
    return TrainingModel(model, working, names, half, autocast, reason, parallel)


def try_model(
    model: SequenceModel, device: torch.device, precision: torch.dtype | None, *, rewards: bool
) -> tuple[tuple[str, ...], int]:
    """Try a stranger's model on two windows, and undo what that leaves behind.

    Returns the names of its losses, if they are several, and how many tensors no loss reaches; they
    are frozen.  What it gives in another form than it must is ``MODEL``, and so is what it raises.
    """
    name, facts = type(model).__name__, model.facts
    shape = (2, facts.context_length)
    ramp = torch.arange(2.0 * shape[1] * facts.state_width, device=device) % 7 / 10
    states = facts.states(ramp.reshape(*shape, -1))
    numbers = torch.zeros(shape, dtype=torch.int64, device=device)
    zeros = torch.zeros((*shape, 1), device=device)
    actions = numbers if facts.discrete else zeros.repeat(1, 1, facts.action_dim)
    goals = states[:, :1] if facts.goals else None
    bounds = torch.arange(1, len(facts.tasks), device=device) if len(facts.tasks) > 1 else None
    batch = Batch(
        states=states,
        actions=actions,
        rewards=zeros if rewards else None,
        returns_to_go=zeros if rewards else None,
        timesteps=torch.arange(shape[1], device=device).expand(shape),
        attention_mask=numbers + 1,
        segments=torch.zeros((2, 2), dtype=torch.int64, device=device),
        extras={} if goals is None else {GOALS: goals},
        task_bounds=bounds,
    )
    asked = None if facts.goals else zeros
    window = PlayedWindow(states, actions, asked, goals, batch.timesteps, numbers[:, 0])
    kept = [buffer.clone() for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    half = torch.autocast(device.type, dtype=precision, enabled=precision is not None)
    trial = "trying its losses" + ("" if rewards else " on data without rewards")
    with torch.random.fork_rng(devices), calling_part(MODELS, trial, name):
        with half, warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")  # a mean over a broadcast
            losses = model.train().losses(batch)
        values: Any = list(losses.values()) if isinstance(losses, dict) else [losses]
        wrong = [x for x in values if not isinstance(x, Tensor) or x.shape != shape]
        if wrong or not values or not isinstance(losses, dict):
            shapes = [tuple(getattr(x, "shape", ())) or type(x).__name__ for x in wrong or values]
            what = f"losses() gave {type(losses).__name__} of {shapes}, not a dict of tensors "
            what += f"(B, K), here {shape}"
            remedy = 'return {"action": ((predicted - batch.actions) ** 2).mean(-1)}'
            raise InputError("MODEL", what, name, remedy)
        total: Any = total_loss(losses).sum()
        if not total.requires_grad:
            what = "no loss reaches a parameter that learns"
            raise InputError("MODEL", what, name, "give it one, such as nn.Linear")
        total.backward()
    with (
        torch.random.fork_rng(devices),
        calling_part(MODELS, "trying act()", name),
        torch.no_grad(),
    ):
        is_float = (chosen := model.eval().act(copy.deepcopy(window))).is_floating_point()
        wanted: Any = (2, facts.action_dim) if is_float or not facts.discrete else (2,)
        if chosen.shape != wanted or not (is_float or facts.discrete):
            what = f"act() gave {chosen.dtype} of shape {tuple(chosen.shape)}, not floats {wanted}"
            raise InputError("MODEL", what, name, "return one action for each window")
        if obstacle := _obstacle(model, window, batch):
            raise InputError("MODEL", obstacle[0], name, obstacle[1])
    frozen = [p for p in model.parameters() if p.requires_grad and p.grad is None]
    for parameter in frozen:
        parameter.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    for buffer, before in zip(model.buffers(), kept, strict=True):
        buffer.copy_(before)
    return tuple(losses) if len(losses) > 1 else (), len(frozen)


def _obstacle(model: SequenceModel, window: PlayedWindow, batch: Batch) -> tuple[str, str] | None:
    """Return a fault of a model and its remedy: weights are not saved, or it sees its action."""
    if odd := [key for key, value in model.state_dict().items() if not isinstance(value, Tensor)]:
        return f"its state dict has {odd[0]}, which is no tensor", "make it a buffer"
    again = make_model(model.part[0], model.facts, model.settings).to(window.actions.device).eval()
    again.load_state_dict(model.state_dict())
    if _differ(lambda which: which.act(copy.deepcopy(window)), model, again):
        what = "made anew with its state dict it acts otherwise: what it has learnt would be lost"
        return what, "keep modules in nn.ModuleList, tensors in nn.Parameter or register_buffer"
    (other := copy.deepcopy(batch)).actions[:, -1] += 1
    is_own = type(model).predict is not SequenceModel.predict
    if is_own and _differ(lambda seen: model.predict(copy.deepcopy(seen))[:, -1], batch, other):
        what = "predict() of a step depends on the action of that step, unknown while acting"
        return what, "use those of the steps before: torch.roll(batch.actions, 1, 1)"
    return None


def _differ(call: Callable[[Any], Tensor], argument: Any, other: Any) -> bool:
    """Return true if a call that repeats itself gives something else for another argument."""
    values = [(torch.manual_seed(0), call(x).float())[1] for x in (argument, argument, other)]
    near = partial(torch.allclose, values[0], rtol=1e-3, atol=1e-5, equal_nan=True)
    return near(values[1]) and not near(values[2])


def eight_bit_obstacle(recipe: Recipe, device: torch.device, world: World) -> str | None:
    """Return the obstacle to products in 8 bits in the recipe's blocks, as a clause, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return "only GPUs from Hopper (H100) on scale them by rows"
    width = recipe.model.shape[1]
    if width % MULTIPLE:
        return f"model.hidden_size is {width}, no multiple of {MULTIPLE}"
    share = recipe.loader.batch_size // world.size // recipe.train.accumulate
    steps = share * recipe.loader.context_length
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
