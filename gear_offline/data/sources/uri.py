"""From what a user types to an open source."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.config.arguments import check_arguments
from gear_offline.core.files import read_regular
from gear_offline.core.hub import fetch, is_hub
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.dataset.manifest import is_dataset
from gear_offline.data.dataset.scores import dataset_file, dataset_of_file
from gear_offline.data.sources.base import Source, SourceRequest
from gear_offline.data.sources.columns import some_names
from gear_offline.data.sources.combine import (
    adapt_columns,
    dataset_source,
    join_sources,
    with_columns,
)
from gear_offline.data.sources.d4rl import EXPORTED, find_or_download
from gear_offline.data.sources.dqn_replay import open_dqn_replay, replay_folder
from gear_offline.data.sources.episode_ends import judge_ends
from gear_offline.data.sources.flags import LIMIT, MEANING, find_flags, true_rows
from gear_offline.data.sources.flat import open_hdf5
from gear_offline.data.sources.hdf5 import SUFFIXES, Hdf5File
from gear_offline.data.sources.hdf5_groups import episode_groups, open_groups
from gear_offline.data.sources.input_files import files_in, misfit, reading_errors
from gear_offline.data.sources.lerobot import INFO, open_lerobot
from gear_offline.data.sources.minari import data_directory, find_directory, open_minari
from gear_offline.data.sources.npz import open_npz
from gear_offline.data.sources.parquet import ARROW, open_parquet
from gear_offline.data.sources.rules import CONVENTIONS
from gear_offline.data.sources.zarr import open_zarr
from gear_offline.errors import InputError, given_path

KINDS = (SUFFIXES, (".npz",), (".parquet",), ARROW)  # a folder of files of one kind is one dataset
ACCEPTED = (
    "a .hdf5, .h5, .npz, .parquet or .arrow file, a folder of them, robomimic:FILE#FILTER_KEY, "
)
ACCEPTED += "d4rl:NAME (d4rl:hopper-medium-v2), minari:ID (minari:mujoco/hopper/medium-v0), the "
ACCEPTED += "directory of a Minari or LeRobot dataset, of DQN-Replay's checkpoints, of a zarr "
ACCEPTED += "store (or its .zip) or of GEAR shards; others: docs/how-to/convert.md, Other files"
# not to train on, or what Hugging Face's map() keeps beside the data
_HELD = re.compile(r"(^|[-_.])(val|valid|validation|test|eval)(?=[-_.]|$)|^cache-[0-9a-f]{16}")
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.(?:parquet|arrow)")
MAX_LIST_BYTES = 16 << 20


@check_arguments()
def open_source(
    uri: str | os.PathLike[str],
    *,
    rule: str | None = None,
    names: Mapping[str, str] | None = None,
    partial: bool = False,
) -> Source:
    """Open a dataset of another format for reading.

    Parameters
    ----------
    uri
        Path of a file or directory, or a name, as docs/how-to/convert.md lists them.
    rule
        Boundary rule in place of the format's own, e.g. ``"terminals|steps=1000"``; see
        docs/how-to/convert.md.
    names
        Column name to the column that gets it; of an HDF5 file to the dataset, or group of
        datasets: ``{"observations": "obs", "dones": "episode_end"}``.  Several vectors are put
        side by side: ``{"observations": "observations/position + observations/goal"}``.
    partial
        Take a source without observations or actions: they are made of its other columns.

    Returns
    -------
    Source
        Columns by row range and the episode index; close it, or use it in a ``with`` statement.

    Raises
    ------
    InputError
        ``SOURCE_READ`` for what is missing, damaged or no source, ``SOURCE_LAYOUT`` for what makes
        no trajectories, ``SOURCE_UNSAFE``, ``COLUMN`` for `names` that do not fit.
    UnavailableError
        ``SOURCE_READ`` for a failed download, ``PACKAGE_MISSING``.
    """
    if is_hub(uri):
        folder = fetch(str(uri), "dataset", "SOURCE_READ")
        source = open_source(folder, rule=rule, names=names, partial=partial)
        source.info = replace(source.info, uri=str(uri))
        return source
    names = names or {}
    if not (isinstance(names, Mapping) and all(isinstance(o, str) for o in names.values())):
        remedy = 'give a mapping: {"observations": "obs"}'
        raise InputError("COLUMN", f"names={names!r} is not usable", "", remedy)
    if isinstance(uri, Mapping | list | tuple):
        remedy = "make a source of it: go.from_arrays(columns), go.from_episodes(episodes)"
        raise InputError("SOURCE_READ", f"a {type(uri).__name__} is not a path", "", remedy)
    text, path, key = str(uri), given_path(uri, "SOURCE_READ", where="uri"), None
    scheme, _, name = text.partition(":") if isinstance(uri, str) else ("", "", "")
    if scheme == "d4rl" and name:
        path = find_or_download(name)
    elif scheme == "minari" and name:
        path = find_directory(name)
    elif scheme == "robomimic" and name:
        file, key = _file_and_key(name)
        text, path = Path(file).name, Path(file)
    else:
        _check_exists(text, path)
        text = path.name
    return adapt_columns(_open(path, SourceRequest(text, rule, names, key, partial)), rule)


def find_local_path(source: str) -> Path | None:
    """Return the place of a source on this machine; None where it is not here, or not yet."""
    scheme, _, name = source.partition(":")
    if scheme == "minari" and name:
        with suppress(InputError):
            return find_directory(name)
    path = Path(_file_and_key(name)[0] if scheme == "robomimic" else source)
    return path if path.exists() else None


def was_read_from(source: str, uri: str, files: Sequence[str]) -> bool:
    """Compare a source with the `uri` and `files` of data; True if they may be of it."""
    scheme, _, name = source.partition(":")
    if name and (is_hub(source) or scheme in ("d4rl", "minari")):
        # The file of a D4RL dataset may have been converted under its own name.
        return uri == source or Path((scheme == "d4rl" and dataset_file(name)) or "-").name in files
    local_path = find_local_path(source)
    return not (files and local_path and local_path.is_file()) or local_path.name in files


def _file_and_key(name: str) -> tuple[str, str]:
    file, _, key = (name, "", "") if Path(name).is_file() else name.partition("#")
    return file, key


def _open(path: Path, request: SourceRequest) -> Source:
    reader: Reader = _open_hdf5
    if request.shards:
        reader = open_parquet
    elif request.key is None and path.is_dir():
        reader = next((reader for fits, reader in FOLDERS if fits(path)), _open_folder)
    elif request.key is None:
        reader = FILES.get(path.suffix.lower(), _open_hdf5)
    if reader is _open_folder:
        return _open_folder(path, request)
    with reading_errors(path.suffix or "dataset", path):
        source = reader(path, request)
        if source.info.format not in FLAT:
            _judge(source, request)
    flags = find_flags(source.stored_names, request.names).values()
    for alias, origin in request.names.items() if not request.rule else ():
        if origin in flags and alias not in MEANING:
            source.warn(f"{origin}, now {alias}, still tells ends; --rule may name others")
    return with_columns(source, request.names)


def _judge(source: Source, request: SourceRequest) -> None:
    """Judge how stored episodes ended, by a rule or the flags of the user or the format."""
    terms = [term.partition("=") for term in (request.rule or "").split("|")]
    if request.rule and not any(
        n in (MEANING if is_valued else CONVENTIONS) for n, is_valued, _ in terms
    ):
        problem = (
            f"boundary rule {request.rule!r} does not apply to a format that stores episodes apart"
        )
        remedy = "leave it out, or say how they ended: done-and-timeout|steps=N, done-only, "
        raise misfit(problem, request.uri, f"{remedy}FLAG-as-truncations")
    names = request.names.items()
    renamed = any(MEANING.get(name) not in (None, MEANING.get(origin)) for name, origin in names)
    if not (request.rule or renamed or source.info.format in JUDGED):
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


def _open_folder(path: Path, request: SourceRequest) -> Source:
    """Open the files of a folder that make one dataset, or those in it where the Hub has them."""
    folder = path.absolute()
    is_bare = not any(files_in(folder, suffixes) for suffixes in KINDS)
    places = (
        folder,
        *(p for p in (folder / "train", folder / "data")[: 1 + is_bare] if p.is_dir()),
    )
    if _listed_files(folder):
        places = (folder,)
    elif (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits", ["train"])
        places = (folder / "train",) if "train" in splits else ()
    groups = [_data_files(folder, suffixes) for folder in places for suffixes in KINDS]
    groups = [files for files in groups if files]
    subfolders = [p for p in sorted({*folder.iterdir()} - {*places}) if p.is_dir()]
    aside = [p.name for p in subfolders if any(files_in(p, suffixes) for suffixes in KINDS)]
    if not groups and (keys := [p.name for p in subfolders if "=" in p.name]):
        problem = f"a folder of partitions, {some_names(keys, 3)}, whose names are a column"
        remedy = f"pyarrow.dataset.dataset({str(path)!r}, partitioning='hive').to_table()"
        remedy = f"in Python: pyarrow.parquet.write_table({remedy}, 'mine.parquet')"
        raise InputError("SOURCE_READ", problem, str(folder), remedy)
    if not groups:
        problem = f"the directory {str(path)!r} holds no dataset and no data files"
        raise _unknown(
            f"{problem}; give one of those in it: {some_names(aside)}" if aside else problem
        )
    if len(groups) > 1:
        kinds = " and ".join(f"{len(f)} like {f[0].relative_to(folder)}" for f in groups)
        problem, remedy = (
            f"files of several kinds or places: {kinds}",
            "give each a folder of its own",
        )
        raise InputError("SOURCE_READ", problem, str(folder), remedy)
    held = [file for file in groups[0] if _HELD.search(file.stem)]
    files = [file for file in groups[0] if file not in held] or groups[0]
    tables, notes = _split_tables(files)
    sources = [
        _open(table[0].parent, request._replace(uri=folder.name, shards=table))
        if table[1:]
        else _open(table[0], request._replace(uri=table[0].name))
        for table in tables
    ]
    source = join_sources(sources, uri=folder.name)
    source.warn(*notes)
    aside += [file.name for file in held if file not in files]
    source.warn(*[f"{some_names(aside)} left out: convert apart, or go.join_sources"] * bool(aside))
    return source


def _data_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a folder that are its data: those that it lists itself, if it does."""
    files, listed = files_in(folder, suffixes), _listed_files(folder)
    if (folder / "_delta_log").is_dir() and files:
        remedy = "write its rows as parquet: deltalake.DeltaTable(PATH).to_pyarrow_table()"
        raise InputError("SOURCE_READ", "a Delta table, which keeps old files", str(folder), remedy)
    if not listed:
        return files
    return [folder / name for name in listed] if {*listed} & {f.name for f in files} else []


def _split_tables(files: Sequence[Path]) -> tuple[list[tuple[Path, ...]], list[str]]:
    """Return the files of each table, in order, and a line for each of which some are missing.

    Files of one table are what a folder lists itself, or numbered as shards.
    """
    if _listed_files(files[0].parent):
        return [(*files,)], []
    shards_by_name = dict[tuple[str, int], list[Path]]()
    tables, notes = list[tuple[Path, ...]](), list[str]()
    for file in files:
        shard = _SHARD.fullmatch(file.name)
        key = (shard[1], int(shard[2])) if shard else (file.name, 1)
        shards_by_name.setdefault(key, []).append(file)
    for (name, count), shards in shards_by_name.items():
        is_whole = len(shards) == count
        tables += [(*shards,)] if is_whole else [(file,) for file in shards]
        notes += [f"{len(shards)} of the {count} files of {name} are here"] * (not is_whole)
    return tables, notes


def _listed_files(folder: Path) -> list[str]:
    """Return the files that a folder of Hugging Face's ``save_to_disk`` lists."""
    state = folder / "state.json"
    facts = _read_json(state) if state.is_file() else {}
    return [Path(str(file["filename"])).name for file in facts.get("_data_files", ())]


def _read_json(path: Path) -> dict[str, Any]:
    with reading_errors(path.name, path):
        return dict(json.loads(read_regular(path, most=MAX_LIST_BYTES)))


def _open_hdf5(path: Path, request: SourceRequest) -> Source:
    """Open an HDF5 file by its layout; with a key, which may be empty, it is robomimic's."""
    with Hdf5File(path.absolute()) as file:
        is_exported = file.attribute("/", EXPORTED) is not None
        if not is_exported and (groups := episode_groups(file, request.names)):
            return open_groups(file, groups, request)
        if request.key is None:
            return open_hdf5(file, request)
    raise misfit("no group data/demo_0", path, "leave robomimic: out for another layout")


Reader = Callable[[Path, SourceRequest], Source]
FILES: dict[str, Reader] = {".npz": open_npz, ".zip": open_zarr}  # any other is HDF5
FILES |= dict.fromkeys((".parquet", *ARROW), open_parquet)
# formats whose episodes a rule cuts
FLAT = ("d4rl", "hdf5", "npz", "ogbench", "parquet-rows", "arrow-rows", "zarr")
# formats whose flags at the last steps tell how episodes ended
JUDGED = ("hdf5-groups", "lerobot", "parquet", "arrow")
FOLDERS: tuple[tuple[Callable[[Path], Any], Reader], ...] = (  # the first that fits
    (data_directory, open_minari),
    (is_dataset, lambda path, _: dataset_source(open_dataset(path))),
    (replay_folder, open_dqn_replay),
    (lambda path: (path / INFO).is_file(), open_lerobot),
    (lambda path: any((path / n).is_file() for n in (".zgroup", "zarr.json")), open_zarr),
)


def _check_exists(text: str, path: Path) -> None:
    if not text.strip():  # a variable of a shell that is not set, not "."
        raise _unknown(f"{text!r} names nothing")
    with suppress(OSError, ValueError):  # too long, or not a name at all
        if path.exists():
            return
    d4rl = dataset_of_file(path.name)
    if not d4rl and not any(path.suffix.lower() in suffixes for suffixes in KINDS):
        raise _unknown(f"{text if len(text) <= 100 else text[:100] + '...'!r} is not a source")
    download = f", or give d4rl:{d4rl}, which downloads it from D4RL's server" if d4rl else ""
    raise InputError("SOURCE_READ", "no such file", text, f"check the path{download}")


def _unknown(problem: str) -> InputError:
    return InputError("SOURCE_READ", problem, remedy=f"accepted are {ACCEPTED}")
