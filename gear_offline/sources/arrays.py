"""Episodes that a program holds in memory, as a source: what no file of a known layout has.

Shape legend: N steps, E episodes, T steps of an episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.environment_id import check_environment_id
from gear_offline.core.text import count_text
from gear_offline.dataset.schema import BoolArray, ColumnSpec
from gear_offline.errors import InputError
from gear_offline.sources.base import SourceInfo, legal_names, renaming_warnings
from gear_offline.sources.combine import Piece, PieceSource
from gear_offline.sources.episode_ends import (
    TERMINAL_FLAGS,
    TIME_FLAGS,
    Rule,
    check_rule,
    default_rule,
    find_boundaries,
    terminal_flags,
)

AnyArray = npt.NDArray[Any]

METADATA = "metadata"
OBSERVATIONS, NEXT_OBSERVATIONS, REWARDS = "observations", "next_observations", "rewards"
FLAGS = (*TERMINAL_FLAGS, *TIME_FLAGS)
_BLOCK_ROWS = 1 << 20


@dataclass(frozen=True, eq=False)
class _Columns:
    """Arrays by column name, one row a step."""

    values: Mapping[str, AnyArray]

    def read(self, column: str, start: int, stop: int) -> AnyArray:
        return self.values[column][start:stop]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Episode:
    """One episode: its columns, and how it ended as far as its flags say."""

    columns: dict[str, AnyArray] = field(default_factory=dict)
    steps: int
    terminated: bool
    truncated: bool


def from_episodes(
    episodes: Iterable[Mapping[str, Any]],
    *,
    name: str = "memory",
    environment: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> PieceSource:
    """Return a source over episodes in memory, to be given to `gear_offline.convert.convert`.

    Parameters
    ----------
    episodes
        One mapping an episode: column name to an array or list of T rows.  ``observations``,
        ``actions`` and ``rewards`` are needed for training.  A mapping in place of an array (Dict
        observations) becomes a column for each of its parts, ``observations/camera``.
        ``observations`` of T + 1 rows, as Gymnasium and Minari have them, become ``observations``
        (the first T) and ``next_observations`` (the last T).

        How an episode ended is said by a flag: ``terminals``, ``terminations``, ``terminated``,
        ``dones`` or ``done``, and ``timeouts``, ``truncations`` or ``truncated``.  A flag of T
        values is a column, and its last value counts; one bool is not a column.  An episode that
        has flags and did not terminate counts as truncated; without a flag it is neither.
    name
        For the provenance.
    environment
        Gymnasium id.
    attributes
        Small JSON-able facts for the provenance.

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
    if not isinstance(episodes, Iterable):
        what = f"a {type(episodes).__name__} is given"
        raise _misfit(what, "episodes", "give a mapping of column names to arrays for each episode")
    found = [_episode(number, episode) for number, episode in enumerate(episodes)]
    if not found:
        raise _misfit("there are no episodes", "", "give at least one")
    for number, episode in enumerate(found):
        _check_same(number, episode.columns, found[0].columns)
    columns = [_renamed(episode.columns)[0] for episode in found]
    warnings = _renamed(found[0].columns)[1]
    told = {"warnings": warnings} if warnings else {}
    return PieceSource(
        [
            Piece(rows=_Columns(arrays), first=0, steps=episode.steps)
            for arrays, episode in zip(columns, found, strict=True)
        ],
        _columns_of(columns[0]),
        lengths=[e.steps for e in found],
        terminated=[e.terminated for e in found],
        truncated=[e.truncated for e in found],
        info=_info(name, "episodes", environment, {**(attributes or {}), **told}),
    )


def from_arrays(
    columns: Mapping[str, Any],
    *,
    rule: str | None = None,
    name: str = "memory",
    environment: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> PieceSource:
    """Return a source over flat arrays in memory, all episodes one after the other.

    Parameters
    ----------
    columns
        Column name to N rows; as an episode of `from_episodes`, without an additional row.  What
        lies below ``metadata``, as D4RL has it, is no column and goes into the provenance.
    rule
        Where episodes end, as docs/sources.md says; default the flags that are there.
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
    if not isinstance(columns, Mapping):
        what = f"a {type(columns).__name__} is given"
        raise _misfit(what, "columns", "give a mapping of column names to arrays")
    named = _named(columns, "")
    metadata = {key: named.pop(key) for key in tuple(named) if key.split("/")[0] == METADATA}
    arrays = {key: _scalar_flags(key, _array(value, key, "")) for key, value in named.items()}
    steps = _steps(arrays, "")
    told: dict[str, list[str]] = {"warnings": []}
    if rule is None:
        rule, told["warnings"] = default_rule(
            [flag for flag in FLAGS if flag in arrays], where=name
        )
    parsed = check_rule(rule, list(arrays), where=name)
    ends = find_boundaries(parsed, _flag_blocks(arrays, parsed, steps), steps)
    arrays, renamed = _renamed(arrays)
    told["warnings"] += renamed
    return PieceSource(
        [Piece(rows=_Columns(arrays), first=0, steps=steps)],
        _columns_of(arrays),
        lengths=ends.lengths,
        terminated=ends.terminated,
        truncated=ends.truncated,
        info=_info(name, rule, environment, {**_described(metadata), **(attributes or {}), **told}),
    )


def _described(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return for the provenance what is no column: small values as they are, others by shape."""
    found: dict[str, Any] = {}
    for name, value in metadata.items():
        array = np.asarray(value)
        one = array.item() if array.ndim == 0 else f"{array.dtype} {list(array.shape)}"
        found[name] = one.decode("utf-8", "replace") if isinstance(one, bytes) else one
    return {METADATA: found} if found else {}


def _flag_blocks(
    arrays: Mapping[str, AnyArray], rule: Rule, steps: int
) -> Iterator[tuple[BoolArray, BoolArray]]:
    """Yield what `find_boundaries` goes through."""
    terminals = terminal_flags(rule, list(arrays))
    for start in range(0, steps, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, steps)
        none = np.zeros(stop - start, np.bool_)
        yield (
            np.logical_or.reduce([none, *(arrays[n][start:stop] != 0 for n in rule.flags)]),
            np.logical_or.reduce([none, *(arrays[n][start:stop] != 0 for n in terminals)]),
        )


def _episode(number: int, given: Mapping[str, Any]) -> _Episode:
    where = f"episode {number}"
    if not isinstance(given, Mapping):
        what = f"an episode is a {type(given).__name__}"
        raise _misfit(what, where, "give a mapping of column names to arrays for each episode")
    flags: dict[str, bool] = {}
    columns: dict[str, AnyArray] = {}
    for key, value in _named(given, where).items():
        array = _array(value, key, where)
        if key in FLAGS and array.ndim == 0:
            flags[key] = bool(array)
        else:
            columns[key] = _scalar_flags(key, array)
    _split_observations(columns, where)
    steps = _steps(columns, where)
    flags |= {key: bool(columns[key][-1]) for key in FLAGS if key in columns}
    terminated = any(flags.get(key, False) for key in TERMINAL_FLAGS)
    return _Episode(
        columns=columns,
        steps=steps,
        terminated=terminated,
        truncated=bool(flags) and not terminated,
    )


def _named(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what is given by column name; two of one name are refused."""
    found: dict[str, Any] = {}
    for name, value in _leaves("", given):
        if name in found:
            raise _misfit("a column is given twice", _place(name, where), "give each one once")
        found[name] = value
    return found


def _leaves(prefix: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, part in value.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(part, Mapping):
            yield from _leaves(name, part)
        else:
            yield name, part


def _array(value: Any, column: str, where: str) -> AnyArray:
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of a GPU
        raise _misfit(f"no array: {error}", _place(column, where), "give arrays of rows") from error
    if np.ma.is_masked(value):  # the numbers below a mask mean nothing
        what = f"{count_text(int(np.ma.getmaskarray(value).sum()), 'value')} masked"
        raise _misfit(what, _place(column, where), "fill them: values.filled(...)")
    if found.dtype.kind not in "biufc":
        what = f"dtype {found.dtype} is neither numeric nor bool"
        remedy = "give numbers or bools, the same shape at every step; leave text out"
        raise _misfit(what, _place(column, where), remedy)
    if column in FLAGS:
        wide = found.ndim > 1 and found.shape[1:] != (1,)
        if wide or np.isnan(found).any():
            what = f"a flag of per-step shape {found.shape[1:]}" if wide else "NaN in a flag"
            raise _misfit(what, _place(column, where), "give one true or false for each step")
    return found


def _scalar_flags(column: str, array: AnyArray) -> AnyArray:
    """Read rewards and flags of shape (T, 1) as (T,), as the readers of files do."""
    if column in (REWARDS, *FLAGS) and array.ndim == 2 and array.shape[1] == 1:
        return array[:, 0]
    return array


def _split_observations(columns: dict[str, AnyArray], where: str) -> None:
    """Make (T + 1) observations into observations and next observations, in place."""
    rewards = columns.get(REWARDS)
    names = [n for n in columns if n == OBSERVATIONS or n.startswith(f"{OBSERVATIONS}/")]
    if rewards is None or rewards.ndim < 1 or not names:
        return
    if any(columns[n].ndim < 1 or len(columns[n]) != len(rewards) + 1 for n in names):
        return  # as many rows as steps, or an error that `_steps` tells
    if any(n.split("/")[0] == NEXT_OBSERVATIONS for n in columns):
        what = f"observations have {len(rewards) + 1} rows beside next_observations"
        raise _misfit(what, where, "give T rows of each, or T + 1 observations alone")
    for name in names:
        rows = columns[name]
        columns[name] = rows[:-1]
        columns[NEXT_OBSERVATIONS + name.removeprefix(OBSERVATIONS)] = rows[1:]


def _steps(columns: Mapping[str, AnyArray], where: str) -> int:
    """Return T, the rows that all columns have."""
    flat = next((name for name, rows in columns.items() if rows.ndim == 0), None)
    if flat is not None:
        raise _misfit("one number instead of rows", _place(flat, where), "give a row for each step")
    lead = REWARDS if REWARDS in columns else next(iter(columns), "")
    steps = len(columns[lead]) if lead else 0
    if not steps:
        what = f"{lead} has no rows" if lead else "there are no columns"
        raise _misfit(what, where, "give at least one step of observations, actions and rewards")
    for name, rows in columns.items():
        if len(rows) != steps:
            what = f"{len(rows)} rows where {lead} has {steps}"
            raise _misfit(what, _place(name, where), "give one row for each step")
    return steps


def _columns_of(columns: Mapping[str, AnyArray]) -> tuple[ColumnSpec, ...]:
    return tuple(
        ColumnSpec(name=name, dtype=rows.dtype, shape=rows.shape[1:])
        for name, rows in columns.items()
    )


def _check_same(
    number: int, columns: Mapping[str, AnyArray], wanted: Mapping[str, AnyArray]
) -> None:
    where = f"episode {number}"
    differ = sorted(set(columns) ^ set(wanted))
    if differ:
        what = "is missing" if differ[0] in wanted else "is not in episode 0"
        raise _misfit(f"column {differ[0]} {what}", where, "give every episode the same columns")
    for name, first in wanted.items():
        rows = columns[name]
        if (rows.dtype.newbyteorder("="), rows.shape[1:]) != (
            first.dtype.newbyteorder("="),
            first.shape[1:],
        ):
            raise _misfit(
                f"{rows.dtype} {rows.shape[1:]} a step, episode 0 has {first.dtype} "
                f"{first.shape[1:]}",
                _place(name, where),
                "give every episode the same dtype, "
                "as with numpy.asarray(values, numpy.float32), and shape",
            )


def _renamed(columns: Mapping[str, AnyArray]) -> tuple[dict[str, AnyArray], list[str]]:
    """Return columns under legal names, and what to say of those that had others."""
    names = legal_names(columns)
    return {names[name]: rows for name, rows in columns.items()}, renaming_warnings(names)


def _info(
    name: str, rule: str, environment: str | None, attributes: Mapping[str, Any] | None
) -> SourceInfo:
    if environment is not None:
        check_environment_id(environment, where="environment")
    return SourceInfo(
        uri=name,
        format="arrays",
        rule=rule,
        environment_id=environment,
        attributes=dict(attributes or {}),
    )


def _place(column: str, where: str) -> str:
    return ", ".join(part for part in (where, f"column {column}") if part)


def _misfit(what: str, where: str, remedy: str) -> InputError:
    return InputError("SOURCE_LAYOUT", what, where=where, remedy=remedy)
