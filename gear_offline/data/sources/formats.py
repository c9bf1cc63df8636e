"""The formats that are read: files or folders, the function that opens them, where episodes end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gear_offline.data.dataset.manifest import is_dataset
from gear_offline.data.sources.base import Source, SourceRequest
from gear_offline.data.sources.combine import open_shards, with_columns
from gear_offline.data.sources.d4rl import find_or_download
from gear_offline.data.sources.dqn_replay import open_dqn_replay, replay_folder
from gear_offline.data.sources.episode_ends import judge_ends
from gear_offline.data.sources.flags import LIMIT, MEANING, find_flags, true_rows
from gear_offline.data.sources.hdf5 import SUFFIXES
from gear_offline.data.sources.hdf5_groups import open_hdf5
from gear_offline.data.sources.input_files import misfit
from gear_offline.data.sources.lerobot import is_lerobot, open_lerobot
from gear_offline.data.sources.minari import data_directory, find_directory, open_minari
from gear_offline.data.sources.npz import open_npz
from gear_offline.data.sources.parquet import ARROW, open_parquet
from gear_offline.data.sources.rules import CONVENTIONS
from gear_offline.data.sources.zarr import is_store, open_zarr
from gear_offline.errors import reading_errors


@dataclass(frozen=True)
class Format:
    """Files, or folders, of one kind."""

    open: Callable[[Path, SourceRequest], Source]  # one of them
    # by the format that its sources bear: a rule has "cut" episodes, or they are "stored" apart, or
    # "judged" too, by flags at their last steps that tell how they ended
    layouts: Mapping[str, Literal["cut", "judged", "stored"]]
    suffixes: tuple[str, ...] = ()  # of files; without `is_folder` a folder of them is one dataset
    is_folder: Callable[[Path], Any] | None = None  # tells a folder; the first that fits counts
    names: str = ""  # how users call it, beside files of these suffixes
    # by the word before a colon, what finds the file or folder that is named behind it
    schemes: Mapping[str, Callable[[str], Path]] = field(default_factory=dict)


HDF5 = Format(
    open_hdf5,
    {"d4rl": "cut", "hdf5": "cut", "hdf5-groups": "judged", "robomimic": "stored"},
    SUFFIXES,
    names="robomimic:FILE#FILTER_KEY, d4rl:NAME (d4rl:hopper-medium-v2)",
    schemes={"d4rl": find_or_download, "robomimic": Path},
)
MINARI = "minari:ID (minari:mujoco/hopper/medium-v0) or its directory"
FORMATS = (
    HDF5,
    Format(open_npz, {"npz": "cut", "ogbench": "cut"}, (".npz",)),
    Format(open_parquet, {"parquet": "judged", "parquet-rows": "cut"}, (".parquet",)),
    Format(open_parquet, {"arrow": "judged", "arrow-rows": "cut"}, ARROW),
    Format(
        open_minari, {"minari": "stored"}, (), data_directory, MINARI, {"minari": find_directory}
    ),
    Format(open_shards, {"gear": "stored"}, (), is_dataset, "a directory of GEAR shards"),
    Format(open_dqn_replay, {"dqn-replay": "stored"}, (), replay_folder, "of DQN-Replay's logs"),
    Format(open_lerobot, {"lerobot": "judged"}, (), is_lerobot, "of a LeRobot dataset"),
    Format(open_zarr, {"zarr": "cut"}, (".zip",), is_store, "of a zarr store (or its .zip)"),
)
SCHEMES = {scheme: find for form in FORMATS for scheme, find in form.schemes.items()}
FILE_FORMATS = tuple(form for form in FORMATS if form.is_folder is None)


def list_formats() -> str:
    """Name the accepted formats, for a remedy."""
    *suffixes, last = (suffix for form in FILE_FORMATS for suffix in form.suffixes)
    files = f"a {', '.join(suffixes)} or {last} file, a folder of them"
    names = ", ".join(["an address, https://...", *(form.names for form in FORMATS if form.names)])
    return f"accepted are {files}, {names}; others: --reader FILE.py:FUNCTION"


def find_format(path: Path) -> Format | None:
    """Return the format of a file, HDF5 unless its suffix tells another, or of a folder."""
    if path.is_dir():
        return next((f for f in FORMATS if f.is_folder and f.is_folder(path)), None)
    return next((f for f in FORMATS if path.suffix.lower() in f.suffixes), HDF5)


def open_format(form: Format, path: Path, request: SourceRequest) -> Source:
    """Open a file or folder of a format, with ends that are judged and columns that are named."""
    with reading_errors(path.suffix or "dataset", path):
        source = form.open(path, request)
        if (ends := form.layouts[source.info.format]) != "cut":
            _judge(source, request, is_judged=ends == "judged")
    flags = find_flags(source.stored_names, request.names).values()
    for alias, origin in request.names.items() if not request.rule else ():
        if origin in flags and alias not in MEANING:
            source.warn(f"{origin}, now {alias}, still tells ends; --rule may name others")
    return with_columns(source, request.names)


def _judge(source: Source, request: SourceRequest, *, is_judged: bool) -> None:
    """Judge how stored episodes ended, by a rule or the flags of the user or the format."""
    terms = [term.partition("=") for term in (request.rule or "").split("|")]
    fits = (n in (MEANING if is_valued else CONVENTIONS) for n, is_valued, _ in terms)
    if request.rule and not any(fits):
        problem = f"boundary rule {request.rule!r} does not apply"
        problem += " to a format that stores episodes apart"
        remedy = "leave it out, or say how they ended: done-and-timeout|steps=N, done-only, "
        raise misfit(problem, request.uri, f"{remedy}FLAG-as-truncations")
    names = request.names.items()
    renamed = any(MEANING.get(name) not in (None, MEANING.get(origin)) for name, origin in names)
    if not (request.rule or renamed or is_judged):
        return
    flags = find_flags(source.stored_names, request.names)
    rows = {flag: source.column(source.find_column(origin)) for flag, origin in flags.items()}
    lengths = source.episodes.lengths
    for flag in (f for f in rows if MEANING[f] == LIMIT and source.info.format == "hdf5-groups"):
        ends = () if request.rule else true_rows(rows[flag], flag, str(source.where))
        if np.setdiff1d(ends, np.cumsum(lengths) - 1).size:
            remedy = "read one: --columns observations=GROUP/observations,actions=GROUP/actions,..."
            raise misfit(f"{flag} is true inside groups, of several episodes", source.where, remedy)
    source.terminated, notes = judge_ends(rows, lengths, request.rule, where=str(source.where))
    source.truncated = ~source.terminated
    source.info = replace(source.info, rule=request.rule or source.info.rule)
    source.warn(*notes)
