"""Files in D4RL's HDF5 layouts: which family a file is of, and how that family ends episodes.

D4RL's families share column names and differ in what their flags mean.  docs/sources.md gives the
reasons and the public reports behind each rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gear_offline.core.text import count_text
from gear_offline.dataset.scores import dataset_of_file, reference_scores
from gear_offline.sources.base import SourceInfo
from gear_offline.sources.boundaries import ARTIFICIAL, TIME_FLAGS, Rule
from gear_offline.sources.flat import FlatSource, Layout, find_columns
from gear_offline.sources.hdf5 import Hdf5Rows

REQUIRED = ("observations", "actions", "rewards")
OPTIONAL = ("next_observations", "terminals", "timeouts")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family of D4RL datasets marks the ends of its episodes.

    Attributes
    ----------
    name
        Name in messages and attributes.
    pattern
        Regular expression searched in the lower-case file name or environment id.
    rule
        Boundary rule of files with a ``timeouts`` column.
    rule_without_timeouts
        Boundary rule of files without one.
    step_limit
        Longest episode that the family can have, ``None`` when lengths say nothing.
    """

    name: str
    pattern: str
    rule: str
    rule_without_timeouts: str
    step_limit: int | None = None


_WORD = r"(?:^|[^a-z])"
FAMILIES = (
    Family(
        name="antmaze",
        pattern=r"ant_?-?maze",
        rule="timeouts",
        rule_without_timeouts="steps=1001",
        step_limit=1001,
    ),
    Family(name="maze2d", pattern=r"maze2d", rule="timeouts", rule_without_timeouts=ARTIFICIAL),
    Family(
        name="kitchen",
        pattern=r"kitchen",
        rule=f"{ARTIFICIAL}|timeouts",
        rule_without_timeouts=ARTIFICIAL,
    ),
    Family(
        name="adroit-pen",
        pattern=_WORD + r"pen(?:$|[^a-z])",
        rule="terminals|timeouts",
        rule_without_timeouts="terminals|steps=100",
    ),
    Family(
        name="adroit",
        pattern=_WORD + r"(?:door|hammer|relocate)(?:$|[^a-z])",
        rule="terminals|timeouts",
        rule_without_timeouts="terminals|steps=200",
    ),
    Family(
        name="mujoco",
        pattern=_WORD + r"(?:hopper|halfcheetah|walker(?:2d)?|ant)(?:$|[^a-z])",
        rule="terminals|timeouts",
        rule_without_timeouts="terminals|steps=1000",
        step_limit=1000,
    ),
    Family(
        name="d4rl",
        pattern=r"(?!)",
        rule="terminals|timeouts",
        rule_without_timeouts="terminals",
    ),
)
_BY_NAME = {family.name: family for family in FAMILIES}


def looks_like_d4rl(rows: Hdf5Rows) -> bool:
    """Whether the file has D4RL's columns at its root."""
    return all(name in rows.facts for name in (*REQUIRED, "terminals"))


def open_d4rl(rows: Hdf5Rows, *, uri: str, name: str, rule: str | None) -> FlatSource:
    """Read `rows` as a file of D4RL.

    Parameters
    ----------
    rows
        The guarded file; closed by the caller when this raises.
    uri
        What the user asked for, for the provenance.
    name
        Dataset or file name that tells the family.
    rule
        Boundary rule in place of the family's own.

    Raises
    ------
    InputError
        ``COLUMN_MISSING``, ``RULE_UNKNOWN``, ``RULE_FLAG`` and the ``HDF5_*`` codes.
    """
    attributes = rows.attributes()
    environment = gymnasium_id(attributes.get("env_id"))
    layout = find_columns(rows, REQUIRED, OPTIONAL)
    family, evidence = detect_family(rows, layout, name, attributes.get("env_id"))
    own = family.rule if "timeouts" in layout.columns else family.rule_without_timeouts
    if foreign := _foreign_flag(layout):
        own = f"terminals|{foreign}"
    dataset = dataset_of_file(name)
    if environment:
        reference = environment if reference_scores(environment) else None
    else:
        reference = dataset or dataset_of_file(str(attributes.get("env_id", "")))
    info = SourceInfo(
        uri=uri,
        format="d4rl",
        rule=own if rule is None else rule,
        environment_id=environment,
        reference_name=reference,
        files=(rows.path,),
        opened=rows.identity,
        locator=str(rows.path),
        attributes={
            "family": family.name,
            "family_from": evidence,
            "attributes": attributes,
            "metadata": rows.describe("metadata/"),
            "left_out": layout.left_out,
        },
    )
    source = FlatSource(rows, layout, Rule.parse(info.rule), info)
    warnings = source.storage_warnings + _warnings(
        source, family, dataset or name, rule is not None, evidence
    )
    extra = {"unfinished_tail_steps": source.tail_steps, "warnings": warnings}
    source.info = replace(info, attributes={**info.attributes, **extra})
    return source


def gymnasium_id(value: Any) -> str | None:
    """Return `value` if it is the id of a Gymnasium environment.

    They begin with a capital, or with the module that registers them: D4RL's names do neither.
    """
    found = isinstance(value, str) and re.fullmatch(
        r"[\w.]+:(?:[\w-]+/)?[\w-]+|(?:[\w-]+/)?[A-Z]\w*(?:-\w+)*", value
    )
    return str(value) if found else None


def _foreign_flag(layout: Layout) -> str | None:
    """Return the time flag that there is in place of D4RL's own, if there is one."""
    flag = next((flag for flag in TIME_FLAGS if flag in layout.columns), "timeouts")
    return None if flag == "timeouts" else flag


def detect_family(rows: Hdf5Rows, layout: Layout, name: str, env_id: Any) -> tuple[Family, str]:
    """Return the family and what told it: the name, then ``env_id``, then the content.

    A Gymnasium id says that the file was collected with today's flags, which need no repair: only
    D4RL's own files give terminals another meaning.  So does a time flag that D4RL has not.
    """
    if foreign := _foreign_flag(layout):
        return _BY_NAME["d4rl"], f"a column {foreign}, which no file of D4RL has"
    for text, evidence in ((Path(name).stem, "name"), (str(env_id or ""), "env_id")):
        for family in FAMILIES:
            if text and re.search(family.pattern, text.lower()):
                if gymnasium_id(env_id) and family.name != "mujoco":
                    return _BY_NAME["d4rl"], "env_id"
                return family, evidence
    if gymnasium_id(env_id):
        return _BY_NAME["d4rl"], "env_id"
    shapes = {n: (rows.facts[n].shape or ())[1:] for n in layout.columns}
    spaces = (shapes["observations"], shapes["actions"])
    if "infos" in shapes and "timeouts" not in shapes:
        return _BY_NAME["kitchen"], "content: a flat infos column, no timeouts"
    if spaces == ((29,), (8,)):
        return _BY_NAME["antmaze"], "content: 29 observations, 8 actions"
    if spaces == ((4,), (2,)) and "infos/goal" in shapes:
        return _BY_NAME["maze2d"], "content: 4 observations, 2 actions, infos/goal"
    return _BY_NAME["d4rl"], "content: D4RL's column names"


def _warnings(
    source: FlatSource, family: Family, name: str, overridden: bool, evidence: str
) -> list[str]:
    """Return what a user should know about the episodes that the rule gave."""
    found: list[str] = []
    if evidence.startswith("content: ") and family.name != "d4rl" and not overridden:
        found.append(
            f"taken for {family.name} by its {evidence.removeprefix('content: ')}: episodes end "
            f"by {family.name}'s rule; rule='terminals|timeouts' overrides"
        )
    lengths = source.episodes.lengths
    finished = lengths[:-1] if source.tail_steps else lengths
    limit = family.step_limit
    own = "terminals" if family.name == "mujoco" else "timeouts"
    if limit and int(lengths.max()) > limit:
        found.append(
            f"{count_text(int((lengths > limit).sum()), 'episode')} longer than the {limit} steps "
            f"of {family.name} (the longest has {int(lengths.max())}): flags may be missing; "
            f"rule='{own}|steps={limit}' would cut them"
        )
    if family.name == "mujoco" and limit and "timeouts" in source.spec:
        cut = ~source.terminated[: finished.size] & (finished < limit)
        if cut.any():
            found.append(
                f"{count_text(int(cut.sum()), 'episode')} cut by a timeout before step {limit}: "
                "replay data can be cut in mid-episode, and returns-to-go of such episodes are too "
                "small (D4RL#162)"
            )
    if overridden:
        return found
    notes = {
        "kitchen": "terminals mark the end of each demonstration, not success: its episodes count "
        "as truncated",
        "adroit": "no timeouts column: episodes are cut at D4RL's step limit, which human "
        "demonstrations need not keep",
        "maze2d": "no timeouts column: the file is one continuous trajectory, cut only at "
        "terminals; rule='steps=N' cuts it at the environment's step limit",
        "antmaze": "no timeouts column: episodes are cut every 1001 steps, as D4RL's generator "
        "does",
        "mujoco": f"no timeouts column: episodes end at terminals or after {limit} steps",
        "d4rl": "no timeouts column: only terminals end episodes, so time limits are not seen; "
        "rule='terminals|steps=N' adds one",
    }
    if not any(flag in source.spec for flag in TIME_FLAGS) or family.name == "kitchen":
        found.append(notes[family.name.split("-")[0]])
    if family.name == "antmaze" and re.search(r"-v0(?:\D|$)", name):
        found.append(
            "antmaze v0: timeouts are out of step with the resets in the released files, so "
            "episodes can hold jumps of metres (D4RL#77, D4RL#146); v2 repairs this"
        )
    if re.match(r"hopper-.*-v1(?:\D|$)", name):
        found.append("hopper v1 files were published with errors (D4RL#76, D4RL#86); use v2")
    return found
