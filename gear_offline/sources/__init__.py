"""Readers of foreign formats; `open_source` picks one from what the user typed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gear_offline.errors import InputError, given_path
from gear_offline.sources.arrays import from_arrays, from_episodes
from gear_offline.sources.base import Source, SourceInfo, iter_episodes
from gear_offline.sources.columns import Parts, names_in_file, parse_names, with_columns
from gear_offline.sources.pieces import join_sources, pick_episodes

__all__ = [
    "Source",
    "SourceInfo",
    "from_arrays",
    "from_episodes",
    "iter_episodes",
    "join_sources",
    "open_source",
    "pick_episodes",
]

ACCEPTED = (
    "a .hdf5 or .h5 file, a folder of them, d4rl:NAME (d4rl:hopper-medium-v2), minari:ID "
    "(minari:mujoco/hopper/medium-v0), the directory of a Minari dataset, or one of GEAR shards; "
    "arrays are given from Python, see docs/sources.md"
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
        docs/sources.md.
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
        ``SOURCE_UNKNOWN`` for anything else, ``COLUMN_MISSING`` and ``CONVERT_OPTION`` for `names`
        that do not fit, and the readers' own codes.
    UnavailableError
        ``D4RL_DOWNLOAD``, ``PYARROW_MISSING``.
    """
    # Readers are imported when they are used: h5py is not needed to import this package.
    parts = parse_names(names)
    before, after = names_in_file(parts)
    text = str(uri)
    scheme, _, name = text.partition(":")
    if isinstance(uri, str) and scheme == "d4rl" and name:
        from gear_offline.sources.d4rl_files import locate
        from gear_offline.sources.generic import open_hdf5

        found = open_hdf5(locate(name), uri=text, name=name, rule=rule, names=before)
        return with_columns(found, after, before)
    if isinstance(uri, str) and scheme == "minari" and name:
        from gear_offline.sources.minari import open_minari
        from gear_offline.sources.minari_metadata import find_directory

        return with_columns(open_minari(find_directory(name), uri=text, rule=rule), parts)
    path = given_path(uri, "SOURCE_UNKNOWN", where="uri")
    if isinstance(uri, str) and not uri.strip():  # a variable of a shell that is not set, not "."
        what = f"{text!r} names nothing"
        raise InputError("SOURCE_UNKNOWN", what, remedy=f"accepted are {ACCEPTED}")
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, ValueError):  # too long, or not a name at all
        is_directory = exists = False
        text = text if len(text) <= 100 else f"{text[:100]}..."
    if is_directory:
        opened = _open_directory(path, rule, parts)
        if opened is not None:
            return opened
    elif exists or path.suffix.lower() in (".hdf5", ".h5"):
        from gear_offline.sources.generic import open_hdf5

        found = open_hdf5(path, uri=path.name, name=path.name, rule=rule, names=before)
        return with_columns(found, after, before)
    what = f"{text!r} is not a source"
    if is_directory:
        what = f"the directory {text!r} holds neither a Minari dataset nor HDF5 files"
    raise InputError("SOURCE_UNKNOWN", what, remedy=f"accepted are {ACCEPTED}")


def _open_directory(path: Path, rule: str | None, parts: Parts) -> Source | None:
    """Open what a directory holds; ``None`` if that is nothing known."""
    from gear_offline.sources.folder import hdf5_files, open_folder
    from gear_offline.sources.minari import open_minari
    from gear_offline.sources.minari_metadata import data_directory
    from gear_offline.sources.shards import is_dataset, open_shards

    if data_directory(path) is not None:
        return with_columns(open_minari(path, uri=None, rule=rule), parts)
    if is_dataset(path):
        return with_columns(open_shards(path, rule=rule), parts)
    if hdf5_files(path):
        before, after = names_in_file(parts)
        return with_columns(open_folder(path, rule=rule, names=before), after, before)
    return None
