"""Digests of a source's files, computed beside its conversion; a file that changes is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from gear_offline.core import files
from gear_offline.core.files import FileIdentity as Identity
from gear_offline.errors import GearError, InputError


@contextmanager
def digested(paths: Sequence[Path], opened: Sequence[Identity] = ()) -> Iterator[Any]:
    """Digest the source files beside the conversion; yields a function that waits for the list.

    `opened` are their identities from before they were opened, if those are known.
    """
    before = [file_identity(path) for path in paths]
    for path, identity, then in zip(paths, before, opened or before, strict=True):
        if identity != then:
            raise _changed(path)
    stop: list[bool] = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending: Future[list[str]] = pool.submit(lambda: [_file_digest(p, stop) for p in paths])

        def wait() -> tuple[Mapping[str, Any], ...]:
            digests = pending.result()
            for path, identity in zip(paths, before, strict=True):
                if file_identity(path) != identity:
                    raise _changed(path)
            return tuple(
                {"name": path.name, "bytes": identity[2], "digest": found}
                for path, identity, found in zip(paths, before, digests, strict=True)
            )

        try:
            yield wait
        finally:
            stop.append(True)


def _changed(path: Path) -> InputError:
    return InputError(
        "SOURCE_CHANGED",
        "the source changed while it was converted",
        where=path.name,
        remedy="convert again once nothing writes to it",
    )


def file_identity(path: Path) -> Identity:
    """Return what another file or content has not.

    Raises
    ------
    InputError
        ``SOURCE_READ``.
    """
    try:
        return files.file_identity(path)
    except OSError as error:
        raise _source_error(path, error) from error


def _source_error(path: Path, error: OSError) -> GearError:
    what = f"cannot read the source: {error.strerror or error}"
    return InputError("SOURCE_READ", what, where=path.name, remedy="check the file")


def _file_digest(path: Path, stop: Sequence[bool]) -> str:
    found, buffer = xxhash.xxh3_128(), bytearray(256 << 10)
    try:
        with open(path, "rb", buffering=0) as file:
            while not stop and (count := file.readinto(buffer)):
                found.update(memoryview(buffer)[:count])
    except OSError as error:
        raise _source_error(path, error) from error
    return str(found.hexdigest())
