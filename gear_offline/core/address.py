"""Addresses of files and folders on servers, ``PROTOCOL://...``: text, without the servers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from gear_offline.core.hub import is_hub
from gear_offline.core.text import first_line
from gear_offline.errors import InputError, UnavailableError

IN_EXTRA = ("s3", "s3a", "gs", "gcs")  # protocols that `gear-offline[remote]` reads


def parse_address(path: object) -> str | None:
    """Return an address, ``PROTOCOL://...``, from a text or a path; None: it is something else."""
    text = str(path) if isinstance(path, str | Path) else ""
    if isinstance(path, Path):  # which has made one slash of two
        text = re.sub(r"^([a-zA-Z][a-zA-Z0-9+-]*):/", r"\1://", text)
    if not re.match(r"[a-z][a-z0-9+-]*://", text, re.IGNORECASE):
        return None
    try:
        urlsplit(text)
    except ValueError as error:  # brackets of IPv6
        raise InputError("USAGE", f"no address: {error}", remedy="check the address") from error
    return text


def is_remote(path: object) -> bool:
    return is_hub(path) or parse_address(path) is not None


def is_there(path: str | Path) -> bool:
    """Look for a path; a server is asked later."""
    return is_remote(path) or Path(path).exists()


def hide_secrets(path: str) -> str:
    """Return an address without user, password, query and last slash; other text as it is."""
    if parse_address(path) is None:
        return path
    protocol, _, place, _ = _split(path)
    return protocol.lower() + place.rstrip("/")


def join_address(address: str, name: str) -> str:
    """Return the address of a file in the folder at `address`."""
    protocol, login, place, query = _split(address)
    return f"{protocol}{login}{place.rstrip('/')}/{name}{query}"


def _split(address: str) -> Sequence[str]:
    """Return protocol, login, place and query, which web servers alone have: others' names do."""
    web = r"(https?://)([^/?#]*@)?([^?#]*)(.*)"
    match = re.fullmatch(web, address, re.DOTALL | re.IGNORECASE)
    match = match or re.fullmatch("(.*?://)([^/]*@)?(.*)()", address, re.DOTALL)
    assert match is not None, "an address"
    return match.groups("")


def check_address(address: str, code: str) -> None:
    """Refuse an address whose protocol nobody knows, or whose package is missing."""
    scheme, _, rest = address.partition("://")
    scheme, where = scheme.lower(), hide_secrets(address)
    if scheme in ("file", "local"):
        raise InputError(code, "a file of this machine has no address", where, "give its path")
    if not rest.strip("/"):
        raise InputError(code, "the address names no server", where, "check the address")
    if scheme in ("http", "https"):
        if "#" in rest:
            remedy = "write %23 for # and %3F for ? in a name, else leave it out"
            raise InputError(code, "nobody sends a server what follows #", where, remedy)
        return
    import fsspec  # slow to load

    protocols = fsspec.available_protocols()
    if scheme not in protocols:
        near = difflib.get_close_matches(scheme, protocols, n=2) or ["https", "s3", "gs", "hf"]
        remedy = f"did you mean {' or '.join(f'{name}://' for name in near)}"
        raise InputError(code, f"there is no protocol {scheme}://", where, remedy)
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        problem, remedy = f"{scheme}:// needs a package", first_line(error)
        if scheme in IN_EXTRA:
            remedy = "pip install 'gear-offline[remote]'"
        raise UnavailableError("PACKAGE_MISSING", problem, where, remedy) from error
