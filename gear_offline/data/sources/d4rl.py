"""D4RL: which family a file is of and how that family ends episodes; where its files come from.

Families share column names and differ in what their flags mean.  docs/reference/sources.md gives
the reasons and the public reports behind each rule.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from gear_offline.core.remote import download
from gear_offline.core.text import count_text
from gear_offline.data.dataset.scores import dataset_file, dataset_names, dataset_of_file
from gear_offline.data.sources.base import Source
from gear_offline.data.sources.columns import rename_columns
from gear_offline.data.sources.flags import TERMINAL_FLAGS, TIME_FLAGS
from gear_offline.data.sources.rules import ARTIFICIAL
from gear_offline.errors import GearError, InputError, UnavailableError

SERVER = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"  # d4rl/infos.py; it has no https
EXPORTED = "gear_offline"  # attribute of our own files, by which no layout is guessed


class Family(NamedTuple):
    """A family of D4RL datasets, and its marks of episode ends."""

    name: str
    pattern: str  # searched in the lower-case file name or environment id
    widths: Collection[tuple[int, int]]  # of observations and actions
    rule_without_timeouts: str
    rule: str | None = "terminals|timeouts"  # of files with a column timeouts; None: it has none
    step_limit: int | None = None  # of the longest episode that it can have
    sign: str | None = None  # column that tells it by content; "": widths are enough


_GYM = r"(?:^|[^a-z])(?:hopper|halfcheetah|walker(?:2d)?|ant)(?:$|[^a-z])"
_GYM_WIDTHS = {(11, 3), (17, 6), (27, 8), (111, 8), (15, 3), (26, 6), (22, 6), (28, 8)}
_HANDS = r"(?:^|[^a-z])(?:door|hammer|relocate)(?:$|[^a-z])"
FAMILIES = (
    Family("antmaze", r"ant_?-?maze", {(29, 8)}, "steps=1001", "timeouts", 1001, ""),
    Family("maze2d", "maze2d", {(4, 2)}, ARTIFICIAL, "timeouts", sign="infos/goal"),
    Family("kitchen", "kitchen", {(60, 9)}, ARTIFICIAL, None, sign="infos"),
    Family("adroit-pen", r"(?:^|[^a-z])pen(?:$|[^a-z])", {(45, 24)}, "terminals|steps=100"),
    Family("adroit", _HANDS, {(39, 28), (46, 26), (39, 30)}, "terminals|steps=200"),
    Family("mujoco", _GYM, _GYM_WIDTHS, "terminals|steps=1000", step_limit=1000),
    Family("d4rl", r"(?!)", (), "terminals"),
)


class D4rlFile(NamedTuple):
    """A file in D4RL's layout."""

    name: str  # D4RL's of the dataset, or the file's
    family: Family
    evidence: str  # what told the family
    rule: str | None  # for the columns that are there
    environment: str | None  # Gymnasium id
    reference: str | None  # D4RL's dataset of the reference scores, if no environment tells them

    @classmethod
    def detect(
        cls,
        name: str,
        attributes: Mapping[str, Any],
        stored: Mapping[str, Any],
        names: Mapping[str, str],
    ) -> D4rlFile | None:
        """Find the family by attributes, the file's name and its content; None: another layout.

        Columns are those that the user's `names` make; widths are those of the `stored` ones, which
        have a ``shape``.
        """
        columns, is_exported = rename_columns(stored, names), EXPORTED in attributes
        has_timeouts = "timeouts" in columns
        foreign = not has_timeouts and any(flag in columns for flag in TIME_FLAGS)
        is_d4rl = not foreign and {"observations", "actions", "rewards", "terminals"} <= columns
        if not (is_exported or is_d4rl):
            return None
        env_id = str(attributes.get("env_id") or "")
        is_part = "gear_offline" in attributes and ".py:" in env_id  # FILE.py:Name, of `collect`
        environment = env_id if is_part or is_gymnasium_id(env_id) else None
        pair = (stored.get(n, stored.get(names.get(n, ""))) for n in ("observations", "actions"))
        widths = tuple(prod((getattr(column, "shape", None) or ())[1:]) for column in pair)
        family, evidence, dataset = FAMILIES[-1], "attributes", dataset_of_file(name)
        if not (is_exported or {*names} & {*TERMINAL_FLAGS}):
            family, evidence = _find_family(name, env_id, widths, columns)
            dataset = dataset if widths in family.widths else None
        rule = family.rule if has_timeouts else family.rule_without_timeouts
        if is_exported:  # flags at their word
            rule = str(attributes.get("rule", rule))
        reference = None if environment else dataset or dataset_of_file(env_id)
        return cls(dataset or name, family, evidence, rule, environment, reference)

    @property
    def is_named(self) -> bool:
        """True if a name tells its family."""
        return self.evidence in ("name", "env_id") and self.family is not FAMILIES[-1]

    def hints(self, rule: str | None) -> list[str]:
        """Return a warning of rows that look like a family's, and go by another `rule`."""
        if rule or self.family is FAMILIES[-1] or self.rule in (None, FAMILIES[-1].rule):
            return []
        finding = f"the rows look like {self.family.name}'s, whose episodes end by another rule"
        return [f"{finding}: --rule {self.rule} reads them so"]

    def warnings(self, source: Source, *, overridden: bool) -> list[str]:
        """Return warnings of the episodes that the rule gave."""
        family, limit, lengths = self.family.name, self.family.step_limit, source.episodes.lengths
        _, content, evidence = self.evidence.rpartition("content: ")
        notes: list[str] = []
        if content and family != "d4rl" and not overridden:
            finding = f"taken for {family} by its {evidence}: episodes end by {family}'s rule"
            notes.append(f"{finding}; rule='terminals|timeouts' overrides")
        if family == "mujoco" and limit and "timeouts" in source.info.rule:
            cut_short = source.truncated & (lengths < limit)
            cut_short[-1] &= not source.info.attributes["unfinished_tail_steps"]
            if cut := int(cut_short.sum()):
                finding = f"{count_text(cut, 'episode')} cut by a timeout before step {limit}, as"
                notes.append(f"{finding} in replay data: returns-to-go are too small (D4RL#162)")
        if overridden:
            return notes
        if "timeouts" not in source.info.rule or family == "kitchen":
            notes.append(_NOTES[family.split("-")[0]])
        return [*notes, *(note for name, note in _RELEASES.items() if re.match(name, self.name))]


_RELEASES = {  # by the name of a dataset
    r"antmaze-.*-v0(?:\D|$)": "antmaze v0: timeouts are out of step with the resets: episodes can "
    "hold jumps of metres (D4RL#77, D4RL#146); v2 repairs this",
    r"hopper-.*-v1(?:\D|$)": "hopper v1 files have errors (D4RL#76, D4RL#86); use v2",
}
_NOTES = {
    "kitchen": "terminals mark the end of each demonstration, not success: all count as truncated",
    "adroit": "no timeouts column: episodes are cut at D4RL's step limit, which human "
    "demonstrations need not keep",
    "maze2d": "no timeouts column: the file is one continuous trajectory, cut only at terminals; "
    "--rule steps=N cuts it at the environment's step limit",
    "antmaze": "no timeouts column: episodes are cut every 1001 steps, as D4RL's generator does",
    "mujoco": "no timeouts column: episodes end at terminals or after 1000 steps",
    "d4rl": "no timeouts column: only terminals end episodes, so time limits are not seen; "
    "--rule 'terminals|steps=N' adds one",
}


def is_gymnasium_id(name: str) -> bool:
    """Tell a Gymnasium id, which begins with a capital or a module's name, from D4RL's names."""
    id_text = r"[\w.]+:(?:[\w-]+/)?[\w-]+|(?:[\w-]+/)?[A-Z]\w*(?:-\w+)*"
    return re.fullmatch(id_text, name) is not None


def _find_family(
    name: str, env_id: str, widths: tuple[int, ...], columns: Collection[str]
) -> tuple[Family, str]:
    """Return the family and its evidence: the file's name, ``env_id``, or else its content.

    Widths and columns must be the family's too.  A Gymnasium id says that the file was collected
    with today's flags, which need no repair: only D4RL's own files give terminals another meaning.
    """
    today = is_gymnasium_id(env_id)
    fitting = [f for f in FAMILIES if widths in f.widths and (f.rule or "timeouts" not in columns)]
    for text, evidence in ((Path(name).stem, "name"), (env_id, "env_id")):
        for family in fitting:
            if re.search(family.pattern, text.lower()) and (not today or family.name == "mujoco"):
                return family, evidence
    if today:
        return FAMILIES[-1], "env_id"
    for family in fitting:
        if family.sign is not None and (not family.sign or family.sign in columns):
            column = f", the {family.sign} column" if family.sign else ""
            return family, f"content: {widths[0]} observations, {widths[1]} actions{column}"
    return FAMILIES[-1], "content: D4RL's column names"


def find_or_download(name: str) -> Path:
    """Return the file of D4RL's dataset `name`, which is downloaded if it is missing."""
    file, target = dataset_file(name), find_place(name)
    if file is None or target is None:
        near = ", ".join(difflib.get_close_matches(name, dataset_names(), n=3))
        remedy = f"did you mean {near}" if near else "names look like hopper-medium-v2"
        raise InputError("SOURCE_READ", f"D4RL has no dataset {name!r}", remedy=remedy)
    if not target.is_file():
        _download(SERVER + file, target)
    return target


def find_place(name: str) -> Path | None:
    """Return where a dataset's file is in the cache that the d4rl package has too."""
    configured, file = os.environ.get("D4RL_DATASET_DIR"), dataset_file(name)
    folder = Path(configured).expanduser() if configured else Path.home() / ".d4rl" / "datasets"
    return None if file is None else folder / PurePosixPath(file).name


def _download(url: str, target: Path) -> None:
    """Fetch `url` to `target`, which appears when it is complete."""
    try:
        download(url, target, "SOURCE_READ")
    except GearError as error:
        remedy = "download it on a machine with network and put it there"
        problem = f"cannot fetch {url}: {error.problem}"
        raise UnavailableError("SOURCE_READ", problem, str(target), remedy) from error
