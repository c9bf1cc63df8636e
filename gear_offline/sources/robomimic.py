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
from contextlib import suppress
from typing import Any

from gear_offline.core.text import count_text
from gear_offline.dataset.scores import dataset_of_file
from gear_offline.errors import InputError
from gear_offline.sources.base import Asked, Piece, Source, SourceInfo
from gear_offline.sources.columns import Kinds, common_columns, row_kinds, some_names, split_names
from gear_offline.sources.combine import observation_vectors
from gear_offline.sources.d4rl import is_gymnasium_id
from gear_offline.sources.flat import find_columns
from gear_offline.sources.hdf5 import Hdf5Dataset, Hdf5File
from gear_offline.sources.input_files import misfit

_DEMO = re.compile(r"data/(demo_[0-9]+)/(.+)")
GYM_TYPE = 2  # of robomimic's EnvType: the name is that of a gym environment
DONES = (
    "dones mark a success or the end of a recording, and do not say which: every demonstration "
    "counts as truncated; --rule done-only takes them as terminations"
)
JOINED = "one row a step is needed everywhere: the file is damaged, or joined of several"
STEPWISE = ("actions", "rewards", "obs", "next_obs")
Demo = dict[str, Hdf5Dataset]


def open_robomimic(file: Hdf5File, demos: Mapping[str, Demo], asked: Asked) -> Source:
    """Open a file's `demonstrations`; with a filter key only those of ``mask/KEY``."""
    names, key = asked.names, asked.key
    masks = [n.removeprefix("mask/") for n in file.datasets if n.startswith("mask/")]
    chosen = _chosen(file, key, masks, demos) if key else list(demos)
    parts = {name: _columns(file, name, demos[name], asked) for name in chosen}
    wanted = {part.split("/")[0] for old in names.values() for part in split_names(old)}
    kinds = [(name, own) for name, (own, _) in parts.items()]
    needed = (*STEPWISE, *wanted)
    columns, others = common_columns(kinds, needed, where=file.path, remedy=JOINED)
    left_out = {n: why for _, left in parts.values() for n, why in left.items()}
    paths = [{column: demos[name][column].path for column in columns} for name in chosen]
    pieces = [Piece.of({column: file.column(path) for column, path in of.items()}) for of in paths]
    attributes, environment, reference = _environment(file)
    untold = "dones" in columns and "dones" not in names.values() and not asked.rule
    return Source(
        pieces,
        columns,
        usual=observation_vectors(columns, "obs/", file.path, names),
        info=SourceInfo(
            uri=f"{asked.uri}#{key}" if key else asked.uri,
            format="robomimic",
            rule="demonstrations",
            environment_id=environment,
            reference_name=reference,
            files=(file.file,),
            attributes={
                **attributes,
                "filter_keys": sorted(masks),
                "left_out": others | left_out,
                "warnings": [*file.warnings, *[DONES] * untold],
            },
        ),
    )


def demonstrations(file: Hdf5File) -> dict[str, Demo]:
    """Return the datasets of each ``data/demo_N`` by their names in it, ``demo_2`` before 10."""
    demos, others = dict[str, Demo](), []
    for name, dataset in file.datasets.items():
        if match := _DEMO.fullmatch(name):
            demos.setdefault(match[1], {})[match[2]] = dataset
        elif name.startswith("data/"):
            others.append(name)
    if demos and others:
        what = f"{some_names(others, 3)} beside demonstrations (data/demo_0, ...)"
        raise misfit(what, file.path, "take it away")
    return dict(sorted(demos.items(), key=lambda demo: int(demo[0].removeprefix("demo_"))))


def _chosen(file: Hdf5File, key: str, masks: list[str], demos: Mapping[str, Demo]) -> list[str]:
    """Return the demonstrations of a filter key, in the order of the file."""
    if key not in masks:
        raise misfit(f"no filter key {key!r}", file.path, f"keys here: {some_names(masks)}")
    listed = set(file.texts(f"mask/{key}"))
    missing = listed - set(demos)
    if missing or not listed:
        what = f"it names {some_names(missing, 3)}" + (", which data lacks" if missing else "")
        raise misfit(what, f"{file.path}: mask/{key}", "write the filter key again")
    return [name for name in demos if name in listed]


def _columns(file: Hdf5File, name: str, demo: Demo, asked: Asked) -> tuple[Kinds, dict[str, str]]:
    """Return the columns of a demonstration in the table's order, what is left out and why."""
    where = f"{file.path}: data/{name}"
    groups = {column.split("/")[0] for column in demo}
    named = "observations" in {*asked.names, *groups}
    if not named and "obs" not in groups and not asked.partial:
        remedy = f"found: {some_names(demo)}; dataset_states_to_obs.py makes it of states"
        raise InputError("COLUMN", "no group 'obs'", where, remedy)
    needed, others = ("observations" if named else "obs", "actions"), ("rewards", "next_obs")
    chosen, left_out = find_columns(demo, asked, needed, others, where=where)
    shape, claimed = demo[chosen[0]].shape or (), file.attribute(f"data/{name}", "num_samples")
    if isinstance(claimed, int) and claimed != shape[0]:
        raise misfit(f"{count_text(shape[0], 'row')}, num_samples is {claimed}", where)
    return row_kinds({n: demo[n] for n in chosen}), left_out


def _environment(file: Hdf5File) -> tuple[dict[str, Any], str | None, str | None]:
    """Return facts, the Gymnasium id and D4RL's dataset that ``env_args`` tells."""
    text = file.attribute("data", "env_args")
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        args = json.loads(str(text))
        name, kind = str(args["env_name"]), args.get("type")
        gymnasium = kind == GYM_TYPE and is_gymnasium_id(name)
        return {"env_args": text}, name if gymnasium else None, dataset_of_file(name)
    return {}, None, None
