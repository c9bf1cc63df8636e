"""Flags of steps: their names, what each means, and the rows at which one is true.

Shape legend: N rows, K rows at which a flag is true.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.data.sources.columns import read_rows
from gear_offline.data.sources.input_files import misfit

UNIONS = ("dones", "done", "next.done")  # may be true at time limits too
TERMINAL_FLAGS: tuple[str, ...] = ("terminals", "terminations", "terminated", "is_terminal")
TERMINAL_FLAGS += ("terminal", "termination", "terminateds", *UNIONS)
TIME_FLAGS: tuple[str, ...] = ("timeouts", "truncations", "truncated", "is_last", "next.truncated")
TIME_FLAGS += ("TimeLimit.truncated", "infos/TimeLimit.truncated", "episode_terminals")
TIME_FLAGS += ("timeout", "time_outs", "is_timeout", "is_truncated", "truncation", "truncateds")
FLAGS = (*TERMINAL_FLAGS, *TIME_FLAGS)
TERMINATION, EITHER, LIMIT = range(3)
MEANING = dict.fromkeys(TERMINAL_FLAGS, TERMINATION) | dict.fromkeys(TIME_FLAGS, LIMIT)
MEANING |= dict.fromkeys(UNIONS, EITHER)
SCALARS = ("rewards", *FLAGS)  # (N, 1) is read as one number a step
PAIRS = {"terminals": "timeouts", "terminations": "truncations", "terminated": "truncated"}
PAIRS |= {"is_terminal": "is_last", "terminal": "timeout", "termination": "truncation"}
PAIRS |= {"terminateds": "truncateds"}
PADDED = "; of shape (episodes, steps, ...): --reader padded, docs/how-to/convert.md"
BLOCK_ROWS = 1 << 20  # of a column in memory
RowsWhereTrue = Callable[[str], Int64Array]  # of a flag by its name, (K,)


def find_flags(columns: Collection[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the stored column of each flag.

    Where the user names a flag of terminations, or one of time limits, it is the only one.
    Beside those of TorchRL's ``next`` the others are of the step before.
    """
    later = "next/" if any(f"next/{flag}" in columns for flag in FLAGS) else ""
    flags = {flag: origin for flag, origin in names.items() if flag in FLAGS and origin in columns}
    free = {*columns} - {*flags.values()}
    for group in (TERMINAL_FLAGS, TIME_FLAGS):
        if not flags.keys() & {*group}:
            flags |= {flag: later + flag for flag in group if later + flag in free}
    return {flag: flags[flag] for flag in FLAGS if flag in flags}


def flag_values(
    values: Array, name: str, where: str, first: int = 0, flags: Collection[str] = ()
) -> BoolArray:
    """Return rows `first` on of one of `flags` as (n,) bools; refuse what is neither 0 nor 1."""
    rows = values.reshape(len(values), prod(values.shape[1:]))
    if rows.shape[1] == 1 and (rows.dtype == np.bool_ or ((rows == 0) | (rows == 1)).all()):
        return np.asarray(rows[:, 0] != 0)
    remedy, missing = "give one true or false for each step", np.isnan(rows)
    if rows.shape[1] != 1:
        remedy += PADDED
        problem = f"the flag {name} has {rows.shape[1]} values a step, as of rows side by side"
    elif missing.any():
        problem = f"the flag {name} is NaN at row {first + int(missing.argmax())}"
    else:
        values = np.unique(rows)
        problem = f"{name} is no flag: it holds {', '.join(f'{v:g}' for v in values[:5])}"
        runs = 1 + np.count_nonzero(rows[1:] != rows[:-1])  # of an id each, or of other values
        other_flags = [flag for flag in flags if MEANING[flag] != MEANING.get(name)]
        # 255 of 0 and 255, -1 of -1 and 0
        true = max(values, key=lambda value: (abs(value), value))
        rule = "|".join([f"{name}={true:g}", *other_flags])
        reads = f"--ends ids:{name}" if runs == values.size > 2 else f"--rule '{rule}'"
        remedy = f"{reads} may read it" if flags else remedy
        if flags and not other_flags and values.size == 3 and 2 * np.sum(rows == 0) > rows.size:
            end, cut = values[values != 0]
            remedy = f"--ends 'last:{name}={cut:g}|{name}={end:g}' if {end:g} is a termination and "
            remedy += f"{cut:g} a cut, or the other way round"
    raise misfit(problem, where, remedy)


def true_rows(
    column: Any, name: str, where: str, value: str | None = None, flags: Collection[str] = ()
) -> Int64Array:
    """Return the rows at which a flag is true, or a column has a value."""
    hit_rows = [np.zeros(0, np.int64)]
    for row, block in blocks_of(column):
        if value is None:
            hits = flag_values(block, name, where, row, flags)
        else:
            hits = block == as_number(value)
        hit_rows.append(np.flatnonzero(hits) + row)
    return np.concatenate(hit_rows)


def as_number(text: str) -> float:
    """Return the number that a text names, a whole one exactly."""
    return int(text) if text.lstrip("-").isdigit() else float(text)


def blocks_of(column: Any) -> Iterator[tuple[int, Array]]:
    """Yield the rows of a column block by block, with the number of each first one."""
    rows = max(1, BLOCK_ROWS // max(prod(column.shape[1:]), 1))
    for row in range(0, column.shape[0], rows):
        yield row, np.asarray(read_rows(column, row, min(row + rows, column.shape[0])))
