"""Marks: columns that tell where episodes are by values other than a flag's true and false.

A mark is the term ``KIND:COLUMN`` or ``KIND:COLUMN=VALUE`` of a rule.  The column holds the
``starts``, ``ends`` or ``lengths`` of the episodes, or the ``ids`` of the episode of each row.
Ends are the rows behind the last ones, as of replay buffers.  Or the column has a value on
``first`` or ``last`` rows.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from gear_offline.core.types import Array, Int64Array
from gear_offline.data.sources.flags import blocks_of, true_rows
from gear_offline.data.sources.input_files import misfit
from gear_offline.errors import InputError

BOUNDS = ("starts", "ends", "lengths")  # that need not have a row a step
MARK = re.compile(r"(starts|ends|lengths|ids|first|last|by):([^|=]+)(?:=(-?[0-9.]+))?")
MIXED = "sort the rows by episode and step, and give each episode an id of its own"
_ROW_MARKS = (  # names of columns that tell where episodes are, and the term of a rule for them
    (r"(.*/)?(is_first|episode_starts?)", "first:{}"),
    (r"(.*/)?step_type", "last:{}=2"),
    (r"(.*/)?(episode|traj(ectory)?|demo|rollout)(_?(id|idx|index|number|num))?", "ids:{}"),
    (r"(.*/)?eps?_?(id|idx|index|number|num)", "ids:{}"),
    (r"(.*/)?(t|(time|episode|env)?_?steps?(_?(id|idx|index))?|frame_index)", "first:{}=0"),
)


def row_marks(columns: Collection[str]) -> list[str]:
    """Return terms of a rule for columns whose names say that they tell where episodes are."""
    pairs = ((name, *mark) for mark in _ROW_MARKS for name in columns)
    return [term.format(name) for name, pattern, term in pairs if re.fullmatch(pattern, name)]


def last_rows(mark: re.Match[str], column: Any, rows: int, where: str) -> Int64Array:
    """Return the last row of each episode that a mark tells of."""
    label, name, value = mark.groups()
    last, problem, remedy = None, f"{name} marks no row", "name another column or value"
    if label not in BOUNDS and column.shape[0] != rows:
        problem = f"{name} has {column.shape[0]:,} rows, and {mark[0]} asks for {rows:,}"
        raise misfit(problem, where, f"it may hold starts:{name}, ends:{name} or lengths:{name}")
    if column.dtype.kind == "U" and label != "ids":
        problem = f"{name} is text, and {mark[0]} asks for numbers"
        raise InputError("COLUMN", problem, where, "store it as whole numbers")
    if label in BOUNDS:
        last = _bounds(label, column, rows)
        problem = f"{name} holds no {label} of the episodes of {rows:,} rows"
        remedy = f"a value in each row is first:{name} or ids:{name}; of last rows add 1 to each"
    elif label == "ids":
        first, ids = runs(blocks_of(column))
        if np.unique(ids).size == first.size:
            last = np.append(first[1:], rows) - 1
        problem, remedy = f"{name} has an id again behind another one", MIXED
    elif (hits := true_rows(column, name, where, value)).size:
        last = hits if label == "last" else np.append(hits[hits > 0], rows) - 1
    else:
        remedy += f": its first row holds {next(blocks_of(column))[1].flat[0] + 0:g}"
    if last is None:
        raise misfit(problem, where, remedy)
    return last


def _bounds(label: str, column: Any, rows: int) -> Int64Array | None:
    """Return the last row of each episode by such marks; ``None`` if they are none."""
    numbers = np.concatenate([np.zeros(0), *(block.reshape(-1) for _, block in blocks_of(column))])
    stops, total = np.cumsum(numbers) if label == "lengths" else numbers, rows * (label != "starts")
    rising = (np.diff(stops, prepend=0) >= 0).all() and (numbers == np.rint(numbers)).all()
    if not (numbers.size and rising and total <= stops[-1] <= rows):
        return None
    if label == "starts" and numbers[0] > 0 and stops[-1] == rows - 1:  # they are last rows
        return None
    return np.union1d(stops[stops > 0].astype(np.int64), [rows]) - 1


def _counts_from(column: Any) -> float | None:
    """Return the number from which a column counts the steps of each episode, by equal rises.

    ``None`` of one that does not, or that seldom rises.
    """
    first: float | None = None
    rise: float | None = None
    dtype = np.float64 if column.dtype.kind == "f" else np.int64
    before, rises, repeats = np.zeros(0, dtype), 0, 0
    for _, block in blocks_of(column):
        steps = np.append(before, block.astype(dtype))
        first = steps[0].item() if first is None else first
        up = np.diff(steps)[steps[1:] != first]
        if up.size and rise is None:
            rise = up[0].item()
        if rise is not None and (rise <= 0 or not (up == rise).all()):
            return None
        rises, repeats = rises + up.size, repeats + int((np.diff(steps) == 0).sum())
        before = steps[-1:]
    return first if rises > repeats else None


def falls(column: Any, rows: int) -> Int64Array:
    """Return the rows behind which a column of one number a row falls."""
    drops, before = [np.zeros(0, np.int64)], np.zeros(0, column.dtype)
    is_counter = column.shape == (rows,) and column.dtype.kind in "iuf"
    for row, block in blocks_of(column) if is_counter else ():
        steps = np.append(before, block)
        drops.append(np.flatnonzero(steps[1:] < steps[:-1]) + row - before.size)
        before = steps[-1:]
    return np.concatenate(drops)


def guess_marks(table: Mapping[str, Any], rows: int) -> dict[str, tuple[Int64Array, str]]:
    """Return marks of columns that no rule names and that tell episodes: last rows, a remedy."""
    marks = dict[str, tuple[Int64Array, str]]()
    for name, column in table.items():
        size = column.shape[0]
        if column.shape == (size,) and column.dtype.kind in "iu" and 1 < size < rows:
            for label in ("lengths", "starts"):
                last = _bounds(label, column, rows)
                if last is not None and last.size in (size, size - 1) and last[-2:][0] >= size - 1:
                    marks[f"{label}:{name}"] = last, ""
    for mark in filter(None, map(MARK.fullmatch, row_marks(table))):
        column = table[mark[2]]
        if column.shape[0] != rows:
            continue
        if mark[3] == "0":
            first = _counts_from(column) if column.dtype.kind in "iuf" else None
            text = f"{first:.15g}" if isinstance(first, float) else str(first)
            counter_mark = None if first is None else MARK.fullmatch(f"first:{mark[2]}={text}")
            if counter_mark is None:
                continue
            mark = counter_mark
        try:
            marks[mark[0]] = last_rows(mark, column, rows, ""), ""
        except InputError:  # of floats it is another column, of a usual name
            if mark[1] == "ids" and column.dtype.kind in "iuU" and not mark[2].endswith("demo"):
                marks[mark[0]] = np.append(runs(blocks_of(column))[0][1:], rows) - 1, MIXED
    return marks


def runs(blocks: Iterable[tuple[int, Array]]) -> tuple[Int64Array, Array]:
    """Return the first rows of runs of one value, and the values; of numbered blocks of rows."""
    firsts, values, before = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)], None
    for row, block in blocks:
        block = block.reshape(-1)
        changes = np.append(before is None or block[0] != before, block[1:] != block[:-1])
        firsts.append(np.flatnonzero(changes) + row)
        values.append(block[changes])
        before = block[-1]
    return np.concatenate(firsts), np.concatenate(values)
