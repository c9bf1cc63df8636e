"""The facts of the data for a plan: bytes of a step, shards and how often they are drawn from.

A dataset that is there gives everything; one that does not exist yet is described by its columns
and its bytes.

Shape legend: S shards, K steps of a window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np

from gear_offline.batches.tables.fields import ACTIONS
from gear_offline.batches.tables.joint import TableData, is_kept
from gear_offline.batches.tables.table import TableOptions, plan_groups
from gear_offline.config.recipe import Recipe
from gear_offline.core.types import Float64Array
from gear_offline.data.convert.conversion import SHARD_BYTES
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.distributed.sharding import shard_weights
from gear_offline.errors import InputError
from gear_offline.loaders.options import open_data, open_one, recipe_sampler
from gear_offline.models.base import ModelSizes
from gear_offline.runs.checks import check_selection
from gear_offline.training.model import data_sizes

MOST_SHARDS = 1 << 20  # that are planned one by one
EPISODES, LENGTH = 4096, 1000  # of data that are described rather than there
DISCRETE_ACTIONS = 18  # of the Arcade Learning Environment
EXAMPLE = "'observations=float32[17],actions=float32[6],rewards=float32'"
_COLUMN = re.compile(r"([\w./-]+)=(\w+)(?:\[([\d,\s]*)\])?")


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """The data of a recipe, as a plan sees them."""

    source: str  # where this comes from
    steps: float
    episodes: float
    shard_bytes: Float64Array  # (S,) as rows in memory
    weights: Float64Array  # (S,) sum 1: how often each shard is drawn from
    row_bytes: int  # of one step in memory
    window_bytes: int  # of the rows of one window
    reads: int  # from a tier for one window: one a column group
    sizes: ModelSizes
    longest: int  # steps of the longest episode
    learns: bool  # the sampler learns from losses

    @property
    def table_bytes(self) -> float:
        return float(self.shard_bytes.sum())


def make_workload(
    recipe: Recipe, *, data_bytes: int | None = None, columns: str | None = None
) -> Workload:
    """Return the facts of a recipe's data, scaled to `data_bytes` in memory if given.

    `columns` such as ``"observations=uint8[84,84],actions=int64,rewards=float32"`` stand for data
    that do not exist, with episodes of 1,000 steps.
    """
    loader, described = recipe.loader, columns is not None
    if columns is not None:
        check_selection(recipe, recipe.name)
        if data_bytes is None:
            problem = "columns alone do not say how much data there are"
            remedy = "add the bytes of all data in memory, such as --data 100TB"
            raise InputError("USAGE", problem, "--columns", remedy)
        source: TableData = cast(Dataset, _describe(columns))
        text = f"{columns}, episodes of {LENGTH:,} steps, as described"
        strategies = [entry["strategy"] for entry in recipe.selection.options.get("parts", ())]
        learns = "prioritized" in (recipe.selection.strategy, *strategies)
        shares = weights = np.ones(1)
    else:
        try:
            source = open_data(recipe, partial(open_one, fetches=False))
        except InputError as error:
            if error.code != "DATASET_NOT_FOUND":
                raise
            remedy = f"{error.remedy}; or describe the data: --data 1TB --columns {EXAMPLE}"
            raise InputError(error.code, error.problem, error.where, remedy) from error
        columns_read = (*loader.observations, *loader.extra_columns)
        if kept := [name for name in columns_read if is_kept(source, name)]:
            problem = f"frames of {', '.join(kept)} stay in videos, whose cost is not foretold"
            remedy = "plan for a conversion without --video keep"
            raise InputError("LOADER_OPTION", problem, recipe.data.path or "", remedy)
        text = f"dataset {recipe.data.path}"
        if tasks := recipe.data.tasks:
            text = f"datasets of {len(tasks)} tasks: {', '.join(tasks)}"
        sampler = recipe_sampler(recipe, source)
        learns = sampler.loss_sampler is not None
        shares, weights = shard_weights(source), shard_weights(source, sampler.episode_weight)
    rows, window = 0, 0
    groups = plan_groups(source, TableOptions.of(loader.model_dump()))
    for group in groups:
        row = group.width * group.dtype.itemsize
        history = max((field.history for field in group.fields.values()), default=0)
        steps = loader.context_length + history
        steps += (loader.chunk or 0) * (ACTIONS in group.fields)
        rows, window = rows + row, window + steps * row
    memory_bytes = float(source.episodes.steps) * rows
    if data_bytes is not None:
        text = f"{text}, taken for {data_bytes:,} bytes in memory"
    scale = 1.0 if data_bytes is None else data_bytes / memory_bytes
    choices = DISCRETE_ACTIONS if described else None
    # a dataset taken for a larger one has its shards several times, each of about SHARD_BYTES
    times = max(min(int(memory_bytes * scale // SHARD_BYTES), MOST_SHARDS) // len(shares), 1)
    return Workload(
        source=text,
        steps=source.episodes.steps * scale,
        episodes=source.episodes.episodes * scale,
        shard_bytes=np.tile(shares / shares.sum(), times) / times * memory_bytes * scale,
        weights=np.tile(weights / weights.sum(), times) / times,
        row_bytes=rows,
        window_bytes=window,
        reads=len(groups),
        sizes=data_sizes(source, loader.observations, choices=choices),
        longest=int(source.episodes.lengths.max()),
        learns=learns,
    )


def _describe(text: str) -> SimpleNamespace:
    """Return a stand-in for a dataset of the columns that `text` names."""
    columns = []
    for column_text in re.split(r",(?![^\[]*\])", text):
        match = _COLUMN.fullmatch(column_text.strip())
        try:
            if match is None:
                raise ValueError(column_text)
            name, dtype, shape = match.groups()
            sizes = tuple(int(size) for size in (shape or "").split(",") if size.strip())
            columns.append(ColumnSpec(name=name, dtype=np.dtype(dtype), shape=sizes))
        except (ValueError, TypeError):
            problem = f"{column_text.strip()!r} is not a column and its NumPy dtype"
            remedy = "write it like observations=float32[11] or rewards=float32"
            raise InputError("USAGE", problem, "--columns", remedy) from None
    spec = TableSpec(columns=tuple(columns), steps=EPISODES * LENGTH, episodes=EPISODES)
    unit = {c.name: SimpleNamespace(mean=np.zeros(c.shape), std=np.ones(c.shape)) for c in columns}
    lengths = np.full(EPISODES, LENGTH, np.int64)
    return SimpleNamespace(spec=spec, episodes=EpisodeIndex(lengths), statistics=unit)
