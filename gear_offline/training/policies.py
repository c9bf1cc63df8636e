"""What acts: the policy of a run or of one of its checkpoints, without the optimiser's state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.config.recipe import Recipe
from gear_offline.core.device import resolve_device
from gear_offline.core.types import Float64Array
from gear_offline.errors import given_path
from gear_offline.models.decision_transformer import (
    DecisionTransformer,
    DecisionTransformerConfig,
)
from gear_offline.models.multitask import single_task, task_number, tasks_of_config
from gear_offline.models.policy import Policy
from gear_offline.training.checkpoint import Checkpoint, chosen_checkpoint, damaged

__all__ = ["TrainedModel", "load_policy"]


@dataclass(frozen=True)
class TrainedModel:
    """A model and how its inputs were scaled: what it takes to act."""

    model: DecisionTransformer
    recipe: Recipe
    state_mean: Float64Array | None = None  # (S,) of the training data; None: not normalised
    state_std: Float64Array | None = None  # (S,) the model saw (state - mean) / (std + 1e-6)

    def policy(self, task: str | None = None, device: torch.device | str = "cpu") -> Policy:
        """Return what acts in the task, or in the only one; the model is moved to `device`."""
        model, scale = self.model, self.recipe.loader.returns_scale
        mean: npt.ArrayLike | None = self.state_mean
        std: npt.ArrayLike | None = self.state_std
        tasks = tasks_of_config(model.config)
        if tasks or task is not None:
            name = tasks[0].name if task is None and len(tasks) == 1 else task
            one = tasks[task_number(model, name)]
            model, scale = single_task(model, one.name), one.returns_scale
            mean, std = one.state_mean, one.state_std
        return Policy(
            model,
            state_mean=mean,
            state_std=std,
            returns_scale=scale,
            context_length=self.recipe.loader.context_length,
            device=device,
        )

    def on(self, device: torch.device | str) -> TrainedModel:
        """Return this model if it is on `device`, else a copy: it goes on training where it is."""
        here, device = next(self.model.parameters()).device, torch.device(device)
        if here.type == device.type and device.index in (None, here.index):
            return self
        return replace(self, model=copy_model(self.model, self.model.state_dict()))


def load_policy(
    run_or_checkpoint: str | os.PathLike[str],
    task: str | None = None,
    *,
    checkpoint: str | int | None = None,
    device: str = "auto",
) -> Policy:
    """Return what acts: the policy of a run, which takes raw observations and asked returns.

    Parameters
    ----------
    run_or_checkpoint
        Run directory (its newest whole checkpoint), a checkpoint of it, or its
        ``checkpoints/best``.
    task
        Of a run of several tasks: the one to act in.
    checkpoint
        Of a run: ``"last"`` (the default), ``"best"`` (the highest return while training) or a
        step number.
    device
        ``"auto"`` (CUDA if there is one), or a torch device: ``"cpu"``, ``"cuda:1"``.

    Returns
    -------
    Policy
        See `gear_offline.models.policy.Policy`: `reset`, then `act` and `observe_reward` by turns.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``, ``RUN_DAMAGED``, ``RECIPE`` for a task that the model does not know,
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
    path = given_path(run_or_checkpoint, "RUN_NOT_FOUND", where="run_or_checkpoint")
    return trained_model(chosen_checkpoint(path, checkpoint)).policy(task, where)


def copy_model(model: DecisionTransformer, weights: Mapping[str, Tensor]) -> DecisionTransformer:
    """Return a model of the same kind with `weights`, on the CPU, neither sharded nor compiled."""
    with torch.random.fork_rng(devices=[]):  # weights are drawn before they are set
        copied = DecisionTransformer(model.config)
    copied.attention = model.attention
    copied.load_state_dict(dict(weights))
    return copied


def trained_model(checkpoint: Checkpoint) -> TrainedModel:
    """Return the model of a checkpoint, on the CPU; what does not fit together is damaged."""
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
    return TrainedModel(model, checkpoint.recipe, *checkpoint.state.statistics)
