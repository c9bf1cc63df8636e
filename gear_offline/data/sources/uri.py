"""From what a user types to an open source."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from gear_offline.config.arguments import check_arguments
from gear_offline.core.address import hide_secrets, is_remote, parse_address
from gear_offline.core.hub import fetch, is_hub
from gear_offline.core.remote import fetch_file
from gear_offline.data.dataset.dataset import Dataset, open_to_read
from gear_offline.data.dataset.scores import dataset_file, dataset_of_file
from gear_offline.data.sources.base import Source, SourceRequest
from gear_offline.data.sources.combine import adapt_columns, dataset_source, with_columns
from gear_offline.data.sources.d4rl_package import open_d4rl_package
from gear_offline.data.sources.folders import open_folder
from gear_offline.data.sources.formats import (
    FILE_FORMATS,
    FORMATS,
    HDF5,
    SCHEMES,
    Format,
    find_format,
    list_formats,
    open_format,
)
from gear_offline.data.sources.reader import EpisodeReader, open_by_reader
from gear_offline.errors import InputError, given_path


@check_arguments()
def open_source(
    uri: str | os.PathLike[str],
    *,
    rule: str | None = None,
    names: Mapping[str, str] | None = None,
    partial: bool = False,
    reader: str | EpisodeReader | None = None,
    keeps_videos: bool = False,
    resize: tuple[int, int] | None = None,
) -> Source:
    """Open a dataset of another format for reading.

    Parameters
    ----------
    uri
        Path of a file or directory, a name, or an address, as docs/how-to/convert.md lists them.
    rule
        Boundary rule in place of the format's own, e.g. ``"terminals|steps=1000"``; see
        docs/how-to/convert.md.
    names
        Column name to the column that gets it; of an HDF5 file to the dataset, or group of
        datasets: ``{"observations": "obs", "dones": "episode_end"}``.  Several vectors are put
        side by side: ``{"observations": "observations/position + observations/goal"}``.
    partial
        Take a source without observations or actions: they are made of its other columns.
    reader
        Function that gets the path and yields episodes, as `from_episodes` takes them; as text
        ``FILE.py:function``, ``module:function`` or the entry point of a package
        (``gear_offline.readers``).  Memory holds one episode; they wait in temporary files.
    keeps_videos
        Columns of videos hold references to their frames, as `gear_offline.convert` keeps them.
    resize
        Height and width of frames of LeRobot's datasets; other formats have none to decode.

    Returns
    -------
    Source
        Columns by row range and the episode index; close it, or use it in a ``with`` statement.

    Raises
    ------
    InputError
        ``SOURCE_READ`` for what is missing, damaged or no source, ``SOURCE_LAYOUT`` for what makes
        no trajectories, ``SOURCE_UNSAFE``, ``COLUMN`` for `names` that do not fit, ``USAGE``.
    UnavailableError
        ``SOURCE_READ`` for a failed download, ``PACKAGE_MISSING``.
    """
    frames = {"keeps_videos": keeps_videos, "resize": resize}
    source = _open(uri, rule, names or {}, partial, reader, frames)
    if resize is not None and source.info.format != "lerobot":
        source.close()
        problem = "frames of LeRobot datasets alone are decoded, so none is resized"
        raise InputError("USAGE", problem, source.info.uri, "--map changes frames of others")
    return source


def _open(
    uri: str | os.PathLike[str],
    rule: str | None,
    names: Mapping[str, str],
    partial: bool,
    reader: str | EpisodeReader | None,
    frames: Mapping[str, Any],
) -> Source:
    if is_remote(uri):
        uri = parse_address(uri) or str(uri)
        fetched: Any = fetch_source(uri, is_file=reader is not None)
        source = _open(fetched, rule, names, partial, reader, frames)
        source.info = replace(source.info, uri=hide_secrets(uri))
        return source
    if not (isinstance(names, Mapping) and all(isinstance(o, str) for o in names.values())):
        remedy = 'give a mapping: {"observations": "obs"}'
        raise InputError("COLUMN", f"names={names!r} is not usable", "", remedy)
    if isinstance(uri, Dataset):  # of an address
        opened = Format(lambda path, request: dataset_source(uri), {"gear": "stored"})
        request = SourceRequest(uri.name, rule, names)
        return adapt_columns(open_format(opened, uri.path, request), rule)
    if isinstance(uri, Mapping | list | tuple):
        remedy = "make a source of it: go.from_arrays(columns), go.from_episodes(episodes)"
        raise InputError("SOURCE_READ", f"a {type(uri).__name__} is not a path", "", remedy)
    if not str(uri).strip():  # a variable of a shell that is not set, not "."
        raise InputError("SOURCE_READ", f"{uri!r} names nothing", remedy=list_formats())
    path = given_path(uri, "SOURCE_READ", where="uri")
    if reader is not None:
        if not path.exists():
            raise _no_file(str(path))
        request = SourceRequest(path.name, rule, names, partial=partial)
        return adapt_columns(with_columns(open_by_reader(reader, path, request), names))
    scheme, name, key = _split(uri) if isinstance(uri, str) else ("", "", None)
    request = SourceRequest(str(uri), rule, names, key, partial, **frames)
    if scheme == "d4rl" and (packaged := open_d4rl_package(name, request)):
        return adapt_columns(with_columns(packaged, names), rule)
    if scheme:
        path = SCHEMES[scheme](name)
    else:
        _check_exists(str(uri), path)
    if scheme not in ("d4rl", "minari"):
        request = request._replace(uri=path.name)
    form = find_format(path) if key is None else HDF5
    source = open_format(form, path, request) if form else open_folder(path, request)
    return adapt_columns(source, rule)


def fetch_source(uri: str, *, is_file: bool) -> Path | Dataset:
    """Return the place on this machine of a source on a server; shards that stay there, opened."""
    if is_hub(uri):
        return fetch(uri, "dataset", "SOURCE_READ")
    suffix = PurePosixPath(hide_secrets(uri)).suffix.lower()
    if is_file or any(suffix in form.suffixes for form in FORMATS):
        return fetch_file(uri, "SOURCE_READ")
    return open_to_read(uri, "SOURCE_READ")


def find_local_path(source: str) -> Path | None:
    """Return the place of a source on this machine; None where it is not here, or not yet."""
    scheme, name, _ = _split(source)
    with suppress(InputError):
        # d4rl: might download it
        path = Path(source) if scheme == "d4rl" else SCHEMES.get(scheme, Path)(name)
        return path if path.exists() else None
    return None


def was_read_from(source: str, uri: str, files: Sequence[str]) -> bool:
    """Compare a source with the `uri` and `files` of data; True if they may be of it."""
    scheme, name, _ = _split(source)
    if is_remote(source) or scheme in ("d4rl", "minari"):
        # The file of a D4RL dataset may have been converted under its own name.
        file = dataset_file(name) if scheme == "d4rl" else None
        return uri == hide_secrets(source) or Path(file or "-").name in files
    local_path = find_local_path(source)
    return not (files and local_path and local_path.is_file()) or local_path.name in files


def _split(source: str) -> tuple[str, str, str | None]:
    """Return the scheme of a source, "" of a path; what it names; and robomimic's filter key."""
    scheme, _, name = source.partition(":")
    if scheme not in SCHEMES or not name:
        return "", source, None
    if scheme != "robomimic":
        return scheme, name, None
    file, _, key = (name, "", "") if Path(name).is_file() else name.partition("#")
    return scheme, file, key


def _check_exists(text: str, path: Path) -> None:
    with suppress(OSError, ValueError):  # too long, or not a name at all
        if path.exists():
            return
    d4rl = dataset_of_file(path.name)
    if not d4rl and not any(path.suffix.lower() in form.suffixes for form in FILE_FORMATS):
        problem = f"{text if len(text) <= 100 else text[:100] + '...'!r} is not a source"
        raise InputError("SOURCE_READ", problem, remedy=list_formats())
    download = f", or give d4rl:{d4rl}, which downloads it from D4RL's server" if d4rl else ""
    raise _no_file(text, download)


def _no_file(text: str, otherwise: str = "") -> InputError:
    where = "" if Path(text).is_absolute() else f" (relative to {Path.cwd()})"
    return InputError("SOURCE_READ", f"no such file{where}", text, f"check the path{otherwise}")
