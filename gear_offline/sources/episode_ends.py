"""Where episodes end: the rules, and one streaming pass over the flags that applies a rule.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.errors import InputError

_STEPS = re.compile(r"steps=([1-9][0-9]{0,11})")
TERMINAL_FLAGS = ("terminals", "terminations", "terminated", "dones", "done")
TIME_FLAGS = ("timeouts", "truncations", "truncated")
FLAGS = (*TERMINAL_FLAGS, *TIME_FLAGS)
SCALARS = ("rewards", *FLAGS)  # (N, 1) is read as one number a step
PAIRS = {"terminals": "timeouts", "terminations": "truncations", "terminated": "truncated"}
ARTIFICIAL = "terminals-as-truncations"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What ends an episode.

    Attributes
    ----------
    text
        The rule as written: parts joined by ``|``, each a flag column, ``steps=N`` or
        ``terminals-as-truncations``; or ``none`` for one episode over the whole file.
    flags
        Flag columns whose true rows end an episode.
    step_limit
        An episode also ends after this many steps; ``None`` for no limit.
    artificial
        The terminal flags mark cuts of the recording, not ends of the environment.
    """

    text: str
    flags: tuple[str, ...]
    step_limit: int | None = None
    artificial: bool = False

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule as written; raises `InputError` (``SOURCE_LAYOUT``)."""
        flags: list[str] = []
        limit: int | None = None
        artificial = False
        for part in text.split("|") if text != "none" else ():
            steps = _STEPS.fullmatch(part)
            if steps and limit is None:
                limit = int(steps.group(1))
            elif part == ARTIFICIAL and "terminals" not in flags:
                flags.append("terminals")
                artificial = True
            elif part in FLAGS and part not in flags:
                flags.append(part)
            else:
                raise InputError(
                    "SOURCE_LAYOUT",
                    f"boundary rule {text!r} is not understood at {part!r}",
                    remedy="join parts with '|': "
                    + ", ".join((*FLAGS, ARTIFICIAL, "steps=N"))
                    + "; or 'none' for one episode",
                )
        return cls(text=text, flags=tuple(flags), step_limit=limit, artificial=artificial)


def default_rule(flags: Sequence[str], *, where: str) -> tuple[str, list[str]]:
    """Return the rule that the flag columns of a table imply, and what it cannot tell."""
    for pair in PAIRS.items():
        if set(pair) <= set(flags):
            return "|".join(pair), []
    terminal = next((name for name in TERMINAL_FLAGS if name in flags), None)
    time_flag = next((name for name in TIME_FLAGS if name in flags), None)
    if terminal and time_flag:
        return f"{terminal}|{time_flag}", [
            f"{terminal} and {time_flag} end episodes: one that ends with both counts as terminated"
        ]
    if terminal:
        return terminal, [
            f"only {terminal} end episodes: a time limit cannot be told from a termination"
        ]
    if time_flag:
        return time_flag, [f"only {time_flag} end episodes: none counts as terminated"]
    raise InputError(
        "COLUMN",
        "no column tells where episodes end",
        where=where,
        remedy="add terminals and timeouts, terminations and truncations, or dones; or give the "
        "rule 'steps=N' or 'none'",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundaries:
    """Episodes found.

    Attributes
    ----------
    lengths
        (E,) int64.
    terminated, truncated
        (E,) bool; exactly one is true.
    tail_steps
        Steps of the last episode when no flag ended it, else 0.
    """

    lengths: Int64Array
    terminated: BoolArray
    truncated: BoolArray
    tail_steps: int


def split_episodes(
    rule: str,
    columns: Sequence[str],
    rows: int,
    read: Callable[[str, int, int], Array],
    *,
    where: str,
    block: int = 1 << 20,
) -> Boundaries:
    """Return the episodes of a table by a boundary rule.

    Parameters
    ----------
    rule
        As written; see `Rule`.
    columns
        Names of the table's columns.
    rows
        N.
    read
        ``read(flag, start, stop)`` gives rows of a flag; any number but 0 is true.
    where
        Place in messages.
    block
        Rows per read.
    """
    parsed = Rule.parse(rule)
    missing = [flag for flag in parsed.flags if flag not in columns]
    if missing:
        raise InputError(
            "COLUMN",
            f"boundary rule {rule!r} needs the column {missing[0]!r}",
            where=where,
            remedy=f"columns here: {', '.join(columns)}",
        )
    # What says whether an episode's last row terminated it: the rule's own flags, or else (a rule
    # on timeouts alone) the counterpart of its time flag.
    terminals = [flag for flag in parsed.flags if flag in TERMINAL_FLAGS]
    if not terminals:
        counterparts = {time: terminal for terminal, time in PAIRS.items()}
        wanted = [counterparts[flag] for flag in parsed.flags] or TERMINAL_FLAGS
        terminals = [flag for flag in wanted if flag in columns]

    def flags(names: Iterable[str], start: int, stop: int) -> BoolArray:
        found = np.zeros(stop - start, np.bool_)
        for name in names:
            values = read(name, start, stop)
            invalid = np.flatnonzero(values != values)
            if invalid.size:
                raise InputError(
                    "SOURCE_LAYOUT",
                    f"the flag {name} is NaN at row {start + int(invalid[0])}",
                    where=where,
                    remedy="give one true or false for each step",
                )
            found |= values != 0
        return found

    blocks = ((start, min(start + block, rows)) for start in range(0, rows, block))
    return find_boundaries(
        parsed,
        ((flags(parsed.flags, *ends), flags(terminals, *ends)) for ends in blocks),
        rows,
    )


def find_boundaries(
    rule: Rule, blocks: Iterable[tuple[BoolArray, BoolArray]], steps: int
) -> Boundaries:
    """Apply `rule` in one pass.

    Parameters
    ----------
    rule
        Gives the step limit and whether terminals are artificial.
    blocks
        Consecutive row blocks: (n,) bool rows that bear an ending flag, and (n,) bool rows on
        which the environment says that it terminated.
    steps
        N, the total of the blocks.

    Returns
    -------
    Boundaries
        An episode is terminated if its last row bears the terminal flag, which wins over a timeout
        on the same row.  Rows behind the last end form an episode that is truncated.
    """
    ends: list[Int64Array] = []
    finals: list[BoolArray] = []
    row, start = 0, 0
    for ending, terminal in blocks:
        stop = row + ending.size
        found = np.flatnonzero(ending).astype(np.int64) + row
        if rule.step_limit is not None:
            found = _with_step_limit(found, start, stop, rule.step_limit)
        if found.size:
            ends.append(found)
            finals.append(terminal[found - row] & (not rule.artificial))
            start = int(found[-1]) + 1
        row = stop
    assert row == steps, f"flag blocks cover {row} of {steps} rows"
    if start < steps:
        ends.append(np.array([steps - 1], dtype=np.int64))
        finals.append(np.array([False]))
    last = np.concatenate(ends)
    terminated = np.concatenate(finals).astype(np.bool_)
    lengths = np.diff(last, prepend=np.int64(-1))
    return Boundaries(
        lengths=lengths, terminated=terminated, truncated=~terminated, tail_steps=steps - start
    )


def _with_step_limit(found: Int64Array, start: int, stop: int, limit: int) -> Int64Array:
    """Add the rows at which `limit` steps are full, between the ends `found` and up to `stop`."""
    previous = np.concatenate(([start - 1], found))
    following = np.concatenate((found, [stop]))
    cuts = [found]
    for before, after in zip(previous, following, strict=True):
        if after - before > limit:
            cuts.append(np.arange(before + limit, after, limit, dtype=np.int64))
    return np.sort(np.concatenate(cuts))
