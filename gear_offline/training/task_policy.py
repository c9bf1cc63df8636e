"""A model of several tasks, ready to act in one of them."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch

from gear_offline.config.recipe import Recipe
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.multitask import single_task, task_number, tasks_of_config
from gear_offline.models.policy import Policy
from gear_offline.training.policy_parts import PolicyParts


def task_parts(model: DecisionTransformer, name: str | None, recipe: Recipe) -> PolicyParts:
    """Return what it takes to act in one task.

    Parameters
    ----------
    name
        May be None for a model of one task.

    Raises
    ------
    InputError
        ``TASK_UNKNOWN``
    """
    tasks = tasks_of_config(model.config)
    task = tasks[task_number(model, tasks[0].name if name is None and len(tasks) == 1 else name)]
    moments = (task.state_mean, task.state_std)
    mean, std = (None if value is None else np.array(value) for value in moments)
    alone = single_task(model, task.name)
    scales = task.returns_scale, recipe.loader.context_length
    return PolicyParts(alone, mean, std, *scales, recipe)


def task_policy(
    model: DecisionTransformer, name: str, recipe: Recipe, device: str | torch.device
) -> Policy:
    """Return the policy of one task; on the model's device it shares the model's blocks.

    Raises
    ------
    InputError
        ``TASK_UNKNOWN``
    """
    parts = task_parts(model, name, recipe)
    here, there = next(model.parameters()).device, torch.device(device)
    if here.type != there.type or there.index not in (None, here.index):
        parts = parts._replace(model=deepcopy(parts.model))  # or the model's blocks would go along
    return parts.policy(device)
