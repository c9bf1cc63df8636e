"""Append episodes to a dataset that grows: the actor's side."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.config.arguments import check_arguments
from gear_offline.core.files import new_hidden_file, write_all, writing
from gear_offline.core.types import Array, BoolArray
from gear_offline.data.dataset.dataset import HISTORIES
from gear_offline.data.dataset.growing import INCOMING, MAX_PIECE_BYTES, piece_returns, too_large
from gear_offline.data.dataset.manifest import Manifest
from gear_offline.data.dataset.schema import ColumnSpec, EpisodeIndex, channels_last, is_lost
from gear_offline.data.dataset.shard import EPISODE_COLUMNS, digest, encode_header, plan_tensors
from gear_offline.data.sources.arrays import Columns, end_flags, read_episode, read_episodes
from gear_offline.data.sources.episode_ends import judge_ends
from gear_offline.data.sources.flags import TERMINAL_FLAGS, TIME_FLAGS
from gear_offline.errors import InputError, given_path

SUFFIX = ".safetensors"


class Appender:
    """Appends whole episodes to a dataset that a learner trains on.

    Any number of them, in any processes that see the file system: nothing is locked and nobody is
    waited for.  A learner with ``data.admit_every`` admits what was appended between its steps.

    Parameters
    ----------
    path
        Directory of a dataset, whose columns each episode has.
    history
        Number of the history that all its episodes go on, of data with histories; by default each
        episode has that column itself.

    Raises
    ------
    InputError
        ``DATASET_NOT_FOUND``, ``DATASET_DAMAGED``; ``USAGE`` for a history of data without any.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import numpy as np
    >>> import gear_offline as go
    >>> appender = go.Appender("tiny")
    >>> steps = np.zeros((4, 1), np.float32)
    >>> columns = {"observations": np.zeros((4, 3)), "actions": steps, "rewards": steps[:, 0]}
    >>> columns |= {"terminals": np.arange(4) == 3, "timeouts": np.zeros(4, bool)}
    >>> piece = appender.append([columns])
    >>> piece.parent.name
    'incoming'
    """

    @check_arguments()
    def __init__(self, path: str | os.PathLike[str], *, history: int | None = None) -> None:
        self._manifest = Manifest.read(path)
        if self._manifest.videos:
            problem = f"frames of {', '.join(self._manifest.videos)} stay in videos"
            remedy = "episodes come to data whose frames are in the shards: convert it again"
            raise InputError("USAGE", problem, str(path), remedy)
        self._history = history
        self._histories = self._manifest.source.attributes.get(HISTORIES)
        if history is not None and self._histories is None:
            problem, remedy = "the dataset has no histories", "convert it with --histories COLUMN"
            raise InputError("USAGE", problem, str(path), remedy)
        self._folder = given_path(path, "DATASET_NOT_FOUND", where="path").absolute() / INCOMING

    def append(self, episodes: Iterable[Mapping[str, Any]]) -> Path:
        """Append `episodes`, as `gear_offline.from_episodes` takes them, as one piece.

        They are there, whole and written to the disk, when this returns.  Columns that the dataset
        does not have are left out.  Numbers take its dtypes where none is changed by that.  How an
        episode ended may be said by flags of other names.

        Returns
        -------
        Path
            The piece's file, until a learner admits it.

        Raises
        ------
        InputError
            ``COLUMN`` if a column is missing, of another shape, or NaN or infinite;
            ``SOURCE_LAYOUT`` if columns have different numbers of rows.
        GearError
            ``OUTPUT_WRITE``.
        """
        if isinstance(episodes, Mapping):
            raise InputError("SOURCE_LAYOUT", "one episode is given", remedy="give a list of them")
        read, terminated, _ = read_episodes(map(self._cast, episodes))
        content = _encode(self._manifest.spec.columns, read, terminated)
        if len(content) > MAX_PIECE_BYTES:
            raise too_large(len(content), self._folder)
        # Names in the order of time are admitted in that order.
        path = self._folder / f"{time.time_ns():020d}-{digest(content)}{SUFFIX}"
        with writing(path):
            self._folder.mkdir(exist_ok=True)
            # Durable before it has its name: a learner admits only what a power cut leaves.  The
            # name is not synced, which costs as much again and saves only the last seconds' pieces.
            with new_hidden_file(path) as (temporary, file):
                write_all(file.fileno(), content)
                os.fsync(file.fileno())
                temporary.rename(path)
        return path

    def _cast(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dataset's columns in its dtypes, and how the episode ended."""
        specs = {column.name: column for column in self._manifest.columns}
        tops = {prefix for name in specs for prefix in (name, name.split("/")[0])}
        arrays = read_episode({n: v for n, v in episode.items() if n in tops}, "an episode")
        step_columns = {name: rows for name, rows in arrays.items() if rows.ndim}
        steps = len(next(iter(step_columns.values()), ()))
        if self._history is not None and self._histories is not None:
            step_columns[self._histories] = np.full(steps, self._history)
        flags = end_flags(episode)
        if not flags:
            problem, remedy = "an episode does not say how it ended", "give terminated or truncated"
            raise InputError("COLUMN", problem, remedy=f"{remedy}, true or false")
        last = {name: np.array([value]) for name, value in flags.items()}
        terminated = bool(judge_ends(last, np.ones(1, np.int64), None, where="an episode")[0][0])
        limits = [flags[name] for name in TIME_FLAGS if name in flags]
        ends = dict.fromkeys(TERMINAL_FLAGS if {*flags} & {*TERMINAL_FLAGS} else (), terminated)
        ends |= dict.fromkeys(TIME_FLAGS if limits else (), any(limits))
        is_last = np.arange(steps) == steps - 1  # a flag has any of these names
        arrays = {name: is_last & ends[name] for name in specs.keys() & ends.keys()} | step_columns
        columns = {name: _rows(arrays, column) for name, column in specs.items()}
        return columns | {name: value for name, value in flags.items() if name not in columns}


def _rows(episode: Mapping[str, Array], column: ColumnSpec) -> Array:
    if column.name not in episode:
        problem = f"an episode lacks the column {column.name!r}, which the dataset has"
        raise InputError("COLUMN", problem, "", "give it, or convert with fewer --columns")
    values = episode[column.name]
    if values.shape[1:] != column.shape == channels_last(values.shape[1:]):
        values = np.moveaxis(values, 1, -1)  # frames of an environment, as they were converted
    with np.errstate(all="ignore"):
        rows = values.astype(column.dtype, copy=False)
    is_same = np.array_equal(rows, values) if column.dtype.kind in "biu" else True
    is_same &= not is_lost(values, column.dtype)
    if values.shape[1:] != column.shape or not is_same:
        problem = f"{values.dtype} of per-step shape {values.shape[1:]} is given"
        raise InputError("COLUMN", problem, str(column), "give it as the dataset has it")
    if not np.isfinite(rows).all():
        problem, remedy = "NaN or infinity in the data", "leave such an episode out"
        raise InputError("COLUMN", problem, str(column), remedy)
    return rows


def _encode(
    columns: tuple[ColumnSpec, ...], episodes: Sequence[Columns], terminated: BoolArray
) -> memoryview:
    index = EpisodeIndex(lengths=np.array([len(next(iter(e.values()))) for e in episodes]))
    tensors = plan_tensors(columns, steps=index.steps, episodes=index.episodes)
    header = encode_header(tensors)
    content = bytearray(header).ljust(len(header) + tensors[-1].stop)
    values: dict[str, Array] = {}
    for tensor in tensors:
        offset, count = len(header) + tensor.start, math.prod(tensor.shape)
        values[tensor.name] = np.frombuffer(content, tensor.dtype, count, offset)
    for column in columns:
        rows = values[column.name].view(column.dtype).reshape(-1, *column.shape)
        np.concatenate([e[column.name] for e in episodes], out=rows)
    returns = piece_returns(values.get("rewards"), index)
    episode_values = (index.lengths, returns, terminated, ~terminated)
    for column, numbers in zip(EPISODE_COLUMNS, episode_values, strict=True):
        values[column.name][:] = numbers
    return memoryview(content)
