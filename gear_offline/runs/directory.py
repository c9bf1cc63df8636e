"""The directory of one training run: who may write it, how files get in, what may change.

docs/reference/run-files.md says what lies in it.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gear_offline.config.files import KINDS, OWN_OPTIONS, flat
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import LOCK, HeldDirectory, unusable, write_file
from gear_offline.core.hub import is_there
from gear_offline.core.parts import bare_name, is_same
from gear_offline.errors import InputError, given_path
from gear_offline.tables.joint import TableData, data_digest
from gear_offline.training.checkpoint import (
    SavedState,
    find_checkpoint,
    list_checkpoints,
    read_state,
    remove_checkpoint,
    remove_partial,
)
from gear_offline.training.json_lines import FILES, truncate_records

NEGLIGIBLE = {LOCK, ".recipe.yaml.partial"}  # a kill leaves them before the run has begun


def default_run_path(recipe: Recipe) -> Path:
    """Return ``runs/NAME-sSEED`` under the current directory."""
    return Path("runs") / f"{recipe.name}-s{recipe.seed}"


def run_and_start(
    named: Recipe | str | os.PathLike[str],
    recipe: Recipe,
    out: str | os.PathLike[str] | None,
    *,
    resume: bool,
    checkpoint: str | int | None,
) -> tuple[Path, Path | None]:
    """Return the directory for the run of a `recipe`, and the checkpoint that it begins with.

    It was `named` by itself, a file or a run (or its ``recipe.yaml``), which is resumed where it
    lies; the checkpoint is that run's.
    """
    run = None
    if not isinstance(named, Recipe):
        folder = given_path(named, "RECIPE", where="recipe")
        folder = folder.parent if folder.name == "recipe.yaml" else folder
        run = folder if is_run(folder) else None
    place = None if out is None else given_path(out, "OUTPUT_WRITE", where="out")
    if checkpoint is None:
        return place or (run if resume and run else default_run_path(recipe)), None
    if run is None or resume:
        what = "another run begins with a checkpoint of a run"
        remedy = f"resume that other run without it, from {out or 'its directory'}"
        if run is None:
            remedy = "name a run directory in place of the recipe"
        raise InputError("USAGE", what, "checkpoint", remedy)
    start = find_checkpoint(run, checkpoint)
    return place or run.with_name(f"{run.resolve().name}-from-{int(start.name[5:])}"), start


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
        raise unusable(path, "not a directory")
    if not is_run(path) and _has_content(path):
        what = "the directory is not empty and holds no run"
        remedy = "move what is there away, or train into another directory: --out"
        raise InputError("OUTPUT_EXISTS", what, str(path), remedy)
    if is_run(path) and not resume:
        remedy = "go on with --resume, or train into another directory (--out, name=, seed=)"
        raise InputError("OUTPUT_EXISTS", "there is a run already", str(path), remedy)


# what may differ when a run is resumed: none of it changes a step that was done
RESUMABLE = (
    "description",
    *(f"loader.{n}" for n in ("engine", "placement", "hbm_budget", "host_budget")),
    *(f"loader.{n}" for n in ("sharding", "exchange")),
    *(f"train.{n}" for n in ("steps", "device", "graph", "parallel", "reshard", "accumulate")),
    *(f"train.{n}" for n in ("recompute", "threads", "timeout", "checkpoint_every")),
    *(f"train.{n}" for n in ("keep_checkpoints", "trackers", "callbacks", "project")),
    *(f"evaluate.{n}" for n in ("background", "device", "workers")),
)


# what is settled at a run's first start, where a recipe leaves it open (null, auto)
SETTLED = re.compile(
    r"optimizer\.warmup_steps|model\.max_timestep|train\.(threads|compile|precision)"
    r"|(evaluate|data\.tasks\..*)\.(environment|reference|targets|returns_scale)"
    r"|data\.(tasks\..*\.)?admissions"
)
# what a dataset is made of, which does not matter once it is there: its digest is compared
ORIGIN = re.compile(r"data\.(tasks\..*\.)?(source|columns|collect|fallback)(\..*)?")


def recipe_before(path: Path, start: Path | None = None) -> tuple[Recipe, SavedState] | None:
    """Return the recipe that the run at `path`, or a checkpoint `start`, began with, and its state.

    None of a run without a checkpoint that can be read.
    """
    saved = [start] if start else [place for _, place in list_checkpoints(path / "checkpoints")]
    for place in reversed(saved):
        with suppress(InputError):  # recipe.yaml may be edited, a checkpoint is not
            state = read_state(place)
            before = Recipe.read(state.recipe, where=str(path))
            warmup = before.optimizer.warmup(before.train.steps)
            return before.settle({"optimizer.warmup_steps": warmup}), state
    return None


def going_on(recipe: Recipe, before: Recipe) -> Recipe:
    """Return a recipe with what it leaves open as it was settled when the run began."""
    old, new = flat(before.to_dict()), flat(recipe.to_dict())
    left = [key for key in new if new[key] in (None, "auto") and SETTLED.fullmatch(key)]
    return recipe.settle({key: old[key] for key in left if key in old})


def check_resumed(
    path: Path, recipe: Recipe, start: Path | None = None, dataset: TableData | None = None
) -> None:
    """Refuse to go on with a run whose recipe or data are another run's, or has fewer steps.

    A run without a checkpoint is not refused.  What goes on is `start`, a checkpoint of any run, or
    by default the run at `path`.  Without a `dataset` the recipe leaves options to the data.
    """
    if (known := recipe_before(path, start)) is None:
        return
    (before, state), recipe = known, going_on(recipe, known[0])
    if unlike := _differences(before, recipe, state.step, is_resolved=dataset is not None):
        remedy = f"undo that (here, or in {path / 'recipe.yaml'} if it was edited), or train "
        remedy += "into another directory"
        if "train.steps" in unlike:
            remedy = f"train.steps may change with optimizer.schedule=constant; {remedy}"
        raise InputError("RUN_MISMATCH", "; ".join(unlike.values()), str(path), remedy)
    grows = recipe.data.admit_every is not None
    if dataset is not None and not grows and state.loader.get("dataset") != data_digest(dataset):
        what, remedy = "the run began with other data", "train into another directory"
        raise InputError("LOADER_STATE", what, str(path), remedy)
    if state.step > (steps := recipe.train.steps):
        what = f"train.steps is {steps}, but {state.step} steps are done"
        remedy = "ask for at least as many steps, or train into another directory"
        raise InputError("RUN_MISMATCH", what, where=str(path), remedy=remedy)


def changed_parts(path: Path, recipe: Recipe, start: Path | None = None) -> list[str]:
    """Return the parts of a recipe whose files have changed since its run began."""
    known = recipe_before(path, start) if recipe.parts else None
    before = known[0].parts if known else {}
    moved = {bare_name(name): digest for name, digest in before.items()}  # with its file
    changed = []
    for name, digest in recipe.parts.items():
        old = before.get(name) or moved.get(bare_name(name))
        changed += [name] if old and digest and old != digest else []
    return changed


def _differences(before: Recipe, now: Recipe, step: int, *, is_resolved: bool) -> dict[str, str]:
    """Return each option that makes another run of `now` after so many steps, with both values."""
    old, new = flat(before.to_dict()), flat(now.to_dict())
    past = before.train.batch_of(step - 1) if step else -1
    for options, recipe in ((old, before), (new, now)):  # what is skipped later is free
        options["train.skip"] = [list(span) for span in recipe.train.skip if span[0] <= past]
    free = {*RESUMABLE, *(key for key in {*old, *new} if key.startswith("parts."))}
    if now.optimizer.schedule != "constant":
        free.remove("train.steps")  # the learning rates of the steps done depend on it
    if is_there(now.data.path or ""):  # the loader's state has the digest of its data
        free.add("data.path")
    if not is_resolved:
        free |= {key for key in {*old, *new} if new.get(key) is None} | {"model.action_tanh"}
    free |= {key for key in {*old, *new} if ORIGIN.fullmatch(key) or old.get(key) == "auto"}
    differences = dict[str, str]()
    for key in sorted({*old, *new} - free, key=lambda key: (key not in KINDS, key)):
        section, was, now_is = key.partition(".")[0], old.get(key), new.get(key)
        is_implied = f"{section}.{OWN_OPTIONS.get(section)}" in differences  # of another model
        if not (is_implied or is_same(was, now_is)):
            differences[key] = f"{key} was {was!r} when the run began and is {now_is!r} now"
    return differences


class RunDirectory(HeldDirectory):
    """A run directory held for writing; with `resume` a run that is already there is accepted.

    Until `begin` nothing in it changes, so that a run that is refused leaves what was there.  A new
    run that fails before it has logged or saved anything leaves nothing.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        check_place(path, resume=resume)
        self._is_new, self.checkpoints = not is_run(path), path / "checkpoints"
        what, remedy = "another process is writing this run", "wait for it, or train elsewhere"
        super().__init__(path, taken=InputError("RUN_LOCKED", what, str(path), remedy))
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
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
