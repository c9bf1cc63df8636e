"""A Decision Transformer of several tasks: an embedding for each task, and its widths.

States and actions of all tasks share the embeddings, each padded with zeros to the widest one, as
in JAT (Gallouedec et al. 2024, arXiv:2402.09844).  Gato (Reed et al. 2022, arXiv:2205.06175) tells
tasks apart by a prompt; here a learned vector of the task is added to each of its tokens.

That vector takes part in the same sum as a timestep's embedding.  So a model of one task can be cut
out exactly: `single_task` moves the vector into the table of timesteps and leaves out the padding.

Shape legend: B windows, T tasks, S state elements, A action elements of the widest task, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from gear_offline.errors import InputError
from gear_offline.models.base import ModelTask, SequenceModel
from gear_offline.models.encoders import InputColumn

TASK_STD = 0.02  # of the initial embeddings, as the released class's own


class TaskEmbedding(nn.Module):
    """Adds a task's embedding to tokens; gives the mask of its action elements.

    `action_dims` are those of each task, `width` that of the widest.
    """

    action_dims: Tensor

    def __init__(self, action_dims: Sequence[int], width: int, hidden_size: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(len(action_dims), hidden_size))
        # Saved, though the configuration has it: loading may make buffers anew without values.
        self.register_buffer("action_dims", torch.tensor(list(action_dims), dtype=torch.int64))
        nn.init.normal_(self.weight, std=TASK_STD)

    def forward(self, tasks: Tensor) -> Tensor:
        """Return (B, 1, 1, H), to be added to the tokens of windows of `tasks`, (B,) int64."""
        return nn.functional.embedding(tasks, self.weight)[:, None, None]

    def valid_actions(self, tasks: Tensor) -> Tensor:
        """Return (B, A) bool: the action elements that the tasks of windows have."""
        elements = torch.arange(self.width, device=tasks.device)
        return elements < self.action_dims[tasks][:, None]


def find_task(model: SequenceModel, name: str | None) -> tuple[int, ModelTask]:
    """Return number and facts of a model's task, None: the only one; `InputError` (``RECIPE``)."""
    tasks = model.facts.tasks
    names = [task.name for task in tasks]
    if name is None and len(tasks) == 1:
        return 0, tasks[0]
    if name not in names:
        several = "the model has several tasks, and none was named"
        problem = several if name is None else f"no task {name!r}"
        remedy = f"say one of {', '.join(names)}: --task, in Python task="
        remedy = remedy if names else "the model was made for one dataset"
        raise InputError("RECIPE", problem, where="model", remedy=remedy)
    return names.index(name), tasks[names.index(name)]


@torch.no_grad()
def single_task(model: SequenceModel, name: str) -> Any:
    """Return the model of one task alone: its own widths, no tasks, the released class's weights.

    Blocks and what else all tasks share are the same tensors as the model's, not copies; the
    embeddings are copies.  The released class loads what ``save_pretrained`` writes of it.
    """
    number, task = find_task(model, name)
    frames = bool(model.config.frame_shape)
    sizes = {"act_dim": task.action_dim} | ({} if frames else {"state_dim": task.state_dim})
    config = model.config.model_copy(update={"tasks": None, **sizes})
    alone: Any = copy(model)
    alone._modules = model._modules.copy()
    alone.config = config
    update: dict[str, object] = {"action_dim": task.action_dim, "tasks": ()}
    if not frames:
        update["state_dim"] = task.state_dim
        update["columns"] = (InputColumn(name="", shape=(task.state_dim,)),)
    alone.facts = model.facts.model_copy(update=update)
    alone.embed_task = None
    alone.embed_state = _cut(model.embed_state, inputs=config.state_dim)
    alone.embed_action = _cut(model.embed_action, inputs=config.act_dim)
    alone.predict_state = _cut(model.predict_state, outputs=config.state_dim)
    head = copy(model.predict_action)
    head._modules = model.predict_action._modules.copy()
    head[0] = _cut(model.predict_action[0], outputs=config.act_dim)
    alone.predict_action = head
    if model.embed_task is not None:
        table = model.embed_timestep.weight + model.embed_task.weight[number]
        rows, width = table.shape
        alone.embed_timestep = nn.Embedding(rows, width, _weight=table)
    return alone


def _cut(layer: nn.Module, *, inputs: int | None = None, outputs: int | None = None) -> nn.Linear:
    """Return a copy of a linear layer that takes or gives the first elements only."""
    assert isinstance(layer, nn.Linear)
    weight = layer.weight[:outputs, :inputs].clone()
    with torch.device("meta"):  # no random numbers are drawn
        cut = nn.Linear(weight.shape[1], weight.shape[0])
    cut.weight, cut.bias = nn.Parameter(weight), nn.Parameter(layer.bias[:outputs].clone())
    return cut
