"""What looks wrong in how a dataset's episodes lie and end, and the option that would change it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.types import BoolArray, Int64Array
from gear_offline.sources.d4rl import FAMILIES
from gear_offline.sources.episode_ends import FLAGS, SPLIT, TERMINAL_FLAGS, row_marks

SAME_LENGTH = 5  # episodes that end as terminated at the greatest length
LATE = ("is_first", "step_type")  # of layouts whose last row is an observation alone


class Oddity(NamedTuple):
    """Episodes that are probably not what was meant."""

    episodes: Int64Array
    what: str  # goes on after their number
    remedy: str


def odd_episodes(
    lengths: Int64Array,
    terminated: BoolArray,
    rule: str,
    facts: Mapping[str, Any],
    columns: Collection[str],
) -> Iterator[Oddity]:
    """Yield what looks wrong in episodes (E,) that a rule made; `facts` are those of the source."""
    every, longest = np.arange(lengths.size), int(lengths.max(initial=0))
    tail, family = facts.get("unfinished_tail_steps"), facts.get("family", "d4rl")
    mark = next(iter(row_marks(columns)), "KIND:COLUMN")
    other = f"--ends {mark} or --rule 'steps=N' cuts them otherwise"
    if lengths.size == 1 < longest == tail and rule != "none" and family != "maze2d":
        yield Oddity(every, f"holds all {longest:,} steps, and nothing ends it", other)
    short = np.flatnonzero(lengths == 1)
    if 2 * short.size > lengths.size > 2:
        yield Oddity(short, f"of {lengths.size:,} are one step long", other)
    limited = np.flatnonzero((lengths == longest) & terminated)
    if limited.size >= SAME_LENGTH and longest > 1:
        what = (
            f"of the greatest length, {longest:,} steps, are said to have terminated: that looks "
        )
        remedy = f"--rule '{SPLIT}|steps={longest}' counts them as truncated"
        yield Oddity(limited, f"{what}like a time limit", remedy)
    known = any(part in TERMINAL_FLAGS for part in rule.split("|")) and family in ("d4rl", "mujoco")
    whole = lengths[:-1] if tail else lengths
    if known and whole.size > 2 and not terminated.any() and (whole != whole[0]).any():
        what = "of different lengths, and none terminated"
        yield Oddity(every, what, "--rename NAME=terminals names the flag of terminations")
    limit = next((one.step_limit for one in FAMILIES if one.name == family), None)
    if limit and longest > limit:
        flag = "terminals" if family == "mujoco" else "timeouts"
        what = f"longer than the {limit} steps of {family} (the longest has {longest}): flags may "
        remedy = f"--rule '{flag}|steps={limit}' cuts them"
        yield Oddity(np.flatnonzero(lengths > limit), f"{what}be missing", remedy)


def late_rows(columns: Collection[str]) -> list[str]:
    """Return what a user should know of columns that lie beside the row they led to."""
    mark = next((name for name in columns if name.rpartition("/")[2] in LATE), None)
    if mark is None:
        return []
    flag = next((name for name in columns if name in FLAGS), "rewards")
    note = f"{mark} is here: where a row's action led to it (Dreamer, dm_env), --shift actions=1,"
    note += f"rewards=1 puts it right; where the last row has no action (RLDS), --shift {flag}=1; "
    return [f"{note}--shift actions=0 says that rows are steps"]
