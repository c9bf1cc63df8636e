"""What a case of the corpus is, and the valid files that cases spoil."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.dataset.shards import digest
from tests.hdf5_files import table, write

FIXTURES = Path(__file__).parents[2] / "fixtures"
STEPS = 40

Make = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One bad input.

    Attributes
    ----------
    name
        Unique, ``group/what``.
    code
        The error code that must answer; ``""`` for input that looks odd and is good.
    arguments
        Command line, run in the folder of the case.
    make
        Makes the files of the case in an empty folder.
    says
        What the message must contain: the place.
    environment
        Variables of the child.
    needs_torch
        Whether the command loads torch, which alone takes 400 MB.
    """

    name: str
    code: str
    arguments: Sequence[str]
    make: Make = lambda folder: None
    says: str = ""
    environment: Mapping[str, str] | None = None
    needs_torch: bool = False


def good_columns() -> dict[str, Any]:
    """Return the columns of a good D4RL file of `STEPS` rows."""
    found = table(STEPS)
    found["terminals"] = np.arange(STEPS) % 10 == 9
    found["timeouts"] = np.arange(STEPS) % 10 == 4
    return found


def good_hdf5(path: Path, **changes: Any) -> Path:
    """Write a good file with some columns replaced, or left out where the change is None."""
    columns = {**good_columns(), **changes}
    return write(path, {name: v for name, v in columns.items() if v is not None})


def good_dataset(folder: Path) -> Path:
    """Copy the version-1 dataset into `folder`."""
    return Path(shutil.copytree(FIXTURES / "v1", folder / "d"))


def seal(document: Mapping[str, Any]) -> bytes:
    """Return a manifest of `document` with a digest that fits, in the form of docs/format.md."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    return seal_text(("{\n" + ",\n".join(lines)).encode())


def seal_text(body: bytes) -> bytes:
    return body + f',\n"digest": "xxh3-128:{digest(body)}"\n}}\n'.encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a dataset without its digest."""
    document: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    document.pop("digest")
    return document
