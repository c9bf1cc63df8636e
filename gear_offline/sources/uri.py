"""From what a user types to an open source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gear_offline.core.hub import fetch, is_hub
from gear_offline.core.text import count_text
from gear_offline.dataset.manifest import is_dataset
from gear_offline.dataset.scores import dataset_file, dataset_of_file
from gear_offline.errors import InputError, given_path
from gear_offline.sources.base import Source, files_in
from gear_offline.sources.combine import (
    join_sources,
    open_shards,
    with_columns,
)
from gear_offline.sources.d4rl import locate
from gear_offline.sources.dqn_replay import open_dqn_replay, replay_folder
from gear_offline.sources.hdf5_table import SUFFIXES, open_hdf5
from gear_offline.sources.lerobot import is_lerobot, open_lerobot
from gear_offline.sources.minari import data_directory, find_directory, open_minari
from gear_offline.sources.npz import open_npz
from gear_offline.sources.parquet import open_parquet
from gear_offline.sources.robomimic import open_robomimic

NPZ, PARQUET = (".npz",), (".parquet",)
KINDS = (SUFFIXES, NPZ, PARQUET)
ACCEPTED = (
    "a .hdf5, .h5, .npz or .parquet file, a folder of them, robomimic:FILE#FILTER_KEY, d4rl:NAME "
    "(d4rl:hopper-medium-v2), minari:ID (minari:mujoco/hopper/medium-v0), the directory of a "
    "Minari or LeRobot dataset, of DQN-Replay's checkpoints, or of GEAR shards; "
    "arrays are given from Python, see docs/how-to/convert.md"
)


def open_source(
    uri: str | Path, *, rule: str | None = None, names: Mapping[str, str] | None = None
) -> Source:
    """Open a dataset of another format for reading.

    Parameters
    ----------
    uri
        Path of an HDF5 file (D4RL's layouts, robomimic's or the generic one), of an ``.npz`` file
        (OGBench's or flat arrays), of a ``.parquet`` file of one row an episode, or of a folder of
        such files, ``robomimic:FILE#FILTER_KEY``, ``d4rl:NAME``, ``minari:ID``, or a directory of a
        Minari or LeRobot dataset, of DQN-Replay's checkpoints, or of GEAR shards;
        ``hub:USER/NAME`` holds any of these.
    rule
        Boundary rule in place of the format's own, e.g. ``"terminals|steps=1000"``; see
        docs/explanation/episodes.md.
    names
        Column name to the column that gets it; of an HDF5 file to the dataset, or group of
        datasets: ``{"observations": "obs", "dones": "episode_end"}``.  Several vectors are put
        side by side: ``{"observations": "observations/position + observations/goal"}``.

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
        source = open_source(fetch(str(uri), "dataset", "SOURCE_READ"), rule=rule, names=names)
        source.info = replace(source.info, uri=str(uri))
        return source
    names = names or {}
    if not (isinstance(names, Mapping) and all(isinstance(o, str) for o in names.values())):
        what, remedy = f"names={names!r} is not usable", 'give a mapping: {"observations": "obs"}'
        raise InputError("COLUMN", what, remedy=remedy)
    text, path = str(uri), given_path(uri, "SOURCE_READ", where="uri")
    scheme, _, name = text.partition(":") if isinstance(uri, str) else ("", "", "")
    if scheme == "d4rl" and name:
        path = locate(name)
    elif scheme == "minari" and name:
        path = find_directory(name)
    elif scheme == "robomimic" and name:
        path = Path(name)
    else:
        scheme, name = "path", ""
    reader: Callable[[Path], Source] | None = None
    if scheme == "minari":
        reader = partial(open_minari, dataset_id=name)
    elif scheme == "path" and _is_directory(text, path):
        reader = _folder_reader(path)
    if reader is not None:
        _refuse_rule(rule, text)
        return with_columns(reader(path), names)
    # The readers of files look for flags under their new names.
    if scheme == "robomimic":
        source = _open_demonstrations(name, rule, names)
    elif path.is_dir() and is_lerobot(path):
        _refuse_rule(rule, text)
        source = open_lerobot(path, names=names)
    elif path.is_dir():
        files, notes = _files(path.absolute())
        if not files:
            raise _unknown(f"the directory {text!r} holds no dataset and no data files")
        parts_of = [_open_file(file, uri=file.name, rule=rule, names=names) for file in files]
        source = join_sources(parts_of, uri=path.absolute().name)
        facts = source.info.attributes
        facts = {**facts, "warnings": [*notes, *facts.get("warnings", ())]}
        source.info = replace(source.info, attributes=facts)
    else:
        uri = text if scheme == "d4rl" else path.name
        source = _open_file(path, uri=uri, rule=rule, names=names)
    return with_columns(source, names, by_reader=True)


def was_read_from(source: str, uri: str, files: Sequence[str]) -> bool:
    """Whether data of this `uri` and these `files` may have been read from `source`."""
    scheme, _, name = source.partition(":")
    path = Path(source)
    if scheme == "robomimic":
        path = Path(name.partition("#")[0])
    elif name and (is_hub(source) or scheme in ("d4rl", "minari")):
        # The file of a D4RL dataset may have been converted under its own name.
        return uri == source or Path((scheme == "d4rl" and dataset_file(name)) or "-").name in files
    return not files or not path.is_file() or path.name in files


def _folder_reader(path: Path) -> Callable[[Path], Source] | None:
    """Return the reader of a folder that is one dataset, ``None`` for a folder of data files."""
    if data_directory(path) is not None:
        return open_minari
    if is_dataset(path):
        return open_shards
    return open_dqn_replay if replay_folder(path) else None


def _files(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files of a folder that make one dataset, and what a user should know of it.

    Sets of Hugging Face's hub have theirs in a folder ``train``.
    """
    places = (folder, folder / "train") if (folder / "train").is_dir() else (folder,)
    found = [f for place in places for kind in KINDS if (f := files_in(place, kind))]
    files = found[0] if found else []
    if len(found) > 1:
        what = " and ".join(f"{len(f)} like {f[0].relative_to(folder)}" for f in found)
        remedy = "give the files that belong together a folder of their own"
        raise InputError(
            "SOURCE_READ", f"files of several kinds or places: {what}", str(folder), remedy
        )
    validation = {f.with_name(f"{f.stem}-val.npz") for f in files if f.suffix == ".npz"}
    kept = [file for file in files if file not in validation]
    left = count_text(len(files) - len(kept), "file")
    note = f"{left} for validation (NAME-val.npz beside NAME.npz) left out: convert them apart"
    return kept, [note] if len(kept) < len(files) else []


def _open_file(path: Path, *, uri: str, rule: str | None, names: Mapping[str, str]) -> Source:
    """Open a file by the reader of its layout."""
    if path.suffix.lower() in NPZ:
        return open_npz(path, uri=uri, rule=rule, names=names)
    if path.suffix.lower() in PARQUET:
        _refuse_rule(rule, uri)
        return open_parquet(path, uri=uri, names=names)
    if source := open_robomimic(path, uri=uri, names=names):
        _refuse_rule(rule, uri)
        return source
    return open_hdf5(path, uri=uri, rule=rule, names=names)


def _open_demonstrations(name: str, rule: str | None, names: Mapping[str, str]) -> Source:
    """Open ``FILE`` or ``FILE#FILTER_KEY`` of robomimic."""
    _refuse_rule(rule, name)
    file, mark, key = name.rpartition("#") if not Path(name).is_file() else (name, "", "")
    path = Path(file if mark else name)
    source = open_robomimic(path, uri=path.name, names=names, key=key if mark else None)
    if source is None:
        remedy = "leave robomimic: out for a file of another layout"
        raise InputError("SOURCE_LAYOUT", "no group data/demo_0", where=str(path), remedy=remedy)
    return source


def _refuse_rule(rule: str | None, where: str) -> None:
    if rule is not None:
        what = f"boundary rule {rule!r} does not apply to a format that stores episodes apart"
        remedy = "leave the rule out, or convert the first source again"
        raise InputError("SOURCE_LAYOUT", what, where=where, remedy=remedy)


def _is_directory(text: str, path: Path) -> bool:
    """Whether `path` is a directory, and not a file; refuse what is neither."""
    if not text.strip():  # a variable of a shell that is not set, not "."
        raise _unknown(f"{text!r} names nothing")
    try:
        if path.exists():
            return path.is_dir()
    except (OSError, ValueError):  # too long, or not a name at all
        pass
    known = dataset_of_file(path.name)
    if not known and path.suffix.lower() not in (*SUFFIXES, *NPZ, *PARQUET):
        raise _unknown(f"{text if len(text) <= 100 else text[:100] + '...'!r} is not a source")
    remedy = "check the path"
    if known:
        remedy += f", or give d4rl:{known}, which downloads it from D4RL's server"
    raise InputError("SOURCE_READ", "no such file", where=text, remedy=remedy)


def _unknown(what: str) -> InputError:
    return InputError("SOURCE_READ", what, remedy=f"accepted are {ACCEPTED}")
