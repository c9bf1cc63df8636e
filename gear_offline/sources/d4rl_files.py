"""Finds the file of a D4RL dataset: in D4RL's own cache, or on its public server."""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from gear_offline.core.progress import progress
from gear_offline.dataset.scores import dataset_file, dataset_names
from gear_offline.errors import InputError, UnavailableError

SERVER = "http://rail.eecs.berkeley.edu/datasets/offline_rl/"  # d4rl/infos.py; it has no https
TIMEOUT = timedelta(seconds=30)
MAX_DOWNLOAD_BYTES = 64 << 30


def cache_directory() -> Path:
    """Return the directory where the d4rl package keeps its files."""
    configured = os.environ.get("D4RL_DATASET_DIR")
    return Path(configured) if configured else Path.home() / ".d4rl" / "datasets"


def locate(name: str) -> Path:
    """Return the file of dataset `name`, downloading it when it is not in the cache.

    Parameters
    ----------
    name
        A D4RL dataset, e.g. ``"hopper-medium-v2"``.

    Raises
    ------
    InputError
        ``D4RL_NAME`` for a name that neither the table nor an installed d4rl package knows.
    UnavailableError
        ``D4RL_DOWNLOAD`` when the file is not here and cannot be fetched.
    """
    url = _url(name)
    target = cache_directory() / PurePosixPath(urlsplit(url).path).name
    if not target.is_file():
        _download(url, target)
    return target


def _url(name: str) -> str:
    file = dataset_file(name)
    if file is not None:
        return SERVER + file
    try:
        # The package raises a plain Exception where MuJoCo 2.1 is missing, hence the wide net.
        url = importlib.import_module("d4rl.infos").DATASET_URLS.get(name)
    except Exception:
        url = None
    if isinstance(url, str) and urlsplit(url).scheme in ("http", "https"):
        return url
    near = difflib.get_close_matches(name, dataset_names(), n=3)
    raise InputError(
        "D4RL_NAME",
        f"D4RL has no dataset {name!r}",
        remedy=f"did you mean {', '.join(near)}" if near else "names look like hopper-medium-v2",
    )


def _download(url: str, target: Path) -> None:
    """Fetch `url` to `target`: to a temporary file beside it, then renamed."""
    temporary: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=TIMEOUT.total_seconds()) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            if total > MAX_DOWNLOAD_BYTES:
                raise OSError(f"the server offers {total} bytes")
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            with (
                os.fdopen(handle, "wb") as file,
                progress(total, f"download {target.name}", unit="bytes") as advance,
            ):
                while block := answer.read(1 << 20):
                    file.write(block)
                    advance(len(block))
                if file.tell() != total and total:
                    raise OSError(f"got {file.tell()} of {total} bytes")
                file.flush()
                os.fsync(file.fileno())
        shutil.move(temporary, target)
        temporary = None
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise UnavailableError(
            "D4RL_DOWNLOAD",
            f"cannot fetch {url}: {error}",
            where=str(target),
            remedy=f"download it on a machine with network and put it there: {target}",
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
