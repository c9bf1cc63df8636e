"""A recipe of several tasks, seen task by task: each is a recipe of its own, as far as data go."""

from __future__ import annotations

from collections.abc import Mapping

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import TaskSettings


def tasks_in(recipe: Recipe) -> Mapping[str, TaskSettings]:
    """Return the recipe's tasks by name; none for a recipe of one dataset."""
    return recipe.data.tasks or {}


def task_recipe(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe of one task alone, with what the tasks share."""
    task = tasks_in(recipe)[name]
    data = {"path": task.path, "source": task.source, "collect": task.collect}
    evaluate = {key: getattr(task, key) for key in ("environment", "reference", "targets")}
    scale = task.returns_scale or recipe.loader.returns_scale
    # copies, not `replace`: its cost would be quadratic in the number of tasks
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={**data, "tasks": None, "schedule": None}),
            "evaluate": recipe.evaluate.model_copy(update=evaluate),
            "loader": recipe.loader.model_copy(update={"returns_scale": scale}),
            "selection": task.selection or recipe.selection,
        }
    )


def environments_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the environments that a resolved recipe is evaluated in, each once."""
    names = [recipe.evaluate.environment, *(t.environment for t in tasks_in(recipe).values())]
    return tuple(dict.fromkeys(name for name in names if name is not None))


def plays(recipe: Recipe) -> bool:
    """Return whether a resolved recipe has an environment to evaluate in, and episodes to play."""
    return recipe.evaluate.episodes > 0 and bool(environments_of(recipe))


def evaluates_at(recipe: Recipe, step: int) -> bool:
    """Return whether the policy is played after `step`."""
    every, last = recipe.train.evaluate_every, step == recipe.train.steps
    return plays(recipe) and (last or (every is not None and step % every == 0))


def named_environments(recipe: Recipe) -> tuple[str, ...]:
    """Return every environment that a recipe names, to evaluate in or to collect in."""
    collected = [recipe.data.collect, *(task.collect for task in tasks_in(recipe).values())]
    names = [settings.environment for settings in collected if settings is not None]
    return tuple(dict.fromkeys((*environments_of(recipe), *names)))


def data_key(recipe: Recipe) -> str:
    """Return what a recipe's dataset depends on; recipes of one key may share it."""
    of_tasks = f" {recipe.loader.returns_scale}" if recipe.data.tasks else ""
    return recipe.data.model_dump_json() + of_tasks
