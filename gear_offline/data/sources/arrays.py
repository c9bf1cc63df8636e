"""Episodes that a program holds in memory, as a source.

Shape legend: N steps, E episodes, T steps of an episode.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from gear_offline.config.arguments import check_arguments
from gear_offline.config.problems import nearest
from gear_offline.core.text import count_text
from gear_offline.core.types import Array, BoolArray
from gear_offline.data.dataset.dataset import HISTORIES
from gear_offline.data.dataset.schema import is_storable
from gear_offline.data.dataset.shard import byte_view, digest
from gear_offline.data.sources.base import Piece, Source, SourceInfo
from gear_offline.data.sources.columns import common_columns, row_kinds
from gear_offline.data.sources.combine import adapt_columns
from gear_offline.data.sources.episode_ends import judge_ends
from gear_offline.data.sources.flags import FLAGS, MEANING, SCALARS, flag_values
from gear_offline.data.sources.flat import flat_source
from gear_offline.data.sources.input_files import check_kind, misfit
from gear_offline.data.sources.row_marks import BOUNDS, MARK
from gear_offline.errors import InputError, check_environment_id, for_caller

METADATA, HISTORY = "metadata", "history"
OBSERVATIONS, NEXT_OBSERVATIONS = "observations", "next_observations"
ACTIONS, REWARDS = "actions", "rewards"
SAME = "give every episode the same columns, of one shape and dtype: np.asarray(x, np.float32)"
_ONE_EACH = "a mapping of column names to arrays for each episode"
Columns = dict[str, Array]


@check_arguments()
def from_episodes(
    episodes: Iterable[Mapping[str, Any]],
    *,
    name: str = "memory",
    environment: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    history: Sequence[int] | None = None,
) -> Source:
    """Return a source over episodes in memory, to be given to `gear_offline.convert`.

    Parameters
    ----------
    episodes
        One mapping an episode: column name to an array or list of T rows.  ``observations``,
        ``actions`` and ``rewards`` are needed for training; without the first it warns.  A mapping
        in place of an array (Dict observations) becomes a column for each of its parts,
        ``observations/camera``.  ``observations`` of T + 1 rows, as Gymnasium and Minari have
        them, become ``observations`` (the first T) and ``next_observations`` (the last T).

        How an episode ended is said by a flag: ``terminals``, ``terminations``, ``terminated``,
        ``dones`` or ``done``, and ``timeouts``, ``truncations`` or ``truncated``.  A flag of T
        values is a column, and only its last value may be true; one bool is not a column.  An
        episode that did not terminate, or has no flag, counts as truncated.
    name
        For the provenance.
    environment
        Gymnasium id.
    attributes
        Small JSON-able facts for the provenance.
    history
        A whole number for each episode: of the learner, task or operator whose history it goes on.
        It becomes the column ``history``, and the histories of what `convert` makes.

    Raises
    ------
    InputError
        ``SOURCE_LAYOUT`` names the episode and the column that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import gear_offline as go
    >>> episodes = [
    ...     {
    ...         "observations": np.full((steps, 3), steps, np.float32),
    ...         "actions": np.zeros((steps, 1), np.float32),
    ...         "rewards": np.ones(steps, np.float32),
    ...         "terminated": steps == 4,
    ...     }
    ...     for steps in (4, 6)
    ... ]
    >>> source = go.from_episodes(episodes, name="two episodes")
    >>> source.episodes.lengths.tolist(), source.terminated.tolist(), source.truncated.tolist()
    ([4, 6], [True, False], [False, True])
    >>> source.read("rewards", 0, 5).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    check_kind(episodes, Iterable, "episodes", f"give {_ONE_EACH}")
    check_environment_id(environment, where="environment")
    read, terminated, notes = read_episodes(episodes)
    facts = dict(attributes or {})
    if history is not None:
        numbers = np.asarray(history)
        if numbers.shape != (len(read),) or numbers.dtype.kind not in "iu":
            problem = f"history is {numbers.dtype} of shape {numbers.shape}"
            remedy = f"give {len(read)} whole numbers, one an episode"
            raise misfit(problem, remedy=remedy)
        for columns, number in zip(read, numbers, strict=True):
            columns[HISTORY] = np.full(len(next(iter(columns.values()))), number)
        facts[HISTORIES] = HISTORY
    episode_kinds = ((f"episode {n}", row_kinds(columns)) for n, columns in enumerate(read))
    kinds, _ = common_columns(episode_kinds, remedy=SAME)
    if not any(n.split("/")[0] == OBSERVATIONS for n in kinds):
        note = f"no column is named {OBSERVATIONS}, which training takes unless "
        note += f"loader.observations names others: {', '.join(kinds)}"
        notes.append(note + _renames(kinds))
        warnings.warn(for_caller(notes[-1]), stacklevel=2)
    info = SourceInfo(
        uri=name, format="arrays", rule="episodes", environment_id=environment, attributes=facts
    )
    source = Source([Piece.of(rows) for rows in read], kinds, terminated=terminated, info=info)
    source.warn(*notes)
    return source


@check_arguments()
def from_arrays(
    columns: Mapping[str, Any],
    *,
    rule: str | None = None,
    name: str = "memory",
    environment: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Source:
    """Return a source over flat arrays in memory, all episodes one after the other.

    Parameters
    ----------
    columns
        Column name to N rows; as an episode of `from_episodes`, without an additional row.  What
        lies below ``metadata``, as D4RL has it, is no column and goes into the provenance.
    rule
        Where episodes end, as docs/how-to/convert.md says (also what it gives to ``--ends``);
        default the flags that are there.
    name, environment, attributes
        As `from_episodes`.

    Raises
    ------
    InputError
        ``SOURCE_LAYOUT``; ``COLUMN`` when nothing tells where episodes end.

    Examples
    --------
    >>> import numpy as np
    >>> import gear_offline as go
    >>> source = go.from_arrays({"rewards": np.ones(5), "terminals": np.array([0, 0, 1, 0, 0])})
    >>> source.episodes.lengths.tolist(), source.terminated.tolist()
    ([3, 2], [True, False])
    """
    check_kind(columns, Mapping, "columns", "give a mapping of column names to arrays")
    check_environment_id(environment, where="environment")
    values = _flatten(columns, "")
    metadata = {key: values.pop(key) for key in tuple(values) if key.split("/")[0] == METADATA}
    marks = {mark[2]: mark[1] for mark in MARK.finditer(rule or "")}
    names = (name for name, label in marks.items() if label in ("ids", "by") and name in values)
    ids = {name: np.asarray(values[name]) for name in names}
    mark_columns = {k: rows.astype(str) for k, rows in ids.items() if rows.dtype.kind in "OU"}
    arrays = {k: as_rows(value, k, "") for k, value in values.items() if k not in mark_columns}
    mark_columns |= {k: arrays.pop(k) for k in arrays.keys() & marks if marks[k] in BOUNDS}
    _check_rows(arrays, "")
    source = flat_source(
        arrays,
        mark_columns=mark_columns,
        uri=name,
        format="arrays",
        rule=rule,
        environment_id=environment,
        where=name,
        facts={**({METADATA: metadata} if metadata else {}), **(attributes or {})},
    )
    return adapt_columns(source, rule)


def read_episodes(
    episodes: Iterable[Mapping[str, Any]], store: Callable[[Columns], Any] = dict
) -> tuple[list[Any], BoolArray, list[str]]:
    """Apply `store` to the columns of each episode; by default return them as they are.

    Also return which terminated, (E,), and doubts about that.
    """
    read, ends, digests = list[Any](), list[dict[str, bool]](), list[dict[str, str]]()
    for number, episode in enumerate(episodes):
        arrays = read_episode(episode, f"episode {number}")
        ends.append(end_flags(arrays, f"episode {number}"))
        columns = {name: rows for name, rows in arrays.items() if rows.ndim}
        read.append(store(columns))
        if store is dict and isinstance(episodes, Iterator):  # which may fill one array each time
            digests.append({name: _digest(rows) for name, rows in columns.items()})
    for number, before in enumerate(digests):
        for name in (n for n, value in before.items() if _digest(read[number][n]) != value):
            remedy = "yield arrays of its own for each episode: rows.copy()"
            raise _in_column("changed after it was yielded", f"episode {number}", remedy, name)
    if not read:
        raise misfit("there are no episodes", remedy="give at least one")
    names = dict.fromkeys(name for flags in ends for name in flags)
    last = {name: np.array([flags.get(name, False) for flags in ends]) for name in names}
    terminated, notes = judge_ends(last, np.ones(len(read), np.int64), None, where="episodes")
    # who gives episodes gives no rule
    notes = [re.sub("; --rule .*", "; terminated and truncated tell them apart", n) for n in notes]
    if names and (silent := sum(not flags for flags in ends)):
        notes.append(f"{count_text(silent, 'episode')} without a flag: truncated, it is taken")
    return read, terminated, notes


def _digest(rows: Array) -> str:
    return digest(byte_view(np.ascontiguousarray(rows)))


def end_flags(episode: Mapping[str, Any], where: str = "an episode") -> dict[str, bool]:
    """Return the flags at an episode's end; refuse one inside it, and one with a misspelt name."""
    flags = {name: np.atleast_1d(np.asarray(episode[name])) for name in FLAGS if name in episode}
    for name in episode.keys() - flags.keys():
        near = _nearest_flag(name)
        if near and MEANING[near] not in map(MEANING.get, flags):
            raise _in_column("is no flag", where, f"name it {near}, or less alike", name)
    for name, rows in flags.items():
        flags[name] = flag_values(rows, name, where)
        if (inside := np.flatnonzero(flags[name][:-1])).size:
            problem = f"true at step {inside[0]} of {len(rows)}, where the episode goes on"
            raise _in_column(problem, where, "cut the episode there, or rename the column", name)
    return {name: bool(rows[-1:].any()) for name, rows in flags.items()}


@lru_cache(maxsize=4096)
def _nearest_flag(name: str) -> str | None:
    return nearest(name, FLAGS, cutoff=0.85)


def read_episode(episode: Mapping[str, Any], where: str) -> Columns:
    """Return an episode's columns, and flags that are one value."""
    if not isinstance(episode, Mapping):
        raise misfit(f"an episode is a {type(episode).__name__}", where, f"give {_ONE_EACH}")
    arrays = {key: as_rows(value, key, where) for key, value in _flatten(episode, where).items()}
    _split_observations(arrays, where)
    _check_rows({n: rows for n, rows in arrays.items() if rows.ndim or n not in FLAGS}, where)
    return arrays


def _flatten(columns: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings by column name; two of one name are refused."""
    leaves: dict[str, Any] = {}
    for key, value in columns.items():
        name = f"{prefix}{key}"
        below = _flatten(value, where, f"{name}/") if isinstance(value, Mapping) else {name: value}
        for twice in leaves.keys() & below.keys():
            raise _in_column("a column is given twice", where, "give each one once", twice)
        leaves |= below
    return leaves


def as_rows(value: Any, column: str, where: str) -> Array:
    """Return a program's value for a column as an array of numbers."""
    try:
        rows = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of a GPU
        raise _in_column(f"no array: {error}", where, "give arrays of rows", column) from error
    if np.ma.is_masked(value):  # the numbers below a mask mean nothing
        masked = count_text(int(np.ma.getmaskarray(value).sum()), "value")
        raise _in_column(f"{masked} masked", where, "fill them: values.filled(...)", column)
    if not is_storable(rows.dtype):
        remedy = "give numbers or bools, the same shape at every step; leave text out"
        raise _in_column(f"dtype {rows.dtype} is neither numeric nor bool", where, remedy, column)
    return rows[:, 0] if column in SCALARS and rows.shape[1:] == (1,) else rows


def _split_observations(columns: Columns, where: str) -> None:
    """Make (T + 1) observations into observations and next observations, in place."""
    rewards = columns.get(REWARDS, columns.get(ACTIONS))
    names = [n for n in columns if n.split("/")[0] == OBSERVATIONS]
    if rewards is None or rewards.ndim < 1 or not names:
        return
    if any(columns[n].shape[:1] != (len(rewards) + 1,) for n in names):
        return  # as many rows as steps, or an error that `_check_rows` tells
    if any(n.split("/")[0] == NEXT_OBSERVATIONS for n in columns):
        problem = f"observations have {len(rewards) + 1} rows beside next_observations"
        raise misfit(problem, where, "give T rows of each, or T + 1 observations alone")
    for name in names:
        rows = columns[name]
        columns[name] = rows[:-1]
        columns[NEXT_OBSERVATIONS + name.removeprefix(OBSERVATIONS)] = rows[1:]


def _check_rows(columns: Columns, where: str) -> None:
    """Refuse columns that have no rows, or not as many as the rewards."""
    first = REWARDS if REWARDS in columns else next(iter(columns), "")
    for name, rows in columns.items():
        if rows.ndim == 0:
            raise _in_column("one number instead of rows", where, "give a row for each step", name)
    if not first or not len(columns[first]):
        problem = f"{first} has no rows" if first else "there are no columns"
        raise misfit(problem, where, "give at least one step of observations, actions and rewards")
    for name, rows in columns.items():
        if len(rows) != len(columns[first]):
            problem = f"{len(rows)} rows where {first} has {len(columns[first])}"
            raise _in_column(problem, where, f"give one row for each step{_renames(columns)}", name)


def _renames(names: Collection[str]) -> str:
    """Return advice for columns that were probably meant to have a name that is not there."""
    missing = {OBSERVATIONS, ACTIONS, REWARDS} - set(names)
    pairs = [(n, m) for n in names for m in missing if len(n) > 2 and m.startswith(n)]
    return "".join(f"; rename {name} to {meant}" for name, meant in pairs)


def _in_column(problem: str, where: str, remedy: str, column: str) -> InputError:
    return misfit(problem, f"{where}, column {column}".removeprefix(", "), remedy)
