"""Check a loader's options, choose its ranks and sampler, or take them from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError

from gear_offline.batches.sampling import (
    PartWeights,
    Sampler,
    TaskPart,
    mix_tasks,
    parse_strategy,
)
from gear_offline.batches.sampling.items import Items
from gear_offline.batches.sampling.registry import Selection, check_repeats, sampler_for
from gear_offline.batches.tables.fields import standard_fields
from gear_offline.batches.tables.joint import JointDataset, Part, TableData, join_datasets
from gear_offline.batches.tables.table import TableOptions
from gear_offline.config.problems import no_data, option_text
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import LoaderSettings, SelectionSettings
from gear_offline.core.address import is_there
from gear_offline.core.text import say, to_plain
from gear_offline.core.types import Int64Array
from gear_offline.data.dataset.dataset import Dataset, open_dataset, open_to_read
from gear_offline.data.dataset.split import HeldOut
from gear_offline.distributed.world import World, joined_world
from gear_offline.errors import InputError, UnavailableError


class LoaderOptions(LoaderSettings):
    """The options of `gear_offline.GearLoader`: a recipe's section."""

    @cached_property
    def table(self) -> TableOptions:
        return TableOptions.of(vars(self))


def check_options(arguments: Mapping[str, Any], device: torch.device) -> LoaderOptions:
    """Return the options among a loader's arguments; refuse those that exclude each other."""
    values = {name: arguments[name] for name in LoaderOptions.model_fields}
    try:
        options = LoaderOptions(**to_plain(values))
    except ValidationError as error:
        problem = option_text(LoaderOptions, error.errors()[0])
        raise InputError("LOADER_OPTION", problem) from error
    name = "placement" if options.placement in ("hbm", "peer") else "engine"
    if name == "placement" and options.engine == "off":
        raise bad_option("engine", "off", "'auto' or 'on' with rows in GPU memory")
    if (value := getattr(options, name)) in ("on", "hbm", "peer") and device.type != "cuda":
        raise no_engine(f"{name}={value!r} needs a CUDA device, batches go to {device}")
    if options.placement == "disk" and options.engine == "on":
        raise bad_option("placement", "disk", "engine='auto' or 'off' with rows on disk")
    for name, value in (("placement", "disk"), ("sharding", "shard")):
        if options.goals is not None and getattr(options, name) == value:
            raise bad_option(name, value, f"{name}='auto' with goals, which may be any row")
    if options.chunk is not None and options.sharding == "shard":
        remedy = "sharding='replicate', or 'auto', with chunk: each node holds all actions"
        raise bad_option("sharding", "shard", remedy)
    return options


def bad_option(name: str, value: object, allowed: str) -> InputError:
    """Return the error ``LOADER_OPTION`` for an option's value."""
    return InputError("LOADER_OPTION", f"{name}={value!r} is not usable", remedy=f"use {allowed}")


def no_engine(problem: str) -> UnavailableError:
    """Return the error ``DEVICE`` where the GPU does not gather."""
    remedy = (
        "use device='cuda', engine='on', which says what is missing; or 'auto', placement='auto'"
    )
    return UnavailableError("DEVICE", problem, remedy=remedy)


def find_world(world: World | Literal["auto"] | None, global_batch: int) -> World:
    """Return the ranks that share batches; with ``"auto"`` say on the first one who they are."""
    if isinstance(world, World):
        return world
    if world is None:
        return World()
    if world != "auto":
        raise bad_option("world", world, "'auto', None, or what open_world() gives")
    joined = joined_world()
    if joined.size > 1:
        say(
            f"world auto: {joined.size} ranks share each batch of {global_batch} segments, "
            f"{joined.rank_batch(global_batch)} each; world=None would read the same batches in "
            "each",
            quiet=not joined.is_first,
        )
    return joined


def choose_sampler(
    selection: Selection | Sampler,
    dataset: TableData,
    context_length: int,
    padding: str,
) -> Sampler:
    """Return the sampler of a loader, made if it is named, else checked to fit it."""
    if not isinstance(selection, Sampler):
        name, options = parse_strategy(selection)
        selection = sampler_for(name, dataset, options, context_length=context_length)
    elif not selection.name:  # else it was made by its name
        check_repeats(selection, type(selection).__name__)
    name, index, episodes = selection.name, selection.index, dataset.episodes
    if selection.padding not in (None, padding):
        problem = f"padding={padding!r} is not usable with strategy {name!r}"
        raise InputError("LOADER_OPTION", problem, remedy=f"use padding={selection.padding!r}")
    if not np.array_equal(index.lengths, episodes.lengths[: index.episodes]):
        problem = (
            f"strategy {name!r} was made for other episodes ({index.episodes} of {index.steps} "
        )
        problem += f"steps) than the dataset has ({episodes.episodes} of {episodes.steps})"
        remedy = f"make it of this dataset: make_sampler({name!r}, dataset, ...)"
        raise InputError("LOADER_OPTION", problem, remedy=remedy)
    if selection.context_length not in (None, context_length):
        problem = f"strategy {name!r} was made for windows of {selection.context_length} steps, "
        problem += f"context_length={context_length} is not usable with it"
        remedy = f"make it with context_length={context_length}"
        raise InputError("LOADER_OPTION", problem, remedy=remedy)
    return selection


# of a recipe --------------------------------------------------------------------------------


def open_one(recipe: Recipe, numbers: Int64Array | None = None, *, fetches: bool = True) -> Dataset:
    """Open the dataset of a recipe of one, as training begins with it, without what is held out.

    Its blocks are compared when they are loaded.  Another rank may know the `numbers` that stay.
    Unless it `fetches`, rows at an address stay there.
    """
    data = recipe.data
    if data.path is not None and is_there(data.path):
        admissions = data.admissions if data.admit_every is None else 0
        if fetches or data.cache is not None:
            dataset = open_dataset(data.path, verify=False, admissions=admissions, cache=data.cache)
        else:
            dataset = open_to_read(data.path, admissions=admissions)
        if data.held_out is None:
            return dataset
        if dataset.ranges and numbers is None:
            say(f"{dataset.ranges}: held_out compares episodes, whose columns are fetched whole")
        return HeldOut(data.held_out, data.held_out_by).others(dataset, numbers)
    raise no_data(data)


def open_data(recipe: Recipe, open_one: Callable[[Recipe], Dataset] = open_one) -> TableData:
    """Return the dataset of a recipe, or the joint table of its tasks.

    `open_one` opens or makes one dataset; by default each must be there.
    """
    if not recipe.data.tasks:
        return open_one(recipe)
    tasks, normalize = [], recipe.loader.normalize_states
    for name in recipe.data.tasks:
        single = recipe.of_task(name)
        task = Part(name=name, dataset=open_one(single), returns_scale=single.loader.returns_scale)
        standard_fields(task.dataset, normalize_states=normalize)  # refuses what fits no batch
        tasks.append(task)
    return join_datasets(tasks)


def recipe_sampler(
    recipe: Recipe,
    dataset: TableData,
    settings: SelectionSettings | None = None,
    *,
    items: Items | None = None,
    step: int = 0,
) -> Sampler:
    """Return the sampler of a recipe's batches; of several tasks, the mixture of theirs.

    `settings` are for every task; by default each has its own, or else the recipe's.  `items` go on
    with the episodes that they have not got yet, and with `step`; by default they begin anew.
    """
    span = recipe.loader.context_length
    if settings == recipe.selection:
        settings = None
    if not isinstance(dataset, JointDataset):
        selection, items = settings or recipe.selection, items or Items(recipe)
        mask = items.insert(dataset)
        sampler = sampler_for(
            selection.strategy, dataset, selection.options, context_length=span, kept=mask
        )
        return items.count_draws(sampler, step)
    task_parts = []
    for task in dataset.tasks:
        task_settings = (recipe.data.tasks or {})[task.name]
        selection = settings or task_settings.selection or recipe.selection
        sampler = sampler_for(
            selection.strategy, task.dataset, selection.options, context_length=span
        )
        task_parts.append(TaskPart(name=task.name, sampler=sampler, weight=task_settings.weight))
    points = recipe.data.schedule or ()
    weights = [[point.weights[task_part.name] for task_part in task_parts] for point in points]
    schedule = PartWeights([point.step for point in points], weights) if points else None
    return mix_tasks(task_parts, schedule)


def loader_options(recipe: Recipe, dataset: TableData) -> dict[str, Any]:
    """Return the options of the loader; tasks of a joint table have scales of their own."""
    # goals as they are: whose law nobody types by making a loader
    options = recipe.loader.model_dump() | {"goals": recipe.loader.goals}
    if isinstance(dataset, JointDataset):
        options["returns_scale"] = 1.0
    return options
