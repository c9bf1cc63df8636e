"""The directory of a sweep: one ordinary run directory a trial, and what is known of all of them.

::

    runs/hopper-medium-sweep/
      sweep.json           the last call: its trials, which of them failed, and at its end the table
      runs/NAME/           a run directory each, as `train` writes it; those of earlier calls stay
      sweep.md, plots/     the report
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from gear_offline.core.files import LOCK, HeldDirectory, read_regular, write_file
from gear_offline.core.text import finite, first_line
from gear_offline.errors import InputError
from gear_offline.sweep.trials import Trial

MOST_BYTES = 1 << 30


class SweepFile(BaseModel):
    """The content of ``sweep.json``, written once when a sweep begins and once at its end."""

    format: Literal[2] = 2
    recipe: str
    threads: int | None = None  # of a trial in a process of its own: other numbers round otherwise
    exact: bool = False  # trials on a GPU give the bits of runs alone
    trials: list[Trial] = Field(min_length=1)
    failures: dict[str, str] = {}  # "CODE: what was wrong" by trial
    table: dict[str, Any] | None = None


class SweepDirectory:
    """The directory of a sweep, to look at; `hold` it to write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.json_path = self.path / "sweep.json"

    def run_path(self, trial: Trial) -> Path:
        """Return the run directory of a trial."""
        return self.path / "runs" / trial.name

    @property
    def is_begun(self) -> bool:
        return os.path.lexists(self.json_path)

    def hold(self) -> HeldDirectory:
        """Keep other processes from running this sweep; a context manager."""
        what, remedy = "another process is running this sweep", "wait for it, or choose another"
        taken = InputError("RUN_LOCKED", what, str(self.path), f"{remedy} directory with --out")
        if self.path.is_dir() and not self.is_begun:
            foreign = {entry.name for entry in self.path.iterdir()} - {LOCK, ".sweep.json.partial"}
            if foreign:
                what = "the directory is not empty and holds no sweep"
                raise InputError("OUTPUT_EXISTS", what, str(self.path), "choose another with --out")
        return HeldDirectory(self.path, taken=taken)

    def read(self) -> SweepFile:
        """Return the content of ``sweep.json``."""
        if not self.is_begun:
            raise InputError("RUN_NOT_FOUND", "there is no sweep", str(self.path))
        try:
            content = read_regular(self.json_path, most=MOST_BYTES)
            return SweepFile.model_validate_json(content)
        except (OSError, ValueError) as error:
            what = f"sweep.json cannot be read: {first_line(error)[:200]}"
            remedy = "sweep into another directory with --out"
            raise InputError("RUN_DAMAGED", what, str(self.path), remedy) from error

    def begin(self, trials: Sequence[Trial]) -> SweepFile:
        """Return the content for a call with `trials`; what rounds numbers is as of the first."""
        before: dict[str, Any] = {}
        if self.is_begun:
            before = self.read().model_dump(include={"threads", "exact"})
        return SweepFile(recipe=trials[0].recipe.name, trials=list(trials), **before)

    def write(self, file: SweepFile) -> None:
        """Write ``sweep.json``, with all recipes."""
        text = json.dumps(finite(file.model_dump(mode="json")), indent=1, allow_nan=False) + "\n"
        write_file(self.json_path, text.encode())
