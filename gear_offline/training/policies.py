"""What acts: the policy of a run or of one of its checkpoints, without the optimiser's state."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.device import resolve_device
from gear_offline.core.types import Float64Array
from gear_offline.errors import InputError, given_path
from gear_offline.models.decision_transformer import (
    DecisionTransformer,
    DecisionTransformerConfig,
)
from gear_offline.models.multitask import single_task, task_number, tasks_of_config
from gear_offline.models.policy import Policy
from gear_offline.training.checkpoint import (
    Checkpoint,
    damaged,
    newest_checkpoint,
    read_checkpoint,
)
from gear_offline.training.checkpoint_folder import find_checkpoint

__all__ = ["PolicyParts", "load_policy", "load_policy_parts"]


class PolicyParts(NamedTuple):
    """What it takes to act: the model and how its inputs were scaled.

    The statistics are (S,) float64, or None when the states were not normalised.
    """

    model: DecisionTransformer
    """Where it was made: on the CPU if it comes from a checkpoint."""
    state_mean: Float64Array | None
    """(S,) of the training data."""
    state_std: Float64Array | None
    """(S,); the model saw ``(state - mean) / (std + 1e-6)``."""
    returns_scale: float
    """Returns-to-go were divided by it."""
    context_length: int
    """K, steps of the training windows."""
    recipe: Recipe
    """Of the run."""

    def policy(self, device: torch.device | str = "cpu") -> Policy:
        """Return what acts, on `device`; the model is moved there, into evaluation mode."""
        return Policy(
            self.model,
            state_mean=self.state_mean,
            state_std=self.state_std,
            returns_scale=self.returns_scale,
            context_length=self.context_length,
            device=device,
        )


def load_policy(
    run_or_checkpoint: str | Path, task: str | None = None, *, device: str = "auto"
) -> Policy:
    """Return what acts: the policy of a run, which takes raw observations and asked returns.

    Parameters
    ----------
    run_or_checkpoint
        Run directory (its newest whole checkpoint), a checkpoint of it, or its
        ``checkpoints/best``.
    task
        Of a run of several tasks: the one to act in.
    device
        ``"auto"`` (CUDA if there is one), or a torch device: ``"cpu"``, ``"cuda:1"``.

    Returns
    -------
    Policy
        See `gear_offline.models.policy.Policy`: `reset`, then `act` and `observe_reward` by turns.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``, ``RUN_DAMAGED``, ``USAGE`` for a task that the model does not know,
        ``LOADER_OPTION`` for a device that torch does not know.
    UnavailableError
        ``DEVICE`` if a CUDA device is asked for and there is none.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import numpy as np
    >>> import gear_offline as go
    >>> policy = go.load_policy("runs/tiny", device="cpu")
    >>> policy.reset([0, 1], [7.0, 5.0])
    >>> policy.act(np.ones((2, 3), np.float32)).shape
    (2, 1)
    >>> policy.observe_reward([1.0, 1.0])
    >>> policy.targets.tolist()
    [6.0, 4.0]
    """
    where = resolve_device(device)
    return load_policy_parts(run_or_checkpoint, task).policy(where)


def load_policy_parts(run_or_checkpoint: str | Path, task: str | None = None) -> PolicyParts:
    """Read what it takes to act; the arguments are those of `load_policy`."""
    path = given_path(run_or_checkpoint, "RUN_NOT_FOUND", where="run_or_checkpoint")
    folder = path / "checkpoints"
    if not folder.is_dir():
        return policy_parts(read_checkpoint(find_checkpoint(path), training=False), task)
    newest = newest_checkpoint(folder, lambda message: None, training=False)
    if newest is None:
        what, remedy = "the run has no checkpoint yet", "wait for its first one"
        raise InputError("RUN_NOT_FOUND", what, where=str(path), remedy=remedy)
    return policy_parts(newest, task)


def policy_parts(checkpoint: Checkpoint, task: str | None = None) -> PolicyParts:
    """Return what it takes to act with a checkpoint that was read."""
    recipe, model = checkpoint.recipe, restore_model(checkpoint)
    if task is not None or recipe.data.tasks:
        return task_parts(model, task, recipe)
    scales = recipe.loader.returns_scale, recipe.loader.context_length
    return PolicyParts(model, *checkpoint.state.statistics, *scales, recipe)


def task_parts(model: DecisionTransformer, name: str | None, recipe: Recipe) -> PolicyParts:
    """Return what it takes to act in one task; `name` may be None for a model of one."""
    tasks = tasks_of_config(model.config)
    task = tasks[task_number(model, tasks[0].name if name is None and len(tasks) == 1 else name)]
    moments = (task.state_mean, task.state_std)
    mean, std = (None if value is None else np.array(value) for value in moments)
    scales = task.returns_scale, recipe.loader.context_length
    return PolicyParts(single_task(model, task.name), mean, std, *scales, recipe)


def task_policy(
    model: DecisionTransformer, name: str, recipe: Recipe, device: str | torch.device
) -> Policy:
    """Return the policy of one task; on the model's device it shares the model's blocks."""
    parts = task_parts(model, name, recipe)
    here, there = next(model.parameters()).device, torch.device(device)
    if here.type != there.type or there.index not in (None, here.index):
        parts = parts._replace(model=deepcopy(parts.model))  # or the model's blocks would go along
    return parts.policy(device)


def restore_model(checkpoint: Checkpoint) -> DecisionTransformer:
    """Build the model that a checkpoint holds, in evaluation mode, on the CPU."""
    weights = checkpoint.weights()
    try:
        layers = checkpoint.config["n_layer"]
        if type(layers) is not int or layers > len(weights):
            raise ValueError(f"{layers} layers")
        config = DecisionTransformerConfig.from_dict(dict(checkpoint.config))
        # Without memory first: what a configuration asks for may be more than the machine has.
        with torch.device("meta"):
            wanted = {name: w.shape for name, w in DecisionTransformer(config).state_dict().items()}
        if wanted != {name: w.shape for name, w in weights.items()}:
            raise ValueError("other shapes")
        model = DecisionTransformer(config)
        model.attention = checkpoint.recipe.model.attention
        model.load_state_dict(weights)
    except Exception as error:  # a library's own checks raise what they like
        raise damaged(checkpoint.path, "the weights do not fit the configuration") from error
    model.train(False)
    return model
