"""The folder of a run's checkpoints: what is there, what stays, what a killed run left behind."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step-([0-9]{8,19})")


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of `step`."""
    return f"step-{step:08d}"


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


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Keep the newest `keep` checkpoints and that of step `best`; point the link ``best`` to it."""
    found = list_checkpoints(folder)
    steps = {step for step, _ in found}
    if best in steps:
        link = folder / ".partial-best"
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint_name(int(best or 0)))
        os.replace(link, folder / "best")
    for step, path in found[:-keep]:
        if step != best:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; one that is half removed is no checkpoint any more."""
    aside = path.with_name(f".removed-{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(path, aside)
    shutil.rmtree(aside)
