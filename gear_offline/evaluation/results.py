"""What an evaluation found: returns for each asked return, with interval and score.

``return`` is in the environment's units; ``normalized_score`` is on D4RL's scale, 0 random and 100
an expert.  Of goals, ``target`` is the number of a task and ``return`` the share of episodes that
reached its goal.  A task of a model of several without reference scores is measured on the returns
of its own data: 0 is the worst episode there, 100 the best; ``scale`` says which of the two it was.

Shape legend: n episodes of one target.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from gear_offline.core.files import write_file
from gear_offline.core.text import count_text
from gear_offline.core.types import BoolArray, Float64Array, Int64Array
from gear_offline.dataset.scores import ReferenceScores
from gear_offline.progress import Printed, print_table
from gear_offline.training.metrics import finite

if TYPE_CHECKING:
    from gear_offline.evaluation.evaluate import EvaluationTask  # which makes these

CONFIDENCE = "two-sided 95 % Student t interval of the mean over episodes"
CONFIDENCE_OF_SHARES = "two-sided 95 % interval of the share of episodes (Wilson 1927)"
HEADINGS = ("95 % interval", "std", "score", "length", "n")  # behind what is asked and achieved
BY_REFERENCE, BY_DATA = "reference scores", "returns of its data"


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetResult:
    """What one asked return led to."""

    target: float  # the asked return, in the environment's units
    returns: Float64Array  # (n,) achieved undiscounted returns; of goals: reached, 0 or 1
    lengths: Int64Array  # (n,) steps of each episode
    terminated: BoolArray  # (n,) False where a time limit ended the episode
    actions: npt.NDArray[Any]  # (t, A) or (t,) of the first episode, for a video

    @property
    def mean_return(self) -> float:
        return float(self.returns.mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskResult:
    """The results of all asked returns in one environment."""

    task: EvaluationTask  # what was asked
    targets: tuple[TargetResult, ...]  # in the order asked
    reference: ReferenceScores | None  # returns that 0 and 100 stand for, where known

    @property
    def mean_return(self) -> float:
        """Highest mean return of a target (say so when citing it); of goals, the mean of all."""
        means = [target.mean_return for target in self.targets]
        return float(np.mean(means)) if self.task.goals else max(means)

    @property
    def normalized_score(self) -> float | None:
        """Of `mean_return`."""
        return self.normalized(self.mean_return)

    @property
    def ends(self) -> tuple[float, float] | None:
        """The returns that 0 and 100 stand for, where known."""
        if self.reference is not None:
            return self.reference.minimum, self.reference.maximum
        low, high = self.task.data_returns or (0.0, 0.0)
        return (low, high) if high > low else None

    @property
    def scale(self) -> str | None:
        """What scores are measured on; None: there are none."""
        named = BY_DATA if self.reference is None else BY_REFERENCE
        return None if self.ends is None else named

    def normalized(self, value: float) -> float | None:
        """Return the score of a return; None without a scale, or for NaN."""
        if self.ends is None or not math.isfinite(value):
            return None
        low, high = self.ends
        return 100.0 * (value - low) / (high - low)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able document."""
        task = self.task
        worst, best = task.data_returns or (None, None)
        return {
            "environment": task.environment,
            "return": self.mean_return,
            "normalized_score": self.normalized_score,
            "scale": self.scale,
            "reference": None if self.reference is None else self.reference.model_dump(),
            "data_worst": worst,
            "data_best": best,
            "seed": task.seed,
            "episodes": int(self.targets[0].returns.size),
            "environments": task.environments,
            "goals": task.goals,
            "confidence": CONFIDENCE_OF_SHARES if task.goals else CONFIDENCE,
            "targets": [self.row(target) for target in self.targets],
        }

    def row(self, target: TargetResult) -> dict[str, Any]:
        """Return what is said of a target; of a single episode deviation and interval are NaN."""
        returns, lengths = target.returns, target.lengths
        interval = share_interval(returns) if self.task.goals else mean_interval(returns)
        return {
            "target": target.target,
            "episodes": returns.size,
            "return": target.mean_return,
            "std": float(returns.std(ddof=1)) if returns.size > 1 else math.nan,
            "ci95": interval,
            "normalized_score": self.normalized(target.mean_return),
            "normalized_ci95": [self.normalized(end) for end in interval],
            "min": float(returns.min()),
            "max": float(returns.max()),
            "length_mean": float(lengths.mean()),
            "returns": returns.tolist(),
            "lengths": lengths.tolist(),
            "terminated": target.terminated.tolist(),
        }

    def print(self, console: Console, heading: str) -> None:
        """Print a table, one row a target."""
        goals, digits = self.task.goals, 2 if self.task.goals else 1
        name = f"{self.task.name}: " if self.task.name else ""
        console.print(f"{name}{heading} in {self.task.environment}", markup=False, highlight=False)
        cells = []
        for row in map(self.row, self.targets):
            low, high = row["ci95"]
            cells.append(
                [
                    f"{row['target']:,.6g}",
                    f"{row['return']:,.{digits}f}",
                    "-" if math.isnan(low) else f"{low:,.{digits}f} .. {high:,.{digits}f}",
                    "-" if math.isnan(row["std"]) else f"{row['std']:,.{digits}f}",
                    score_text(row["normalized_score"]),
                    f"{row['length_mean']:,.0f}",
                    str(row["episodes"]),
                ]
            )
        first = ("task", "success") if goals else ("asked return", "achieved")
        print_table(console, (*first, *HEADINGS), cells)
        note = self.reference.note if self.reference is not None else ""
        if goals:
            note = f"success over all tasks: {self.mean_return:.2f}"
        if self.scale == BY_DATA and self.ends is not None:
            note = "score on the {}: 0 is {:,.6g}, 100 is {:,.6g}".format(BY_DATA, *self.ends)
        if note:
            console.print(note, style="dim", markup=False, highlight=False)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EvaluationReport(Printed):
    """The results of a policy in its tasks; prints as a table."""

    tasks: tuple[TaskResult, ...]  # a policy of one task has one, without a name
    seconds: float  # wall time
    run: str | None = None  # its name, where known
    step: int | None = None  # of the weights, where known
    device: str | None = None  # where the policy ran, where known
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages that matter, by name
    videos: tuple[str, ...] = ()  # files, seen from the run directory

    @property
    def mean_return(self) -> float | None:
        """Of the only task's best target; None of several tasks, whose units differ."""
        return self.tasks[0].mean_return if len(self.tasks) == 1 else None

    @property
    def normalized_score(self) -> float | None:
        """Mean of the tasks' scores; None if one of them has none."""
        scores = [task.normalized_score for task in self.tasks]
        known = [score for score in scores if score is not None]
        return sum(known) / len(known) if len(known) == len(scores) else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON-able document that `evaluate` writes (docs/reference/run-files.md).

        A task without a name stands at the top level, named ones in ``tasks``.
        """
        named = {one.task.name: one.to_json() for one in self.tasks}
        document = named.get("", {"targets": [], "tasks": named})
        if self.videos:
            document["videos"] = self.videos
        document |= {name: getattr(self, name) for name in ("run", "step", "device", "versions")}
        document |= {"return": self.mean_return, "normalized_score": self.normalized_score}
        found: dict[str, Any] = finite({**document, "seconds": round(self.seconds, 3)})
        return found

    def write(self, path: Path) -> None:
        """Write `to_json` to `path`, whole or not at all."""
        write_file(path, (json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n").encode())

    def print(self, *, console: Console | None = None) -> None:
        """Print a table a task, one row a target."""
        console = console or Console()
        place = f" at step {self.step:,}" if self.step is not None else ""
        for task in self.tasks:
            task.print(console, f"{self.run or 'policy'}{place}")
        if len(self.tasks) > 1:
            count = count_text(len(self.tasks), "task")
            console.print(f"\nmean score of {count}: {score_text(self.normalized_score)}")


def joined(reports: Sequence[EvaluationReport], *, seconds: float) -> EvaluationReport:
    """Return one report of sets of episodes; those of a task lie side by side."""
    tasks = []
    for _, group in itertools.groupby((r.tasks[0] for r in reports), key=lambda one: one.task.name):
        sets = list(group)
        targets = tuple(
            replace(
                parts[0],
                returns=np.concatenate([part.returns for part in parts]),
                lengths=np.concatenate([part.lengths for part in parts]),
                terminated=np.concatenate([part.terminated for part in parts]),
            )
            for parts in zip(*(one.targets for one in sets), strict=True)
        )
        tasks.append(replace(sets[0], targets=targets))
    return replace(reports[0], tasks=tuple(tasks), seconds=seconds)


def score_text(score: float | None) -> str:
    """Return a score to print; ``-`` where there is none."""
    return "-" if score is None or not math.isfinite(score) else f"{score:.1f}"


def summary_text(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return what to say of an evaluation's document: its best target in short, and all of it."""
    if document.get("error"):
        return "evaluation failed", f"evaluation failed: {document['error']}"
    if "tasks" in document:
        text = f"mean score {score_text(document['normalized_score'])}"
        parts = [f"{name} {task['return']:,.4g}" for name, task in document["tasks"].items()]
        return text, f"{'; '.join(parts)}; {text}"
    targets, score = document["targets"], document["normalized_score"]
    if document.get("goals"):
        text = f"success {document['return']:.2f}"
        parts = [f"task {t['target']:g} {t['return']:.2f}" for t in targets]
        return text, f"{text}: {', '.join(parts)}"
    scored = "" if score is None else f", score {score:.1f}"
    text = f"return {document['return']:,.4g}{scored}"
    pairs = "; ".join(f"asked {t['target']:,.4g}, got {t['return']:,.4g}" for t in targets)
    if len(targets) == 1:
        return text, pairs + scored
    # not "best return": a reader takes that for the best so far
    return text, f"{pairs}; best of {len(targets)} targets: {text}"


def mean_interval(values: Float64Array) -> tuple[float, float]:
    """Return the 95 % Student t interval of the mean of `values` (n,); NaN when n < 2."""
    from scipy.special import stdtrit  # 0.1 s to import

    if values.size < 2:
        return math.nan, math.nan
    quantile = float(stdtrit(values.size - 1, 0.975))
    half = quantile * float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def share_interval(values: Float64Array) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share of ones in `values` (n,), of zeros and ones."""
    share, z2 = float(values.mean()), 1.959964**2 / values.size
    half = math.sqrt(z2 * share * (1 - share) + z2 * z2 / 4)
    low, high = ((share + z2 / 2 + side * half) / (1 + z2) for side in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def keep_earlier(path: Path) -> Path | None:
    """Copy the result at `path`, if there is one, to ``NAME-1.json`` or the next free number."""
    if not path.is_file():
        return None
    content = path.read_bytes()
    for number in itertools.count(1):
        kept = path.with_name(f"{path.stem}-{number}{path.suffix}")
        with suppress(FileExistsError), open(kept, "xb") as file:
            file.write(content)
            return kept
    raise AssertionError("numbers do not end")
