"""Rows of several environments in one table: sorted by environment, or doubted.

Shape legend: N rows, K rows of a read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array, Int64Array
from gear_offline.data.sources.base import READ_BYTES
from gear_offline.data.sources.columns import read_rows
from gear_offline.data.sources.flags import blocks_of
from gear_offline.data.sources.row_marks import MARK, runs
from gear_offline.errors import InputError

_STREAM = re.compile(  # a column of environments, if it has no `tag` one that changes often
    r"(.*[/_])?(env(ironment)?s?|workers?|actors?|(?P<tag>agent|rank|robot|thread|proc(ess)?|sim))"
    r"(_?(u?id|idx|index|number|num|name))?"
)
STEP_COLUMNS = ("observations", "actions", "rewards", "next_observations")
MOST_STREAMS, MOST_COMPARED = 1024, 1 << 14  # rows


def split_order(
    rule: str | None, columns: Mapping[str, Any], rows: int, where: str
) -> tuple[str | None, str, Int64Array | None, Int64Array]:
    """Take ``by:COLUMN`` or ``by:NUMBER`` out of a rule.

    Return the remaining rule, that term, the (N,) order of rows by the column, and the last row of
    each environment in this order.  Without such a term there is no order and no row.
    """
    terms = (rule or "").split("|")
    by = next((term for term in terms if term.startswith("by:") and MARK.fullmatch(term)), None)
    if by is None:
        return rule, "", None, np.zeros(0, np.int64)
    remaining, name = "|".join(term for term in terms if term != by) or None, by[3:]
    if name in columns and columns[name].shape == (rows,):
        values = np.concatenate([block for _, block in blocks_of(columns[name])])
    elif name.isdecimal() and rows % int(name or 0) == 0:
        values = np.arange(rows) % int(name)
    else:
        problem = f"boundary rule {by!r} needs a column {name!r} of one value a row"
        raise InputError("COLUMN", problem, where, f"columns here: {', '.join(columns)}")
    order = np.argsort(values, kind="stable")
    last = np.append(runs([(0, values[order])])[0][1:], rows) - 1
    return remaining, by, order, last


class SortedColumn:
    """A column whose rows are read in another order, which rises over long runs."""

    def __init__(self, column: Any, order: Int64Array) -> None:
        self._column, self._order = column, order
        self.shape, self.dtype = column.shape, column.dtype
        step_bytes = max(int(np.prod(self.shape[1:])) * self.dtype.itemsize, 1)
        self._span = max(READ_BYTES // step_bytes, 1)

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)`` of the order, (K, *step shape)."""
        places = self._order[start:stop]
        if isinstance(self._column, np.ndarray):
            return np.asarray(self._column[places])
        rows = np.empty((len(places), *self.shape[1:]), self.dtype)
        done = 0
        while done < len(places):
            first = int(places[done])
            near = (places[done:] >= first) & (places[done:] < first + self._span)
            count = len(near) if near.all() else int(near.argmin())
            near_rows = places[done : done + count]
            block = self._column.read(first, int(near_rows.max()) + 1)
            rows[done : done + count] = block[near_rows - first]
            done += count
        return rows


def doubts(
    table: Mapping[str, Any], flags: Collection[str], last: Int64Array, rows: int
) -> Iterator[tuple[str, str, bool]]:
    """Yield doubts that rows are of several environments in turn: finding, remedy, certainty.

    `last` are the last rows of the episodes that were found.
    """
    for name in (n for n in table if n not in flags and n.split("/")[0] not in STEP_COLUMNS):
        column, stream = table[name], _STREAM.fullmatch(name)
        if column.shape != (rows,) or column.dtype.kind not in ("iufU" if stream else "iuUb"):
            continue
        ends = runs(blocks_of(column))[0][1:] - 1 if stream else np.zeros(0, np.int64)
        is_named = stream and (not stream["tag"] or 2 * ends.size > rows)
        ends = ends if is_named else _rounds(column)
        inside = np.setdiff1d(ends, last)
        if not inside.size or (is_sorted := _is_sorted(table, column)) is False:
            continue
        finding = f"{name} {'changes' if is_named else 'goes round'} at "
        finding += f"{count_text(inside.size, 'step')} inside episodes, as of environments in turn"
        is_certain = is_named or (is_sorted and not np.isin(last[:-1], ends).all())
        yield finding, f"--ends by:{name} sorts rows", bool(is_certain)


def _is_sorted(table: Mapping[str, Any], column: Any) -> bool | None:
    """Check that rows follow those of the same value, and not those that are stored before.

    Next observations tell it, or distances; ``None`` where they do not.
    """
    name = next((n for n in table if n.split("/")[0] == "observations"), None)
    if name is None or table[name].dtype.kind not in "biuf":
        return None
    observed, after = table[name], table.get(f"next_{name}")
    step_bytes = prod(observed.shape[1:]) * observed.dtype.itemsize
    rows = min(column.shape[0], MOST_COMPARED, READ_BYTES // max(step_bytes, 1))
    values = _first_rows(column, rows)[:, 0]
    order = np.argsort(values, kind="stable")
    is_same = values[order[1:]] == values[order[:-1]]
    before, then = order[:-1][is_same], order[1:][is_same]
    now = _first_rows(observed, rows).astype(np.float64)
    if not then.size:
        return None
    if after is not None and after.shape == observed.shape:
        following = _first_rows(after, rows)
        is_stored = np.isclose(following[:-1], now[1:], 1e-3, 1e-3).all(1).mean() > 0.5
        is_turned = np.isclose(following[before], now[then], 1e-3, 1e-3).all(1).mean() > 0.5
        return None if is_stored == is_turned else bool(is_turned)
    return bool(2 * abs(now[then] - now[before]).mean() < abs(np.diff(now, axis=0)).mean()) or None


def _first_rows(column: Any, rows: int) -> Array:
    return read_rows(column, 0, rows).reshape(rows, -1)


def _rounds(column: Any) -> Int64Array:
    """Return the rows that end a round of a column that repeats its first values, else none."""
    _, values = next(blocks_of(column))
    again = np.flatnonzero(values[1 : MOST_STREAMS + 1] == values[0])
    period = int(again[0]) + 1 if again.size else 0
    if period < 2 or len(values) < 3 * period or np.unique(values[:period]).size < period:
        return np.zeros(0, np.int64)
    is_round = (values[period:] == values[:-period]).all()
    return np.arange(period - 1, len(values) - 1, period) if is_round else np.zeros(0, np.int64)
