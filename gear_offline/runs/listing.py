"""The runs below a folder: how far each is, what it reached, on which data, how old it is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gear_offline.core.text import printable
from gear_offline.errors import InputError, given_path
from gear_offline.progress import Printed, print_table
from gear_offline.runs.run import Run
from gear_offline.training.checkpoint_folder import list_checkpoints

__all__ = ["RunList", "list_runs"]

DEPTH = 4  # folders below the one that was named: sweeps lie in runs/, their runs two below
WRITTEN = ("recipe.yaml", "metrics.jsonl", "evaluations.jsonl", "summary.json")
AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run; returns and scores are None before any evaluation and of several tasks."""

    name: str  # the path below the folder
    path: str
    steps: int = 0  # done
    asked: int = 0
    best_return: float | None = None
    last_return: float | None = None
    normalized_score: float | None = None  # of the best evaluation
    data: str = ""
    age_seconds: float  # since something was last written
    error: str | None = None  # of a damaged one, which has no more than name, path and age


@dataclass(frozen=True, repr=False)
class RunList(Printed):
    """The runs below a folder, the newest first; prints as a table.

    Attributes
    ----------
    rows
        One a run: ``name``, ``path``, ``steps`` done of ``asked``, ``best_return``,
        ``last_return``, ``normalized_score`` of the best evaluation, ``data``, ``age_seconds``,
        and ``error`` of one that is damaged.
    """

    rows: tuple[RunRow, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Return what ``--json`` prints."""
        return [asdict(row) for row in self.rows]

    def print(self, *, console: Console | None = None) -> None:
        """Print a row a run."""
        headings = ["run", "steps", "best", "last", "score", "age", "data"]
        rows = []
        for row in self.rows:
            cells = [f"{row.steps:,}/{row.asked:,}"] if row.error is None else ["damaged"]
            cells += [_number(row.best_return, ",.4g"), _number(row.last_return, ",.4g")]
            cells += [_number(row.normalized_score, ".1f"), age_text(row.age_seconds)]
            rows.append([row.name, *cells, row.data])
        console = console or Console()
        widest = max(sum(map(len, cells)) for cells in rows)
        shown = len(headings) - (widest + 2 * len(headings) > console.width)  # names stay whole
        print_table(console, headings[:shown], [cells[:shown] for cells in rows])


def list_runs(folder: str | os.PathLike[str] = "runs") -> RunList:
    """Return the runs below a folder, those of sweeps too.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND`` where no run is.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import gear_offline as go
    >>> [(row.name, row.steps, row.asked) for row in go.list_runs("runs/tiny").rows]
    [('tiny', 4, 4)]
    """
    top = given_path(folder, "RUN_NOT_FOUND", where="folder")
    rows = [_row(path, top) for path in _runs_below(top, DEPTH)]
    if not rows:
        what = "no run is there" if top.is_dir() else "there is no such folder"
        remedy = "`gear-offline train smoke` makes a run in runs/"
        raise InputError("RUN_NOT_FOUND", what, where=str(top), remedy=remedy)
    return RunList(tuple(sorted(rows, key=lambda row: row.age_seconds)))


def describe_run(run: Run) -> dict[str, Any]:
    """Return what `gear-offline runs show` says of a run, JSON-able."""
    row = _row(run.path, run.path)
    if row.error is not None:
        raise InputError("RUN_DAMAGED", row.error, where=row.path)
    evaluations = [
        {"step": one.step, "return": one.mean_return, "normalized_score": one.normalized_score}
        for one in run.played()
    ]
    saved = [step for step, _ in list_checkpoints(run.path / "checkpoints")]
    return {**asdict(row), "checkpoints": saved, "evaluations": evaluations}


def print_run(run: Run, *, console: Console | None = None) -> None:
    """Print what there is to say of a run, and a line an evaluation."""
    console = console or Console()
    facts, document = run.facts(), describe_run(run)
    facts["checkpoints"] = ", ".join(f"{step:,}" for step in document["checkpoints"]) or "none"
    facts["age"] = age_text(document["age_seconds"])
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in {"run": str(run.path), **facts}.items():
        table.add_row(name, Text(printable(text)))
    console.print(table, highlight=False)
    if document["evaluations"]:
        rows = []
        for one in document["evaluations"]:
            achieved = _number(one["return"], ",.4g"), _number(one["normalized_score"], ".1f")
            rows.append([f"{one['step'] or 0:,}", *achieved])
        console.print()
        print_table(console, ["step", "return", "score"], rows)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "recipe.yaml").is_file():
        if any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
            yield folder
    elif depth and os.access(folder, os.R_OK | os.X_OK) and folder.is_dir():
        for below in sorted(folder.iterdir()):
            if below.is_dir() and not below.name.startswith("."):
                yield from _runs_below(below, depth - 1)


def _row(path: Path, top: Path) -> RunRow:
    name = path.name if path == top else str(path.relative_to(top))
    age = run_age(path)
    run = Run(path)
    try:
        recipe, best, last = run.recipe, run.best, run.last
        return RunRow(
            name=name,
            path=str(path),
            steps=run.steps,
            asked=recipe.train.steps,
            best_return=None if best is None else best.mean_return,
            last_return=None if last is None else last.mean_return,
            normalized_score=None if best is None else best.normalized_score,
            data=", ".join(recipe.data.tasks or ()) or recipe.data.path or "",
            age_seconds=age,
        )
    except InputError as error:  # the others are listed
        return RunRow(name=name, path=str(path), age_seconds=age, error=error.message)


def run_age(path: Path) -> float:
    """Return the seconds since something was written into a run directory."""
    files = [path / name for name in WRITTEN]
    newest = max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    return max(0.0, time.time() - newest)


def age_text(seconds: float) -> str:
    """Return a time in its largest unit, e.g. ``"3 h"``."""
    size, unit = next(((s, u) for s, u in AGES if seconds >= s), AGES[-1])
    return f"{int(seconds // size)} {unit}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
