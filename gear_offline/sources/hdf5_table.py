"""An HDF5 file as a source: its datasets are columns, one row a step, ends marked by flag columns.

A file is in one of D4RL's layouts, or in the generic one with explicit end flags.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.dataset.schema import (
    BoolArray,
    ColumnSpec,
    EpisodeIndex,
    TableSpec,
    is_step_shape,
)
from gear_offline.errors import InputError
from gear_offline.sources.base import Source, SourceInfo, legal_names, renaming_warnings
from gear_offline.sources.d4rl import D4rlFile, looks_like_d4rl
from gear_offline.sources.episode_ends import (
    TERMINAL_FLAGS,
    TIME_FLAGS,
    Rule,
    check_rule,
    default_rule,
    find_boundaries,
    terminal_flags,
)
from gear_offline.sources.hdf5 import Hdf5Column, Hdf5File, some_names

FLAGS = (*TERMINAL_FLAGS, *TIME_FLAGS)
SCALARS = ("rewards", *FLAGS)  # (N, 1) is read as one number a step
REQUIRED = ("observations", "actions", "rewards")
_FLAG_ROWS = 1 << 20


class Hdf5Source(Source):
    """A `Source` over the columns of one file, of which nothing is open between reads."""

    def __init__(
        self,
        columns: Mapping[str, Hdf5Column],
        rows: int,
        rule: Rule,
        info: SourceInfo,
    ) -> None:
        self._columns = columns
        ends = find_boundaries(rule, self._flag_blocks(rule, rows), rows)
        self.tail_steps = ends.tail_steps
        self.episodes = EpisodeIndex(ends.lengths)
        self.terminated: BoolArray = ends.terminated
        self.truncated: BoolArray = ends.truncated
        self.spec = TableSpec(
            columns=tuple(
                ColumnSpec(name=name, dtype=column.dtype, shape=column.shape[1:])
                for name, column in columns.items()
            ),
            steps=rows,
            episodes=self.episodes.episodes,
        )
        self.info = info

    def _flag_blocks(self, rule: Rule, rows: int) -> Iterator[tuple[BoolArray, BoolArray]]:
        """Yield (n,) bool: rows that end an episode, rows that bear the terminal flag."""
        terminals = terminal_flags(rule, list(self._columns))
        names = sorted({*rule.flags, *terminals})
        block = max((self._columns[name].preferred_rows for name in names), default=_FLAG_ROWS)
        for start in range(0, rows, block):
            stop = min(start + block, rows)
            flags = {name: self._read_flag(name, start, stop) for name in names}
            none = np.zeros(stop - start, np.bool_)
            yield (
                np.logical_or.reduce([none, *(flags[n] for n in rule.flags)]),
                np.logical_or.reduce([none, *(flags[n] for n in terminals)]),
            )

    def _read_flag(self, name: str, start: int, stop: int) -> BoolArray:
        """Return rows of a flag column as (n,) bool; any number but 0 is true."""
        values = self._columns[name].read(start, stop)
        invalid = np.flatnonzero(values != values)
        if invalid.size:
            raise InputError(
                "SOURCE_LAYOUT",
                f"the flag {name} is NaN at row {start + int(invalid[0])}",
                remedy="store one true or false for each step",
            )
        return np.asarray(values != 0, np.bool_)

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        return self._columns[column].read(start, stop)

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage (a multiple of its chunks); at least 1."""
        return self._columns[column].preferred_rows


def open_hdf5(
    path: Path, *, uri: str, name: str, rule: str | None, names: Mapping[str, str] | None = None
) -> Hdf5Source:
    """Open an HDF5 file of D4RL's or the generic layout.

    Parameters
    ----------
    path
        The file.
    uri
        What the user asked for.
    name
        Dataset or file name that tells D4RL's family.
    rule
        Boundary rule in place of the layout's own.
    names
        Column name to the dataset, or group of datasets, that gets it.
    """
    with Hdf5File(path.absolute(), names=names) as file:
        known = ("terminals", "timeouts") if looks_like_d4rl(file.datasets) else FLAGS
        flags = [flag for flag in known if flag in file.datasets]
        layout = find_columns(file, ("next_observations", *flags))
        attributes = file.attributes()
        environment = attributes.get("env_id")
        d4rl = None
        warnings: list[str] = []
        if looks_like_d4rl(file.datasets):
            d4rl = D4rlFile.detect(name, attributes, file.datasets)
            chosen = d4rl.rule if rule is None else rule
            environment = d4rl.environment
        elif rule is None:
            chosen, warnings = default_rule(flags, where=str(path))
        else:
            chosen = rule
        parsed = check_rule(chosen, layout.columns, where=str(path))
        renamed = legal_names(layout.columns)
        columns = {renamed[old]: file.column(old, scalar=old in SCALARS) for old in layout.columns}
        source = Hdf5Source(
            columns,
            layout.rows,
            parsed,
            SourceInfo(
                uri=uri,
                format="d4rl" if d4rl else "hdf5",
                rule=chosen,
                environment_id=environment if isinstance(environment, str) else None,
                reference_name=d4rl.reference if d4rl else None,
                files=(file.path,),
                opened=(file.identity,),
            ),
        )
        if d4rl:
            warnings = d4rl.warnings(source, source.tail_steps, overridden=rule is not None)
        facts = {
            "attributes": attributes,
            "metadata": file.metadata(),
            "left_out": layout.left_out,
            "unfinished_tail_steps": source.tail_steps,
            "warnings": file.warnings + renaming_warnings(renamed) + warnings,
        }
    source.info = replace(source.info, attributes={**(d4rl.attributes if d4rl else {}), **facts})
    return source


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which datasets of a file are columns, in the order of the table; others, and why not."""

    columns: tuple[str, ...]
    rows: int
    left_out: dict[str, str]


def find_columns(file: Hdf5File, optional: Sequence[str]) -> Layout:
    """Choose the columns of a file: those that are needed, and all others with as many rows.

    `optional` ones must have as many rows if they are there.
    """
    chosen: list[str] = []
    for column in (*REQUIRED, *optional):
        # of Dict observations the leaves
        leaves = sorted(n for n in file.datasets if n == column or n.startswith(f"{column}/"))
        if not leaves and column in REQUIRED:
            raise InputError(
                "COLUMN",
                f"no dataset {column!r}",
                where=str(file.path),
                remedy=f"needed: {', '.join(REQUIRED)}; found: {some_names(file.datasets)}; other "
                f"names: --columns {column}=NAME,...; other layouts: docs/sources.md",
            )
        chosen.extend(leaves)
    lengths = {name: file.datasets[name].rows for name in chosen}
    count = lengths[chosen[0]]
    misfits = [name for name, length in lengths.items() if length != count]
    if misfits or count < 1:
        what = "the table has no rows"
        if misfits:
            has = count_text(lengths[misfits[0]], "row")
            what = f"{misfits[0]} has {has}, {chosen[0]} has {count:,}"
        raise InputError(
            "SOURCE_LAYOUT",
            what,
            where=str(file.path),
            remedy="every column needs one row a step: the file is damaged or of another layout",
        )
    left_out: dict[str, str] = {}
    for name, found in sorted(file.datasets.items()):
        if name in lengths or name.split("/")[0] == "metadata":
            continue
        shape = found.shape or ()
        if found.rows != count:
            left_out[name] = f"shape {list(shape)} does not have {count_text(count, 'row')}"
        elif found.dtype is None or not is_step_shape(shape[1:], found.dtype.itemsize):
            left_out[name] = f"{found.type_name} of shape {list(shape)}"
        else:
            chosen.append(name)
    return Layout(columns=tuple(chosen), rows=count, left_out=left_out)
