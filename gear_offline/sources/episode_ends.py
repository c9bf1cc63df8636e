"""Where episodes end: the rules, and one streaming pass over the flags that applies a rule.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.errors import InputError

_STEPS = re.compile(r"steps=([1-9][0-9]{0,11})")
TERMINAL_FLAGS = ("terminals", "terminations", "terminated", "dones", "done")
TIME_FLAGS = ("timeouts", "truncations", "truncated")
FLAGS = (*TERMINAL_FLAGS, *TIME_FLAGS)
SCALARS = ("rewards", *FLAGS)  # (N, 1) is read as one number a step
PAIRS = {"terminals": "timeouts", "terminations": "truncations", "terminated": "truncated"}
BLOCK_ROWS = 1 << 20  # of flags in memory
ARTIFICIAL = "terminals-as-truncations"
Read = Callable[[str, int, int], Array]  # rows of a column


class Rule(NamedTuple):
    """What ends an episode: flag columns, or `step_limit` steps.

    `artificial` terminals mark cuts of the recording, not ends of the environment.
    """

    flags: list[str]
    step_limit: int | None
    artificial: bool

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read ``none``, or parts joined by ``|``: a flag, ``steps=N``, `ARTIFICIAL`."""
        flags: list[str] = []
        limit: int | None = None
        parts = text.split("|") if text != "none" else []
        for part in parts:
            flag = "terminals" if part == ARTIFICIAL else part
            if (steps := _STEPS.fullmatch(part)) and limit is None:
                limit = int(steps[1])
            elif flag in FLAGS and flag not in flags:
                flags.append(flag)
            else:
                what = f"boundary rule {text!r} is not understood at {part!r}"
                known = ", ".join((*FLAGS, ARTIFICIAL, "steps=N"))
                remedy = f"join parts with '|': {known}; or 'none' for one episode"
                raise InputError("SOURCE_LAYOUT", what, remedy=remedy)
        return cls(flags, limit, ARTIFICIAL in parts)


def default_rule(flags: Sequence[str], *, where: str) -> tuple[str, list[str]]:
    """Return the rule that the flag columns of a table imply, and what it cannot tell."""
    terminal = next((name for name in TERMINAL_FLAGS if name in flags), None)
    time_flag = next((name for name in TIME_FLAGS if name in flags), None)
    for pair in PAIRS.items():
        if set(pair) <= set(flags):
            return "|".join(pair), []
    if terminal and time_flag:
        note = f"{terminal} and {time_flag} end episodes: one with both counts as terminated"
        return f"{terminal}|{time_flag}", [note]
    if terminal:
        note = f"only {terminal} end episodes: a time limit cannot be told from a termination"
        return terminal, [note]
    if time_flag:
        return time_flag, [f"only {time_flag} end episodes: none counts as terminated"]
    remedy = "add terminals and timeouts, or dones; or give a rule: --rule steps=N, or none"
    raise InputError("COLUMN", "no column tells where episodes end", where, remedy)


class Boundaries(NamedTuple):
    """Episodes, (E,) each; `tail_steps` are those of the last one when no flag ended it, else 0."""

    lengths: Int64Array
    terminated: BoolArray
    tail_steps: int


def split_episodes(
    rule: str, columns: Collection[str], rows: int, read: Read, *, where: str
) -> Boundaries:
    """Return the episodes of a table of `rows` rows by a rule, in one pass.

    ``read(flag, start, stop)`` gives rows of a flag; any number but 0 is true.  An episode is
    terminated if its last row bears a terminal flag, which wins over a timeout on the same row.
    Rows behind the last end form an episode that is truncated.
    """
    parsed = Rule.parse(rule)
    for flag in parsed.flags:
        if flag not in columns:
            what, here = f"boundary rule {rule!r} needs the column {flag!r}", ", ".join(columns)
            raise InputError("COLUMN", what, where, f"columns here: {here}")
    # What says whether an episode's last row terminated it: the rule's own flags, or else (a rule
    # on timeouts alone) the counterpart of its time flag.
    terminals = [flag for flag in parsed.flags if flag in TERMINAL_FLAGS]
    if not terminals:
        counterparts = {time: terminal for terminal, time in PAIRS.items()}
        wanted = [counterparts[flag] for flag in parsed.flags] or TERMINAL_FLAGS
        terminals = [flag for flag in wanted if flag in columns]
    ends: list[Int64Array] = [np.zeros(0, np.int64)]
    finals: list[BoolArray] = [np.zeros(0, np.bool_)]
    start = 0  # of the episode that is under way
    for row in range(0, rows, BLOCK_ROWS):
        stop = min(row + BLOCK_ROWS, rows)
        final = np.flatnonzero(_marked(parsed.flags, row, stop, read, where)) + row
        if parsed.step_limit is not None:
            final = _with_step_limit(final, start, stop, parsed.step_limit)
        terminal = _marked(terminals, row, stop, read, where)
        ends.append(final)
        finals.append(terminal[final - row] & (not parsed.artificial))
        start = int(final[-1]) + 1 if final.size else start
    if start < rows:
        ends.append(np.array([rows - 1]))
        finals.append(np.array([False]))
    last = np.concatenate(ends)
    lengths = np.diff(last, prepend=np.int64(-1))
    return Boundaries(lengths, np.concatenate(finals), rows - start)


def _marked(names: Iterable[str], start: int, stop: int, read: Read, where: str) -> BoolArray:
    """Return (stop - start,) the rows that bear one of these flags."""
    marked, remedy = np.zeros(stop - start, np.bool_), "give one true or false for each step"
    for name in names:
        values = read(name, start, stop).reshape(stop - start, -1)
        if values.shape[1] != 1:
            what = f"the flag {name} has {values.shape[1]} values a step"
            raise InputError("SOURCE_LAYOUT", what, where, remedy)
        if (invalid := np.flatnonzero(values != values)).size:
            what = f"the flag {name} is NaN at row {start + int(invalid[0])}"
            raise InputError("SOURCE_LAYOUT", what, where, remedy)
        marked |= values[:, 0] != 0
    return marked


def _with_step_limit(ends: Int64Array, start: int, stop: int, limit: int) -> Int64Array:
    """Add the rows at which `limit` steps are full, between `ends` and up to `stop`."""
    previous = np.concatenate(([start - 1], ends))
    following = np.concatenate((ends, [stop]))
    cuts = [ends]
    for before, after in zip(previous, following, strict=True):
        if after - before > limit:
            cuts.append(np.arange(before + limit, after, limit, dtype=np.int64))
    return np.sort(np.concatenate(cuts))
