"""The folder of a run's checkpoints: what is there, what stays, what a killed run left behind."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from gear_offline.errors import InputError

_NAME = re.compile(r"step-([0-9]{8,19})")


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of `step`."""
    return f"step-{step:08d}"


def checkpoint_step(path: Path) -> int | None:
    """Return the step that the name of a checkpoint directory says, if it says one."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in `folder` as (step, path), oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    named = [(match, path) for path in found if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match.group(1)), path) for match, path in named if path.is_dir())


def sweep(folder: Path) -> None:
    """Remove what killed runs left in `folder`: half-written and half-removed checkpoints."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith((".partial-", ".removed-")):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def prune(
    folder: Path, *, keep: int, best: int | None, pinned: Collection[int] = frozenset()
) -> None:
    """Keep the newest `keep` checkpoints, `pinned` steps and `best`, which ``best`` links to."""
    found = list_checkpoints(folder)
    if best is not None and best in {step for step, _ in found}:
        _point_at(folder, checkpoint_name(best))
    for step, path in found[:-keep]:
        if step != best and step not in pinned:
            remove_checkpoint(path)


def _point_at(folder: Path, name: str) -> None:
    """Make ``best`` a link to a checkpoint, or a file that names it where there are no links."""
    link, best = folder / ".partial-best", folder / "best"
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(name)
    except OSError:  # exFAT, some network file systems; a full disk is found by writing
        link.write_text(name + "\n")
    if best.is_dir() and not best.is_symlink():
        remove_checkpoint(best)  # the run was copied by something that follows links
    os.replace(link, best)


def _best(folder: Path) -> Path | None:
    """Return the checkpoint that ``best`` leads to, if there is one."""
    best = folder / "best"
    if best.is_file():
        best = folder / best.read_text(errors="replace").strip()
        if checkpoint_step(best) is None:
            return None
    return best.resolve() if best.is_dir() else None


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; one that is half removed is no checkpoint any more."""
    aside = path.with_name(f".removed-{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(path, aside)
    shutil.rmtree(aside)


def find_checkpoint(run: Path, which: str | int | None = None) -> Path:
    """Return the checkpoint folder `which` (``last``, ``best`` or a step number) of `run`.

    ``None`` is the last one, or `run` itself if that is a checkpoint.

    Raises
    ------
    InputError
        ``CHECKPOINT_MISSING``; ``EVALUATE_OPTION`` when `run` is another checkpoint than `which`.
    """
    if run.name == "best" and run.is_file():  # in place of a link
        return find_checkpoint(run_of(run), "best" if which is None else which)
    folder = run / "checkpoints"
    if not folder.is_dir():
        if not (run / "state.json").exists():
            what = "the run has no checkpoint yet" if run.is_dir() else "there is no such run"
            near = sorted(Path("runs").glob(f"{glob.escape(run.name)}*/checkpoints"))
            example = near[0].parent if near and not run.is_dir() else "runs/hopper-medium-s0"
            raise InputError(
                "CHECKPOINT_MISSING",
                what,
                where=str(run),
                remedy=f"give the directory of a run, e.g. {example}",
            )
        chosen = run.resolve()  # one checkpoint; what is wrong with it, its reader says
        if which is not None and str(which) != str(checkpoint_step(chosen)):
            home = run_of(chosen)
            if home == chosen or find_checkpoint(home, which) != chosen:
                raise InputError(
                    "EVALUATE_OPTION",
                    f"{run} is one checkpoint, and not known to be {str(which)!r}",
                    where="evaluate.checkpoint",
                    remedy="give the directory of the run, or leave the choice of a checkpoint out",
                )
        return chosen
    which = "last" if which is None else str(which)
    found = list_checkpoints(folder)
    if which == "best" and (best := _best(folder)) is not None:
        return best
    if which == "last" and found:
        return found[-1][1].resolve()
    for step, path in found:
        if which == str(step):
            return path.resolve()
    steps = ", ".join(str(step) for step, _ in found) or "none"
    raise InputError(
        "CHECKPOINT_MISSING",
        f"no checkpoint {which!r}",
        where=str(folder),
        remedy=f"use last, best (the run must have evaluated) or a step; there are: {steps}",
    )


def run_of(checkpoint: Path) -> Path:
    """Return the run directory of a checkpoint; a checkpoint that was copied out is its own."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def typed_run(run: Path, home: Path) -> Path:
    """Return how to name the run directory `home` to who has named it, or a checkpoint, `run`."""
    if (run / "checkpoints").is_dir():
        return run
    here = Path.cwd()
    return home if run.is_absolute() or not home.is_relative_to(here) else home.relative_to(here)
