"""The directory of one training run: who may write it, how files get in.

docs/reference/run-files.md says what lies in it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from gear_offline.artifacts.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    remove_checkpoint,
    remove_partial,
)
from gear_offline.artifacts.json_lines import FILES, truncate_records
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import LOCK, HeldDirectory, place_error, write_file
from gear_offline.errors import InputError, given_path

NEGLIGIBLE = {LOCK, ".recipe.yaml.partial"}  # a kill leaves them before the run has begun


def default_run_path(recipe: Recipe) -> Path:
    """Return ``runs/NAME-sSEED`` under the current directory."""
    return Path("runs") / f"{recipe.name}-s{recipe.seed}"


def run_and_start(
    source: Recipe | str | os.PathLike[str],
    recipe: Recipe,
    out: str | os.PathLike[str] | None,
    *,
    resume: bool,
    checkpoint: str | int | None,
) -> tuple[Path, Path | None]:
    """Return the directory for the run of a `recipe`, and the checkpoint that it begins with.

    Its `source` is itself, a file or a run (or its ``recipe.yaml``), which is resumed where it
    lies; the checkpoint is that run's.
    """
    run = None
    if not isinstance(source, Recipe):
        folder = given_path(source, "RECIPE", where="recipe")
        folder = folder.parent if folder.name == "recipe.yaml" else folder
        run = folder if is_run(folder) else None
    output = None if out is None else given_path(out, "OUTPUT_WRITE", where="out")
    if checkpoint is None:
        return output or (run if resume and run else default_run_path(recipe)), None
    if run is None or resume:
        problem = "another run begins with a checkpoint of a run"
        remedy = f"resume that other run without it, from {out or 'its directory'}"
        if run is None:
            remedy = "name a run directory in place of the recipe"
        raise InputError("USAGE", problem, "checkpoint", remedy)
    start = find_checkpoint(run, checkpoint)
    return output or run.with_name(f"{run.resolve().name}-from-{int(start.name[5:])}"), start


def is_run(folder: Path) -> bool:
    """Return true if a directory is a run's, and not one in which somebody keeps a recipe."""
    # One that was killed at once has no metrics yet, one that was copied may have no hidden files.
    marked = any((folder / name).is_file() for name in (LOCK, "metrics.jsonl"))
    is_begun = marked and (folder / "recipe.yaml").is_file()
    return is_begun or bool(list_checkpoints(folder / "checkpoints"))  # its recipe may be lost


def _has_content(path: Path) -> bool:
    """Return true if a directory has a file that is not empty, or left by a kill."""
    files = (Path(at, name) for at, _, names in os.walk(path) for name in {*names} - NEGLIGIBLE)
    return any(file.lstat().st_size for file in files)


def check_place(path: Path, *, resume: bool) -> None:
    """Refuse a directory that is not a run's to write."""
    if path.exists() and not path.is_dir():
        raise place_error(path, "not a directory")
    if not is_run(path) and _has_content(path):
        problem = "the directory is not empty and holds no run"
        remedy = "move what is there away, or train into another directory: --out"
        raise InputError("OUTPUT_EXISTS", problem, str(path), remedy)
    if is_run(path) and not resume:
        remedy = "go on with --resume, or train into another directory (--out, name=, seed=)"
        raise InputError("OUTPUT_EXISTS", "there is a run already", str(path), remedy)


class RunDirectory(HeldDirectory):
    """A run directory held for writing; with `resume` a run that is already there is accepted.

    Until `begin` nothing in it changes, so that a run that is refused leaves what was there.  A new
    run that fails before it has logged or saved anything leaves nothing.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        check_place(path, resume=resume)
        self._is_new, self.checkpoints = not is_run(path), path / "checkpoints"
        problem, remedy = "another process is writing this run", "wait for it, or train elsewhere"
        super().__init__(path, in_use=InputError("RUN_LOCKED", problem, str(path), remedy))
        try:
            check_place(path, resume=resume)  # another process may have begun a run meanwhile
        except InputError:
            self.close()
            raise

    def begin(self, recipe: Recipe, *, step: int) -> None:
        """Make the run's first changes: store its recipe, remove what comes after `step`."""
        truncate_records(self.path, last_step=step)  # it may refuse the run
        write_file(self.path / "recipe.yaml", recipe.to_yaml().encode())
        remove_partial(self.checkpoints)
        for done, path in list_checkpoints(self.checkpoints):
            if done > step:  # passed over: it would count as saved, and as the newest to keep
                remove_checkpoint(path)

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        """Let others write; after an error remove a new run that has come to nothing."""
        with suppress(OSError, InputError):
            self.check_place()
            records = [self.path / name for name in FILES]
            is_begun = any(file.is_file() and file.stat().st_size for file in records)
            if error and self._is_new and not is_begun and not list_checkpoints(self.checkpoints):
                for folder in ("checkpoints", "tensorboard"):
                    shutil.rmtree(self.path / folder, ignore_errors=True)
                for file in (*records, self.path / "recipe.yaml"):
                    file.unlink(missing_ok=True)
        self.close()

    def branch(self, start: Path) -> Path:
        """Copy the checkpoint `start` and its run's records.

        `begin` cuts the records and writes the recipe, without which the directory is no run.
        """
        for name in FILES:
            if (start.parents[1] / name).is_file():
                shutil.copyfile(start.parents[1] / name, self.path / name)
        partial = self.checkpoints / f".partial-{start.name}"
        remove_partial(self.checkpoints)
        shutil.copytree(start, partial)
        return partial.rename(self.checkpoints / start.name)
