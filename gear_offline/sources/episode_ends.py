"""Where episodes end and how: the rules, and what a rule makes of flags and other columns.

A flag is the rows at which it is true.

Shape legend: N rows, E episodes, K rows at which a flag is true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.errors import InputError

_STEPS = re.compile(r"steps=([1-9][0-9]{0,11})")
MARK = re.compile(r"(starts|lengths|ids|first|last):([^|=]+)(?:=(-?[0-9.]+))?")
UNIONS = ("dones", "done", "next.done")  # may be true at time limits too
TERMINAL_FLAGS = ("terminals", "terminations", "terminated", "is_terminal", *UNIONS)
TIME_FLAGS: tuple[str, ...] = ("timeouts", "truncations", "truncated", "is_last", "next.truncated")
TIME_FLAGS += ("TimeLimit.truncated", "infos/TimeLimit.truncated", "episode_terminals")
FLAGS = (*TERMINAL_FLAGS, *TIME_FLAGS)
SCALARS = ("rewards", *FLAGS)  # (N, 1) is read as one number a step
PAIRS = {"terminals": "timeouts", "terminations": "truncations", "terminated": "truncated"}
PAIRS |= {"is_terminal": "is_last"}
BLOCK_ROWS = 1 << 20  # of a column in memory
CUTS = "-as-truncations"
ARTIFICIAL = f"terminals{CUTS}"
SPLIT, ONLY = "done-and-timeout", "done-only"
_ROW_MARKS = {  # names of columns that tell where episodes are, and the part of a rule for them
    r"is_first|episode_start": "first:{}",
    r"step_type": "last:{}=2",
    r"(episode|traj(ectory)?|demo)(_?(id|idx|index|number|num))?": "ids:{}",
}
True_ = Callable[[str], Int64Array]  # (K,) rows at which a flag is true


class Rule(NamedTuple):
    """What ends an episode: flags, `step_limit` steps, marks; and whether it terminated there."""

    ends: list[str]  # flags, each of which ends an episode
    terminals: list[str]  # an episode terminated if its last row bears one of these ...
    cuts: list[str]  # ... and none of these
    step_limit: int | None
    limit_cuts: bool  # an episode of `step_limit` steps did not terminate
    marks: list[re.Match[str]]

    @classmethod
    def parse(cls, text: str, columns: Collection[str], where: str) -> Rule:
        """Read ``none``, or flags, ``steps=N``, marks, a convention's name, joined by ``|``."""
        ends, marks, names = list[str](), list[re.Match[str]](), list[str]()
        limit: int | None = None
        for part in text.split("|") if text != "none" else []:
            flag = part.removesuffix(CUTS)
            if (steps := _STEPS.fullmatch(part)) and limit is None:
                limit = int(steps[1])
            elif mark := MARK.fullmatch(part):
                marks.append(mark)
            elif part in FLAGS and part not in ends:
                ends.append(part)
            elif not names and (part in (SPLIT, ONLY) or (flag != part and flag in TERMINAL_FLAGS)):
                names.append(part)
            else:
                what = f"boundary rule {text!r} is not understood at {part!r}"
                known = ", ".join((*FLAGS, SPLIT, ONLY, ARTIFICIAL, "steps=N", "starts:COLUMN"))
                remedy = f"join parts with '|': {known}, lengths:, ids:, first:COLUMN, "
                remedy += "last:COLUMN=VALUE; or 'none' for one episode"
                raise InputError("SOURCE_LAYOUT", what, remedy=remedy)
        own = [flag for flag in ends if flag in TERMINAL_FLAGS]
        terminals, cuts = [flag for flag in own if flag not in UNIONS] or own, list[str]()
        if not own:  # on time flags alone: their counterparts tell
            terminals = [t for t, time in PAIRS.items() if time in ends and t in columns]
        for name in names:
            either = (f for f in (*UNIONS, *TERMINAL_FLAGS) if f in columns)
            flag = name.removesuffix(CUTS) if name.endswith(CUTS) else next(either, "terminals")
            terminals = [] if name.endswith(CUTS) else [flag]
            cuts = [f for f in TIME_FLAGS if f in columns][:1] if name == SPLIT else []
            ends += [f for f in (flag, *cuts) if f not in ends]
        if SPLIT in names and not cuts and limit is None:
            what = f"boundary rule {text!r} needs a flag of time limits beside {ends[-1]}"
            remedy = f"name it, --rename NAME=timeouts; or --rule '{SPLIT}|steps=N'"
            raise InputError("COLUMN", what, where, remedy)
        for column in (*ends, *(mark[2] for mark in marks)):
            if column not in columns:
                what = f"boundary rule {text!r} needs the column {column!r}"
                raise InputError("COLUMN", what, where, f"columns here: {', '.join(columns)}")
        return cls(ends, terminals, cuts, limit, SPLIT in names, marks)

    def terminated(self, last: Int64Array, lengths: Int64Array, true: True_) -> BoolArray:
        """Return (E,) which episodes terminated, by their `last` rows."""
        ended = np.isin(last, _union(map(true, self.terminals)))
        ended &= ~np.isin(last, _union(map(true, self.cuts)))
        return ended & (lengths != self.step_limit) if self.limit_cuts else ended


def chosen_flags(columns: Collection[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the stored column of each flag.

    Where the user names a flag of terminations, or one of time limits, it is the only one.
    """
    flags = {new: old for new, old in names.items() if new in FLAGS and old in columns}
    taken = set(flags.values())
    for kind in (TERMINAL_FLAGS, TIME_FLAGS):
        if not flags.keys() & {*kind}:
            flags |= {flag: flag for flag in kind if flag in columns and flag not in taken}
    return {flag: flags[flag] for flag in FLAGS if flag in flags}


def kind_of_flag(name: str) -> int:
    """Return what a flag means: 0 a termination, 1 either end, 2 a time limit; else -1."""
    return 1 if name in UNIONS else 0 if name in TERMINAL_FLAGS else 2 if name in TIME_FLAGS else -1


def default_rule(flags: Collection[str], true: True_) -> tuple[str, str]:
    """Return the rule that the flags of a table imply, and what they cannot tell; "" for none."""
    by_kind = [
        next((f for f in FLAGS if f in flags and kind_of_flag(f) == k), "") for k in (0, 1, 2)
    ]
    proper, union, time = by_kind
    for pair in PAIRS.items():
        if {*pair} <= {*flags}:
            return "|".join(pair), ""
    if proper and (other := time or union):
        tells = "one with both counts as terminated" if time else f"{proper} tells terminations"
        return f"{proper}|{other}", f"{proper} and {other} end episodes: {tells}"
    if union and time:
        if union != "next.done" and np.setdiff1d(true(time), true(union)).size:
            note = f"{union} and {time} end episodes: one with both counts as terminated; "
            return f"{union}|{time}", f"{note}--rule {SPLIT} counts it as truncated"
        note = f"{union} is true at every {time} too, which count as truncated; --rule {ONLY} "
        return SPLIT, f"{note}counts them as terminated" if true(time).size else ""
    if terminal := proper or union:
        note = f"only {terminal} tells how episodes end: a time limit cannot be told from a "
        return terminal, f"{note}termination; --rule '{SPLIT}|steps=N' splits them by length"
    return time, f"only {time} end episodes: none counts as terminated" if time else ""


class Boundaries(NamedTuple):
    """Episodes, (E,) each; `tail_steps` are those of the last one when nothing ended it, else 0."""

    rule: str
    lengths: Int64Array
    terminated: BoolArray
    tail_steps: int
    notes: list[str]  # what the flags cannot tell


def split_episodes(
    rule: str | None, table: Mapping[str, Any], flags: Collection[str], rows: int, *, where: str
) -> Boundaries:
    """Return the episodes of a table of `rows` rows by a rule, or by its `flags`.

    `table` has arrays, or what has ``shape`` and ``read(start, stop)``.  An episode is terminated
    if its last row bears a terminal flag, which wins over a timeout on the same row.  Rows behind
    the last end form an episode that is truncated.
    """
    true = cache(lambda name: _true_rows(table[name], name, where))
    untold, note = _untold(table, rows) if rule is None else {}, ""
    if rule is None:
        rule, note = default_rule(flags, true)
        if not rule:
            remedy = "add terminals and timeouts, or dones; or give --rule 'steps=N', or none"
            for mark in [*untold, *row_marks(table)][:1]:
                remedy = f"give --ends {mark}"
            raise InputError("COLUMN", "no column tells where episodes end", where, remedy)
    parsed = Rule.parse(rule, table, where)
    told = {*flags} - {mark[2] for mark in parsed.marks}
    if not parsed.ends and told & {*TERMINAL_FLAGS}:
        text, said = default_rule(told, true)
        implied = Rule.parse(text, told, where)
        parsed = parsed._replace(terminals=implied.terminals, cuts=implied.cuts)
        note = said if parsed.marks and implied.terminals[0] in UNIONS else ""
    marked = (_last_rows(mark, table[mark[2]], rows, where) for mark in parsed.marks)
    last = _union([*map(true, parsed.ends), *marked])
    if parsed.step_limit is not None:
        last = _with_step_limit(last, rows, parsed.step_limit)
    tail = rows - 1 - int(last[-1]) if last.size else rows
    last = np.append(last, [rows - 1] * (tail > 0)).astype(np.int64)
    for name, tells in untold.items():
        if not np.isin(tells, last).all():
            what = f"{name} tells of {tells.size:,} episodes, it seems, and {rule} of "
            remedy = f"give --ends {name}, or keep these by --rule '{rule}'"
            raise InputError("SOURCE_LAYOUT", f"{what}{last.size:,} others", where, remedy)
    lengths = np.diff(last, prepend=np.int64(-1))
    terminated = parsed.terminated(last, lengths, true)
    terminated[-1] &= not tail
    return Boundaries(rule, lengths, terminated, tail, [note] if note else [])


def judge_ends(
    flags: Mapping[str, Any], lengths: Int64Array, rule: str | None, *, where: str
) -> tuple[BoolArray, list[str]]:
    """Return which of the episodes that a format stores apart terminated, and what is not known.

    Of `flags`, columns as of `split_episodes`, the values at the last steps count.
    """
    last, true = np.cumsum(lengths) - 1, cache(lambda name: _true_rows(flags[name], name, where))
    inside = {} if rule else {name: np.setdiff1d(true(name), last).size for name in flags}
    notes = [f"{n} is true at {k:,} steps that end no episode" for n, k in inside.items() if k]
    text, note = (
        (rule, "") if rule else default_rule(flags, lambda n: np.intersect1d(true(n), last))
    )
    if not {*flags} & {*TERMINAL_FLAGS} and not rule:
        note = "no flag tells a termination: every episode counts as truncated"
        silent = not any(np.isin(last, true(name)).all() for name in flags)
        return np.zeros(last.size, np.bool_), [*notes, *([note] if silent else [])]
    parsed = Rule.parse(text, flags, where)
    ended = parsed.terminated(last, lengths, true)
    # one flag that says nothing of time limits is enough, as the ends are known
    enough = len(parsed.ends) == 1 and not (ended.any() and parsed.ends[0] in UNIONS)
    return ended, notes if enough or not note else [*notes, note]


def judges_only(rule: str) -> bool:
    """Whether a rule tells how episodes end, not where: one of formats that store them apart."""
    return rule.split("|")[0] in (SPLIT, ONLY) or rule.endswith(CUTS)


def flag_values(values: Array, name: str, where: str, first: int = 0) -> BoolArray:
    """Return rows `first` on of a flag as (n,) bools; refuse what is neither 0 nor 1."""
    rows, remedy, what = values.reshape(len(values), -1), "give one true or false for each step", ""
    if rows.shape[1] != 1:
        what = f"the flag {name} has {rows.shape[1]} values a step"
    elif rows.dtype != np.bool_ and (odd := np.flatnonzero((rows != 0) & (rows != 1))).size:
        seen = np.unique(rows)
        what = f"{name} is no flag: it holds {', '.join(f'{v:g}' for v in seen[:5])}"
        runs = 1 + np.count_nonzero(rows[1:] != rows[:-1])  # of an id each, or of other values
        reads = f"ids:{name}" if runs == seen.size else f"last:{name}={seen[-1]:g}"
        remedy = f"--ends {reads} may read it"
        if np.isnan(rows).any():
            what = f"the flag {name} is NaN at row {first + int(odd[0])}"
            remedy = "give one true or false for each step"
    if what:
        raise InputError("SOURCE_LAYOUT", what, where, remedy)
    return np.asarray(rows[:, 0] != 0)


def row_marks(columns: Collection[str]) -> list[str]:
    """Return parts of a rule for columns whose names say that they tell where episodes are."""
    found = (
        (n, part)
        for pattern, part in _ROW_MARKS.items()
        for n in columns
        if re.fullmatch(pattern, n.rpartition("/")[2])
    )
    return [part.format(name) for name, part in found]


def _union(parts: Any) -> Int64Array:
    return reduce(np.union1d, parts, np.zeros(0, np.int64))


def _blocks(column: Any) -> Any:
    """Yield the rows of a column part by part, with the number of each first one."""
    for row in range(0, column.shape[0], BLOCK_ROWS):
        stop = min(row + BLOCK_ROWS, column.shape[0])
        part = column[row:stop] if isinstance(column, np.ndarray) else column.read(row, stop)
        yield row, np.asarray(part)


def _true_rows(column: Any, name: str, where: str, value: str | None = None) -> Int64Array:
    """Return the rows at which a flag is true, or a column has a value."""
    parts = [np.zeros(0, np.int64)]
    for row, part in _blocks(column):
        hits = flag_values(part, name, where, row) if value is None else part == float(value)
        parts.append(np.flatnonzero(hits) + row)
    return np.concatenate(parts)


def _last_rows(mark: re.Match[str], column: Any, rows: int, where: str) -> Int64Array:
    """Return the last row of each episode that a mark tells of."""
    kind, name, value = mark.groups()
    what, remedy, last = "", "name another column or value", None
    if kind in ("starts", "lengths"):
        last = _bounds(kind, column, rows)
        what = f"{name} holds no {kind} of the episodes of {rows:,} rows"
        remedy = f"a column with a value in each row is first:{name}, last:{name} or ids:{name}"
    elif kind == "ids":
        ids, parts = list[Array](), [np.zeros(0, np.int64)]
        for row, part in _blocks(column):
            part = part.reshape(-1)
            hits = np.append(not ids or part[0] != ids[-1][-1], part[1:] != part[:-1])
            parts.append(np.flatnonzero(hits) + row)
            ids.append(part[hits] if hits.any() else ids[-1][-1:])
        first = np.concatenate(parts)
        if np.unique(np.concatenate(ids)).size == first.size:
            last = np.append(first[1:], rows) - 1
        what = f"{name} has an id again behind another one"
        remedy = "sort the rows by episode, and give each an id of its own"
    elif (hits := _true_rows(column, name, where, value)).size:
        last = hits if kind == "last" else np.append(hits[hits > 0], rows) - 1
    if last is None:
        raise InputError("SOURCE_LAYOUT", what or f"{name} marks no row", where, remedy)
    return last


def _bounds(kind: str, column: Any, rows: int) -> Int64Array | None:
    """Return the last row of each episode by starts, or lengths, ``None`` if they are none."""
    numbers = np.concatenate([np.zeros(0), *(part.reshape(-1) for _, part in _blocks(column))])
    stops = np.cumsum(numbers) if kind == "lengths" else numbers
    fits = numbers.size and (np.diff(stops) > 0).all() and (numbers == np.rint(numbers)).all()
    if (
        not fits
        or numbers[0] < (kind == "lengths")
        or not rows * (kind == "lengths") <= stops[-1] <= rows
    ):
        return None
    return np.union1d(stops[stops > 0].astype(np.int64), [rows]) - 1


def _untold(table: Mapping[str, Any], rows: int) -> dict[str, Int64Array]:
    """Return what whole numbers that no row has seem to tell of episodes: the mark, last rows."""
    marks = dict[str, Int64Array]()
    for name, column in table.items():
        size = column.shape[0]
        if (
            column.shape != (size,)
            or column.dtype.kind not in "iu"
            or not 1 < size <= rows
            or size == rows
        ):
            continue
        for kind in ("lengths", "starts"):
            last = _bounds(kind, column, rows)
            if last is not None and last.size in (size, size - 1) and last[-2] >= size - 1:
                marks[f"{kind}:{name}"] = last
    return marks


def _with_step_limit(last: Int64Array, rows: int, limit: int) -> Int64Array:
    """Add the rows at which `limit` steps are full, between `last` ones and up to `rows`."""
    bounds = np.concatenate(([-1], last, [rows]))
    runs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    cuts = [np.arange(a + limit, b, limit) for a, b in runs if b - a > limit]
    return np.sort(np.concatenate([last, *cuts]))
