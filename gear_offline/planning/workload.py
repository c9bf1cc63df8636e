"""What a plan must know of the data: bytes of a step, shards and how often they are drawn from.

A dataset that is there gives everything; one that does not exist yet is described by its columns,
the length of its episodes and its bytes, so that a cluster can be planned before the data are
collected.

Shape legend: S shards, E episodes, K steps of a window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.config.checks import check_selection
from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import missing_data, open_tasks, recipe_selection
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.distributed.sharding import shard_weights
from gear_offline.errors import InputError
from gear_offline.runs.preparation import ModelSizes
from gear_offline.sampling import Prioritized, Sampler
from gear_offline.tables.fields import is_image
from gear_offline.tables.table import plan_groups

__all__ = ["Described", "Workload", "describe", "make_workload"]

Float64Array = npt.NDArray[np.float64]

SHARD_BYTES = 256 << 20  # as `convert` makes them
MOST_SHARDS = 1 << 20  # that are planned one by one
EPISODES = 4096  # of data that are described rather than there
DISCRETE_ACTIONS = 18  # of the Arcade Learning Environment
_COLUMN = re.compile(r"([\w./-]+)=(\w+)(?:\[([\d,\s]*)\])?")


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """The data of a recipe, as a plan sees them.

    Attributes
    ----------
    source
        A sentence on where this comes from.
    steps, episodes
        Of all data.
    shard_bytes
        (S,) float64: bytes of each shard as rows in memory.
    weights
        (S,) float64, sum 1: how often each shard is drawn from.
    row_bytes
        Bytes of one step in memory.
    window_bytes
        Bytes of the rows of one window of K steps.
    reads
        Reads from a tier for one window: one a group.
    disk_bytes
        Bytes of the shards on disk.
    sizes
        Of states and actions.
    longest
        Steps of the longest episode.
    learns
        The selection learns from losses.
    """

    source: str
    steps: float
    episodes: float
    shard_bytes: Float64Array
    weights: Float64Array
    row_bytes: int
    window_bytes: int
    reads: int
    disk_bytes: float
    sizes: ModelSizes
    longest: int
    learns: bool

    @property
    def table_bytes(self) -> float:
        """Bytes of all rows in memory."""
        return float(self.shard_bytes.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Described:
    """Columns and episodes without rows: enough for the widths of groups.

    Attributes
    ----------
    spec, episodes, checked
        As those of a `gear_offline.dataset.dataset.Dataset`.
    """

    spec: TableSpec
    episodes: EpisodeIndex
    checked: bool = False

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Mean 0 and deviation 1 of each column."""
        shapes = {column.name: column.shape for column in self.spec}
        return {name: _Moments(np.zeros(shape), np.ones(shape)) for name, shape in shapes.items()}

    def read(self, column: str, start: int, stop: int, *, check: bool = False) -> Any:
        """Refuse the rows `start` to `stop` of `column`, whatever `check` says: there are none."""
        raise AssertionError("described data have no rows")


@dataclass(frozen=True)
class _Moments:
    mean: Float64Array
    std: Float64Array


def make_workload(
    recipe: Recipe,
    *,
    data_bytes: int | None = None,
    columns: str | None = None,
    episode_length: int | None = None,
) -> Workload:
    """Return what is known of a recipe's data.

    Parameters
    ----------
    recipe
        Its dataset is opened, unverified, if it exists and no `columns` are given.
    data_bytes
        Bytes of the data in memory; the dataset is taken as a sample of so much.
    columns
        ``"observations=uint8[84,84],actions=int64,rewards=float32"``, for data that do not exist.
    episode_length
        With `columns`: steps of an episode, 1,000 by default.

    Raises
    ------
    InputError
        ``PLAN_DATA``, ``PLAN_COLUMNS``, ``COLUMN_*``, ``SELECTION`` and those of `open_dataset`.
    """
    path = recipe.data.path
    if columns is not None:
        check_selection(recipe, recipe.name)  # of data that are there the law itself is made
        source: Dataset | Described = describe(columns, episode_length or 1000)
        if data_bytes is None:
            raise InputError(
                "PLAN_DATA",
                "columns alone do not say how much data there are",
                where="--columns",
                remedy="add the bytes of all data in memory, such as --data 100TB",
            )
        text = f"{columns}, episodes of {episode_length or 1000:,} steps, as described"
    elif path is not None and Path(path).exists():
        source, text = open_dataset(path, verify=False), f"dataset {path}"
    elif recipe.data.tasks and not missing_data(recipe):
        source = open_tasks(recipe, lambda one: open_dataset(str(one.data.path), verify=False))
        text = f"datasets of {len(recipe.data.tasks)} tasks: {', '.join(recipe.data.tasks)}"
    else:
        path = path or ", ".join(missing_data(recipe))
        raise InputError(
            "PLAN_DATA",
            f"no dataset at {path}" if path else "the recipe names no data",
            where="data.path",
            remedy="make it, or describe it: --columns 'observations=float32[11],"
            "actions=float32[3],rewards=float32' --data 100TB",
        )
    return _measure(recipe, source, text, data_bytes)


def _measure(
    recipe: Recipe, source: Dataset | Described, text: str, data_bytes: int | None
) -> Workload:
    loader = recipe.loader
    groups = plan_groups(
        source,
        normalize_states=loader.normalize_states,
        frame_stack=loader.frame_stack,
    )
    rows = [group.width * group.dtype.itemsize for group in groups]
    histories = [max((f.history for f in group.fields.values()), default=0) for group in groups]
    spans = [
        (loader.context_length + history) * row
        for row, history in zip(rows, histories, strict=True)
    ]
    here = float(source.episodes.steps) * sum(rows)
    scale = 1.0 if data_bytes is None else data_bytes / here
    if data_bytes is not None:
        text = f"{text}, taken for {data_bytes:,} bytes in memory"
    law = None if isinstance(source, Described) else recipe_selection(recipe, source)
    shares, weights = _shards(source, law)
    shares, weights = _multiply(shares, weights, max(here * scale, 1.0))
    return Workload(
        source=text,
        steps=source.episodes.steps * scale,
        episodes=source.episodes.episodes * scale,
        shard_bytes=shares * here * scale,
        weights=weights,
        row_bytes=sum(rows),
        window_bytes=sum(spans),
        reads=len(rows),
        disk_bytes=source.episodes.steps * scale * source.spec.step_bytes,
        sizes=_sizes(source),
        longest=int(source.episodes.lengths.max()),
        learns=_learns_by_name(recipe.selection.model_dump())
        if law is None
        else law.learner is not None,
    )


def _sizes(source: Dataset | Described) -> ModelSizes:
    """Return the model's sizes; discrete actions that are only described are taken for 18."""
    states, actions = source.spec["observations"], source.spec["actions"]
    discrete = actions.dtype.kind in "iub"
    choices = DISCRETE_ACTIONS
    if isinstance(source, Dataset) and discrete:
        choices = int(source.statistics["actions"].max.max()) + 1
    return ModelSizes(
        state_dim=prod(states.shape),
        action_dim=choices if discrete else prod(actions.shape),
        discrete=discrete,
        frame_shape=states.shape if is_image(states) else (),
    )


def _learns_by_name(selection: Mapping[str, Any]) -> bool:
    """Return whether a section that names a strategy, or a part of a mixture, learns from losses.

    A law itself knows, but only data that are there make one.
    """
    parts = selection.get("parts") or selection.get("options", {}).get("parts", ())
    return selection["strategy"] == Prioritized.name or any(map(_learns_by_name, parts))


def _shards(source: Dataset | Described, law: Sampler | None) -> tuple[Float64Array, Float64Array]:
    """Return (S,) shares of the bytes and of the draws by a law, which described data have not."""
    if isinstance(source, Described):
        return np.ones(1), np.ones(1)
    weights = shard_weights(source, None if law is None else law.episode_weight)
    shares = shard_weights(source)
    return shares / shares.sum(), weights / weights.sum()


def _multiply(
    shares: Float64Array, weights: Float64Array, nbytes: float
) -> tuple[Float64Array, Float64Array]:
    """Repeat shards until each has about `SHARD_BYTES`: a dataset taken for a larger one."""
    wanted = min(int(nbytes // SHARD_BYTES), MOST_SHARDS)
    times = max(wanted // len(shares), 1)
    return np.tile(shares, times) / times, np.tile(weights, times) / times


def describe(text: str, episode_length: int) -> Described:
    """Return the columns that a text names, in episodes of one length.

    Parameters
    ----------
    text
        ``"observations=float32[17],actions=float32[6],rewards=float32"``.
    episode_length
        Steps of each episode.

    Raises
    ------
    InputError
        ``PLAN_COLUMNS``, ``COLUMN_*``
    """
    parts = re.split(r",(?![^\[]*\])", text)
    columns = []
    for part in parts:
        match = _COLUMN.fullmatch(part.strip())
        if match is None:
            raise InputError(
                "PLAN_COLUMNS",
                f"{part.strip()!r} is not a column",
                where="--columns",
                remedy="write it like observations=float32[11] or rewards=float32",
            )
        name, dtype, shape = match.groups()
        try:
            kind = np.dtype(dtype)
        except TypeError:
            raise InputError(
                "PLAN_COLUMNS",
                f"{dtype!r} is no NumPy dtype",
                where="--columns",
                remedy="use float32, uint8, int64, ...",
            ) from None
        sizes = tuple(int(size) for size in (shape or "").split(",") if size.strip())
        columns.append(ColumnSpec(name=name, dtype=kind, shape=sizes))
    spec = TableSpec(columns=tuple(columns), steps=EPISODES * episode_length, episodes=EPISODES)
    lengths = np.full(EPISODES, episode_length, np.int64)
    return Described(spec=spec, episodes=EpisodeIndex(lengths))
