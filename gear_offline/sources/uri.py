"""From what a user types to an open source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gear_offline.dataset.manifest import is_dataset
from gear_offline.dataset.scores import dataset_of_file
from gear_offline.errors import InputError, given_path
from gear_offline.sources.base import Source
from gear_offline.sources.combine import names_in_file, open_shards, parse_names, with_columns
from gear_offline.sources.d4rl import locate
from gear_offline.sources.hdf5_table import SUFFIXES, hdf5_files, open_folder, open_hdf5
from gear_offline.sources.minari import data_directory, find_directory, open_minari

ACCEPTED = (
    "a .hdf5 or .h5 file, a folder of them, d4rl:NAME (d4rl:hopper-medium-v2), minari:ID "
    "(minari:mujoco/hopper/medium-v0), the directory of a Minari dataset, or one of GEAR shards; "
    "arrays are given from Python, see docs/how-to/convert.md"
)


def open_source(
    uri: str | Path, *, rule: str | None = None, names: Mapping[str, str] | None = None
) -> Source:
    """Open a dataset of another format for reading.

    Parameters
    ----------
    uri
        Path of an HDF5 file (D4RL's layouts or the generic one) or of a folder of such files,
        ``d4rl:NAME``, ``minari:ID``, a Minari dataset's directory, or one of GEAR shards.
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
    parts = parse_names(names)
    text, path = str(uri), given_path(uri, "SOURCE_READ", where="uri")
    scheme, _, name = text.partition(":") if isinstance(uri, str) else ("", "", "")
    if scheme == "d4rl" and name:
        path = locate(name)
    elif scheme == "minari" and name:
        path = find_directory(name)
    else:
        is_minari = _is_directory(text, path) and data_directory(path) is not None
        scheme, name = "minari" if is_minari else "path", ""
    if scheme == "minari" or is_dataset(path):
        if rule is not None:
            what = f"boundary rule {rule!r} does not apply to a format that stores episodes apart"
            remedy = "leave the rule out, or convert the first source again"
            raise InputError("SOURCE_LAYOUT", what, where=text, remedy=remedy)
        source = open_minari(path, dataset_id=name) if scheme == "minari" else open_shards(path)
        return with_columns(source, parts)
    renamed, parts = names_in_file(parts)  # the reader looks for flags under their new names
    if path.is_dir():
        if not hdf5_files(path):
            raise _unknown(f"the directory {text!r} holds neither a Minari dataset nor HDF5 files")
        source = open_folder(path, rule=rule, names=renamed)
    else:
        uri = text if scheme == "d4rl" else path.name
        source = open_hdf5(path, uri=uri, rule=rule, names=renamed)
    return with_columns(source, parts, renamed)


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
    if not known and path.suffix.lower() not in SUFFIXES:
        raise _unknown(f"{text if len(text) <= 100 else text[:100] + '...'!r} is not a source")
    remedy = "check the path"
    if known:
        remedy += f", or give d4rl:{known}, which downloads it from D4RL's server"
    raise InputError("SOURCE_READ", "no such file", where=text, remedy=remedy)


def _unknown(what: str) -> InputError:
    return InputError("SOURCE_READ", what, remedy=f"accepted are {ACCEPTED}")
