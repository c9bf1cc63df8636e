"""Readers of foreign formats; `open_source` picks one from what the user typed."""

from __future__ import annotations

from pathlib import Path

from gear_offline.errors import InputError
from gear_offline.sources.base import Source, SourceInfo, iter_episodes

__all__ = ["Source", "SourceInfo", "iter_episodes", "open_source"]

ACCEPTED = "a .hdf5 or .h5 file, d4rl:NAME, minari:ID, or the directory of a Minari dataset"


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
    """
    from gear_offline.sources.generic import open_hdf5

    text = str(uri)
    path = Path(uri)
    if path.is_file() or path.suffix.lower() in (".hdf5", ".h5"):
        return open_hdf5(path, uri=path.name, name=path.name, rule=rule)
    raise InputError(
        "SOURCE_UNKNOWN", f"{text!r} is not a source", remedy=f"accepted are {ACCEPTED}"
    )
