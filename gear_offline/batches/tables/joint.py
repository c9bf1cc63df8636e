"""Several datasets as one table: for one model that learns several tasks.

Nothing is copied on disk.  As rows are read into the table, states are normalised with their own
task's mean and deviation.  Vectors narrower than the widest task's are filled up with zeros, as JAT
does (Gallouedec et al. 2024, arXiv:2402.09844).  From there on tiers, kernels, nodes and
resume know nothing of tasks; the task of a segment follows from the number of its episode.

Shape legend: T tasks, E episodes of all, N steps of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from numbers import Real

import numpy as np

from gear_offline.batches.tables.fields import (
    ACTIONS,
    STATES,
    is_discrete,
    is_image,
    standard_fields,
)
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import REWARDS, ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.data.dataset.shard import digest
from gear_offline.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One of the datasets that a table is built from."""

    name: str  # in the recipe
    dataset: Dataset
    returns_scale: float = 1.0  # divides its returns-to-go, besides the table's own scale


@dataclass(frozen=True, kw_only=True, eq=False)
class JointDataset:
    """Several datasets for one table, one task after the other; `join_datasets` makes it."""

    tasks: tuple[Part, ...]
    spec: TableSpec  # columns as wide as the widest task's; steps and episodes of all

    def __repr__(self) -> str:
        names = ", ".join(task.name for task in self.tasks)
        return f"JointDataset({names}: {self.spec.episodes:,} episodes, {self.spec.steps:,} steps)"

    @cached_property
    def episodes(self) -> EpisodeIndex:
        """Index over the steps of all."""
        return EpisodeIndex(np.concatenate([t.dataset.episodes.lengths for t in self.tasks]))

    @cached_property
    def returns(self) -> Float64Array:
        """(E,) undiscounted sum of rewards of each episode, unscaled."""
        return np.concatenate([task.dataset.returns for task in self.tasks])

    @cached_property
    def terminated(self) -> BoolArray:
        """(E,) True if the environment ended the episode."""
        return np.concatenate([task.dataset.terminated for task in self.tasks])

    @cached_property
    def histories(self) -> Int64Array | None:
        """(E,) number of each episode's history; None where each is of its own."""
        found, count = list[Int64Array](), 0
        for dataset in (task.dataset for task in self.tasks):
            single = np.arange(len(dataset)) if dataset.histories is None else dataset.histories
            found.append(np.unique(single, return_inverse=True)[1] + count)
            count += len(dataset)
        return np.concatenate(found) if any(t.dataset.history_column for t in self.tasks) else None

    def column(self, name: str) -> Array:
        """Return a whole column that every task has in one shape, (N, *shape)."""
        return np.concatenate([task.dataset.column(name) for task in self.tasks])

    def verify(self) -> JointDataset:
        """Return the same with every block of all datasets compared with its digest, once."""
        tasks = tuple(replace(task, dataset=task.dataset.verify()) for task in self.tasks)
        return replace(self, tasks=tasks)

    @cached_property
    def first_episodes(self) -> Int64Array:
        """(T + 1,) int64: first episode of each task in the whole joint table, and E."""
        counts = [task.dataset.episodes.episodes for task in self.tasks]
        return np.cumsum([0, *counts], dtype=np.int64)


TableData = Dataset | JointDataset  # what a table is built from


def parts_of(source: TableData) -> tuple[Part, ...]:
    """Return the datasets of a table, in the order of its episodes (one dataset: a list of one)."""
    if isinstance(source, JointDataset):
        return source.tasks
    return (Part(name=source.name, dataset=source),)


def is_kept(source: TableData, column: str | None) -> bool:
    """Return true if a column's frames stay in videos."""
    return any(column in part.dataset.videos for part in parts_of(source))


def stored_number(source: TableData, episode: int) -> int:
    """Return the number that an episode of a view has in the datasets themselves."""
    if isinstance(source, JointDataset):
        task = int(source.first_episodes.searchsorted(episode, side="right")) - 1
        before = sum(len(part.dataset.whole or part.dataset) for part in source.tasks[:task])
        own = stored_number(source.tasks[task].dataset, episode - int(source.first_episodes[task]))
        return before + own
    return episode if source.numbers is None else int(source.numbers[episode])


def shards_of(tasks: Sequence[Part]) -> list[tuple[Part, int]]:
    """Return all shards in the order of their episodes: the part, and the shard's number in it."""
    return [(task, shard) for task in tasks for shard in range(len(task.dataset.first_steps) - 1)]


def data_name(source: TableData) -> str:
    """Return the name of the data in messages."""
    return "+".join(task.name for task in parts_of(source))


def data_digest(source: TableData) -> str:
    """Return the digest of the data: of a dataset its manifest's."""
    if not isinstance(source, JointDataset):
        # what is normalised by all of a grown dataset is not what its first shards normalise
        measured = source.admissions > 0 and not source.frozen
        view = b"" if source.numbers is None else source.numbers.astype("<i8").tobytes()
        return digest(source.manifest.encode() + b"measured" * measured + view)
    identities = [(t.name, data_digest(t.dataset), float(t.returns_scale)) for t in source.tasks]
    return digest(json.dumps(identities).encode())


def join_datasets(tasks: Sequence[Part]) -> JointDataset:
    """Return several datasets, of different names, as the source of one table."""
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) != len(names):
        raise InputError("LOADER_OPTION", f"tasks need names of their own, got {names}")
    for task in tasks:
        if not isinstance(task.dataset, Dataset):
            problem = f"task {task.name!r}: a {type(task.dataset).__name__} is not one dataset"
            remedy = "give what gear_offline.open_dataset(PATH) returns; of joint ones the tasks"
            raise InputError("LOADER_OPTION", problem, remedy=remedy)
        scale = task.returns_scale
        if not (isinstance(scale, Real) and math.isfinite(scale) and scale > 0):
            problem = f"task {task.name!r}: returns_scale={scale!r} is not usable"
            raise InputError("LOADER_OPTION", problem, remedy="use a positive number")
        standard_fields(task.dataset, normalize_states=False)  # refuses what fits no batch
        if REWARDS not in task.dataset.spec:
            problem = (
                f"the data of task {task.name!r} have no rewards, of which returns are asked for"
            )
            remedy = "leave the task out, or add a column rewards to its source"
            raise InputError("COLUMN", problem, task.dataset.name, remedy)
    specs = {task.name: task.dataset.spec for task in tasks}
    return JointDataset(
        tasks=tuple(tasks),
        spec=TableSpec(
            columns=_joint_columns(specs),
            steps=sum(spec.steps for spec in specs.values()),
            episodes=sum(spec.episodes for spec in specs.values()),
        ),
    )


def _joint_columns(specs: Mapping[str, TableSpec]) -> tuple[ColumnSpec, ...]:
    """Return the standard columns, and others that all tasks share."""
    first, *more_specs = specs.values()
    rewards = np.result_type(*(spec[REWARDS].dtype for spec in specs.values()))
    shared = [
        column
        for column in first
        if column.name not in (STATES, ACTIONS, REWARDS)
        and all(column in tuple(table_spec) for table_spec in more_specs)
    ]
    return (_states(specs), _actions(specs), ColumnSpec(name=REWARDS, dtype=rewards), *shared)


def _states(specs: Mapping[str, TableSpec]) -> ColumnSpec:
    columns = {name: spec[STATES] for name, spec in specs.items()}
    frames = [is_image(column) for column in columns.values()]
    if any(frames) and not (all(frames) and len({c.shape for c in columns.values()}) == 1):
        raise _misfit_error(
            "frames of different shapes, or frames and vectors",
            {name: f"{c.dtype} {c.shape}" for name, c in columns.items()},
            "train them apart, or bring the frames to one shape when the data are made",
        )
    return _widest(list(columns.values()))


def _actions(specs: Mapping[str, TableSpec]) -> ColumnSpec:
    columns = {name: spec[ACTIONS] for name, spec in specs.items()}
    discrete = {name: is_discrete(column) for name, column in columns.items()}
    if len(set(discrete.values())) > 1:
        raise _misfit_error(
            "discrete and continuous actions",
            {name: "discrete" if flag else "continuous" for name, flag in discrete.items()},
            "train tasks with discrete actions in a run of their own",
        )
    if all(discrete.values()) and len({(c.dtype, c.shape) for c in columns.values()}) > 1:
        if any(prod(column.shape) != 1 for column in columns.values()):
            raise _misfit_error(
                "discrete actions of several numbers a step",
                {name: str(column.shape) for name, column in columns.items()},
                "store one number from 0 a step",
            )
        return ColumnSpec(name=ACTIONS, dtype=np.dtype(np.int64))
    return _widest(list(columns.values()))


def _widest(columns: Sequence[ColumnSpec]) -> ColumnSpec:
    """Return a column that holds each of `columns` without loss, as wide as the widest."""
    shapes = {column.shape for column in columns}
    shape = shapes.pop() if len(shapes) == 1 else (max(prod(c.shape) for c in columns),)
    dtype = np.result_type(*(column.dtype for column in columns))
    return ColumnSpec(name=columns[0].name, dtype=dtype, shape=shape)


def _misfit_error(problem: str, kinds: Mapping[str, str], remedy: str) -> InputError:
    listing = ", ".join(f"{name} {text}" for name, text in kinds.items())
    problem = f"tasks with {problem} do not fit one model: {listing}"
    return InputError("COLUMN", problem, where="data.tasks", remedy=remedy)
