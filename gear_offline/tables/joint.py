"""Several datasets as one table: for one model that learns several tasks.

A `JointDataset` is a dataset whose shards are those of all its tasks, one task after the other.
Nothing is copied on disk: rows are padded, and states normalised with their own task's mean and
deviation, while they are read into the table.  From there on tiers, kernels, nodes and resume know
nothing of tasks; the task of a segment follows from the number of its episode.

Shape legend: T tasks, E episodes of all, N steps of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.types import Float64Array, Int64Array
from gear_offline.dataset.dataset import Dataset
from gear_offline.dataset.manifest import Manifest, ShardRecord, SourceRecord, shard_name
from gear_offline.dataset.schema import EpisodeIndex, TableSpec
from gear_offline.dataset.shard import digest
from gear_offline.dataset.shard_reader import ShardReader
from gear_offline.dataset.statistics import distribution
from gear_offline.errors import InputError
from gear_offline.kernels.columns import Array, Field
from gear_offline.tables.fields import STATES, is_image, standard_fields
from gear_offline.tables.joint_fields import PartColumn, joint_spec, joint_statistics, part_columns

__all__ = ["JointDataset", "Task", "join_datasets"]

READ_ROWS_BYTES = 8 << 20  # of a task's rows that are padded at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One task of a joint table.

    Attributes
    ----------
    name
        In the recipe.
    dataset
        Its own.
    returns_scale
        Its returns-to-go are divided by this.
    """

    name: str
    dataset: Dataset
    returns_scale: float = 1.0


class PaddedReader:
    """Reads one shard of a task as rows of the joint table.

    Parameters
    ----------
    reader
        Of the task's shard.
    columns
        How each column becomes a joint one.
    """

    def __init__(self, reader: ShardReader, columns: Mapping[str, PartColumn]) -> None:
        self._reader, self._columns = reader, columns
        self._held: dict[str, Array] = {}

    def read(self, column: str, out: Array) -> None:
        """Fill C-contiguous `out`, (n, *joint shape), with the next n rows of a column."""
        way = self._columns[column]
        if way.is_same:
            self._reader.read(column, out.reshape(len(out), *way.source.shape))
            return
        rows = max(READ_ROWS_BYTES // way.source.step_bytes, 1)
        for start in range(0, len(out), rows):
            part = out[start : start + rows]
            held = self._held.get(column)
            if held is None or len(held) < len(part):
                held = np.empty((len(part), *way.source.shape), way.source.dtype)
                self._held[column] = held
            values = held[: len(part)]
            self._reader.read(column, values)
            way.put(values, part)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JointDataset(Dataset):
    """Several datasets as one; `join_datasets` makes it.

    Attributes
    ----------
    tasks
        In the order of their episodes.
    normalized
        Whether the observations are given normalised, each task with its own statistics.
    origin
        Of each shard, by its name here: its task, and its number in that task's dataset.
    """

    tasks: tuple[Task, ...]
    normalized: bool
    origin: Mapping[str, tuple[int, int]]

    def __repr__(self) -> str:
        names = ", ".join(task.name for task in self.tasks)
        return f"JointDataset({names}: {self.spec.episodes:,} episodes, {self.spec.steps:,} steps)"

    @property
    def task_names(self) -> tuple[str, ...]:
        """In the order of `tasks`."""
        return tuple(task.name for task in self.tasks)

    @cached_property
    def first_episodes(self) -> Int64Array:
        """(T + 1,) int64: first episode of each task in the whole joint table, and E."""
        counts = [task.dataset.episodes.episodes for task in self.tasks]
        return np.cumsum([0, *counts], dtype=np.int64)

    @property
    def returns_scales(self) -> tuple[float, ...]:
        """What the returns-to-go of each shard are divided by."""
        return tuple(self._task_of(shard.name).returns_scale for shard in self.manifest.shards)

    @cached_property
    def _ways(self) -> list[dict[str, PartColumn]]:
        columns = self.spec.columns
        return [
            part_columns(task.dataset.spec, columns, _states_field(task, self.normalized))
            for task in self.tasks
        ]

    def _task_of(self, name: str) -> Task:
        return self.tasks[self.origin[name][0]]

    def read(self, column: str, start: int, stop: int, *, check: bool = False) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape).

        `check` and errors are as in `Dataset.read`.
        """
        spec = self.spec[column]
        if not 0 <= start <= stop <= self.spec.steps:
            raise InputError(
                "SELECTION",
                f"steps [{start}, {stop}) are not in [0, {self.spec.steps})",
                where=f"column {column}",
            )
        found = np.empty((stop - start, *spec.shape), spec.dtype)
        firsts = self.first_steps.tolist()
        for index, shard in enumerate(self.manifest.shards):
            low, high = max(start, firsts[index]), min(stop, firsts[index + 1])
            if low >= high:
                continue
            task, number = self.origin[shard.name]
            part = self.tasks[task].dataset
            shift = int(part.first_steps[number]) - firsts[index]
            rows = part.read(column, low + shift, high + shift, check=check)
            self._ways[task][column].put(rows, found[low - start : high - start])
        return found

    def column(self, name: str) -> Array:
        """Return the whole column `name`, (N, *shape)."""
        return self.read(name, 0, self.spec.steps, check=self.checked)

    def verify(
        self, *, threads: int | None = None, on_progress: Callable[[int], None] = lambda n: None
    ) -> JointDataset:
        """Return the tasks with every block compared with its digest; as `Dataset.verify`."""
        if self.verified:
            return self
        tasks = [replace(task, dataset=task.dataset.verify(threads=threads)) for task in self.tasks]
        return replace(self, tasks=tuple(tasks), verified=True)

    @contextmanager
    def reader(self, index: int, columns: Iterable[str], *, check: bool) -> Iterator[Any]:
        """Open shard `index` to read padded `columns` of it from the first row to the last.

        `check` and errors are as in `Dataset.reader`.
        """
        task, number = self.origin[self.manifest.shards[index].name]
        with self.tasks[task].dataset.reader(number, columns, check=check) as opened:
            yield PaddedReader(opened, self._ways[task])


def join_datasets(tasks: Sequence[Task], *, normalize_states: bool = False) -> JointDataset:
    """Return several datasets as one table.

    Parameters
    ----------
    tasks
        At least one; names differ.
    normalize_states
        Normalise observations with the mean and deviation of their own task's dataset.  Pass
        ``normalize_states=False`` to the loader then.

    Raises
    ------
    InputError
        ``TASK_MIXED``, ``NORMALIZE_IMAGES``, ``COLUMN``, ``COLUMN_KIND``; ``TASK_NAMES``,
        ``DATASET_NOT_FOUND``, ``TASK_SCALE``.
    """
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) != len(names):
        raise InputError("TASK_NAMES", f"tasks need names of their own, got {names}")
    for task in tasks:
        _check_task(task)
    for task in tasks:  # refuses what does not fit a batch, and frames that shall be normalised
        standard_fields(task.dataset, normalize_states=normalize_states)
    parts = [task.dataset for task in tasks]
    specs = {task.name: task.dataset.spec for task in tasks}
    columns = joint_spec(specs, normalize_states=normalize_states)
    index = EpisodeIndex(lengths=np.concatenate([part.episodes.lengths for part in parts]))
    returns = np.concatenate([part.returns for part in parts])
    shards: list[ShardRecord] = []
    origin: dict[str, tuple[int, int]] = {}
    for number, part in enumerate(parts):
        for place, shard in enumerate(part.manifest.shards):
            name = shard_name(len(shards))
            shards.append(shard.model_copy(update={"name": name}))
            origin[name] = (number, place)
    manifest = Manifest(
        spec=TableSpec(columns=columns, steps=index.steps, episodes=index.episodes),
        block_bytes=parts[0].manifest.block_bytes,
        shards=tuple(shards),
        statistics={
            c.name: joint_statistics([part.statistics[c.name] for part in parts], c)
            for c in columns
        },
        returns=distribution(returns),
        lengths=distribution(index.lengths, whole=True),
        terminated=sum(part.manifest.terminated for part in parts),
        truncated=sum(part.manifest.truncated for part in parts),
        environment_id=None,
        reference_scores=None,
        source=_source(tasks, normalize_states),
    )
    returns.setflags(write=False)
    return JointDataset(
        path=Path("+".join(names)),
        manifest=manifest,
        episodes=index,
        terminated=np.concatenate([part.terminated for part in parts]),
        truncated=np.concatenate([part.truncated for part in parts]),
        returns=returns,
        verified=all(part.verified for part in parts),
        identities=tuple(one for part in parts for one in part.identities),
        tasks=tuple(tasks),
        normalized=normalize_states,
        origin=origin,
    )


def _check_task(task: Task) -> None:
    if not isinstance(task.dataset, Dataset) or isinstance(task.dataset, JointDataset):
        kind = type(task.dataset).__name__
        raise InputError(
            "DATASET_NOT_FOUND",
            f"task {task.name!r}: a {kind} is not one dataset",
            remedy="give what gear_offline.open_dataset(PATH) returns; of joint ones their tasks",
        )
    scale = task.returns_scale
    if not (isinstance(scale, Real) and math.isfinite(scale) and scale > 0):
        raise InputError(
            "TASK_SCALE",
            f"task {task.name!r}: returns_scale={scale!r} is not usable",
            remedy="use a positive number",
        )


def _source(tasks: Sequence[Task], normalized: bool) -> SourceRecord:
    """Say what the joint table is made of: its digest in a loader's state depends on it."""
    made = [
        {
            "name": task.name,
            "dataset": digest(task.dataset.manifest.encode()),
            "returns_scale": np.asarray(task.returns_scale).item(),  # also of NumPy's numbers
        }
        for task in tasks
    ]
    return SourceRecord(
        uri="+".join(task.name for task in tasks),
        format="joint",
        rule="as each task's",
        attributes={"tasks": made, "normalized": normalized},
    )


def _states_field(task: Task, normalized: bool) -> Field | None:
    if not normalized:
        return None
    return standard_fields(task.dataset, normalize_states=True)[STATES]


def state_moments(task: Task) -> tuple[Float64Array, Float64Array]:
    """Return mean and deviation of a task's states, (S,) float64."""
    found = task.dataset.statistics[STATES]
    return found.mean.ravel(), found.std.ravel()


def tasks_of(dataset: Dataset) -> tuple[Task, ...]:
    """Return the tasks of a joint dataset; none of any other."""
    return dataset.tasks if isinstance(dataset, JointDataset) else ()


def has_frames(dataset: Dataset) -> bool:
    """Return whether states are frames."""
    return is_image(dataset.spec[STATES])


def in_memory_only(what: str, remedy: str) -> InputError:
    """Return the error ``TASK_TIER``."""
    return InputError(
        "TASK_TIER",
        f"{what} is not possible with several tasks, whose files hold rows of different widths",
        where="data.tasks",
        remedy=remedy,
    )
