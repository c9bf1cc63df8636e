"""Small HDF5 files in D4RL's layouts, and a naive reader that knows nothing of the product's.

The reader goes through the rows one by one and keeps lists: slow, and easy to believe.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from gear_offline.data.sources import Source
from tests.support import iter_episodes

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class NaiveEpisode:
    """First row, the row after the last, and how the episode ended."""

    start: int
    stop: int
    terminated: bool


def table(steps: int, *, seed: int = 0, observations: int = 11, actions: int = 3) -> Columns:
    """Return D4RL's columns without flags; every value is different."""
    rng = np.random.default_rng(seed)
    return {
        "observations": rng.normal(size=(steps, observations)).astype(np.float32),
        "actions": rng.uniform(-1, 1, size=(steps, actions)).astype(np.float32),
        "rewards": rng.normal(size=steps).astype(np.float32),
        "next_observations": rng.normal(size=(steps, observations)).astype(np.float32),
        "infos/qpos": rng.normal(size=(steps, 6)),
        "infos/action_log_probs": rng.normal(size=steps).astype(np.float32),
    }


def write(
    path: Path,
    columns: Mapping[str, Any],
    *,
    attributes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write `columns` to a new HDF5 file; `options` go to ``create_dataset`` of arrays."""
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            array = np.asarray(values)
            file.create_dataset(name, data=values, **(options if array.ndim else {}))
        file.attrs.update(dict(attributes or {}))
    return path


def naive_episodes(
    columns: Mapping[str, Any], ends: Callable[[int, int], bool], *, terminal_counts: bool = True
) -> list[NaiveEpisode]:
    """Return the episodes of a table, whose last rows are those that ``ends(row, step)`` names.

    Unless `terminal_counts`, a terminal flag there does not mean that the environment ended.
    """
    found, start, rows = [], 0, len(columns["rewards"])
    for row in range(rows):
        if ends(row, row - start):
            terminal = terminal_counts and bool(np.ravel(columns["terminals"][row])[0])
            found.append(NaiveEpisode(start, row + 1, terminal))
            start = row + 1
    if start < rows:
        found.append(NaiveEpisode(start, rows, False))
    return found


def assert_same(source: Source, columns: Mapping[str, Any], naive: list[NaiveEpisode]) -> None:
    """Assert that `source` gives exactly the episodes and the bytes of the naive reader."""
    offsets = source.episodes.offsets.tolist()
    assert offsets == [0, *(e.stop for e in naive)]
    assert source.terminated.tolist() == [e.terminated for e in naive]
    assert source.truncated.tolist() == [not e.terminated for e in naive]
    assert {c.name for c in source.spec} == set(columns)
    episodes = list(iter_episodes(source))
    assert len(episodes) == len(naive)
    for episode, rows in zip(naive, episodes, strict=True):
        for name, values in columns.items():
            wanted = np.asarray(values)[episode.start : episode.stop]
            assert rows[name].dtype == wanted.dtype.newbyteorder("="), name
            assert rows[name].tobytes() == wanted.astype(rows[name].dtype).tobytes(), name
