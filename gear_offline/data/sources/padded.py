"""Padded arrays of an ``.npz`` file, as JAX code writes them: a row an episode, then its steps.

The steps that are real are said by a number for each episode, or by a mask of its steps.

Shape legend: E episodes, T steps of the arrays, L steps of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.types import Int64Array
from gear_offline.data.sources.columns import some_names
from gear_offline.data.sources.flags import FLAGS
from gear_offline.data.sources.input_files import misfit
from gear_offline.data.sources.npz import LENGTHS, MASKS, Member, find_padding, open_members


def read_padded(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a file of arrays (E, T, ...), T + 1 for observations, or (E,)."""
    _, members = open_members(path)
    if "actions" not in members:
        remedy = "save them as actions, (E, T, ...)"
        raise misfit(f"no actions among {some_names(members)}", path, remedy)
    if not (names := find_padding(members, path)):
        shapes = some_names(f"{name} {array.shape}" for name, array in members.items())
        problem = f"no mask (E, T) or lengths (E,) of arrays (E, T, ...): {shapes}"
        remedy = f"call one of them {MASKS[0]}, as rewards (E, T), or {LENGTHS[0]}"
        raise misfit(problem, path, remedy)
    steps = members["actions"].shape[1]
    lengths = _read_lengths(names[0], members[names[0]], steps, path)
    for name in names[1:]:
        others = _read_lengths(name, members[name], steps, path)
        if (differs := lengths != others).any():
            episode = int(differs.argmax())
            problem = f"episode {episode} has {lengths[episode]} real steps by {names[0]}"
            problem += f", {others[episode]} by {name}"
            raise misfit(problem, path, "leave out the one that is wrong")
    columns = {name: array for name, array in members.items() if name not in names and array.shape}
    for name, array in columns.items():
        is_stepwise = array.shape[1:] == () or array.shape[1] in (steps, steps + 1)
        if array.shape[0] != lengths.size or not is_stepwise:
            problem = f"{name} has shape {array.shape} beside {lengths.size} episodes of {steps}"
            raise misfit(problem, path, "save arrays of one row an episode, then one a step")
    for episode, length in enumerate(lengths.tolist()):
        rows = {n: array.read(episode, episode + 1)[0] for n, array in columns.items()}
        for name, values in rows.items():
            if values.ndim:
                rows[name] = values[: length + values.shape[0] - steps]
            elif name not in FLAGS:  # of the whole episode
                rows[name] = np.full(length, values)
        yield rows


def _read_lengths(name: str, padding: Member, steps: int, path: Path) -> Int64Array:
    """Return the real steps of episodes (E,) by a mask (E, T) or lengths (E,)."""
    values = padding.read(0, padding.shape[0])
    if values.ndim == 1:
        with np.errstate(invalid="ignore"):
            lengths = values.astype(np.int64)
        bad = (lengths != values) | (lengths < 1) | (lengths > steps)
        problem = f"is of {{}} of {steps} steps by {name}"
    elif (odd := values[(values != 0) & (values != 1)]).size:
        problem = f"{name} is no mask: it holds {odd[0]:g}"
        raise misfit(problem, path, "save 1 at steps that are real, 0 behind them")
    else:
        lengths = values.astype(bool).sum(1)
        bad = (values != (np.arange(steps) < lengths[:, None])).any(1) | (lengths < 1)
        problem = f"has a {name} that is not 1 at its first steps and 0 from then on"
    if bad.any():
        episode = int(bad.argmax())
        problem = f"episode {episode} {problem.format(values[episode])}"
        raise misfit(problem, path, "give the steps that are real, from the first one on")
    return lengths
