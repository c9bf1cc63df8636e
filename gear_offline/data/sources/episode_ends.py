"""The ends of episodes: the rows at which they end, and which of them terminated there.

`flags` and `row_marks` read what columns tell, `rules` says which of it counts.  A flag is given
as the rows at which it is true.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import BoolArray, Int64Array
from gear_offline.data.sources.flags import PADDED, TERMINAL_FLAGS, UNIONS, RowsWhereTrue, true_rows
from gear_offline.data.sources.input_files import misfit
from gear_offline.data.sources.row_marks import falls, guess_marks, last_rows, row_marks
from gear_offline.data.sources.rules import CUTS, Rule, default_rule, split_values, union
from gear_offline.data.sources.streams import doubts
from gear_offline.errors import InputError

_LIKELY = re.compile(r"trunc|limit|time_?out|final|last|cut(_|$)", re.IGNORECASE)
NO_TERMINATION = "no flag tells a termination: every episode counts as truncated"


def split_episodes(
    rule: str | None,
    table: Mapping[str, Any],
    flags: Collection[str],
    rows: int,
    cuts: Int64Array,
    *,
    where: str,
) -> tuple[str, Int64Array, BoolArray, int, list[str]]:
    """Return the episodes of a table of `rows` rows by a rule, or by its `flags`.

    They are the rule, (E,) lengths and terminations, the steps of a last episode that nothing
    ended, and what the flags cannot tell.

    `table` has arrays, or what has ``shape`` and ``read(start, stop)``.  Episodes end at the rows
    `cuts` too.  One is terminated if its last row bears a terminal flag, which wins over a timeout
    on the same row.  Rows behind the last end form an episode that is truncated.
    """
    user_rule, (rule, values) = rule, split_values(rule)
    true = cache(lambda name: true_rows(table[name], name, where, values.get(name), flags))
    unnamed, note = dict[str, tuple[Int64Array, str]](), ""
    if rule is None:
        unnamed = guess_marks(table, rows)
        rule, note = default_rule(flags, true)
        if not rule:
            raise _no_rule([*unnamed, *row_marks(table)], where)
    parsed = Rule.parse(rule, table, where)
    other_flags = {*flags} - {mark[2] for mark in parsed.marks}
    if not parsed.ends and other_flags & {*TERMINAL_FLAGS}:  # the rule ends episodes, flags say how
        text, unknown = default_rule(other_flags, true)
        implied = Rule.parse(text, other_flags, where)
        parsed = parsed._replace(terminals=implied.terminals, cuts=implied.cuts)
        note = unknown if parsed.marks and implied.terminals[0] in UNIONS else ""
    last = np.union1d(_ends(parsed, table, rows, true, where), cuts)
    tail = rows - 1 - int(last[-1]) if last.size else rows
    last = np.append(last, [rows - 1] * (tail > 0)).astype(np.int64)
    for name, (ends, remedy) in unnamed.items():
        if not np.isin(ends, last).all():
            problem = f"{name} tells of {ends.size:,} episodes, and {rule} of {last.size:,} others"
            remedy = remedy or f"give --ends {name}"
            raise misfit(problem, where, f"{remedy}; or keep these by --rule '{rule}'")
    in_turn = [] if cuts.size else [*doubts(table, flags, last, rows)]
    for problem, remedy, is_certain in in_turn:
        if is_certain and user_rule is None:
            raise misfit(problem, where, f"{remedy}; or keep these episodes by --rule '{rule}'")
    lengths = np.diff(last, prepend=np.int64(-1))
    terminated = parsed.judge(last, lengths, true)
    terminated[-1] &= not tail
    if parsed.marks and not np.isin(last, union(map(true, parsed.terminals))).all():
        note = ""  # they are not true at every end, so they tell how episodes ended
    notes = [note] if note else []
    if user_rule and not parsed.terminals and CUTS not in user_rule:
        notes.append(NO_TERMINATION)
    for name in sorted(other_flags) if user_rule else ():  # a rule may pass over flags
        with suppress(InputError):  # of other values, which it passes over for that
            notes += _inside({name: true(name)}, last)
    if user_rule is None:
        notes += _likely(table, flags, last, rows, where)
    notes += [f"{problem}: {remedy}" for problem, remedy, _ in in_turn]
    for name in (term[6:-2] for term in row_marks(table) if term[:6] + term[-2:] == "first:=0"):
        if inside := np.setdiff1d(falls(table[name], rows), last).size:
            problem = f"{name} falls at {count_text(inside, 'step')} inside episodes"
            notes.append(f"{problem}: sort their rows by it")
    return user_rule or rule, lengths, terminated, tail, notes


def _likely(
    table: Mapping[str, Any], flags: Collection[str], last: Int64Array, rows: int, where: str
) -> list[str]:
    """Warn of columns that are no `flags`, but have the values and the name of one."""
    notes = []
    for name in (n for n in table if n not in flags and _LIKELY.search(n)):
        column = table[name]
        if column.shape == (rows,) and column.dtype.kind in "biu":
            with suppress(InputError):  # of other values
                if inside := np.setdiff1d(true_rows(column, name, where), last).size:
                    finding = f"{name} is true at {count_text(inside, 'step')} inside episodes"
                    notes.append(f"{finding}; if they end there: --rename {name}=timeouts")
    return notes


def _no_rule(marks: list[str], where: str) -> InputError:
    remedy = f"give --rule 'steps=N', or none; flags are called terminals, timeouts, dones{PADDED}"
    if marks:
        remedy = f"give --ends {marks[0]}"
    return InputError("COLUMN", "no column tells where episodes end", where, remedy)


def _ends(
    rule: Rule, table: Mapping[str, Any], rows: int, true: RowsWhereTrue, where: str
) -> Int64Array:
    """Return the rows at which flags, marks and the limit of steps of a rule end episodes."""
    marked = (last_rows(mark, table[mark[2]], rows, where) for mark in rule.marks)
    last = union([*map(true, rule.ends), *marked])
    return last if rule.step_limit is None else _with_step_limit(last, rows, rule.step_limit)


def judge_ends(
    flags: Mapping[str, Any], lengths: Int64Array, rule: str | None, *, where: str
) -> tuple[BoolArray, list[str]]:
    """Find the terminated episodes of a format that stores them apart, and doubts about that.

    `flags` are columns as of `split_episodes`; their values at the last steps count.
    """
    last, (rule, values) = np.cumsum(lengths) - 1, split_values(rule)
    true = cache(lambda name: true_rows(flags[name], name, where, values.get(name), flags))
    if rule:
        return Rule.parse(rule, flags, where).judge(last, lengths, true), []
    notes = _inside({name: true(name) for name in flags}, last)
    if not {*flags} & {*TERMINAL_FLAGS}:
        if not any(np.isin(last, true(name)).all() for name in flags):
            notes.append(NO_TERMINATION)
        return np.zeros(last.size, np.bool_), notes
    text, note = default_rule(flags, lambda name: np.intersect1d(true(name), last))
    parsed = Rule.parse(text, flags, where)
    ended = parsed.judge(last, lengths, true)
    # one flag that says nothing of time limits is enough, as the ends are known
    enough = len(parsed.ends) == 1 and not (ended.any() and parsed.ends[0] in UNIONS)
    return ended, notes if enough or not note else [*notes, note]


def _inside(true: Mapping[str, Int64Array], last: Int64Array) -> list[str]:
    """Warn of flags that are true at other rows than the `last` of episodes."""
    inside = {name: np.setdiff1d(rows, last).size for name, rows in true.items()}
    counts = {name: count_text(count, "step") for name, count in inside.items() if count}
    return [f"{name} is true at {steps} where no episode ends" for name, steps in counts.items()]


def _with_step_limit(last: Int64Array, rows: int, limit: int) -> Int64Array:
    """Add the rows at which `limit` steps are full, between `last` ones and up to `rows`."""
    bounds = pairwise([-1, *last.tolist(), rows])
    cuts = [np.arange(a + limit, b, limit) for a, b in bounds if b - a > limit]
    return np.sort(np.concatenate([last, *cuts]))
