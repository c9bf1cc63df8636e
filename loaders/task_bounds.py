"""What a loader knows of the tasks of a joint dataset: where their episodes begin."""

from __future__ import annotations

import torch
from torch import Tensor

from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.tables.joint import JointDataset


def task_bounds(dataset: Dataset, device: torch.device, *, normalized: bool) -> Tensor | None:
    """Return (T - 1,) int64 on `device`, the first episode of each task but the first.

    None for a dataset of one task.

    Raises
    ------
    InputError
        ``LOADER_OPTION`` if the loader shall normalise a joint table as a whole: its tasks'
        states are unlike each other.
    """
    if not isinstance(dataset, JointDataset):
        return None
    if normalized:
        raise InputError(
            "LOADER_OPTION",
            "normalize_states=True is not usable with a joint dataset",
            remedy="say it to join_datasets, which normalises each task by itself",
        )
    if len(dataset.tasks) == 1:
        return None
    return torch.from_numpy(dataset.first_episodes[1:-1].copy()).to(device)
