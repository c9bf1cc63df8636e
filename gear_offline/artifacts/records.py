"""Records of a run's files: losses, its summary, and evaluations.

``return`` is in the environment's units; ``normalized_score`` is on D4RL's scale, 0 random and 100
an expert.  Of goals, ``target`` is the number of a task and ``return`` the share of episodes that
reached its goal.  A task of a model of several without reference scores is measured on the returns
of its own data: 0 is the worst episode there, 100 the best.  ``scale`` says which of the two it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_serializer

from gear_offline.artifacts.json_lines import read_document, read_lines
from gear_offline.config.sections import Target
from gear_offline.core.files import write_file
from gear_offline.core.progress import Printed, Terminal, print_table
from gear_offline.core.text import LEAST, count_text, interval_text, told_apart
from gear_offline.core.types import Float64Array
from gear_offline.data.dataset.scores import ReferenceScores
from gear_offline.errors import InputError

BY_REFERENCE, BY_DATA = "reference scores", "returns of its data"
HEADINGS = ("95 % interval", "std", "score", "length", "n")  # behind what is asked and achieved

SHOWN = 5  # episodes of memories, the first and the last, in a table
RESAMPLES = 2000

CONFIDENCE = "two-sided 95 % Student t interval of the mean over episodes"
CONFIDENCE_OF_SHARES = "two-sided 95 % interval of the share of episodes (Wilson 1927)"

Interval = tuple[float | None, float | None]


class _Record(BaseModel):
    """Keys that are not known are left out: a newer version may have written them."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, populate_by_name=True)


class MetricsRecord(_Record):
    """A line of ``metrics.jsonl``."""

    step: int
    loss: float | None = None
    validation_loss: float | None = Field(default=None, validation_alias="validation/loss")


class DataSummary(_Record):
    """Facts of a run's data; of several tasks all together."""

    episodes: int
    steps: int
    return_mean: float | None = None
    return_max: float | None = None


class RunSummary(_Record):
    """The part of ``summary.json`` that other modules read."""

    steps: int
    data: DataSummary | None = None
    choice: dict[str, Any] | None = None  # of `gear_offline.choose`, with evaluate.offline


class EpisodeResult(_Record):
    """The mean return of the episodes of one number in their memories."""

    mean_return: float = Field(validation_alias="return", serialization_alias="return")
    ci95: Interval = (None, None)  # by bootstrap over memories


class TargetResult(_Record):
    """The result of one asked return; of a single episode deviation and interval are None.

    With episodes of memory ``episodes`` counts memories, and deviation and interval are those of
    the means of memories.
    """

    target: float  # the asked return, in the environment's units
    episodes: int = 0
    mean_return: float = Field(
        default=math.nan, validation_alias="return", serialization_alias="return"
    )
    std: float | None = None
    ci95: Interval = (None, None)
    normalized_score: float | None = None
    normalized_ci95: Interval = (None, None)
    min: float | None = None
    max: float | None = None
    length_mean: float = 0.0
    returns: tuple[float, ...] = ()  # achieved undiscounted returns; of goals: reached, 0 or 1
    lengths: tuple[int, ...] = ()  # steps of each episode
    terminated: tuple[bool, ...] = ()  # False where a time limit ended the episode
    by_episode: tuple[EpisodeResult, ...] = ()  # of memories: of their first, second, ... episodes
    # (t, A) or (t,) of the first episode, for a video; not written
    actions: Any = Field(default=None, exclude=True, repr=False)


class TaskResult(_Record):
    """The result in one environment.

    Its return is the highest mean return of a target (say so when citing it); of goals it is the
    mean of all.
    """

    name: str = Field(default="", exclude=True)  # of a task of several
    environment: str = ""
    environment_options: dict[str, Any] = {}
    mean_return: float | None = Field(
        default=None, validation_alias="return", serialization_alias="return"
    )
    normalized_score: float | None = None  # of `mean_return`
    scale: str | None = None  # what scores are measured on; None: there are none
    reference: ReferenceScores | None = None  # returns that 0 and 100 stand for, where known
    data_worst: float | None = None  # else these, of the data's worst and best episode
    data_best: float | None = None
    seed: int | None = None
    episodes: int = 0
    environments: int = 0
    episodes_of_memory: int = 1  # `returns` are those of one memory after the other
    sample: bool = False  # actions were drawn
    context_length: int | None = None  # of the windows, where not as in training
    goals: bool = False
    condition: Target = "return"  # what the targets are
    confidence: str = ""
    targets: tuple[TargetResult, ...] = ()  # in the order asked

    @field_serializer("reference")
    def _serialize_reference(self, scores: ReferenceScores | None) -> Any:
        return scores and scores.model_dump()  # also what was not set

    def normalized(self, value: float | None) -> float | None:
        """Return the score of a return; None without a scale."""
        low, high = self.data_worst, self.data_best
        if self.reference is not None:
            low, high = self.reference.minimum, self.reference.maximum
        if value is None or low is None or high is None or high <= low:
            return None
        return 100.0 * (value - low) / (high - low)

    def with_targets(self, targets: Sequence[TargetResult]) -> TaskResult:
        """Return the task with what the episodes of `targets` came to."""
        results = tuple(map(self._summed_up, targets))
        means = [result.mean_return for result in results]
        mean = float(np.mean(means)) if self.goals else max(means)
        score = self.normalized(mean)
        by_data = None if score is None else BY_DATA
        facts = {
            "mean_return": mean,
            "normalized_score": score,
            "scale": by_data if self.reference is None else BY_REFERENCE,
            "episodes": results[0].episodes,
            "confidence": self._confidence,
            "targets": results,
        }
        return self.model_copy(update=facts)

    @property
    def _confidence(self) -> str:
        if self.episodes_of_memory > 1:
            return CONFIDENCE.replace("episodes", "memories")
        return CONFIDENCE_OF_SHARES if self.goals else CONFIDENCE

    def _summed_up(self, target: TargetResult) -> TargetResult:
        every = np.array(target.returns)
        by_memory = every.reshape(-1, self.episodes_of_memory)
        returns = by_memory.mean(1)
        mean, several = float(returns.mean()), returns.size > 1
        interval: Interval = mean_interval(returns) if several else (None, None)
        if self.goals:
            interval = share_interval(returns)
        facts = {
            "episodes": returns.size,
            "mean_return": mean,
            "std": float(returns.std(ddof=1)) if several else None,
            "ci95": interval,
            "normalized_score": self.normalized(mean),
            "normalized_ci95": tuple(map(self.normalized, interval)),
            "min": float(returns.min()),
            "max": float(returns.max()),
            "length_mean": float(np.mean(target.lengths)),
        }
        if self.episodes_of_memory > 1:
            rows = zip(by_memory.mean(0), *bootstrap_interval(by_memory), strict=True)
            facts["by_episode"] = tuple(
                EpisodeResult(mean_return=mean, ci95=(low, high) if several else (None, None))
                for mean, low, high in rows
            )
        return target.model_copy(update=facts)

    def interval(self, target: TargetResult) -> Interval:
        """Return the interval to show of a target, (None, None) of fewer than five episodes."""
        return target.ci95 if self.goals or target.episodes >= LEAST else (None, None)

    @property
    def asked(self) -> list[str]:
        """The targets as text, in their order."""
        if self.condition == "nothing":
            return [self.condition] * len(self.targets)
        return told_apart([target.target for target in self.targets])

    def print_targets(self, console: Terminal, heading: str) -> None:
        """Print a table, one row a target."""
        length = self.context_length
        windows = "" if length is None else f", windows of {length} steps"
        console.print(f"{heading} in {self.environment}{windows}")
        text = ("{:,.2f}" if self.goals else "{:,.1f}").format
        cells = [
            [
                *(asked, text(target.mean_return), interval_text(self.interval(target), text)),
                "-" if target.std is None else text(target.std),
                *(score_text(target.normalized_score), f"{target.length_mean:,.0f}"),
                str(target.episodes),
            ]
            for target, asked in zip(self.targets, self.asked, strict=True)
        ]
        first = ("task", "success") if self.goals else (f"asked {self.condition}", "achieved")
        if self.condition == "nothing":
            first = ("asked", "achieved")
        print_table(console, (*first, *HEADINGS), cells)
        for target, asked in zip(self.targets, self.asked, strict=True):
            if target.by_episode:
                self._print_episodes(console, target, asked)
        note = self.reference.note if self.reference is not None else ""
        if self.goals:
            note = f"success over all tasks: {self.mean_return:.2f}"
        if self.scale == BY_DATA:
            ends = f"0 is {self.data_worst:,.6g}, 100 is {self.data_best:,.6g}"
            note = f"score on the {BY_DATA}: {ends}"
        if note:
            console.print(note, style="dim")

    def _print_episodes(self, console: Terminal, target: TargetResult, asked: str) -> None:
        """Print the first and the last five episodes of memories."""
        text, count = "{:,.2f}".format, len(target.by_episode)
        rows = [*enumerate(target.by_episode, 1)]
        cells = [
            [str(n), text(each.mean_return), interval_text(each.ci95, text)] for n, each in rows
        ]
        shown = cells if count <= 2 * SHOWN else [*cells[:SHOWN], ["..."] * 3, *cells[-SHOWN:]]
        console.print(f"asked {asked}: return by number of the episode in its memory")
        print_table(console, ("episode", "achieved", HEADINGS[0]), shown)


class EvaluationReport(Printed, TaskResult):
    """The results of a policy in its tasks; prints as a table.

    It is ``evaluation.json``, or a line of ``evaluations.jsonl`` (docs/reference/run-files.md).
    What a policy of one task achieved stands in the report itself; a policy of several has `named`
    instead.  Their units differ, so the report of several says the mean of their scores, None if
    one has none, and no return.
    """

    run: str | None = None
    step: int | None = None  # of the weights
    device: str | None = None  # where the policy ran
    versions: dict[str, str] = {}  # of packages that matter, by name
    seconds: float = 0.0  # wall time
    error: str | None = None  # of an evaluation that failed
    staleness_steps: int = 0
    staleness_seconds: float = 0.0
    named: dict[str, TaskResult] = Field(
        default={}, validation_alias="tasks", serialization_alias="tasks"
    )
    videos: tuple[str, ...] = ()  # of the first episodes, seen from the run directory

    @property
    def tasks(self) -> tuple[TaskResult, ...]:
        """The result of each task."""
        results = self.named.items()
        return tuple(task.model_copy(update={"name": n}) for n, task in results) or (self,)

    @property
    def ranking(self) -> float | None:
        """The number that ranks evaluations: their return, of several tasks the mean score."""
        return self.normalized_score if self.mean_return is None else self.mean_return

    def to_json(self) -> dict[str, Any]:
        """Return the JSON-able document."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def write(self, path: Path) -> None:
        """Write `to_json` to `path`, whole or not at all."""
        write_file(path, (json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n").encode())

    def print(self, *, console: Terminal | None = None) -> None:
        """Print a table a task, one row a target."""
        console = console or Terminal()
        moment = f" at step {self.step:,}" if self.step is not None else ""
        heading = f"{self.run or 'policy'}{moment}"
        for task in self.tasks:
            task.print_targets(console, f"{task.name}: {heading}" if task.name else heading)
        if len(self.named) > 1:
            count = count_text(len(self.named), "task")
            console.print()
            console.print(f"mean score of {count}: {score_text(self.normalized_score)}")

    def summary(self) -> tuple[str, str]:
        """Return a line in short (the best target), and in full."""
        if self.error is not None:
            return "evaluation failed", f"evaluation failed: {self.error}"
        if self.named:
            text = f"mean score {score_text(self.normalized_score)}"
            parts = [f"{name} {task.mean_return:,.4g}" for name, task in self.named.items()]
            return text, f"{'; '.join(parts)}; {text}"
        targets = [*zip(self.asked, self.targets, strict=True)]
        if self.goals:
            text = f"success {self.mean_return:.2f}"
            parts = [f"task {name} {t.mean_return:.2f}" for name, t in targets]
            return text, f"{text}: {', '.join(parts)}"
        score = self.normalized_score
        scored = "" if score is None else f", score {score:.1f}"
        text = f"return {self.mean_return:,.4g}{scored}"
        pairs = "; ".join(f"asked {name}, got {t.mean_return:,.4g}" for name, t in targets)
        if len(self.targets) == 1:
            return text, text if self.condition == "nothing" else pairs + scored
        # not "best return": a reader takes that for the best so far
        return text, f"{pairs}; best of {len(self.targets)} targets: {text}"


def mean_interval(values: Float64Array) -> tuple[float, float]:
    """Return the 95 % Student t interval of the mean of `values` (n,), n >= 2."""
    from scipy.special import stdtrit  # 0.1 s to import

    quantile = float(stdtrit(values.size - 1, 0.975))
    half = quantile * float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def bootstrap_interval(values: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return (m,) ends of the 95 % percentile bootstrap interval of the means over rows (n, m)."""
    count, generator = len(values), np.random.default_rng(0)
    draws = generator.multinomial(count, np.full(count, 1 / count), RESAMPLES) / count
    low, high = np.quantile(draws @ values, [0.025, 0.975], axis=0)
    return low, high


def share_interval(values: Float64Array) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the share of ones in `values` (n,), of zeros and ones."""
    from scipy.stats import binomtest  # a second to import

    interval = binomtest(int(values.sum()), values.size).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def score_text(score: float | None) -> str:
    """Return a score to print; ``-`` where there is none."""
    return "-" if score is None else f"{score:.1f}"


def read_evaluations(run: Path) -> list[EvaluationReport]:
    """Return the newest evaluation of each step of a run, in the order of steps."""
    reports = {r.step or 0: r for r in read_lines(run / "evaluations.jsonl", EvaluationReport)}
    return [reports[step] for step in sorted(reports)]


def failure_of(reports: Sequence[EvaluationReport]) -> str | None:
    """Return the newest error of a run's evaluations, of which every one failed; else None."""
    has_failed = bool(reports) and all(report.error for report in reports)
    return f"evaluation failed: {reports[-1].error}" if has_failed else None


def read_summary(run: Path) -> RunSummary | None:
    """Return the summary of a run directory; None without one that can be read."""
    with suppress(InputError):  # it is written anew
        return read_document(run / "summary.json", RunSummary)
    return None
