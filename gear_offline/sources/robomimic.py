"""robomimic's HDF5 files: a group for each demonstration, and named subsets of them.

``data/demo_N`` holds ``actions``, ``rewards``, ``dones``, ``obs/KEY`` and ``next_obs/KEY``;
``mask/KEY`` lists demonstrations.  Columns bear these names, and unless others are given the
vectors of ``obs`` are put side by side as ``observations``, by name as in robomimic.

Shape legend: T steps of one demonstration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.dataset.schema import is_step_shape
from gear_offline.dataset.scores import dataset_of_file
from gear_offline.errors import InputError
from gear_offline.sources.base import (
    Kinds,
    Piece,
    Source,
    SourceInfo,
    common_columns,
    misfit,
    parts_of,
    some_names,
)
from gear_offline.sources.combine import observation_vectors
from gear_offline.sources.d4rl import is_gymnasium_id
from gear_offline.sources.hdf5 import Hdf5Column, Hdf5Dataset, Hdf5File

_DEMO = re.compile(r"data/(demo_[0-9]+)/(.+)")
GYM_TYPE = 2  # of robomimic's EnvType: the name is that of a gym environment
DONES = (
    "dones mark a success or the end of a recording, and do not say which: every demonstration "
    "counts as truncated"
)
JOINED = "one row a step is needed everywhere: the file is damaged, or joined of several"
STEPWISE = ("actions", "rewards", "obs", "next_obs")
Demo = dict[str, Hdf5Dataset]


def open_robomimic(
    file: Hdf5File, demos: Mapping[str, Demo], *, uri: str, names: Mapping[str, str], key: str
) -> Source:
    """Open a file's `demonstrations`; with a filter key only those of ``mask/KEY``."""
    masks = [n.removeprefix("mask/") for n in file.datasets if n.startswith("mask/")]
    chosen = _chosen(file, key, masks, demos) if key else list(demos)
    asked = {part for old in names.values() for part in parts_of(old)}
    left_out: dict[str, str] = {}
    found = {name: _kinds(file, name, demos[name], names, left_out) for name in chosen}
    needed = (*STEPWISE, *(old.split("/")[0] for old in asked))
    columns, others = common_columns(
        [(name, kinds) for name, (_, kinds) in found.items()],
        needed,
        where=file.path,
        remedy=JOINED,
    )
    columns = {name: columns[name] for name in sorted(columns, key=_order)}
    pieces = []
    for name in chosen:
        opened = {column: file.column(demos[name][column].path) for column in columns}
        pieces.append(Piece(read=partial(_read, opened), steps=found[name][0]))
    attributes, environment, reference = _environment(file)
    return Source(
        pieces,
        columns,
        terminated=[False] * len(pieces),
        info=SourceInfo(
            uri=f"{uri}#{key}" if key else uri,
            format="robomimic",
            rule="demonstrations",
            environment_id=environment,
            reference_name=reference,
            files=(file.file,),
            attributes={
                **attributes,
                "filter_keys": sorted(masks),
                "left_out": others | left_out,
                "warnings": [*file.warnings, *([DONES] if "dones" in columns else [])],
            },
        ),
        usual=observation_vectors(columns, "obs/", file.path, names),
    )


def demonstrations(file: Hdf5File) -> dict[str, Demo]:
    """Return the datasets of each ``data/demo_N`` by their names in it, ``demo_2`` before 10."""
    demos: dict[str, Demo] = {}
    others = []
    for name, dataset in file.datasets.items():
        if match := _DEMO.fullmatch(name):
            demos.setdefault(match[1], {})[match[2]] = dataset
        elif name.startswith("data/"):
            others.append(name)
    if demos and others:
        what = f"{some_names(others, 3)} beside demonstrations"
        remedy = "robomimic's files have data/demo_0, data/demo_1 and so on; take others away"
        raise InputError("SOURCE_LAYOUT", what, str(file.path), remedy)
    return dict(sorted(demos.items(), key=lambda demo: int(demo[0].removeprefix("demo_"))))


def _chosen(file: Hdf5File, key: str, masks: list[str], demos: Mapping[str, Demo]) -> list[str]:
    """Return the demonstrations of a filter key, in the order of the file."""
    if key not in masks:
        what, remedy = f"no filter key {key!r}", f"keys here: {some_names(masks)}"
        raise InputError("SOURCE_LAYOUT", what, str(file.path), remedy)
    listed = set(file.texts(f"mask/{key}"))
    missing = listed - set(demos)
    if missing or not listed:
        what = f"it names {some_names(missing, 3)}" + (", which data lacks" if missing else "")
        remedy = "write the filter key again, with robomimic's create_hdf5_filter_key"
        raise InputError("SOURCE_LAYOUT", what, f"{file.path}: mask/{key}", remedy)
    return [name for name in demos if name in listed]


def _kinds(
    file: Hdf5File, name: str, demo: Demo, names: Mapping[str, str], left_out: dict[str, str]
) -> tuple[int, Kinds]:
    """Return T of a demonstration, and its columns; what cannot be one comes into `left_out`."""
    where = f"{file.path}: data/{name}"
    groups = {column.split("/")[0] for column in demo}
    actions, rewards = (names.get(column, column) for column in ("actions", "rewards"))
    missing = [column for column in (actions, rewards) if column not in demo]
    if missing or not ("observations" in names or groups & {"obs", "observations"}):
        remedy = f"found: {some_names(demo)}; recorded states become observations and rewards "
        remedy += "with robomimic's dataset_states_to_obs.py"
        raise InputError("COLUMN", f"no dataset or group {(*missing, 'obs')[0]!r}", where, remedy)
    steps, said = demo[actions].rows, file.attribute(f"data/{name}", "num_samples")
    if not steps or (isinstance(said, int) and said != steps):
        what = f"actions have {count_text(steps, 'row')}"
        what += "" if said is None else f", num_samples is {said}"
        raise misfit(what, where)
    kinds: dict[str, Any] = {}
    for column, found in demo.items():
        shape = (found.shape or ())[1:]
        if found.dtype is None or not is_step_shape(shape, found.dtype.itemsize):
            left_out[column] = f"{found.type_name} of shape {found.shape}"
        elif found.rows == steps:
            kinds[column] = found.dtype, shape
        else:
            rows = f"{count_text(found.rows, 'row')} for {count_text(steps, 'step')} in {name}"
            if column.split("/")[0] in STEPWISE:
                raise misfit(rows, f"{file.path}: {column}")
            left_out[column] = rows
    return steps, kinds


def _order(column: str) -> tuple[int, str]:
    known = ("observations", "obs", "actions", "rewards", "next_observations", "next_obs")
    top = column.split("/")[0]
    return known.index(top) if top in known else len(known), column


def _read(columns: Mapping[str, Hdf5Column], name: str, start: int, stop: int) -> Array:
    return columns[name].read(start, stop)


def _environment(file: Hdf5File) -> tuple[dict[str, Any], str | None, str | None]:
    """Return facts, the Gymnasium id and D4RL's dataset that ``env_args`` tells."""
    text = file.attribute("data", "env_args")
    try:
        told = json.loads(text) if isinstance(text, str) else {}
        name, kind = str(told["env_name"]), told.get("type")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}, None, None
    gymnasium = kind == GYM_TYPE and is_gymnasium_id(name)
    return {"env_args": text}, name if gymnasium else None, dataset_of_file(name)
