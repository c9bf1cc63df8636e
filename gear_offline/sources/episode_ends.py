"""Where episodes end: the rules, and one streaming pass over the flags that applies a rule.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.errors import InputError

_STEPS = re.compile(r"steps=([1-9][0-9]{0,11})")
MARK = re.compile(r"(starts|lengths|ids|first|last):([^|=]+)(?:=(-?[0-9.]+))?")
UNIONS = ("dones", "done", "next.done")  # may be true at time limits too
TERMINAL_FLAGS = ("terminals", "terminations", "terminated", "is_terminal", *UNIONS)
TIME_FLAGS = ("timeouts", "truncations", "truncated", "is_last", "next.truncated")
TIME_FLAGS += ("TimeLimit.truncated", "infos/TimeLimit.truncated", "episode_terminals")
FLAGS = (*TERMINAL_FLAGS, *TIME_FLAGS)
SCALARS = ("rewards", *FLAGS)  # (N, 1) is read as one number a step
PAIRS = {"terminals": "timeouts", "terminations": "truncations", "terminated": "truncated"}
PAIRS |= {"is_terminal": "is_last"}
BLOCK_ROWS = 1 << 20  # of flags in memory
CUTS = "-as-truncations"
ARTIFICIAL = f"terminals{CUTS}"
SPLIT, ONLY = "done-and-timeout", "done-only"
Read = Callable[[str, int, int], Array]  # rows of a column


class Mark(NamedTuple):
    """A column that tells where episodes are."""

    kind: str  # starts, lengths, ids, first or last
    column: str
    value: float | None  # of a first or last row; None: it is a flag


class Rule(NamedTuple):
    """What ends an episode: flags, `step_limit` steps, marks; and whether it terminated there."""

    ends: list[str]  # flags, each of which ends an episode
    terminals: list[str]  # an episode terminated if its last row bears one of these ...
    cuts: list[str]  # ... and none of these
    step_limit: int | None
    limit_cuts: bool  # an episode of `step_limit` steps did not terminate
    marks: list[Mark]

    @classmethod
    def parse(cls, text: str, columns: Collection[str], where: str = "") -> Rule:
        """Read ``none``, or flags, ``steps=N``, marks, a convention's name, joined by ``|``."""
        ends, marks, names = list[str](), list[Mark](), list[str]()
        limit: int | None = None
        for part in text.split("|") if text != "none" else []:
            is_name = part in (SPLIT, ONLY) or part.removesuffix(CUTS) in TERMINAL_FLAGS
            if (steps := _STEPS.fullmatch(part)) and limit is None:
                limit = int(steps[1])
            elif mark := MARK.fullmatch(part):
                marks.append(Mark(mark[1], mark[2], float(mark[3]) if mark[3] else None))
            elif part in FLAGS and part not in ends:
                ends.append(part)
            elif is_name and part not in FLAGS and not names:
                names.append(part)
            else:
                what = f"boundary rule {text!r} is not understood at {part!r}"
                remedy = f"join parts with '|': {', '.join(FLAGS)}, steps=N, starts:COLUMN, "
                remedy += f"lengths:COLUMN, ids:COLUMN, first:COLUMN, last:COLUMN=VALUE, {SPLIT}, "
                remedy += f"{ONLY}, {ARTIFICIAL}; or 'none' for one episode"
                raise InputError("SOURCE_LAYOUT", what, remedy=remedy)
        own = [flag for flag in ends if flag in TERMINAL_FLAGS]
        proper = [flag for flag in own if flag not in UNIONS]
        terminals, cuts = proper or own, list[str]()
        if not own:  # on time flags alone: their counterparts tell
            terminals = [t for t, time in PAIRS.items() if time in ends and t in columns]
        for name in names:
            flag = name.removesuffix(CUTS)
            if flag == name:
                either = (f for f in (*UNIONS, *TERMINAL_FLAGS) if f in columns)
                flag = next(either, TERMINAL_FLAGS[0])
            terminals = [] if name.endswith(CUTS) else [flag]
            cuts = [f for f in TIME_FLAGS if f in columns][:1] if name == SPLIT else []
            if name == SPLIT and not cuts and limit is None:
                what = f"boundary rule {text!r} needs a flag of time limits beside {flag}"
                remedy = f"name it, --rename NAME=timeouts; or --rule '{SPLIT}|steps=N'"
                raise InputError("COLUMN", what, where, remedy)
            ends = [*ends, *(f for f in (flag, *cuts) if f not in ends)]
        for column in (*ends, *(mark.column for mark in marks)):
            if column not in columns:
                what, here = f"boundary rule {text!r} needs the column {column!r}", list(columns)
                raise InputError("COLUMN", what, where, f"columns here: {', '.join(here)}")
        return cls(ends, terminals, cuts, limit, SPLIT in names, marks)

    def terminated(self, last: Mapping[str, BoolArray], lengths: Int64Array) -> BoolArray:
        """Return (E,) which episodes terminated, by the flags at their last rows, (E,) each."""
        none: BoolArray = np.zeros(len(lengths), np.bool_)
        ended = np.logical_or.reduce([none, *(last[name] for name in self.terminals)])
        ended &= ~np.logical_or.reduce([none, *(last[name] for name in self.cuts)])
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


def default_rule(
    flags: Collection[str], rows: int, read: Read, *, where: str, remedy: str = ""
) -> tuple[str, list[str]]:
    """Return the rule that the flag columns of a table imply, and what it cannot tell."""
    proper = next((f for f in TERMINAL_FLAGS if f in flags and f not in UNIONS), None)
    union = next((flag for flag in UNIONS if flag in flags), None)
    time = next((flag for flag in TIME_FLAGS if flag in flags), None)
    for pair in PAIRS.items():
        if {*pair} <= {*flags}:
            return "|".join(pair), []
    if proper and (other := time or union):
        tells = "one with both counts as terminated" if time else f"{proper} tells terminations"
        return f"{proper}|{other}", [f"{proper} and {other} end episodes: {tells}"]
    if union and time:
        limits = 0
        for row in range(0, rows, BLOCK_ROWS):
            at_limit, done = (
                flag_values(read(f, row, min(row + BLOCK_ROWS, rows)), f, where, row)
                for f in (time, union)
            )
            limits += int(at_limit.sum())
            if (at_limit & ~done).any() and union != "next.done":
                note = f"{union} and {time} end episodes: one with both counts as terminated"
                return f"{union}|{time}", [f"{note}; --rule {SPLIT} counts it as truncated"]
        note = f"{union} is true at every {time} too, which count as truncated; "
        return SPLIT, [f"{note}--rule {ONLY} counts them as terminated"] if limits else []
    if terminal := proper or union:
        note = f"only {terminal} tells how episodes end: a time limit cannot be told from a "
        return terminal, [f"{note}termination; --rule '{SPLIT}|steps=N' splits them by length"]
    if time:
        return time, [f"only {time} end episodes: none counts as terminated"]
    remedy = (
        remedy or "add terminals and timeouts, or dones; or give a rule: --rule steps=N, or none"
    )
    raise InputError("COLUMN", "no column tells where episodes end", where, remedy)


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
    """Return the episodes of a table of `rows` rows by a rule, or by its `flags`, in one pass.

    `table` has arrays, or what has ``shape`` and ``read(start, stop)``.  An episode is terminated
    if its last row bears a terminal flag, which wins over a timeout on the same row.  Rows behind
    the last end form an episode that is truncated.
    """

    def read(name: str, start: int, stop: int) -> Array:
        column = table[name]
        part = column[start:stop] if isinstance(column, np.ndarray) else column.read(start, stop)
        return np.asarray(part)

    notes, untold = list[str](), dict[str, Int64Array]()
    if rule is None:
        untold = _untold(table, rows, read)
        marks = [*untold, *row_marks(table)]
        remedy = f"give --ends {marks[0]}" if marks else ""
        rule, notes = default_rule(flags, rows, read, where=where, remedy=remedy)
    parsed = Rule.parse(rule, table, where)
    told = {*flags} - {mark.column for mark in parsed.marks}
    if not parsed.ends and told & {*TERMINAL_FLAGS}:
        text, more = default_rule(told, rows, read, where=where)
        implied = Rule.parse(text, told)
        parsed = parsed._replace(terminals=implied.terminals, cuts=implied.cuts)
        notes = more if parsed.marks and implied.terminals[0] in UNIONS else []
    sizes = {mark: table[mark.column].shape[0] for mark in parsed.marks}
    marked = [_last_rows(mark, size, rows, read, where) for mark, size in sizes.items()]
    last_rows = np.unique(np.concatenate([np.zeros(0, np.int64), *marked]))
    ends: list[Int64Array] = [np.zeros(0, np.int64)]
    finals: list[BoolArray] = [np.zeros(0, np.bool_)]
    start = 0  # of the episode that is under way
    for row in range(0, rows, BLOCK_ROWS):
        stop = min(row + BLOCK_ROWS, rows)
        bears = {
            name: flag_values(read(name, row, stop), name, where, row)
            for name in dict.fromkeys([*parsed.ends, *parsed.terminals, *parsed.cuts])
        }
        by_flag = np.logical_or.reduce([np.zeros(stop - row, bool), *map(bears.get, parsed.ends)])
        inside = last_rows[(last_rows >= row) & (last_rows < stop)]
        final = np.union1d(np.flatnonzero(by_flag) + row, inside)
        if parsed.step_limit is not None:
            final = _with_step_limit(final, start, stop, parsed.step_limit)
        lengths = np.diff(final, prepend=start - 1)
        ends.append(final)
        finals.append(parsed.terminated({n: f[final - row] for n, f in bears.items()}, lengths))
        start = int(final[-1]) + 1 if final.size else start
    if start < rows:
        ends.append(np.array([rows - 1]))
        finals.append(np.array([False]))
    last = np.concatenate(ends)
    for mark_text, tells in untold.items():
        if not np.isin(tells, last).all():
            what = f"{mark_text.partition(':')[2]} looks like the {mark_text.partition(':')[0]} of "
            what += f"{tells.size:,} episodes, and {rule} makes {last.size:,} others"
            remedy = f"give --ends {mark_text}, or keep these by --rule '{rule}'"
            raise InputError("SOURCE_LAYOUT", what, where, remedy)
    lengths = np.diff(last, prepend=np.int64(-1))
    return Boundaries(rule, lengths, np.concatenate(finals), rows - start, notes)


def judge_ends(
    flags: Mapping[str, Array], lengths: Int64Array, rule: str | None, *, where: str
) -> tuple[BoolArray, list[str]]:
    """Return which of the episodes that a format stores apart terminated, and what is not known.

    `flags` are (N,) each; their values at the last step of each episode count.
    """
    ends, notes = np.cumsum(lengths) - 1, list[str]()
    bears = {name: flag_values(rows, name, where) for name, rows in flags.items()}
    last = {name: rows[ends] for name, rows in bears.items()}
    for name in flags if rule is None else ():
        if inside := int(bears[name].sum() - last[name].sum()):
            notes.append(
                f"{name} is true at {inside:,} steps that end no episode: they do not count"
            )
    if rule is None and not {*flags} & {*TERMINAL_FLAGS}:
        note = "no flag tells a termination: every episode counts as truncated"
        limited = any(rows.all() for rows in last.values())
        return np.zeros(ends.size, np.bool_), [*notes, *([] if limited else [note])]
    text, more = (
        (rule, [])
        if rule
        else default_rule(last, ends.size, lambda n, a, b: last[n][a:b], where=where)
    )
    parsed = Rule.parse(text, flags, where)
    ended = parsed.terminated(last, lengths)
    told = (
        parsed.cuts or len(parsed.ends) > 1
    )  # a flag alone needs a word only if it is of two meanings
    return ended, notes + (more if told or (ended.any() and parsed.ends[0] in UNIONS) else [])


def kind_of_flag(name: str) -> int:
    """Return what a flag means: 0 a termination, 1 either end, 2 a time limit; else -1."""
    kinds = ({*TERMINAL_FLAGS} - {*UNIONS}, UNIONS, TIME_FLAGS)
    return next((number for number, names in enumerate(kinds) if name in names), -1)


def judges_only(rule: str | None) -> bool:
    """Whether a rule tells how episodes end, not where: one of formats that store them apart."""
    return rule is not None and (rule.split("|")[0] in (SPLIT, ONLY) or rule.endswith(CUTS))


def flag_values(values: Array, name: str, where: str, first: int = 0) -> BoolArray:
    """Return rows `first` on of a flag as (n,) bools; refuse what is neither 0 nor 1."""
    rows, remedy = values.reshape(len(values), -1), "give one true or false for each step"
    what = f"the flag {name} has {rows.shape[1]} values a step" if rows.shape[1] != 1 else ""
    if not what and rows.dtype != np.bool_:
        odd = np.flatnonzero((rows != 0) & (rows != 1))
        if odd.size and rows[odd[0], 0] != rows[odd[0], 0]:
            what = f"the flag {name} is NaN at row {first + int(odd[0])}"
        elif odd.size:
            seen = np.unique(rows)
            what = f"{name} is no flag: it holds {', '.join(f'{v:g}' for v in seen[:5])}"
            remedy = f"if {seen[-1]:g} marks the last step of an episode, --ends "
            remedy += f"last:{name}={seen[-1]:g} reads it; if it numbers episodes, ids:{name}"
    if what:
        raise InputError("SOURCE_LAYOUT", what, where, remedy)
    return np.asarray(rows[:, 0] != 0)


def _last_rows(mark: Mark, size: int, rows: int, read: Read, where: str) -> Int64Array:
    """Return the last row of each episode that a mark tells of."""
    kind, name, value = mark
    if kind in ("starts", "lengths"):
        if (last := _bounds(kind, read(name, 0, size), rows)) is None:
            what = f"{name} holds no {kind} of episodes of {rows:,} rows in all"
            remedy = (
                "starts are row numbers that rise, lengths add up to all rows; a column with a "
            )
            remedy += f"value each row is first:{name}, last:{name} or ids:{name}"
            raise InputError("SOURCE_LAYOUT", what, where, remedy)
        return last
    found, ids = [np.zeros(0, np.int64)], list[Array]()
    for row in range(0, rows, BLOCK_ROWS):
        values = read(name, row, min(row + BLOCK_ROWS, rows)).reshape(-1)
        if kind == "ids":
            before = read(name, row - 1, row).reshape(-1) if row else values[:1]
            hits = np.diff(values, prepend=before) != 0
            ids += [values[:1]] * (not row) + [values[hits]]
        else:
            hits = flag_values(values, name, where, row) if value is None else values == value
        found.append(np.flatnonzero(hits) + row - (kind != "last"))
    last = np.concatenate(found)
    numbers = np.concatenate([np.zeros(0), *ids])
    if (twice := numbers.size - np.unique(numbers).size) or not (last.size or ids):
        what = (
            f"{name} has the same id again later, {twice:,} times"
            if twice
            else f"no row of {name} is marked"
        )
        remedy = (
            "sort the rows by episode and give each an id of its own"
            if twice
            else "name another column or value"
        )
        raise InputError("SOURCE_LAYOUT", what, where, remedy)
    return np.unique([*last[last >= 0], *([] if kind == "last" else [rows - 1])])


def _bounds(kind: str, values: Array, rows: int) -> Int64Array | None:
    """Return the last row of each episode by starts or lengths, ``None`` if they are none."""
    numbers = values.reshape(-1)
    stops = np.cumsum(numbers) if kind == "lengths" else numbers
    if (
        values.size != len(values)
        or not (np.diff(stops) > 0).all()
        or (numbers != np.rint(numbers)).any()
    ):
        return None
    if (
        not numbers.size
        or numbers[0] < (kind == "lengths")
        or stops[-1] > rows
        or (kind == "lengths" and stops[-1] != rows)
    ):
        return None
    return np.unique([*stops[stops > 0].astype(np.int64), rows]) - 1


def _untold(table: Mapping[str, Any], rows: int, read: Read) -> dict[str, Int64Array]:
    """Return what arrays of fewer rows seem to tell of episodes: the mark, and the last rows."""
    marks = dict[str, Int64Array]()
    for name, column in table.items():
        size = column.shape[0]
        if (
            len(column.shape) != 1
            or column.dtype.kind not in "iu"
            or not 1 < size <= rows + 1
            or size == rows
        ):
            continue
        values = read(name, 0, size)
        for kind in ("lengths", "starts"):
            last = _bounds(kind, values, rows)
            whole = kind == "lengths" or values[0] == 0 or values[-1] == rows
            if last is not None and whole and values[-1] >= size * (kind == "starts"):
                marks[f"{kind}:{name}"] = last
    return marks


_ROW_MARKS = {  # names of columns that tell where episodes begin, and the part of a rule for them
    r"is_first|episode_start": "first:{}",
    r"step_type": "last:{}=2",
    r"(episode|traj(ectory)?|demo)(_?(id|idx|index|number|num))?": "ids:{}",
}


def row_marks(columns: Collection[str]) -> list[str]:
    """Return parts of a rule for columns whose names say that they tell where episodes are."""
    return [
        part.format(name)
        for pattern, part in _ROW_MARKS.items()
        for name in columns
        if re.fullmatch(pattern, name.rpartition("/")[2])
    ]


def _with_step_limit(ends: Int64Array, start: int, stop: int, limit: int) -> Int64Array:
    """Add the rows at which `limit` steps are full, between `ends` and up to `stop`."""
    previous = np.concatenate(([start - 1], ends))
    following = np.concatenate((ends, [stop]))
    cuts = [ends]
    for before, after in zip(previous, following, strict=True):
        if after - before > limit:
            cuts.append(np.arange(before + limit, after, limit, dtype=np.int64))
    return np.sort(np.concatenate(cuts))
