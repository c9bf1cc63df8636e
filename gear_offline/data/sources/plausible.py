"""Plausibility of episodes, and the options that change them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.data.sources.d4rl import FAMILIES
from gear_offline.data.sources.flags import FLAGS, TERMINAL_FLAGS
from gear_offline.data.sources.row_marks import row_marks
from gear_offline.data.sources.rules import SPLIT

SAME_LENGTH = 5  # episodes that end as terminated at the greatest length
LATE = ("is_first", "step_type", "discount")  # of layouts whose last row is an observation alone


def odd_episodes(
    lengths: Int64Array,  # (E,)
    terminated: BoolArray,  # (E,)
    rule: str,
    facts: Mapping[str, Any],  # of the source
    columns: Collection[str],
) -> Iterator[tuple[Array, str, str]]:
    """Yield episodes that are probably not what was meant, what is odd, and what changes it."""
    every, longest = np.arange(lengths.size), int(lengths.max(initial=0))
    tail, family = facts.get("unfinished_tail_steps"), facts.get("family", "d4rl")
    mark = next(iter(row_marks(columns)), "KIND:COLUMN")
    cutting = f"--ends {mark} or --rule 'steps=N' cuts them"
    if lengths.size == 1 < longest == tail and rule != "none" and family != "maze2d":
        yield every, f"holds all {longest:,} steps, and nothing ends it", cutting
    if 2 * (short := np.flatnonzero(lengths == 1)).size > lengths.size > 2:
        yield short, f"of {lengths.size:,} are one step long", cutting
    limited = np.flatnonzero((lengths == longest) & terminated)
    if limited.size >= SAME_LENGTH and longest > 1:
        oddity = f"of the greatest length ({longest:,}) terminated, which looks like a time limit"
        remedy = f"--rule '{SPLIT}|steps={longest}' counts them as truncated"
        is_read = "reader" in facts  # which says itself how each ended
        yield limited, oddity, "yield terminated=False with them" if is_read else remedy
    flagged = family in ("d4rl", "mujoco") and {*rule.split("|")} & {*TERMINAL_FLAGS}
    finished = lengths[:-1] if tail else lengths
    if flagged and finished.size > 2 and not terminated.any() and (finished != finished[0]).any():
        remedy = "--rename NAME=terminals names the flag of terminations"
        yield every, "of different lengths, and none terminated", remedy
    limit = next((entry.step_limit for entry in FAMILIES if entry.name == family), None)
    if limit and longest > limit:
        oddity = f"longer than the {limit} steps of {family} (the longest has {longest})"
        flag = "terminals" if family == "mujoco" else "timeouts"
        yield np.flatnonzero(lengths > limit), oddity, f"--rule '{flag}|steps={limit}' cuts them"


def late_rows(columns: Collection[str]) -> list[str]:
    """Return a warning of columns that may stand beside the row that they led to."""
    mark = next((n for late in LATE for n in columns if n.rpartition("/")[2] == late), None)
    flag = next((name for name in columns if name in FLAGS), "FLAG")
    finding = f"{mark} is here: where a row's action led to it (Dreamer, dm_env), --shift actions="
    finding += f"1,rewards=1 puts it right; where the last row has none (RLDS), --shift {flag}=1; "
    return [f"{finding}--shift actions=0 says that rows are steps"] if mark else []
