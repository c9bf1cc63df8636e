"""The shape of a dataset: columns, tables, and the first steps of episodes.

Shape legend: N steps of a table, E episodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.errors import InputError

REWARDS = "rewards"  # the column that returns are sums of
VALUES, ADVANTAGES = "values", "advantages"  # of each step, by a critic
_COLUMN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*(/[A-Za-z0-9_][A-Za-z0-9_.\-]*)*")
MAX_DIMENSIONS = 8
MAX_STEP_BYTES = 64 << 20  # one step of one column; larger is a damaged or hostile shape
COARSE = 1e-4  # between two numbers of a narrower float, where an offset may be too large for it
MOST_CHANNELS = 16  # of a frame
# what LeRobot's datasets call the observations that its environments call so
LEROBOT = {"agent_pos": "state", "pixels": "image"}


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a frame's shape with few channels last: (3, 84, 84) is (84, 84, 3)."""
    is_first = len(shape) == 3 and shape[0] <= MOST_CHANNELS and 2 * shape[0] < min(shape[1:])
    return (*shape[1:], shape[0]) if is_first else shape


@lru_cache
def match_columns(columns: tuple[str, ...], names: tuple[str, ...]) -> Mapping[str, str]:
    """Return the one of `names` that each column is: the same, or with the same last parts.

    ``observation.images.top`` is ``pixels/top``, ``observation.state`` LeRobot's ``agent_pos``.
    A column that none or several fit, or one that fits another too, is left out.
    """

    def last(name: str, count: int = 1) -> list[str]:
        *path, leaf = re.split(r"[/.]", name)
        return [*path, LEROBOT.get(leaf, leaf)][-count:]

    fits = dict[str, list[str]]()
    for column in columns:
        matches = [name for name in names if last(name) == last(column)]
        longer = [name for name in matches if last(name, 2) == last(column, 2)]
        fits[column] = [column] if column in names else longer or matches
    used = [*chain(*fits.values())]
    return {c: fit[0] for c, fit in fits.items() if len(fit) == 1 == used.count(fit[0])}


def is_column_name(name: str) -> bool:
    return _COLUMN_NAME.fullmatch(name) is not None and ".." not in name and len(name) <= 200


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Tell a number or bool that is the same on every machine."""
    return dtype.kind in "biufc" and dtype.char not in "gG"


def is_step_shape(shape: Sequence[int], itemsize: int) -> bool:
    fits = len(shape) <= MAX_DIMENSIONS and all(n > 0 for n in shape)
    return fits and prod(shape) * itemsize <= MAX_STEP_BYTES


@dataclass(frozen=True, kw_only=True)
class ColumnSpec:
    """One field of every step.

    Attributes
    ----------
    name
        Name in the source and in the shards, e.g. ``"observations"`` or ``"infos/qpos"``.
    dtype
        NumPy numeric or bool dtype, native byte order.
    shape
        Shape of one step; ``()`` for scalars such as rewards.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        dtype, problem, remedy = np.dtype(self.dtype), "", ""
        object.__setattr__(self, "dtype", dtype.newbyteorder("="))
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if not is_column_name(self.name):
            problem = "a name that is not allowed"
            remedy = "use letters, digits, '_', '-', '.' and single '/' between parts"
        elif not is_storable(dtype):
            problem = f"dtype {dtype} is not a numeric or bool dtype of a fixed width"
            remedy = "store the column as a NumPy bool, integer, float or complex dtype"
        elif not is_step_shape(self.shape, dtype.itemsize):
            problem = f"per-step shape {self.shape} is not usable"
            remedy = f"use up to {MAX_DIMENSIONS} positive dimensions and at most 64 MiB a step"
        if problem:
            raise InputError("COLUMN", problem, where=f"column {self.name!r}", remedy=remedy)

    def __str__(self) -> str:
        """Name, dtype and shape, e.g. ``observations float32[11]``."""
        return f"{self.name} {self.dtype.name}{list(self.shape) if self.shape else ''}"

    @property
    def step_bytes(self) -> int:
        return int(self.dtype.itemsize) * prod(self.shape)


@dataclass(frozen=True, kw_only=True, repr=False)
class TableSpec:
    """Columns over steps in episodes.

    Attributes
    ----------
    columns
        In the order of the source; no two names are equal or differ by case only.
    steps, episodes
        How many there are, N and E.
    """

    columns: tuple[ColumnSpec, ...]
    steps: int
    episodes: int

    def __post_init__(self) -> None:
        names = [c.name for c in self.columns]
        if len({n.casefold() for n in names}) != len(names):
            problem = f"column names repeat or differ by case only: {names}"
            raise InputError("COLUMN", problem, remedy="rename one of them, or leave it out")

    def __str__(self) -> str:
        """Counts and columns: ``2 episodes, 12 steps: actions float32[1], rewards float32``"""
        episodes, steps = count_text(self.episodes, "episode"), count_text(self.steps, "step")
        return f"{episodes}, {steps}: {', '.join(map(str, self.columns))}"

    def __repr__(self) -> str:
        return f"TableSpec({self})"

    def __iter__(self) -> Iterator[ColumnSpec]:
        return iter(self.columns)

    @cached_property
    def _by_name(self) -> dict[object, ColumnSpec]:
        return {column.name: column for column in self.columns}

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> ColumnSpec:
        if (column := self._by_name.get(name)) is not None:
            return column
        names = [c.name for c in self.columns]
        remedy = f"columns here: {', '.join(names)}"
        if members := "+".join(n for n in names if n.startswith(f"{name}/")):
            remedy += f"; to put its parts together, convert with --columns {name}={members}"
        if name == "observations":
            remedy += "; name one or more of them: loader.observations=[COLUMN, ...]"
        raise InputError("COLUMN", f"no column {name!r}", remedy=remedy)


@dataclass(frozen=True, eq=False, repr=False)
class EpisodeIndex:
    """First steps of episodes: ``offsets[e] <= step < offsets[e + 1]`` belongs to episode ``e``.

    Attributes
    ----------
    lengths
        (E,) int64, steps of each episode, all >= 1.
    histories
        (E,) int64, number of the history that an episode is of, in which it follows those of the
        same number before it; None: each is of its own.
    steps
        N, the steps of all episodes.
    """

    lengths: Int64Array
    histories: Int64Array | None = None
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.ascontiguousarray(self.lengths, dtype=np.int64)
        if lengths.ndim != 1 or (lengths < 1).any():
            raise InputError("SOURCE_LAYOUT", "episode lengths must be a list of numbers >= 1")
        if lengths.sum(dtype=np.float64) >= 2.0**63:
            raise InputError("SOURCE_LAYOUT", "episode lengths add up to more than 2^63 steps")
        lengths.setflags(write=False)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "steps", int(lengths.sum()))

    def __repr__(self) -> str:
        episodes, steps = count_text(self.episodes, "episode"), count_text(self.steps, "step")
        return f"EpisodeIndex({episodes}, {steps})"

    @property
    def episodes(self) -> int:
        """E, the number of episodes."""
        return int(self.lengths.size)

    @cached_property
    def offsets(self) -> Int64Array:
        """(E + 1,) int64, first step of each episode, and N at the end."""
        offsets = np.zeros(self.lengths.size + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        offsets.setflags(write=False)
        return offsets

    @cached_property
    def order(self) -> Int64Array:
        """(E,) int64, the episodes in an order in which those of a history lie side by side."""
        if self.histories is None:
            return np.arange(self.episodes)
        _, firsts, numbers = np.unique(self.histories, return_index=True, return_inverse=True)
        return np.argsort(firsts[numbers], kind="stable")

    @cached_property
    def side_by_side(self) -> EpisodeIndex:
        """The episodes in that order."""
        if self.histories is None:
            return self
        return EpisodeIndex(self.lengths[self.order], self.histories[self.order])

    @cached_property
    def is_side_by_side(self) -> bool:
        """True if the episodes of a history follow each other as they are."""
        return self.histories is None or bool((np.diff(self.order) == 1).all())

    @cached_property
    def rows(self) -> Int64Array:
        """(E,) int64, first step of each episode in that order."""
        rows = np.empty(self.episodes, np.int64)
        rows[self.order] = self.side_by_side.offsets[:-1]
        return rows

    @cached_property
    def reach(self) -> Int64Array:
        """(E,) int64, steps from an episode's first one to the end of its history."""
        if self.histories is None:
            return self.lengths
        _, numbers = np.unique(self.histories, return_inverse=True)
        ends = np.zeros(self.episodes, np.int64)
        np.maximum.at(ends, numbers, self.rows + self.lengths)
        return ends[numbers] - self.rows


def fold_episodes(
    function: np.ufunc, totals: Array, offsets: Int64Array, rows: Array, start: int
) -> None:
    """Update (E,) `totals` with `rows`, the first of which is step `start`: np.add adds them up."""
    first = int(np.searchsorted(offsets, start, side="right")) - 1
    last = int(np.searchsorted(offsets, start + len(rows), side="left"))
    sums = function.reduceat(rows, np.maximum(offsets[first:last] - start, 0))
    totals[first:last] = function(totals[first:last], sums)


def check_advantages(spec: TableSpec, where: str) -> None:
    """Refuse data that have not one advantage a step (``COLUMN``)."""
    column = next((column for column in spec if column.name == ADVANTAGES), None)
    if column is None or prod(column.shape) != 1 or column.dtype.kind == "c":
        problem = f"no column {ADVANTAGES}" if column is None else f"{column} is no number a step"
        remedy = "write them with `gear-offline value DATA OUT --with RUN`, RUN of model iql; or "
        raise InputError("COLUMN", problem, where, f"{remedy}leave loader.condition=return")


def check_whole(histories: Int64Array | None, mask: BoolArray, where: str) -> None:
    """Refuse (``SELECTION``) episodes, (E,) bool, that are some of a history and not all."""
    if histories is not None and (cut := np.intersect1d(histories[mask], histories[~mask])).size:
        of = histories == cut[0]
        problem = f"{mask[of].sum()} of {of.sum()} episodes of history {cut[0]} are chosen"
        remedy = "choose by what is the same in a history, or leave histories out"
        raise InputError("SELECTION", problem, where, remedy)


def parse_episodes(which: npt.ArrayLike, episodes: int) -> Int64Array:
    """Return the numbers of chosen episodes, int64; `which` are numbers or (E,) bool."""
    numbers = np.atleast_1d(np.asarray(which))
    if numbers.dtype == np.bool_ and numbers.shape == (episodes,):
        numbers = np.flatnonzero(numbers)
    if not numbers.size or numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        problem = f"{numbers.dtype} of shape {numbers.shape}" if numbers.size else "none is chosen"
    elif numbers.min() < 0 or numbers.max() >= episodes:
        problem = f"{numbers.min()} to {numbers.max()} are asked for, there are 0 to {episodes - 1}"
    elif np.unique(numbers).size < numbers.size:
        problem = "one is named twice"
    else:
        return numbers.astype(np.int64)
    remedy = f"give numbers from 0 to {episodes - 1}, each once, or {episodes} bools"
    raise InputError("SELECTION", f"not a choice of episodes: {problem}", remedy=remedy)


def is_lost(rows: Array, dtype: npt.DTypeLike) -> bool:
    """Return true if a narrower float `dtype` keeps an episode's rows (T, ...) too coarsely.

    Beside a large offset, 0.0001 or more between two of its numbers, an element of the step has
    less than a thousand of them for its range in the episode.
    """
    dtype = np.dtype(dtype)
    if not rows.dtype.kind == dtype.kind == "f" or rows.dtype.itemsize <= dtype.itemsize:
        return False
    low, high = rows.min(0), rows.max(0)
    with np.errstate(all="ignore"):
        gap = np.spacing(np.maximum(abs(low), abs(high)).astype(dtype)).astype(np.float64)
        is_coarse = (high > low) & (gap >= COARSE) & (1000 * gap > high - low)
    return bool(is_coarse.any())
