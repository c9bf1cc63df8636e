"""From a recipe of several tasks to one that says everything in numbers, task by task."""

from __future__ import annotations

from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import task_recipe
from gear_offline.models.multitask import ModelTask
from gear_offline.runs.preparation import check_memory, resolve
from gear_offline.tables.fields import STATES, is_image
from gear_offline.tables.joint import JointDataset, Part
from gear_offline.training.model import ModelSizes


def resolve_tasks(
    recipe: Recipe, dataset: JointDataset, *, quiet: bool = False
) -> tuple[Recipe, ModelSizes]:
    """Fill in what each task leaves to its data, and check it as a recipe of one task is checked.

    Raises
    ------
    InputError
        As `gear_offline.runs.preparation.resolve`.
    """
    found: dict[str, tuple[Recipe, ModelSizes]] = {}
    changed = recipe.to_dict()
    for task in dataset.tasks:
        single, sizes = resolve(task_recipe(recipe, task.name), task.dataset, quiet=quiet)
        found[task.name] = single, sizes
        here: dict[str, Any] = changed["data"]["tasks"][task.name]
        evaluate = single.evaluate
        here |= {
            "returns_scale": single.loader.returns_scale,
            "environment": evaluate.environment,
            "reference": evaluate.reference,
            "targets": None if evaluate.targets is None else list(evaluate.targets),
        }
    recipes, sizes_of = zip(*found.values(), strict=True)
    discrete = any(sizes.discrete for sizes in sizes_of)
    changed["model"]["max_timestep"] = max(one.model.max_timestep or 0 for one in recipes)
    if discrete:
        changed["model"]["action_tanh"] = False
    resolved = Recipe.parse(changed)
    joint = ModelSizes(
        state_dim=max(sizes.state_dim for sizes in sizes_of),
        action_dim=max(sizes.action_dim for sizes in sizes_of),
        discrete=discrete,
        frame_shape=sizes_of[0].frame_shape,
        tasks=tuple(
            _model_task(dataset.tasks[number], sizes, normalized=recipe.loader.normalize_states)
            for number, sizes in enumerate(sizes_of)
        ),
    )
    check_memory(resolved, joint)
    return resolved, joint


def _model_task(task: Part, sizes: ModelSizes, *, normalized: bool) -> ModelTask:
    moments, returns = task.dataset.statistics[STATES], task.dataset.manifest.returns
    normalized = normalized and not is_image(task.dataset.spec[STATES])
    return ModelTask(
        name=task.name,
        state_dim=sizes.state_dim,
        action_dim=sizes.action_dim,
        returns_scale=task.returns_scale,
        state_mean=tuple(moments.mean.ravel().tolist()) if normalized else None,
        state_std=tuple(moments.std.ravel().tolist()) if normalized else None,
        return_worst=returns.min,
        return_best=returns.max,
    )
