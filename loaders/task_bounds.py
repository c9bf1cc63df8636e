"""What a loader knows of the tasks of a joint dataset: where their episodes begin."""

from __future__ import annotations

import torch
from torch import Tensor

from gear_offline.tables.joint import JointDataset, Source


def task_bounds(dataset: Source, device: torch.device) -> Tensor | None:
    """Return (T - 1,) int64 on `device`, the first episode of each task but the first.

    None for a dataset of one task.
    """
    if not isinstance(dataset, JointDataset) or len(dataset.tasks) == 1:
        return None
    return torch.from_numpy(dataset.first_episodes[1:-1].copy()).to(device)
