"""The directory of a sweep: one ordinary run directory a trial, and what is known of all of them.

::

    runs/hopper-medium-sweep/
      sweep.json           the trials, how they were run, and the table when the sweep has ended
      failures.jsonl       one line a trial that failed
      runs/NAME/           a run directory each, as `train` writes it
      sweep.md, plots/     the report
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gear_offline.config.files import flat
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import read_regular, write_file
from gear_offline.errors import GearError, InputError
from gear_offline.runs.directory import LOCK, HeldDirectory
from gear_offline.sweep.results import TrialResult, is_complete, read_result
from gear_offline.sweep.trials import Trial
from gear_offline.training.metrics import GrowingFile, finite

MOST_BYTES = 1 << 30
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=,+-]{0,99}$")]


class TrialEntry(BaseModel):
    """A trial in ``sweep.json``; `asked` is whether the last call named it."""

    name: RunName
    label: str
    seed: int
    settings: dict[str, Any]
    recipe: dict[str, Any]
    asked: bool = True

    @classmethod
    def of(cls, trial: Trial) -> TrialEntry:
        return cls(
            name=trial.name,
            label=trial.label,
            seed=trial.recipe.seed,
            settings=dict(trial.settings),
            recipe=trial.recipe.to_dict(),
        )

    def trial(self, where: Path) -> Trial:
        recipe = Recipe.parse(self.recipe, where=f"{where}: trial {self.name}")
        return Trial(name=self.name, label=self.label, recipe=recipe, settings=self.settings)


class SweepFile(BaseModel):
    """The content of ``sweep.json``.

    Attributes
    ----------
    threads
        Of each trial in a process of its own: other numbers round differently.
    exact
        Whether trials on a GPU give the bits of runs alone.
    trials
        All that were ever asked for.
    table
        Of those asked for last, as `gear_offline.sweep.table` made it.
    """

    format: Literal[2] = 2
    recipe: str
    threads: int | None = None
    exact: bool = False
    trials: list[TrialEntry] = Field(min_length=1)
    table: dict[str, Any] | None = None


class _Failure(BaseModel):
    trial: str
    error: str


class SweepDirectory:
    """The directory of a sweep, to look at; `hold` it to write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.json_path = self.path / "sweep.json"

    def run_path(self, trial: Trial) -> Path:
        """Return the run directory of a trial."""
        return self.path / "runs" / trial.name

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

    @property
    def is_begun(self) -> bool:
        return os.path.lexists(self.json_path)

    def read(self) -> SweepFile:
        """Return the content of ``sweep.json``."""
        if not self.is_begun:
            raise InputError("RUN_NOT_FOUND", "there is no sweep", str(self.path))
        try:
            content = read_regular(self.json_path, most=MOST_BYTES)
            return SweepFile.model_validate_json(content)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                "RUN_DAMAGED",
                f"sweep.json cannot be read: {reason}",
                str(self.path),
                "sweep into another directory with --out",
            ) from error

    def write(self, file: SweepFile) -> None:
        """Write ``sweep.json``, with all recipes: once when a sweep begins and once at its end."""
        text = json.dumps(finite(file.model_dump()), indent=1, allow_nan=False) + "\n"
        write_file(self.json_path, text.encode())

    def note_failure(self, trial: Trial, error: GearError) -> None:
        """Append a line to ``failures.jsonl``."""
        lines = GrowingFile(self.path / "failures.jsonl")
        try:
            text = f"{error.code}: {error.message}"
            lines.append(_Failure(trial=trial.name, error=text).model_dump())
        finally:
            lines.close()

    def results(self, trials: Iterable[Trial]) -> list[TrialResult]:
        """Return how trials stand."""
        errors = self._failures()
        return [read_result(one, self.run_path(one), errors.get(one.name)) for one in trials]

    def open_trials(self, trials: Iterable[Trial]) -> list[Trial]:
        """Return those that are not complete."""
        return [trial for trial in trials if not is_complete(trial, self.run_path(trial))]

    def _failures(self) -> dict[str, str]:
        """Return the last error of each trial; a line that a kill cut short does not count."""
        path = self.path / "failures.jsonl"
        if not os.path.lexists(path):
            return {}
        try:
            lines = read_regular(path, most=MOST_BYTES).split(b"\n")[:-1]
            failures = [_Failure.model_validate_json(line) for line in lines]
        except (OSError, ValueError) as error:
            what, remedy = "failures.jsonl cannot be read", "remove it: failed trials run again"
            raise InputError("RUN_DAMAGED", what, str(path), remedy) from error
        return {failure.trial: failure.error for failure in failures}


def merged(
    before: SweepFile | None, trials: Sequence[Trial], *, free: Iterable[str], path: Path
) -> SweepFile:
    """Return the file of a sweep that goes on with `trials`, or begins.

    Trials may differ from those before in the sweep's own options, the seed and what is `free`:
    else the name of a run would not tell what it is.
    """
    file = SweepFile(
        recipe=trials[0].recipe.name, trials=[TrialEntry.of(trial) for trial in trials]
    )
    if before is None:
        return file
    old, new = before.trials[0], file.trials[0]
    if old.settings.keys() != new.settings.keys():
        then, now = (", ".join(entry.settings) or "their seeds" for entry in (old, new))
        raise _mismatch(f"its trials differ in {then}, these in {now}", path)
    own = (*old.settings, *free, "seed", "description")
    leaves, others = flat(old.recipe), flat(new.recipe)
    for key in sorted({*leaves, *others}):
        is_own = any(key == name or key.startswith(f"{name}.") for name in own)
        if not is_own and leaves.get(key) != others.get(key):
            raise _mismatch(f"{key} was {leaves.get(key)!r} and is {others.get(key)!r} now", path)
    asked = {trial.name for trial in trials}
    for entry in before.trials:
        if entry.name not in asked:
            file.trials.append(entry.model_copy(update={"asked": False}))
    file.threads, file.exact = before.threads, before.exact
    return file


def _mismatch(what: str, path: Path) -> InputError:
    remedy = "give another directory with --out, or other values and seeds of the same options"
    return InputError("RUN_MISMATCH", f"there is another sweep: {what}", str(path), remedy)
