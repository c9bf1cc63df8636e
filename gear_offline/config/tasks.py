"""A recipe of several tasks, seen task by task: each is a recipe of its own, as far as data go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import TaskSettings
from gear_offline.errors import InputError
<<<<<<< HEAD
=======
from gear_offline.sampling import Sampler, Schedule, TaskPart, make_sampler, mix_tasks
from gear_offline.tables.fields import standard_fields
from gear_offline.tables.joint import JointDataset, Task, join_datasets
>>>>>>> 7934052 (Samplers in fewer words; the page of strategies says how they draw now)


def tasks_in(recipe: Recipe) -> Mapping[str, TaskSettings]:
    """Return the recipe's tasks by name; none for a recipe of one dataset."""
    return recipe.data.tasks or {}


def task_recipe(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe of one task alone, with what the tasks share.

    Raises
    ------
    InputError
        ``TASK_UNKNOWN``
    """
    task = named(recipe, name)
    changed = recipe.to_dict()
    single = task.model_dump(mode="json")
    changed["data"] |= {"tasks": None, "schedule": None}
    changed["data"] |= {key: single[key] for key in ("path", "source", "collect")}
    changed["evaluate"] |= {key: single[key] for key in ("environment", "reference", "targets")}
    if task.returns_scale is not None:
        changed["loader"]["returns_scale"] = task.returns_scale
    if task.selection is not None:
        changed["selection"] = single["selection"]
    return Recipe.parse(changed, where=f"data.tasks.{name}")


def named(recipe: Recipe, name: str) -> TaskSettings:
    """Return the task `name` of a recipe; raises `InputError` (``TASK_UNKNOWN``)."""
    tasks = tasks_in(recipe)
    if name not in tasks:
        raise InputError(
            "TASK_UNKNOWN",
            f"no task {name!r}",
            where=recipe.name,
            remedy=f"tasks: {', '.join(tasks)}" if tasks else "the recipe has one dataset only",
        )
    return tasks[name]


def environments_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the environments that a resolved recipe is evaluated in, each once."""
    named = [recipe.evaluate.environment, *(t.environment for t in tasks_in(recipe).values())]
    return tuple(dict.fromkeys(name for name in named if name is not None))


def missing_data(recipe: Recipe) -> list[str]:
    """Return the paths of the tasks' datasets that do not exist."""
    return [task.path for task in tasks_in(recipe).values() if not Path(task.path).exists()]


def data_key(recipe: Recipe) -> str:
    """Return what a recipe's dataset depends on; recipes of one key may share it."""
    loader = recipe.loader
    of_tasks = f" {loader.normalize_states} {loader.returns_scale}" if recipe.data.tasks else ""
    return recipe.data.model_dump_json() + of_tasks
<<<<<<< HEAD
=======


def open_tasks(recipe: Recipe, open_one: Callable[[Recipe], Dataset]) -> JointDataset:
    """Return the joint table of a recipe's tasks.

    Parameters
    ----------
    open_one
        Opens the dataset of a recipe of one task, making it where that is asked for.

    Raises
    ------
    InputError
        ``TASK_MIXED``, ``NORMALIZE_IMAGES``, ``COLUMN_KIND``, and what `open_one` raises.
    """
    tasks, normalize = [], recipe.loader.normalize_states
    for name in tasks_in(recipe):
        single = task_recipe(recipe, name)
        task = Task(name=name, dataset=open_one(single), returns_scale=single.loader.returns_scale)
        # refused here first, in a recipe's words
        standard_fields(task.dataset, normalize_states=normalize, recipe=True)
        tasks.append(task)
    return join_datasets(tasks, normalize_states=normalize)


def recipe_selection(
    recipe: Recipe, dataset: Dataset, settings: SelectionSettings | None = None
) -> Sampler:
    """Return the sampler of a recipe's batches; of several tasks, the mixture of theirs.

    Parameters
    ----------
    settings
        For every task; by default, and where it is the recipe's own, each task has its own if it
        names one, and else the recipe's.

    Raises
    ------
    InputError
        Those of `gear_offline.sampling.make_sampler` and `gear_offline.sampling.mix_tasks`.
    """
    span = recipe.loader.context_length
    if settings == recipe.selection:
        settings = None
    if not isinstance(dataset, JointDataset):
        chosen = settings or recipe.selection
        return make_sampler(chosen.strategy, dataset, context_length=span, **chosen.options)
    parts = []
    for task in dataset.tasks:
        own = named(recipe, task.name)
        chosen = settings or own.selection or recipe.selection
        sampler = make_sampler(chosen.strategy, task.dataset, context_length=span, **chosen.options)
        parts.append(TaskPart(name=task.name, sampler=sampler, weight=own.weight))
    points = recipe.data.schedule or ()
    weights = [[point.weights[part.name] for part in parts] for point in points]
    schedule = Schedule([point.step for point in points], weights) if points else None
    return mix_tasks(parts, schedule)


def loader_options(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """Return the options of the loader; a joint table is normalised and scaled already."""
    options = recipe.loader.model_dump()
    if isinstance(dataset, JointDataset):
        options |= {"normalize_states": False, "returns_scale": 1.0}
    return options
>>>>>>> 7934052 (Samplers in fewer words; the page of strategies says how they draw now)
