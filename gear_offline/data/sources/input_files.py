"""Files from outside: opened only as they were first, and refused in one line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from gear_offline.core.files import FileIdentity, file_identity, open_regular, read_regular
from gear_offline.errors import InputError, reading_errors

MAX_JSON_BYTES = 64 << 20
APART = "files are missing, damaged, out of order or of several sources: get them again"


@dataclass(frozen=True)
class InputFile:
    """A file from outside, and what tells whether it is still the one that was opened."""

    path: Path
    identity: FileIdentity

    @classmethod
    def find(cls, path: Path) -> InputFile:
        """Return the regular file at `path` as it is now."""
        with _open(path) as file:
            if file.read(23) == b"version https://git-lfs":
                problem = "a pointer of Git LFS in place of the file"
                raise InputError("SOURCE_READ", problem, str(path), "get the file: git lfs pull")
            return cls(path, file_identity(file.fileno()))

    def open(self) -> FileIO:
        """Open it for reading; refuse another one (``SOURCE_CHANGED``)."""
        file = _open(self.path)
        if file_identity(file.fileno()) != self.identity:
            file.close()
            raise changed_error(self.path.name)
        return file


def _open(path: Path) -> FileIO:
    try:
        return os.fdopen(open_regular(path), "rb", buffering=0)
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror or error}"
        raise InputError("SOURCE_READ", problem, str(path), "check path and permissions") from error


def by_number(path: Path | str) -> list[tuple[int, int, str]]:
    """Return a key that sorts ``part_2`` before ``part_10``, of a file or folders and a file."""
    segments = re.split(r"([0-9]+)", str(path))
    return [(1, int(p), p) if p.isdigit() and p.isascii() else (0, 0, p) for p in segments]


def files_in(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of some suffixes right in a folder, ``part_2`` before ``part_10``.

    A link that leads nowhere is one too: opening it is an error, leaving it out would lose rows.
    """
    files = (p for p in folder.iterdir() if p.suffix.lower() in suffixes and not p.is_dir())
    return sorted((p for p in files if not p.name.startswith(".")), key=by_number)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file of JSON holds."""
    with reading_errors(path.name, path):
        return dict(json.loads(read_regular(path, most=MAX_JSON_BYTES)))


def read_json_lines(path: Path, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the values of these names in each line of a file of JSON."""
    with reading_errors(path.name, path):
        lines = read_regular(path, most=MAX_JSON_BYTES).splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return [tuple(row[name] for name in names) for row in rows]


def changed_error(name: str) -> InputError:
    problem = "the source changed while it was converted"
    return InputError("SOURCE_CHANGED", problem, name, "convert again once nothing writes to it")


def misfit(problem: str, where: Path | str = "", remedy: str = APART) -> InputError:
    """Return the error for what is readable and makes no trajectories."""
    return InputError("SOURCE_LAYOUT", problem, str(where), remedy)


def check_kind(value: object, required_type: type, where: str, remedy: str) -> None:
    if not isinstance(value, required_type):
        raise misfit(f"a {type(value).__name__} is given", where, remedy)
