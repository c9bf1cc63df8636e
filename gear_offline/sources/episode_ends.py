"""Boundary rules: the rows at which episodes end, and the episodes that terminated there.

A flag is the rows at which it is true.

Shape legend: N rows, E episodes, K rows at which a flag is true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, reduce
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.errors import InputError
from gear_offline.sources.input_files import misfit

MARK = re.compile(r"(starts|lengths|ids|first|last):([^|=]+)(?:=(-?[0-9.]+))?")
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
BLOCK_ROWS = 1 << 20  # of a column in memory
CUTS = "-as-truncations"
MIXED = "sort the rows by episode, and give each an id of its own"
NO_TERMINATION = "no flag tells a termination: every episode counts as truncated"
_NUMBER = r"-?[0-9.]+(e[+-]?[0-9]+)?"
ARTIFICIAL = f"terminals{CUTS}"
SPLIT, ONLY = "done-and-timeout", "done-only"
CONVENTIONS = (SPLIT, ONLY, *(f"{flag}{CUTS}" for flag in TERMINAL_FLAGS))
KNOWN = ", ".join((*FLAGS, SPLIT, ONLY, ARTIFICIAL, "steps=N, starts:COLUMN, lengths:, ids:"))
_ROW_MARKS = (  # names of columns that tell where episodes are, and the part of a rule for them
    (r"(.*/)?(is_first|episode_starts?)", "first:{}"),
    (r"(.*/)?step_type", "last:{}=2"),
    (r"(.*/)?(episode|traj(ectory)?|demo|rollout)(_?(id|idx|index|number|num))?", "ids:{}"),
    (r"(.*/)?eps?_?(id|idx|index|number|num)", "ids:{}"),
    (r"(.*/)?(t|(time|episode|env)?_?steps?(_?(id|idx|index))?|frame_index)", "first:{}=0"),
)
True_ = Callable[[str], Int64Array]  # (K,) rows at which a flag is true


class Rule(NamedTuple):
    """The parts of a rule: each ends episodes, and some tell which of them terminated."""

    ends: list[str]  # flags, each of which ends an episode
    terminals: list[str]  # an episode terminated if its last row bears one of these ...
    cuts: list[str]  # ... and none of these
    step_limit: int | None
    limit_cuts: bool  # an episode of `step_limit` steps did not terminate
    marks: list[re.Match[str]]

    @classmethod
    def parse(cls, text: str, columns: Collection[str], where: str) -> Rule:
        """Read ``none``, or flags, ``steps=N``, marks, a convention's name, joined by ``|``."""
        parts = text.split("|") if text != "none" else []
        ends = [part for part in parts if part in FLAGS]
        names = [part for part in parts if part in CONVENTIONS]
        marks = [mark for part in parts if (mark := MARK.fullmatch(part))]
        limits = [p[6:] for p in parts if re.fullmatch(r"steps=[1-9][0-9]{0,11}", p)]
        count = len({*ends}) + len(names[:1]) + len(marks) + len(limits[:1])
        if count < len(parts):
            remedy = f"join parts with '|': {KNOWN}, first:COLUMN, last:COLUMN=VALUE; or 'none'"
            raise misfit(f"boundary rule {text!r} is not understood", "", remedy)
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
        if SPLIT in names and not cuts and not limits:
            what = f"boundary rule {text!r} needs a flag of time limits beside {ends[-1]}"
            remedy = f"name it, --rename NAME=timeouts; or --rule '{SPLIT}|steps=N'"
            raise InputError("COLUMN", what, where, remedy)
        for column in (*ends, *(mark[2] for mark in marks)):
            if column not in columns:
                what = f"boundary rule {text!r} needs the column {column!r}"
                raise InputError("COLUMN", what, where, f"columns here: {', '.join(columns)}")
        limit = int(limits[0]) if limits else None
        return cls(ends, terminals, cuts, limit, SPLIT in names, marks)

    def terminated(self, last: Int64Array, lengths: Int64Array, true: True_) -> BoolArray:
        """Return (E,) bool: the episodes that terminated, by their `last` rows."""
        ended = np.isin(last, _union(map(true, self.terminals)))
        ended &= ~np.isin(last, _union(map(true, self.cuts)))
        return ended & (lengths != self.step_limit) if self.limit_cuts else ended


def chosen_flags(columns: Collection[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the stored column of each flag.

    Where the user names a flag of terminations, or one of time limits, it is the only one.
    Beside those of TorchRL's ``next`` the others are of the step before.
    """
    later = "next/" if any(f"next/{flag}" in columns for flag in FLAGS) else ""
    flags = {new: old for new, old in names.items() if new in FLAGS and old in columns}
    taken = {*names.values()}  # what the user calls otherwise is none
    for kind in (TERMINAL_FLAGS, TIME_FLAGS):
        if not flags.keys() & {*kind}:
            stored = {flag: later + flag for flag in kind}
            flags |= {f: old for f, old in stored.items() if old in columns and old not in taken}
    return {flag: flags[flag] for flag in FLAGS if flag in flags}


def default_rule(flags: Collection[str], true: True_) -> tuple[str, str]:
    """Return the rule that the flags of a table imply, and what they cannot tell; "" for none."""
    here = [flag for flag in FLAGS if flag in flags]
    proper, union, time = (next((f for f in here if MEANING[f] == k), "") for k in range(3))
    for pair in PAIRS.items():
        if {*pair} <= {*flags}:
            return "|".join(pair), ""
    gym = time.endswith("TimeLimit.truncated") and (union or proper)  # true only at time limits
    if proper and not gym and (other := time or union):
        tells = "one with both counts as terminated" if time else f"{proper} tells terminations"
        return f"{proper}|{other}", f"{proper} and {other} end episodes: {tells}"
    if time and (union := gym or union):
        if gym or union == "next.done" or np.isin(true(time), true(union)).all():
            note = f"{union} is true at every {time} too, which count as truncated; --rule {ONLY} "
            return SPLIT, f"{note}counts them as terminated" if true(time).size else ""
        note = f"{union} and {time} end episodes: one with both counts as terminated; "
        return f"{union}|{time}", f"{note}--rule {SPLIT} counts it as truncated"
    if terminal := proper or union:
        note = f"only {terminal} tells how episodes end: a time limit cannot be told from a "
        return terminal, f"{note}termination; --rule '{SPLIT}|steps=N' truncates those of N steps"
    return time, f"only {time} end episodes: none counts as terminated" if time else ""


def split_episodes(
    rule: str | None, table: Mapping[str, Any], flags: Collection[str], rows: int, *, where: str
) -> tuple[str, Int64Array, BoolArray, int, list[str]]:
    """Return the episodes of a table of `rows` rows by a rule, or by its `flags`.

    They are the rule, (E,) lengths and terminations, the steps of a last episode that nothing
    ended, and what the flags cannot tell.

    `table` has arrays, or what has ``shape`` and ``read(start, stop)``.  An episode is terminated
    if its last row bears a terminal flag, which wins over a timeout on the same row.  Rows behind
    the last end form an episode that is truncated.
    """
    asked, (rule, values) = rule, split_values(rule)
    true = cache(lambda name: _true_rows(table[name], name, where, values.get(name), flags))
    untold, note = _untold(table, rows) if rule is None else {}, ""
    if rule is None:
        rule, note = default_rule(flags, true)
        if not rule:
            remedy = "give --rule 'steps=N', or none; flags are called terminals, timeouts, dones"
            for mark in [*untold, *row_marks(table)][:1]:
                remedy = f"give --ends {mark}; in Python rule={mark!r}"
            raise InputError("COLUMN", "no column tells where episodes end", where, remedy)
    parsed = Rule.parse(rule, table, where)
    flagged = {*flags} - {mark[2] for mark in parsed.marks}
    if not parsed.ends and flagged & {*TERMINAL_FLAGS}:
        text, unknown = default_rule(flagged, true)
        implied = Rule.parse(text, flagged, where)
        parsed = parsed._replace(terminals=implied.terminals, cuts=implied.cuts)
        note = unknown if parsed.marks and implied.terminals[0] in UNIONS else ""
    marked = (_last_rows(mark, table[mark[2]], rows, where) for mark in parsed.marks)
    last = _union([*map(true, parsed.ends), *marked])
    if parsed.step_limit is not None:
        last = _with_step_limit(last, rows, parsed.step_limit)
    tail = rows - 1 - int(last[-1]) if last.size else rows
    last = np.append(last, [rows - 1] * (tail > 0)).astype(np.int64)
    for name, (tells, way) in untold.items():
        if not np.isin(tells, last).all():
            what = f"{name} tells of {tells.size:,} episodes, and {rule} of {last.size:,} others"
            way = way or f"give --ends {name}, in Python rule={name!r}"
            raise misfit(what, where, f"{way}; or keep these by --rule '{rule}'")
    lengths = np.diff(last, prepend=np.int64(-1))
    terminated = parsed.terminated(last, lengths, true)
    terminated[-1] &= not tail
    notes = [note] if note else []
    if asked and not parsed.terminals and CUTS not in asked:
        notes.append(NO_TERMINATION)
    if parsed.marks:
        notes += _inside({name: true(name) for name in flagged}, last)
    return asked or rule, lengths, terminated, tail, notes


def judge_ends(
    flags: Mapping[str, Any], lengths: Int64Array, rule: str | None, *, where: str
) -> tuple[BoolArray, list[str]]:
    """Find the terminated episodes of a format that stores them apart, and what is not known.

    `flags` are columns as of `split_episodes`; their values at the last steps count.
    """
    last, (rule, values) = np.cumsum(lengths) - 1, split_values(rule)
    true = cache(lambda name: _true_rows(flags[name], name, where, values.get(name), flags))
    if rule:
        return Rule.parse(rule, flags, where).terminated(last, lengths, true), []
    notes = _inside({name: true(name) for name in flags}, last)
    if not {*flags} & {*TERMINAL_FLAGS}:
        if not any(np.isin(last, true(name)).all() for name in flags):
            notes.append(NO_TERMINATION)
        return np.zeros(last.size, np.bool_), notes
    text, note = default_rule(flags, lambda name: np.intersect1d(true(name), last))
    parsed = Rule.parse(text, flags, where)
    ended = parsed.terminated(last, lengths, true)
    # one flag that says nothing of time limits is enough, as the ends are known
    enough = len(parsed.ends) == 1 and not (ended.any() and parsed.ends[0] in UNIONS)
    return ended, notes if enough or not note else [*notes, note]


def split_values(rule: str | None) -> tuple[str | None, dict[str, str]]:
    """Return a rule without the values of ``FLAG=VALUE``, at which a flag is true; and those."""
    parts = [part.partition("=") for part in rule.split("|")] if rule else []
    values = {n: value for n, _, value in parts if n in FLAGS and re.fullmatch(_NUMBER, value)}
    texts = (name if name in values else f"{name}{equals}{value}" for name, equals, value in parts)
    return rule and "|".join(texts), values


def _inside(true: Mapping[str, Int64Array], last: Int64Array) -> list[str]:
    """Warn of flags that are true at other rows than the `last` of episodes."""
    inside = {name: np.setdiff1d(rows, last).size for name, rows in true.items()}
    return [f"{n} is true at {k:,} steps that end no episode" for n, k in inside.items() if k]


def flag_values(
    values: Array, name: str, where: str, first: int = 0, flags: Collection[str] = ()
) -> BoolArray:
    """Return rows `first` on of one of `flags` as (n,) bools; refuse what is neither 0 nor 1."""
    rows = values.reshape(len(values), prod(values.shape[1:]))
    if rows.shape[1] == 1 and (rows.dtype == np.bool_ or ((rows == 0) | (rows == 1)).all()):
        return np.asarray(rows[:, 0] != 0)
    remedy, missing = "give one true or false for each step", np.isnan(rows)
    if rows.shape[1] != 1:
        what = f"the flag {name} has {rows.shape[1]} values a step"
    elif missing.any():
        what = f"the flag {name} is NaN at row {first + int(missing.argmax())}"
    else:
        values = np.unique(rows)
        what = f"{name} is no flag: it holds {', '.join(f'{v:g}' for v in values[:5])}"
        runs = 1 + np.count_nonzero(rows[1:] != rows[:-1])  # of an id each, or of other values
        others = [flag for flag in flags if MEANING[flag] != MEANING.get(name)]
        rule = "|".join([f"{name}={values[-1]:g}", *others])
        reads = f"--ends ids:{name}" if runs == values.size > 2 else f"--rule '{rule}'"
        remedy = f"{reads} may read it" if flags else remedy
    raise misfit(what, where, remedy)


def row_marks(columns: Collection[str]) -> list[str]:
    """Return parts of a rule for columns whose names say that they tell where episodes are."""
    pairs = ((name, *mark) for mark in _ROW_MARKS for name in columns)
    return [part.format(name) for name, pattern, part in pairs if re.fullmatch(pattern, name)]


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


def _union(parts: Any) -> Int64Array:
    return reduce(np.union1d, parts, np.zeros(0, np.int64))


def _blocks(column: Any) -> Iterator[tuple[int, Array]]:
    """Yield the rows of a column part by part, with the number of each first one."""
    for row in range(0, column.shape[0], BLOCK_ROWS):
        stop = min(row + BLOCK_ROWS, column.shape[0])
        part = column[row:stop] if isinstance(column, np.ndarray) else column.read(row, stop)
        yield row, np.asarray(part)


def _true_rows(
    column: Any, name: str, where: str, value: str | None = None, flags: Collection[str] = ()
) -> Int64Array:
    """Return the rows at which a flag is true, or a column has a value."""
    parts = [np.zeros(0, np.int64)]
    for row, part in _blocks(column):
        hits = flag_values(part, name, where, row, flags) if value is None else part == float(value)
        parts.append(np.flatnonzero(hits) + row)
    return np.concatenate(parts)


def _last_rows(mark: re.Match[str], column: Any, rows: int, where: str) -> Int64Array:
    """Return the last row of each episode that a mark tells of."""
    kind, name, value = mark.groups()
    last, what, remedy = None, f"{name} marks no row", "name another column or value"
    if kind in ("starts", "lengths"):
        last = _bounds(kind, column, rows)
        what = f"{name} holds no {kind} of the episodes of {rows:,} rows"
        remedy = f"a value in each row is first:{name} or ids:{name}; of last rows add 1 to each"
    elif kind == "ids":
        first, ids = runs(_blocks(column))
        if np.unique(ids).size == first.size:
            last = np.append(first[1:], rows) - 1
        what, remedy = f"{name} has an id again behind another one", MIXED
    elif (hits := _true_rows(column, name, where, value)).size:
        last = hits if kind == "last" else np.append(hits[hits > 0], rows) - 1
    if last is None:
        raise misfit(what, where, remedy)
    return last


def _bounds(kind: str, column: Any, rows: int) -> Int64Array | None:
    """Return the last row of each episode by starts, or lengths; ``None`` if they are none."""
    numbers = np.concatenate([np.zeros(0), *(part.reshape(-1) for _, part in _blocks(column))])
    stops, total = (np.cumsum(numbers), rows) if kind == "lengths" else (numbers, 0)
    rising = (np.diff(stops, prepend=0) >= 0).all() and (numbers == np.rint(numbers)).all()
    known = numbers.size and rising and total <= stops[-1] <= rows
    if not known or (kind == "starts" and numbers[0] > 0 and stops[-1] == rows - 1):  # last rows
        return None
    return np.union1d(stops[stops > 0].astype(np.int64), [rows]) - 1


def _counts_steps(column: Any) -> bool:
    """Check that a column counts the steps of each episode from 0 on."""
    before = -1
    for _, part in _blocks(column):
        steps = np.append(before, part)
        if not np.where(steps[1:] == 0, steps[:-1] != 0, np.diff(steps) == 1).all():
            return False
        before = steps[-1]
    return True


def _untold(table: Mapping[str, Any], rows: int) -> dict[str, tuple[Int64Array, str]]:
    """Return marks of columns that no rule names and that tell episodes: last rows, a remedy."""
    marks = dict[str, tuple[Int64Array, str]]()
    for name, column in table.items():
        size = column.shape[0]
        if column.shape == (size,) and column.dtype.kind in "iu" and 1 < size < rows:
            for kind in ("lengths", "starts"):
                last = _bounds(kind, column, rows)
                if last is not None and last.size in (size, size - 1) and last[-2:][0] >= size - 1:
                    marks[f"{kind}:{name}"] = last, ""
    for mark in filter(None, map(MARK.fullmatch, row_marks(table))):
        column = table[mark[2]]
        if column.shape[0] != rows or (mark[3] == "0" and not _counts_steps(column)):
            continue
        try:
            marks[mark[0]] = _last_rows(mark, column, rows, ""), ""
        except InputError:  # of floats it is another column, of a usual name
            if mark[1] == "ids" and column.dtype.kind in "iu" and not mark[2].endswith("demo"):
                marks[mark[0]] = np.append(runs(_blocks(column))[0][1:], rows) - 1, MIXED
    return marks


def _with_step_limit(last: Int64Array, rows: int, limit: int) -> Int64Array:
    """Add the rows at which `limit` steps are full, between `last` ones and up to `rows`."""
    bounds = pairwise([-1, *last.tolist(), rows])
    cuts = [np.arange(a + limit, b, limit) for a, b in bounds if b - a > limit]
    return np.sort(np.concatenate([last, *cuts]))
