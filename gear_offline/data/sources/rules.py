"""Boundary rules: which flags and marks end episodes, and which flags tell a termination.

Shape legend: E episodes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.types import BoolArray, Int64Array
from gear_offline.data.sources.flags import (
    FLAGS,
    MEANING,
    PAIRS,
    TERMINAL_FLAGS,
    TIME_FLAGS,
    UNIONS,
    RowsWhereTrue,
)
from gear_offline.data.sources.input_files import misfit
from gear_offline.data.sources.row_marks import MARK
from gear_offline.errors import InputError

CUTS = "-as-truncations"
_NUMBER = r"-?[0-9.]+(e[+-]?[0-9]+)?"
ARTIFICIAL = f"terminals{CUTS}"
SPLIT, ONLY = "done-and-timeout", "done-only"
CONVENTIONS = (SPLIT, ONLY, *(f"{flag}{CUTS}" for flag in TERMINAL_FLAGS))
KNOWN = ", ".join((*FLAGS, SPLIT, ONLY, ARTIFICIAL, "steps=N"))
KNOWN += ", starts:COLUMN, ends:, lengths:, ids:, by:"


class Rule(NamedTuple):
    """The terms of a rule: each ends episodes, and some tell which of them terminated."""

    ends: list[str]  # flags, each of which ends an episode
    terminals: list[str]  # an episode terminated if its last row bears one of these ...
    cuts: list[str]  # ... and none of these
    step_limit: int | None
    limit_cuts: bool  # an episode of `step_limit` steps did not terminate
    marks: list[re.Match[str]]

    @classmethod
    def parse(cls, text: str, columns: Collection[str], where: str) -> Rule:
        """Read ``none``, or flags, ``steps=N``, marks, a convention's name, joined by ``|``."""
        terms = text.split("|") if text != "none" else []
        ends = [term for term in terms if term in FLAGS]
        names = [term for term in terms if term in CONVENTIONS]
        marks = [m for term in terms if (m := MARK.fullmatch(term)) and m[1] != "by"]
        limits = [p[6:] for p in terms if re.fullmatch(r"steps=[1-9][0-9]{0,11}", p)]
        count = len({*ends}) + len(names[:1]) + len(marks) + len(limits[:1])
        if count < len(terms):
            remedy = f"join parts with '|': {KNOWN}, first:COLUMN, last:COLUMN=VALUE; or 'none'"
            raise misfit(f"boundary rule {text!r} is not understood", "", remedy)
        enders = [flag for flag in ends if flag in TERMINAL_FLAGS]
        terminals, cuts = [f for f in enders if f not in UNIONS] or enders, list[str]()
        if not enders:  # on time flags alone: their counterparts tell
            terminals = [t for t, time in PAIRS.items() if time in ends and t in columns]
        for name in names:
            either = (f for f in (*UNIONS, *TERMINAL_FLAGS) if f in columns)
            flag = name.removesuffix(CUTS) if name.endswith(CUTS) else next(either, "terminals")
            terminals = [] if name.endswith(CUTS) else [flag]
            cuts = [f for f in TIME_FLAGS if f in columns][:1] if name == SPLIT else []
            ends += [f for f in (flag, *cuts) if f not in ends]
        if SPLIT in names and not cuts and not limits:
            problem = f"boundary rule {text!r} needs a flag of time limits beside {ends[-1]}"
            remedy = f"name it, --rename NAME=timeouts; or --rule '{SPLIT}|steps=N'"
            raise InputError("COLUMN", problem, where, remedy)
        for column in (*ends, *(mark[2] for mark in marks)):
            if column not in columns:
                problem = f"boundary rule {text!r} needs the column {column!r}"
                raise InputError("COLUMN", problem, where, f"columns here: {', '.join(columns)}")
        limit = int(limits[0]) if limits else None
        return cls(ends, terminals, cuts, limit, SPLIT in names, marks)

    def judge(self, last: Int64Array, lengths: Int64Array, true: RowsWhereTrue) -> BoolArray:
        """Return (E,) bool: the episodes that terminated, by their `last` rows."""
        ended = np.isin(last, union(map(true, self.terminals)))
        ended &= ~np.isin(last, union(map(true, self.cuts)))
        return ended & (lengths != self.step_limit) if self.limit_cuts else ended


def default_rule(flags: Collection[str], true: RowsWhereTrue) -> tuple[str, str]:
    """Return the rule that the flags of a table imply, and what they cannot tell; "" for none."""
    ordered = [flag for flag in FLAGS if flag in flags]
    terminal, union, time = (next((f for f in ordered if MEANING[f] == k), "") for k in range(3))
    for pair in PAIRS.items():
        if {*pair} <= {*flags}:
            return "|".join(pair), ""
    # Gymnasium's flag is true at time limits alone: the other one is true at every end.
    every_end = (union or terminal) if time.endswith("TimeLimit.truncated") else ""
    if terminal and not every_end and (second := time or union):
        reading = "one with both counts as terminated" if time else f"{terminal} tells terminations"
        return f"{terminal}|{second}", f"{terminal} and {second} end episodes: {reading}"
    if time and (flag := every_end or union):
        if every_end or flag == "next.done" or np.isin(true(time), true(flag)).all():
            note = f"{flag} is true at every {time} too, which count as truncated; --rule {ONLY} "
            return SPLIT, f"{note}counts them as terminated" if true(time).size else ""
        note = f"{flag} and {time} end episodes: one with both counts as terminated; "
        return f"{flag}|{time}", f"{note}--rule {SPLIT} counts it as truncated"
    if flag := terminal or union:
        note = f"only {flag} tells how episodes end: a time limit cannot be told from a "
        return flag, f"{note}termination; --rule '{SPLIT}|steps=N' truncates those of N steps"
    return time, f"only {time} end episodes: none counts as terminated" if time else ""


def split_values(rule: str | None) -> tuple[str | None, dict[str, str]]:
    """Return a rule without the values of ``FLAG=VALUE``, at which a flag is true; and those."""
    terms = [term.partition("=") for term in rule.split("|")] if rule else []
    values = {n: value for n, _, value in terms if n in FLAGS and re.fullmatch(_NUMBER, value)}
    texts = (name if name in values else f"{name}{equals}{value}" for name, equals, value in terms)
    return rule and "|".join(texts), values


def union(row_sets: Any) -> Int64Array:
    """Return the rows that are in any of `row_sets`, sorted."""
    return reduce(np.union1d, row_sets, np.zeros(0, np.int64))
