"""Tables whose columns are datasets of one HDF5 file, one row a step, ends marked by flag columns.

The D4RL and the generic reader differ in names and rules; what they share is here.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.core.text import count_text
from gear_offline.dataset.schema import (
    BoolArray,
    ColumnSpec,
    EpisodeIndex,
    TableSpec,
    is_column_name,
    is_step_shape,
)
from gear_offline.errors import InputError
from gear_offline.sources.base import SourceInfo, source_text
from gear_offline.sources.boundaries import (
    TERMINAL_FLAGS,
    TIME_FLAGS,
    Rule,
    find_boundaries,
    terminal_flags,
)
from gear_offline.sources.hdf5 import Hdf5Rows, some_names
from gear_offline.sources.hdf5_guard import DatasetFacts

SCALARS = ("rewards", *TERMINAL_FLAGS, *TIME_FLAGS)  # (N, 1) is read as one number a step


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which datasets of a file are columns.

    Attributes
    ----------
    columns
        Names, in the order of the table.
    rows
        N.
    left_out
        Datasets that are not columns, and why.
    """

    columns: tuple[str, ...]
    rows: int
    left_out: dict[str, str]


def is_part_of(name: str, column: str) -> bool:
    """Whether dataset `name` is `column` or, for Dict observations, a leaf below it."""
    return name == column or name.startswith(f"{column}/")


def find_columns(
    rows: Hdf5Rows, required: Sequence[str], optional: Sequence[str], *, ignore: str = "metadata"
) -> Layout:
    """Choose the columns of a file.

    Parameters
    ----------
    rows
        The file.
    required, optional
        Columns that must have as many rows as the first required one; the latter may be absent.
        ``observations`` may be a group of leaves.
    ignore
        Group whose datasets are never columns.

    Raises
    ------
    InputError
        ``COLUMN_MISSING``; ``HDF5_LENGTHS`` for unequal lengths and for tables without rows.
    """
    chosen: list[str] = []
    for column in (*required, *optional):
        leaves = sorted(n for n in rows.facts if is_part_of(n, column))
        if not leaves and column in required:
            raise InputError(
                "COLUMN_MISSING",
                f"no dataset {column!r}",
                where=str(rows.path),
                remedy=f"needed: {', '.join(required)}; found: {some_names(rows.facts)}; other "
                f"names: --columns {column}=NAME,...; other layouts: docs/sources.md",
            )
        chosen.extend(leaves)
    lengths = {name: rows.facts[name].rows for name in chosen}
    count = lengths[chosen[0]]
    odd = [name for name, length in lengths.items() if length != count]
    if odd or count < 1:
        what = (
            f"{odd[0]} has {count_text(lengths[odd[0]], 'row')}" if odd else "the table has no rows"
        )
        raise InputError(
            "HDF5_LENGTHS",
            f"{what}{f', {chosen[0]} has {count:,}' if odd else ''}",
            where=str(rows.path),
            remedy="every column needs one row a step: the file is damaged or of another layout",
        )
    left_out: dict[str, str] = {}
    taken = {name.casefold(): name for name in chosen}
    for name, fact in sorted(rows.facts.items()):
        if name in lengths or is_part_of(name, ignore):
            continue
        shape = fact.shape or ()
        if fact.rows != count:
            left_out[name] = f"shape {list(shape)} does not have {count_text(count, 'row')}"
        elif fact.dtype is None or not is_step_shape(shape[1:], fact.dtype.itemsize):
            left_out[name] = f"{fact.type_name} of shape {list(shape)}"
        elif not is_column_name(name):
            left_out[ascii(name)] = "name is not a column name"
        elif (other := taken.setdefault(name.casefold(), name)) != name:
            left_out[name] = f"name differs from {other} by case only"
        else:
            chosen.append(name)
    return Layout(columns=tuple(chosen), rows=count, left_out=left_out)


class FlatSource(Closing):
    """A `Source` over an `Hdf5Rows`; see `gear_offline.sources.base.Source`.

    Parameters
    ----------
    rows
        The open file; owned by the source from here on.
    layout
        Its columns.
    rule
        Boundary rule; its flags must be among the columns.
    info
        Provenance.  ``attributes["warnings"]`` is completed by the caller.

    Raises
    ------
    InputError
        ``RULE_FLAG`` for a rule whose flag the file lacks, the guard's ``HDF5_*`` codes.
    """

    def __init__(self, rows: Hdf5Rows, layout: Layout, rule: Rule, info: SourceInfo) -> None:
        self._rows = rows
        missing = [flag for flag in rule.flags if flag not in layout.columns]
        if missing:
            raise InputError(
                "RULE_FLAG",
                f"boundary rule {rule.text!r} needs the column {missing[0]!r}",
                where=str(rows.path),
                remedy=f"columns here: {', '.join(layout.columns)}",
            )
        self.storage_warnings = rows.admit(layout.columns)
        specs: list[ColumnSpec] = [rows.spec(n, scalar=n in SCALARS) for n in layout.columns]
        self._flat = {s.name for s in specs if not s.shape}
        found = find_boundaries(rule, self._flag_blocks(rule, layout), layout.rows)
        self.episodes = EpisodeIndex(found.lengths)
        self.terminated: BoolArray = found.terminated
        self.truncated: BoolArray = found.truncated
        self.tail_steps = found.tail_steps
        self.spec = TableSpec(
            columns=tuple(specs), steps=layout.rows, episodes=self.episodes.episodes
        )
        self.info = info

    def _flag_blocks(self, rule: Rule, layout: Layout) -> Iterator[tuple[BoolArray, BoolArray]]:
        """Yield (n,) bool: rows that end an episode, rows that bear the terminal flag."""
        terminals = terminal_flags(rule, layout.columns)
        names = {*rule.flags, *terminals}
        block = max((self._rows.preferred_rows(n) for n in names), default=1 << 20)
        for start in range(0, layout.rows, block):
            stop = min(start + block, layout.rows)
            flags = {name: self._read_flag(name, start, stop) for name in sorted(names)}
            none = np.zeros(stop - start, dtype=np.bool_)
            yield (
                np.logical_or.reduce([none, *(flags[n] for n in rule.flags)]),
                np.logical_or.reduce([none, *(flags[n] for n in terminals)]),
            )

    def _read_flag(self, name: str, start: int, stop: int) -> BoolArray:
        """Return rows of a flag column as (n,) bool; any number but 0 is true."""
        values = self.read(name, start, stop)
        bad = np.flatnonzero(values != values)
        if bad.size:
            raise InputError(
                "HDF5_VALUE",
                f"the flag {name} is NaN at row {start + int(bad[0])}",
                where=str(self._rows.path),
                remedy="the file is damaged: get it again",
            )
        return np.asarray(values != 0, dtype=np.bool_)

    def __repr__(self) -> str:
        return source_text(self)

    @property
    def facts(self) -> Mapping[str, DatasetFacts]:
        """What the file holds, by name."""
        return self._rows.facts

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        rows = self._rows.read(column, start, stop)
        return rows.reshape(stop - start) if column in self._flat else rows

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage (a multiple of its chunks); at least 1."""
        return self._rows.preferred_rows(column)

    def close(self) -> None:
        """Release the file; reading afterwards raises ValueError."""
        self._rows.close()
