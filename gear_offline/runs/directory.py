"""The directory of one training run: what lies where, who may write it, and how files get in.

::

    runs/hopper-medium-s0/
      recipe.yaml          every option, with what was taken from the data filled in
      metrics.jsonl        one line every train.log_every steps
      evaluations.jsonl    one line an evaluation
      tensorboard/         the same for TensorBoard
      checkpoints/         step-00010000/ ..., and best, a link to one of them
      plots/
      summary.json         when the run is complete
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.core.files import write_file
from gear_offline.errors import InputError
from gear_offline.runs.held_directory import LOCK, HeldDirectory
from gear_offline.training.checkpoint_folder import list_checkpoints

# what a run writes before its first checkpoint
FALSE_START = (
    *("recipe.yaml", "metrics.jsonl", "evaluations.jsonl", "tensorboard", "checkpoints", "plots"),
    *("report.md", "summary.json"),
)


def default_run_path(recipe: Recipe) -> Path:
    """Return ``runs/NAME-sSEED`` under the current directory."""
    return Path("runs") / f"{recipe.name}-s{recipe.seed}"


def run_in(recipe: str | Path) -> Path | None:
    """Return the run directory that a recipe was named by: itself, or its ``recipe.yaml``."""
    place = Path(recipe)
    folder = place.parent if place.name == "recipe.yaml" and place.is_file() else place
    return folder if is_run(folder) else None


def is_run(folder: Path) -> bool:
    """Return whether a directory is a run's, and not one in which somebody keeps a recipe."""
    if not (folder / "recipe.yaml").is_file():
        return False
    # One that was killed at once has no metrics yet, one that was copied may have no hidden files.
    marked = any((folder / name).is_file() for name in (LOCK, "metrics.jsonl"))
    return marked or bool(list_checkpoints(folder / "checkpoints"))


class RunDirectory(HeldDirectory):
    """A run directory held for writing; a context manager.

    Until `write_recipe` nothing in it changes, so that a run that is refused leaves what was there.

    Parameters
    ----------
    path
        Created when missing.
    resume
        Accept a run that is already there.

    Attributes
    ----------
    begins_anew
        Whether it holds a false start, which goes when the recipe is written.

    Raises
    ------
    InputError
        ``RUN_EXISTS`` when there is a run and `resume` is false, ``RUN_LOCKED`` when another
        process writes it, ``RUN_DIRECTORY`` when the place cannot be a run directory.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self._check(resume)
        taken = InputError(
            "RUN_LOCKED",
            "another process is writing this run",
            where=str(path),
            remedy="wait for it, or train into another directory",
        )
        super().__init__(path, unusable="RUN_DIRECTORY", taken=taken)
        try:
            self._check(resume)  # another process may have begun a run before we had the lock
        except InputError:
            self.close()
            raise
        self.begins_anew = not resume and self.is_false_start

    def _check(self, resume: bool) -> None:
        """Refuse a directory that is not ours to write."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(
                "RUN_DIRECTORY",
                "not a directory",
                where=str(self.path),
                remedy="give another place with --out",
            )
        content = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        if not content - {LOCK, ".recipe.yaml.partial"}:
            return
        if not is_run(self.path):
            raise InputError(
                "RUN_DIRECTORY",
                "the directory is not empty and holds no run",
                where=str(self.path),
                remedy="train into another directory: --out",
            )
        if not resume and not self.is_false_start:
            raise InputError(
                "RUN_EXISTS",
                "there is a run already",
                where=str(self.path),
                remedy="go on with --resume, or train into another directory (--out, name=, seed=)",
            )

    @property
    def is_false_start(self) -> bool:
        """Whether this is a run that ended before its first checkpoint: nothing can go on there."""
        content = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        known = content <= {LOCK, ".recipe.yaml.partial", *FALSE_START}
        return known and self.recipe_path.is_file() and not list_checkpoints(self.checkpoints_path)

    def _sweep(self) -> None:
        """Remove what a false start left."""
        for name in FALSE_START:
            place = self.path / name
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations_path(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    def write_recipe(self, recipe: Recipe) -> None:
        """Store the resolved recipe, in place of what a false start left."""
        if self.begins_anew:
            self._sweep()
            self.begins_anew = False
        write_file(self.recipe_path, recipe.to_yaml().encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Store ``summary.json``."""
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        write_file(self.summary_path, text.encode())
