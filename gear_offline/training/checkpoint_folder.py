"""The folder of a run's checkpoints: what is there, what stays, what a killed run left behind.

Torch is not needed here.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from gear_offline.core.hub import is_hub
from gear_offline.errors import InputError

STATE = "state.json"  # in each checkpoint
_NAME = re.compile(r"step-([0-9]{8,19})")


@dataclass(frozen=True)
class Keep:
    """What stays in a folder: the `newest`, the `best` step, and `pinned` steps."""

    newest: int
    best: int | None = None
    pinned: tuple[int, ...] = ()


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of `step`."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in `folder` as (step, path), oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    matches = [(match, path) for path in entries if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in matches if path.is_dir())


def prune(folder: Path, keep: Keep) -> None:
    """Remove the checkpoints that need not stay, and let the link ``best`` lead to the best."""
    checkpoints = list_checkpoints(folder)
    kept = [path.name for step, path in checkpoints if step == keep.best]
    if kept:
        link, best = folder / ".partial-best", folder / "best"
        link.unlink(missing_ok=True)
        link.symlink_to(kept[0])
        if best.is_dir() and not best.is_symlink():
            remove_checkpoint(best)  # the run was copied by something that follows links
        os.replace(link, best)
    for step, path in checkpoints[: -keep.newest]:
        if step != keep.best and step not in keep.pinned:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; one that is half removed is no checkpoint any more."""
    aside = path.with_name(f".removed-{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(path, aside)
    shutil.rmtree(aside)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left in `folder`: half-written and half-removed checkpoints."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith((".partial-", ".removed-")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def find_checkpoint(run: Path, which: str | int | None = None) -> Path:
    """Return the checkpoint ``best`` or of a step of `run`; None: `run` is a checkpoint itself."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        if not (run / STATE).exists():
            raise no_run(run)
        if which is not None:
            what, remedy = f"{run} is one checkpoint", "leave the choice of a checkpoint out"
            raise InputError("USAGE", what, where="checkpoint", remedy=remedy)
        return run.resolve()
    known = {str(step): path for step, path in list_checkpoints(folder)}
    steps = ", ".join(known) or "none"
    if known:
        known["last"] = [*known.values()][-1]
    if (folder / "best").is_dir():
        known["best"] = folder / "best"
    if (name := str(which).lstrip("0") or "0") in known:
        return known[name].resolve()
    what = f"no checkpoint {'last' if which is None else which!r}"
    remedy = f"use last, best (the run must have evaluated) or a step; there are: {steps}"
    raise InputError("RUN_NOT_FOUND", what, str(folder), remedy)


def check_trained(run: Path, which: str | None) -> None:
    """Refuse a path of this machine where no policy is; what there is may still be damaged."""
    if not (is_hub(run) or (run / "policy.json").is_file()):
        find_checkpoint(run, which or ("last" if (run / "checkpoints").is_dir() else None))


def no_run(path: Path) -> InputError:
    """Return the error of a path that is no run, with what it may be instead."""
    near = sorted(Path("runs").glob(f"{glob.escape(path.name)}*/checkpoints"))
    near = sorted(path.glob("*/checkpoints")) or near
    what, example = "there is no such run", Path("runs/hopper-medium-s0")
    if (path / "manifest.json").exists():
        what = "this is a dataset, not a run"
    elif path.is_dir():
        is_run = (path / "recipe.yaml").is_file()
        what = "the run has no checkpoint yet" if is_run else "there is no run in this folder"
    example = near[0].parent if near else example
    remedy = f"give the directory of a run, e.g. {example}"
    return InputError("RUN_NOT_FOUND", what, where=str(path), remedy=remedy)


def run_of(checkpoint: Path) -> Path:
    """Return the run directory of a checkpoint; a checkpoint that was copied out is its own."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
