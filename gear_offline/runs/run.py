"""Runs as their user sees them: `open_run` opens one, `list_runs` lists those below a folder.

What a `Run` says is read from its directory each time, so one that still trains can be watched.
"""

from __future__ import annotations

import base64
import html
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gear_offline.artifacts.checkpoint import list_checkpoints, no_run
from gear_offline.artifacts.json_lines import last_record, read_records
from gear_offline.artifacts.records import EvaluationReport, read_evaluations, score_text
from gear_offline.config.arguments import check_arguments
from gear_offline.config.recipe import Recipe, read_recipe
from gear_offline.core.parts import readmit
from gear_offline.core.progress import Printed, Terminal, print_table
from gear_offline.core.text import number_text
from gear_offline.errors import InputError, given_path

if TYPE_CHECKING:  # it loads torch
    from gear_offline.models.policy import Policy

DEPTH = 4  # folders below the one that was named: sweeps lie in runs/, their runs two below
WRITTEN = ("recipe.yaml", "metrics.jsonl", "evaluations.jsonl", "summary.json")
AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, repr=False)
class Run(os.PathLike[str]):
    """A run directory, complete or not; wherever a path is taken, a run can be given.

    It comes from `gear_offline.train` or `gear_offline.open_run`.

    Attributes
    ----------
    path
        The run directory.
    """

    path: Path
    _folder: Path = field(init=False, compare=False)  # whatever the working directory becomes

    def __post_init__(self) -> None:
        object.__setattr__(self, "_folder", self.path.absolute())

    def __fspath__(self) -> str:
        return str(self._folder)

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self._folder.resolve().name

    @property
    def recipe(self) -> Recipe:
        """Its recipe, with the values that come from the data filled in."""
        recipe = read_recipe(self._folder / "recipe.yaml")
        readmit(recipe.trusted)
        return recipe

    @property
    def steps(self) -> int:
        """Steps done, as far as they are logged or saved; `recipe.train.steps` are asked for."""
        logged = last_record(self._folder / "metrics.jsonl") or {"step": 0}
        saved = [step for step, _ in list_checkpoints(self._folder / "checkpoints")[-1:]]
        return max([int(logged["step"]), *saved])

    @property
    def metrics(self) -> Any:
        """The training log: a list of dicts, or a `pandas.DataFrame` where pandas is installed.

        ``step``, ``loss`` and more, a record every ``train.log_every`` steps; see
        docs/reference/run-files.md.
        """
        return _frame(read_records(self._folder / "metrics.jsonl"))

    @property
    def evaluations(self) -> Any:
        """The evaluations while training, as `metrics`: ``step``, ``return``, ``targets``, ..."""
        return _frame([report.to_json() for report in read_evaluations(self._folder)])

    @property
    def best(self) -> EvaluationReport | None:
        """The evaluation with the highest return, the latest of equals; None before any."""
        return best_of(self._list_played())

    @property
    def last(self) -> EvaluationReport | None:
        """The newest evaluation that did not fail; None before any."""
        return next(reversed(self._list_played()), None)

    def _list_played(self) -> list[EvaluationReport]:
        """Return the evaluations that did not fail, in the order of steps."""
        return [report for report in read_evaluations(self._folder) if report.ranking is not None]

    def policy(
        self,
        task: str | None = None,
        *,
        checkpoint: str | int | None = None,
        device: str = "auto",
        memory: bool = False,
        context_length: int | None = None,
    ) -> Policy:
        """Load its policy; options and errors are those of `gear_offline.load_policy`."""
        from gear_offline.artifacts.trained import load_policy

        how: dict[str, Any] = {"checkpoint": checkpoint, "device": device, "memory": memory}
        return load_policy(self._folder, task, context_length=context_length, **how)

    def evaluate(self, **options: Any) -> EvaluationReport:
        """Play episodes, score them and keep the result; options of `gear_offline.evaluate`."""
        from gear_offline.runs.evaluate import evaluate

        return evaluate(self._folder, **options)

    def facts(self) -> dict[str, str]:
        """Return short facts of the run by name."""
        recipe, best, last = self.recipe, self.best, self.last
        facts = {
            "recipe": f"{recipe.name}, seed {recipe.seed}",
            "data": ", ".join(recipe.data.tasks or ()) or recipe.data.path or "none",
            "steps": f"{self.steps:,} of {recipe.train.steps:,}",
        }
        if best is not None and last is not None:
            facts["best"], facts["last"] = (_result_text(report) for report in (best, last))
        return facts

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``runs show --json``; ``RUN_DAMAGED`` if it cannot be read."""
        row = _row(self, self.path.name)
        if row.error is not None:
            raise InputError("RUN_DAMAGED", row.error, where=row.path)
        evaluations = [
            {"step": r.step, "return": r.mean_return, "normalized_score": r.normalized_score}
            for r in self._list_played()
        ]
        saved = [step for step, _ in list_checkpoints(self._folder / "checkpoints")]
        return {**asdict(row), "checkpoints": saved, "evaluations": evaluations}

    def print(self, *, console: Terminal | None = None) -> None:
        """Print what there is to say, and a line an evaluation."""
        console, document = console or Terminal(), self.to_json()
        saved = ", ".join(f"{step:,}" for step in document["checkpoints"])
        facts = {"run": str(self.path), **self.facts(), "checkpoints": saved or "none"}
        facts["age"] = age_text(document["age_seconds"])
        for name, text in facts.items():
            console.print(f"{name:13}{text}")
        rows = [
            [f"{r.step or 0:,}", number_text(r.mean_return), score_text(r.normalized_score)]
            for r in self._list_played()
        ]
        if rows:
            console.print()
            print_table(console, ["step", "return", "score"], rows)

    def __repr__(self) -> str:
        try:
            facts = "; ".join(f"{name} {text}" for name, text in self.facts().items())
        except InputError as error:  # a repr must not fail
            facts = error.message
        return f"Run({str(self.path)!r}: {facts})"

    def _repr_html_(self) -> str:
        """Return the same, and the learning curve once there is one, for notebooks."""
        curve = self._folder / "plots" / "learning_curve.png"
        picture = base64.b64encode(curve.read_bytes()).decode() if curve.is_file() else ""
        image = f"<img width='720' alt='learning curve' src='data:image/png;base64,{picture}'>"
        return f"<p>{html.escape(repr(self))}</p>{image if picture else ''}"


@check_arguments()
def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run that is there already; nothing in its directory changes.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import gear_offline as go
    >>> run = go.open_run("runs/tiny")
    >>> run
    Run('runs/tiny': recipe smoke, seed 0; data ...tiny; steps 4 of 4)
    >>> len(run.metrics), run.recipe.loader.batch_size
    (1, 16)
    """
    folder = given_path(path, "RUN_NOT_FOUND", where="path")
    if not (folder / "recipe.yaml").is_file():
        raise no_run(folder)
    return Run(folder)


def best_of(records: Sequence[EvaluationReport]) -> EvaluationReport | None:
    """Return the one of the highest return, the latest of equals; None if all have failed."""
    ranked = [(r.ranking, r.step, r) for r in records if r.ranking is not None]
    usable = [entry for entry in ranked if isfinite(entry[0])]  # nothing is larger than NaN
    return max(usable, key=lambda entry: entry[:2])[2] if usable else None


def _frame(records: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return records
    return pandas.DataFrame(records)


def _result_text(record: EvaluationReport) -> str:
    score, value = record.normalized_score, record.mean_return
    texts = [] if value is None else [f"return {number_text(value)}"]
    texts += [] if score is None else [f"score {score_text(score)}"]
    return f"{', '.join(texts)} at step {record.step or 0:,}"


# the runs below a folder ----------------------------------------------------------------------


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
        One `RunRow` a run.
    """

    rows: tuple[RunRow, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the document of ``--json``."""
        return [asdict(row) for row in self.rows]

    def print(self, *, console: Terminal | None = None) -> None:
        headings = ["run", "steps", "best", "last", "score", "age", "data"]
        rows = []
        for row in self.rows:
            cells = [f"{row.steps:,}/{row.asked:,}"] if row.error is None else ["damaged"]
            cells += [number_text(row.best_return), number_text(row.last_return)]
            cells += [score_text(row.normalized_score), age_text(row.age_seconds)]
            rows.append([row.name, *cells, row.data])
        print_table(console or Terminal(), headings, rows, names=["data"])


@check_arguments()
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
    paths = _runs_below(top, DEPTH)
    rows = [_row(Run(p), p.name if p == top else str(p.relative_to(top))) for p in paths]
    if not rows:
        problem = "no run is there" if top.is_dir() else "there is no such folder"
        remedy = "`gear-offline train smoke` makes a run in runs/"
        raise InputError("RUN_NOT_FOUND", problem, where=str(top), remedy=remedy)
    return RunList(tuple(sorted(rows, key=lambda row: row.age_seconds)))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "recipe.yaml").is_file() or list_checkpoints(folder / "checkpoints"):
        if any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
            yield folder
    elif depth and os.access(folder, os.R_OK | os.X_OK) and folder.is_dir():
        for below in sorted(folder.iterdir()):
            if below.is_dir() and not below.name.startswith("."):
                yield from _runs_below(below, depth - 1)


def _row(run: Run, name: str) -> RunRow:
    facts: Any = {"name": name, "path": str(run.path), "age_seconds": run_age(Path(run))}
    try:
        recipe, best, last = run.recipe, run.best, run.last
        if best is not None and last is not None:
            facts |= {"best_return": best.mean_return, "last_return": last.mean_return}
            facts["normalized_score"] = best.normalized_score
        data = ", ".join(recipe.data.tasks or ()) or recipe.data.path or ""
        return RunRow(**facts, steps=run.steps, asked=recipe.train.steps, data=data)
    except InputError as error:  # the others are listed
        return RunRow(**facts, error=error.message)


def run_age(path: Path) -> float:
    """Return the seconds since something was written into a run directory."""
    files = [path / name for name in WRITTEN]
    newest = max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    return max(0.0, time.time() - newest)


def age_text(seconds: float) -> str:
    """Return a time in its largest unit, e.g. ``"3 h"``."""
    size, unit = next(((s, u) for s, u in AGES if seconds >= s), AGES[-1])
    return f"{int(seconds // size)} {unit}"
