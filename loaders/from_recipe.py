"""From a recipe to the data, the sampler and the options of its loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gear_offline.config.problems import no_data
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import SelectionSettings
from gear_offline.core.hub import is_there
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.sampling import PartWeights, Sampler, TaskPart, mix_tasks
from gear_offline.sampling.items import Items
from gear_offline.sampling.registry import sampler_for
from gear_offline.tables.fields import standard_fields
from gear_offline.tables.joint import JointDataset, Part, TableData, join_datasets


def open_one(recipe: Recipe) -> Dataset:
    """Open the dataset of a recipe of one, as training begins with it.

    Its blocks are compared when they are loaded.
    """
    data = recipe.data
    if data.path is not None and is_there(data.path):
        admissions = data.admissions if data.admit_every is None else 0
        return open_dataset(data.path, verify=False, admissions=admissions)
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
        chosen, items = settings or recipe.selection, items or Items(recipe)
        kept = items.insert(dataset)
        sampler = sampler_for(
            chosen.strategy, dataset, chosen.options, context_length=span, kept=kept
        )
        return items.counted(sampler, step)
    parts = []
    for task in dataset.tasks:
        own = (recipe.data.tasks or {})[task.name]
        chosen = settings or own.selection or recipe.selection
        sampler = sampler_for(chosen.strategy, task.dataset, chosen.options, context_length=span)
        parts.append(TaskPart(name=task.name, sampler=sampler, weight=own.weight))
    points = recipe.data.schedule or ()
    weights = [[point.weights[part.name] for part in parts] for point in points]
    schedule = PartWeights([point.step for point in points], weights) if points else None
    return mix_tasks(parts, schedule)


def loader_options(recipe: Recipe, dataset: TableData) -> dict[str, Any]:
    """Return the options of the loader; tasks of a joint table have scales of their own."""
    options = recipe.loader.model_dump()
    if isinstance(dataset, JointDataset):
        options["returns_scale"] = 1.0
    return options
