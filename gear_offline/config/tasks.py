"""A recipe of several tasks, seen task by task: each is a recipe of its own, as far as data go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import TaskSettings
from gear_offline.errors import InputError


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
    of_tasks = f" {recipe.loader.returns_scale}" if recipe.data.tasks else ""
    return recipe.data.model_dump_json() + of_tasks
