"""A run as its user sees it: `open_run` opens one, `Run` is what is there.

What a `Run` says is read from its directory each time, so one that still trains can be watched.
"""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.errors import InputError, given_path
from gear_offline.training.checkpoint_folder import list_checkpoints, no_run
from gear_offline.training.metrics import read_records
from gear_offline.training.records import EvaluationRecord, read_lines

if TYPE_CHECKING:  # these load torch
    from gear_offline.evaluation.results import EvaluationReport
    from gear_offline.models.policy import Policy

__all__ = ["Run", "open_run"]


class EvaluateOptions(TypedDict, total=False):
    """The options of `gear_offline.evaluate`."""

    targets: Sequence[float] | float | None
    episodes: int | None
    environment: str | None
    checkpoint: str | int | None
    seed: int | None
    device: str
    out: str | Path | None
    video: str | Path | None
    ray: str | None
    quiet: bool


class Run(os.PathLike[str]):
    """A run directory, complete or not; wherever a path is taken, a run can be given.

    It comes from `gear_offline.train` or `gear_offline.open_run`.

    Attributes
    ----------
    path : Path
        The run directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.resolve().name

    @property
    def recipe(self) -> Recipe:
        """What it trains, with what was taken from the data filled in."""
        return load_recipe(self.path / "recipe.yaml")

    @property
    def steps(self) -> int:
        """Steps done, as far as they are logged or saved; `recipe.train.steps` are asked for."""
        logged = [record["step"] for record in read_records(self.path / "metrics.jsonl")[-1:]]
        saved = [step for step, _ in list_checkpoints(self.path / "checkpoints")[-1:]]
        return max([*logged, *saved], default=0)

    @property
    def metrics(self) -> Any:
        """What training logged: a list of dicts, or a `pandas.DataFrame` where pandas is installed.

        ``step``, ``loss`` and more, a record every ``train.log_every`` steps; see
        docs/reference/run-files.md.
        """
        return _frame(read_records(self.path / "metrics.jsonl"))

    @property
    def evaluations(self) -> Any:
        """The evaluations while training, as `metrics`: ``step``, ``return``, ``targets``, ..."""
        return _frame(read_records(self.path / "evaluations.jsonl"))

    @property
    def best(self) -> EvaluationRecord | None:
        """The evaluation with the highest return, the latest of equals; None before any."""
        return max(self.played(), key=lambda one: (one.ranking, one.step), default=None)

    @property
    def last(self) -> EvaluationRecord | None:
        """The newest evaluation that did not fail; None before any."""
        return next(reversed(self.played()), None)

    def played(self) -> list[EvaluationRecord]:
        """Return the evaluations that did not fail, in the order of steps."""
        records = read_lines(self.path / "evaluations.jsonl", EvaluationRecord)
        return [record for record in records if record.ranking is not None]

    def policy(
        self,
        task: str | None = None,
        *,
        checkpoint: str | int | None = None,
        device: str = "auto",
    ) -> Policy:
        """Return what acts; options and errors are those of `gear_offline.load_policy`."""
        from gear_offline.training.policies import load_policy

        return load_policy(self.path, task, checkpoint=checkpoint, device=device)

    def evaluate(self, **options: Unpack[EvaluateOptions]) -> EvaluationReport:
        """Play episodes, score them and keep the result; options as of `gear_offline.evaluate`."""
        from gear_offline.runs.evaluate import evaluate

        return evaluate(self.path, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def facts(self) -> dict[str, str]:
        """Return what there is to say in short, by what it is."""
        recipe, best, last = self.recipe, self.best, self.last
        facts = {
            "recipe": f"{recipe.name}, seed {recipe.seed}",
            "data": ", ".join(recipe.data.tasks or ()) or recipe.data.path or "none",
            "steps": f"{self.steps:,} of {recipe.train.steps:,}",
        }
        if best is not None and last is not None:
            facts["best"], facts["last"] = (_achieved(one) for one in (best, last))
        return facts

    def __repr__(self) -> str:
        try:
            facts = "; ".join(f"{name} {text}" for name, text in self.facts().items())
        except InputError as error:  # a repr must not fail
            facts = error.message
        return f"Run({str(self.path)!r}: {facts})"

    def _repr_html_(self) -> str:
        """Return the same, and the learning curve once there is one, for notebooks."""
        curve = self.path / "plots" / "learning_curve.png"
        picture = base64.b64encode(curve.read_bytes()).decode() if curve.is_file() else ""
        image = f"<img width='720' alt='learning curve' src='data:image/png;base64,{picture}'>"
        return f"<p>{html.escape(repr(self))}</p>{image if picture else ''}"


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
    Run('runs/tiny': recipe smoke, seed 0; data tiny; steps 4 of 4)
    >>> len(run.metrics), run.recipe.loader.batch_size
    (1, 16)
    """
    folder = given_path(path, "RUN_NOT_FOUND", where="path")
    if not (folder / "recipe.yaml").is_file():
        raise no_run(folder)
    return Run(folder)


def _frame(records: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return records
    return pandas.DataFrame(records)


def _achieved(record: EvaluationRecord) -> str:
    score = record.normalized_score
    parts = [] if record.mean_return is None else [f"return {record.mean_return:,.4g}"]
    parts += [] if score is None else [f"score {score:.1f}"]
    return f"{', '.join(parts)} at step {record.step or 0:,}"
