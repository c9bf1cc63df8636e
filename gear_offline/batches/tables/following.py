"""Extra columns of what follows a step: the next state, and how the episode ends there.

These are extra columns that are in no file: ``next_states`` are the states after each step, as
``batch.states`` holds them; ``terminated`` is true at the last step of an episode that the
environment ended, not of one that was cut; ``has_next`` is true where the next state is known.
At an episode's last step it is known if the data store ``next_observations``; elsewhere it is zero.
So is a step's number in its episode, `STEPS`, where windows reach over the ends of episodes.

Shape legend: n steps of a shard, S state elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gear_offline.batches.tables.fields import EXTRA, to_float32
from gear_offline.core.types import Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.kernels.columns import Field, final_values

NEXT_STATES, TERMINATED, HAS_NEXT = "next_states", "terminated", "has_next"
STEPS = "/timesteps"  # the name of no column
FOLLOWING = {NEXT_STATES, TERMINATED, HAS_NEXT, STEPS}


def following_field(name: str, states: Sequence[Field]) -> Field:
    """Return the field of an extra column of `FOLLOWING`, of data with such states."""
    if name == STEPS:
        return Field(name="timesteps", dtype=np.dtype(np.int64), shape=())
    if name != NEXT_STATES:
        return Field(name=EXTRA + name, dtype=np.dtype(np.bool_), shape=())
    if len(states) > 1 or states[0].dtype != np.float32 or states[0].history:
        problem = "next_states are of one column of vectors"
        remedy = "use windows of one step more, whose states they are, or one column of vectors"
        raise InputError("LOADER_OPTION", problem, "loader.extra_columns", remedy)
    return Field(name=EXTRA + name, dtype=states[0].dtype, shape=states[0].shape)


def following_rows(dataset: Dataset, shard: int, name: str, states: Field, column: str) -> Array:
    """Return a column of `FOLLOWING` for the steps of a shard: (n, S) float32, else (n, 1)."""
    base, end = dataset.first_steps[shard : shard + 2].tolist()
    offsets = dataset.episodes.offsets
    low, high = np.searchsorted(offsets, [base, end])
    lasts = offsets[low + 1 : high + 1] - 1 - base
    if name == STEPS:
        firsts, counts = offsets[low:high], dataset.episodes.lengths[low:high]
        return (np.arange(base, end) - firsts.repeat(counts))[:, None]
    stored = next_column(dataset, column)
    if name == NEXT_STATES:
        rows = np.concatenate([each.copy() for _, each in dataset.stream(shard, stored or column)])
        if states.mean is not None:
            rows = final_values(rows.reshape(len(rows), *states.shape), states)
        else:
            rows = to_float32(rows, stored or column, base)
        rows = rows.reshape(len(rows), -1)
        if stored is None:
            rows = np.roll(rows, -1, axis=0)
            rows[lasts] = 0.0
        return rows
    flags = np.full((end - base, 1), name == HAS_NEXT)
    if name == TERMINATED:
        flags[lasts, 0] = dataset.terminated[low:high]
    elif stored is None:
        flags[lasts] = False
    return flags


def next_column(dataset: Dataset, column: str) -> str | None:
    """Return the stored column of what `column` is after each step; None: there is none."""
    names = {spec.name: spec for spec in dataset.spec}
    after = names.get(f"next_{column}")
    return after.name if after is not None and after.shape == names[column].shape else None
