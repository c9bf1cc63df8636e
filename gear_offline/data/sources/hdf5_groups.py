"""HDF5 files with a group for each episode, such as robomimic's, ManiSkill's and d3rlpy's.

An episode is a group that holds ``actions`` (``data/demo_N``, ``traj_N``), or datasets of one
number (``actions_N``).  Columns bear the names in it; the vectors of ``obs`` side by side, by name
as in robomimic, are ``observations``.  A number of an episode, stored alone or as an attribute, is
a column too.  ``mask/KEY`` lists some of robomimic's demonstrations.

Shape legend: T steps of one episode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.data.dataset.scores import dataset_of_file
from gear_offline.data.sources.base import Piece, Source, SourceInfo, SourceRequest
from gear_offline.data.sources.columns import common_columns, row_kinds, some_names, split_names
from gear_offline.data.sources.combine import observation_vectors
from gear_offline.data.sources.d4rl import EXPORTED, is_gymnasium_id
from gear_offline.data.sources.flags import FLAGS, flag_values
from gear_offline.data.sources.flat import OPTIONAL, find_columns, open_table
from gear_offline.data.sources.hdf5 import Hdf5Dataset, Hdf5File
from gear_offline.data.sources.input_files import by_number, misfit

_DIGITS, _DEMO = re.compile("[0-9]+"), re.compile("data/demo_[0-9]+")
_NUMBERED = re.compile(r"^([^/]+?)_([0-9]+)(?:_([0-9]+))?$")  # actions_7, observations_7_0
DONES = "dones mark a success or the end of a recording, and do not say which: every demonstration "
DONES += "counts as truncated; --rule done-only takes them as terminations"
JOINED = "one row a step is needed everywhere: the file is damaged, or joined of several"
STEPWISE = {"observations", "actions", "rewards", "obs", "next_obs"}
SAMPLES = "num_samples"  # attribute of a demonstration: its steps
Group = dict[str, Hdf5Dataset]


class Number(NamedTuple):
    """A column of one number an episode, at every step or a flag at the last one."""

    value: Any
    steps: int
    at_end: bool = False

    @property
    def shape(self) -> tuple[int]:
        return (self.steps,)

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)``."""
        rows = np.full(stop - start, self.value)
        return rows & (np.arange(start, stop) == self.steps - 1) if self.at_end else rows


def open_hdf5(path: Path, request: SourceRequest) -> Source:
    """Open an HDF5 file by its layout; with a key, which may be empty, it is robomimic's."""
    with Hdf5File(path.absolute()) as file:
        is_exported = file.attribute("/", EXPORTED) is not None
        if not is_exported and (groups := episode_groups(file, request.names)):
            return open_groups(file, groups, request)
        if request.key is None:
            return open_table(file, request)
    raise misfit("no group data/demo_0", path, "leave robomimic: out for another layout")


def open_groups(file: Hdf5File, groups: Mapping[str, Group], request: SourceRequest) -> Source:
    """Open the `episode_groups` of a file; with a filter key only those of ``mask/KEY``."""
    names, key = request.names, request.key
    masks = [n.removeprefix("mask/") for n in file.datasets if n.startswith("mask/")]
    group_names = _pick_demos(file, key, masks, groups) if key else list(groups)
    episodes = {n: rows for n in group_names if (rows := _columns(file, n, groups[n], request))[0]}
    if not episodes:
        raise misfit("no episode has a step", file.path)
    lacking = _align_numbers({name: rows for name, (rows, _) in episodes.items()})
    required = {path.split("/")[0] for origin in names.values() for path in split_names(origin)}
    kinds = [(name.rpartition("/")[2], row_kinds(rows)) for name, (rows, _) in episodes.items()]
    columns, differing = common_columns(kinds, required | STEPWISE, where=file.path, remedy=JOINED)
    used = {header.path for group in groups.values() for header in group.values()}
    used |= {f"mask/{name}" for name in masks}
    aside = [name for name in file.datasets if name not in used]  # in an order that stays
    left_out = {n: why for _, reasons in episodes.values() for n, why in reasons.items()}
    facts, known_environment = _environment(file)
    facts["filter_keys"] = sorted(masks)
    empty, is_demos = len(group_names) - len(episodes), all(map(_DEMO.fullmatch, groups))
    is_unclear = is_demos and "dones" in columns and not ("dones" in names.values() or request.rule)
    notes = [f"{count_text(empty, 'episode')} without steps left out"] * (empty > 0)
    facts["left_out"] = differing | lacking | left_out | dict.fromkeys(aside, "in no group")
    facts["warnings"] = [*file.warnings, *notes, *[DONES] * is_unclear]
    return Source(
        [Piece.of({n: rows[n] for n in columns}) for rows, _ in episodes.values()],
        columns,
        usual=observation_vectors(columns, "obs/", file.path, names),
        info=SourceInfo(
            uri=f"{request.uri}#{key}" if key else request.uri,
            format="robomimic" if is_demos else "hdf5-groups",
            rule="demonstrations" if is_demos else "groups",
            files=(file.file,),
            **known_environment,
            attributes=facts,
        ),
    )


def episode_groups(file: Hdf5File, names: Mapping[str, str]) -> dict[str, Group]:
    """Return the datasets of each episode by their names in it, episode 2 before 10.

    Groups that hold actions are, if one has a number, and those that are named like them.
    """
    stored, groups = file.datasets, dict[str, Group]()
    actions = re.escape(split_names(names.get("actions", "actions"))[0])
    is_numbered = any(re.match(f"{actions}_[0-9]", n) for n in stored)
    if (is_numbered and not {"rewards", *FLAGS} & {*stored}) or all(map(_NUMBERED.match, stored)):
        stored = {_NUMBERED.sub(r"\2/\1/\3", n).strip("/"): rows for n, rows in stored.items()}
    matches = [re.match(rf"(?:(.+?)/)??{actions}(?:/|$)", name) for name in stored]
    if not any(matches):  # they may have another name
        matches = [re.match(r"(?!mask/|meta)(?:(.*?[0-9][^/]*)/)?", name) for name in stored]
    heads = {match[1] or "" for match in matches if match}
    alike = {_DIGITS.sub("#", head) for head in heads}
    if "" in heads or alike == heads or (len(heads) == 1 and not max(heads)[-1].isdigit()):
        return {}
    for name, dataset in stored.items():
        prefixes = (name[: slash.start()] for slash in re.finditer("/", name))
        if head := next((prefix for prefix in prefixes if _DIGITS.sub("#", prefix) in alike), None):
            groups.setdefault(head, {})[name.removeprefix(f"{head}/")] = dataset
    return dict(sorted(groups.items(), key=lambda group: by_number(group[0])))


def _pick_demos(file: Hdf5File, key: str, masks: list[str], groups: Iterable[str]) -> list[str]:
    """Return the demonstrations of a filter key, in the order of the file."""
    if key not in masks:
        raise misfit(f"no filter key {key!r}", file.path, f"keys here: {some_names(masks)}")
    demos = {name.rpartition("/")[2]: name for name in groups}
    listed = set(file.texts(f"mask/{key}"))
    missing = listed - set(demos)
    if missing or not listed:
        problem = f"it names {some_names(missing, 3)}" + (", which data lacks" if missing else "")
        raise misfit(problem, f"{file.path}: mask/{key}", "write the filter key again")
    return [name for demo, name in demos.items() if demo in listed]


def _columns(
    file: Hdf5File, name: str, group: Group, request: SourceRequest
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the columns of an episode, none if it has no steps; what is left out and why."""
    where, names = f"{file.path}: {name}", request.names
    tops = {column.split("/")[0] for column in group} | {*names}
    observations = "obs" if "obs" in tops and "observations" not in tops else "observations"
    actions, *_ = split_names(names.get("actions", "actions"))
    observed, headers = names.get("observations", "observations"), dict[str, Any](group)
    below = (headers[n].shape for n in group if f"{n}/".startswith(f"{actions}/"))
    if (steps := next(filter(None, below), (-1,))[0]) == 0:
        return {}, {}
    rewards, flags = names.get("rewards", "rewards"), [names.get(flag, flag) for flag in FLAGS]
    for column, header in [*headers.items()]:
        after = f"next_{column}" if column.split("/")[0] == "obs" else ""
        if f"{column}/".startswith(f"{observed}/"):
            after = f"next_observations{column.removeprefix(observed)}"
        is_longer = header.shape and header.shape[0] == steps + 1 and after not in group
        if is_longer and column not in (rewards, *flags) and column[:5] != "next_":
            headers[column] = header._replace(shape=(steps, *header.shape[1:]))
            headers |= {after: headers[column]._replace(first=1)} if after else {}
    numbers: dict[str, Any] = {n: v for n, v in file.numbers(name).items() if n not in group}
    for column, header in group.items():
        if header.dtype and header.shape in {(), (1,)} - {(steps,)}:
            value = file.scalar(header.path)
            numbers |= {} if value is None else {column: np.asarray(value, header.dtype)}
    for column, value in numbers.items() if steps > 0 else ():
        if column in flags:
            headers[column] = Number(flag_values(value[None], column, where)[0], steps, at_end=True)
        elif column != SAMPLES and column.split("/")[0] not in {rewards, *STEPWISE}:
            headers[column] = Number(value, steps)
    required, optional = (observations, "actions"), (*OPTIONAL, "next_obs")
    column_names, left_out = find_columns(headers, request, required, optional, where=where)
    rows, claimed = headers[column_names[0]].shape[0], file.attribute(name, SAMPLES)
    if isinstance(claimed, int) and claimed != rows:
        raise misfit(f"{count_text(rows, 'row')}, num_samples is {claimed}", where)
    read = {n: headers[n] for n in column_names}
    opened = {n: file.column(h) for n, h in read.items() if isinstance(h, Hdf5Dataset)}
    return read | opened, left_out


def _align_numbers(episodes: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Give each number of episodes one dtype; return which episodes lack one that others have."""
    lacking = dict[str, str]()
    tables = episodes.values()
    for name in {n: 0 for table in tables for n, rows in table.items() if isinstance(rows, Number)}:
        numbers = [table for table in tables if isinstance(table.get(name), Number)]
        dtypes = {table[name].dtype for table in numbers}
        common = np.result_type(*dtypes)
        if common.kind != "f" or any(dtype.kind == "f" for dtype in dtypes):  # int64 and uint64
            for table in numbers:
                table[name] = table[name]._replace(value=common.type(table[name].value))
        if missing := [demo for demo, table in episodes.items() if name not in table]:
            lacking[name] = f"{some_names(missing, 3)} of {len(episodes):,} episodes have none"
    return lacking


def _environment(file: Hdf5File) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return facts, and the Gymnasium id and D4RL's dataset that ``env_args`` tells."""
    text = file.attribute("data", "env_args")
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        args = json.loads(str(text))
        name, env_type = str(args["env_name"]), args.get("type")
        gymnasium = env_type == 2 and is_gymnasium_id(name)  # EnvType.GYM_TYPE of robomimic
        info = {"environment_id": name if gymnasium else None}
        return {"env_args": text}, {**info, "reference_name": dataset_of_file(name)}
    return {}, {}
