"""Readers of foreign formats; `open_source` picks one from what the user typed."""

from __future__ import annotations

from pathlib import Path

from gear_offline.errors import InputError
from gear_offline.sources.base import Source, SourceInfo, iter_episodes

__all__ = ["Source", "SourceInfo", "iter_episodes", "open_source"]

ACCEPTED = (
    "a .hdf5 or .h5 file, d4rl:NAME (d4rl:hopper-medium-v2), minari:ID "
    "(minari:mujoco/hopper/medium-v0), or the directory of a Minari dataset"
)


def open_source(uri: str | Path, *, rule: str | None = None) -> Source:
    """Open a dataset of another format for reading.

    Parameters
    ----------
    uri
        Path of an HDF5 file (D4RL's layouts or the generic one), ``d4rl:NAME``, ``minari:ID``, or
        a Minari dataset's directory.
    rule
        Boundary rule in place of the format's own, e.g. ``"terminals|steps=1000"``; see
        docs/sources.md.

    Returns
    -------
    Source
        Columns by row range and the episode index; close it, or use it in a ``with`` statement.

    Raises
    ------
    InputError
        ``SOURCE_UNKNOWN`` for anything else, and the readers' own codes.
    UnavailableError
        ``D4RL_DOWNLOAD``, ``PYARROW_MISSING``.
    """
    # Readers are imported when they are used: h5py is not needed to import this package.
    text = str(uri)
    scheme, _, name = text.partition(":")
    if isinstance(uri, str) and scheme == "d4rl" and name:
        from gear_offline.sources.d4rl_files import locate
        from gear_offline.sources.generic import open_hdf5

        return open_hdf5(locate(name), uri=text, name=name, rule=rule)
    if isinstance(uri, str) and scheme == "minari" and name:
        from gear_offline.sources.minari import open_minari
        from gear_offline.sources.minari_metadata import find_directory

        return open_minari(find_directory(name), uri=text, rule=rule)
    path = Path(uri)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, ValueError):  # too long, or not a name at all
        is_directory = exists = False
        text = text if len(text) <= 100 else f"{text[:100]}..."
    if is_directory:
        from gear_offline.sources.minari import open_minari
        from gear_offline.sources.minari_metadata import data_directory

        if data_directory(path) is not None:
            return open_minari(path, uri=None, rule=rule)
    elif exists or path.suffix.lower() in (".hdf5", ".h5"):
        from gear_offline.sources.generic import open_hdf5

        return open_hdf5(path, uri=path.name, name=path.name, rule=rule)
    what = f"{text!r} is not a source"
    if is_directory:
        what = f"the directory {text!r} holds no Minari dataset"
        if (path / "manifest.json").is_file():
            what += ", but looks like GEAR shards already"
    raise InputError("SOURCE_UNKNOWN", what, remedy=f"accepted are {ACCEPTED}")
