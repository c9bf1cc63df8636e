"""The results of a sweep's trials, read from their run directories, and the table over seeds.

The interval of a mean is the two-sided Student t interval over seeds.  It says how well the mean
over all seeds is known from these, not how far a single run may lie from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gear_offline.artifacts.checkpoint import list_checkpoints
from gear_offline.artifacts.json_lines import last_record, read_document, read_lines
from gear_offline.artifacts.records import (
    EvaluationReport,
    MetricsRecord,
    RunSummary,
    failure_of,
    mean_interval,
    read_evaluations,
)
from gear_offline.config.recipe import Recipe
from gear_offline.core.progress import Terminal, print_table
from gear_offline.core.text import Document, short, told_apart
from gear_offline.errors import InputError
from gear_offline.sweep.trials import Trial

INTERVAL = "two-sided 95 % Student t interval of the mean over seeds"
METRICS = {  # by name, with the heading of a table
    "return": "return",
    "best_return": "best return",
    "normalized_score": "score",
    "loss": "loss",
}
RANKING = {  # with the name of an axis; of several tasks there is no common return
    "return": "mean return",
    "normalized_score": "normalized score",
    "loss": "training loss",
}
LEAST_SEEDS = 3  # for an interval: that of two is 9 times as wide as they lie apart


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The status and results of one trial of a sweep."""

    trial: Trial
    path: Path  # its run directory, as `train` writes it
    status: Literal["complete", "failed", "open"]  # open: not done yet
    curves: dict[str, dict[int, float]]  # values by step, by `RANKING`
    last: EvaluationReport | None  # the last evaluation that did not fail
    played: Mapping[int, EvaluationReport] = field(default_factory=dict)  # those, by step
    problem: str | None = None  # "CODE: what was wrong", or that of evaluations if all failed

    @property
    def steps(self) -> int:
        """The last step of which it says anything."""
        return max((step for curve in self.curves.values() for step in curve), default=0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds, and half the width of its 95 % interval; None of fewer than three."""

    mean: float
    half: float | None
    values: tuple[float, ...]

    def __str__(self) -> str:
        return short(self.mean) if self.half is None else f"{short(self.mean)} ± {short(self.half)}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of a sweep."""

    label: str
    settings: Mapping[str, Any]
    trials: int
    seeds: tuple[int, ...]  # of the complete ones
    failed: tuple[str, ...]
    estimates: Mapping[str, Estimate]  # by `METRICS`, over those seeds that have a value at
    steps: Mapping[str, int]  # the step of each: the last one that all seeds have come to
    missing: Mapping[str, tuple[str, ...]]  # the runs without a value there
    asked: Mapping[float, Estimate]  # of several targets each, at the step of the return


@dataclass(frozen=True, kw_only=True)
class SeedTable(Document):
    """The rows of a sweep, the best first by `metric`: one of `RANKING`, the first there is."""

    rows: tuple[Row, ...]
    metric: str
    goals: bool = False  # targets are numbers of tasks
    advantages: bool = False  # targets of a setting are advantages, no returns
    interval: str = INTERVAL

    @property
    def headings(self) -> dict[str, str]:
        """The headings of the metrics that some trial has; the best return where it is another."""
        pairs = [(r.estimates.get("return"), r.estimates.get("best_return")) for r in self.rows]
        none = {"best_return"} if all(last == best for last, best in pairs) else set()
        names = {name for row in self.rows for name in row.estimates} - none
        return {name: text for name, text in METRICS.items() if name in names}

    @property
    def asked(self) -> dict[float, str]:
        """The headings of the targets, where a setting has several."""
        targets = [*dict.fromkeys(target for row in self.rows for target in row.asked)]
        word = "task" if self.goals else "asked"
        return {t: f"{word} {text}" for t, text in zip(targets, told_apart(targets), strict=True)}

    @property
    def notes(self) -> list[str]:
        """Differences behind the means, in sentences."""
        steps = {row.label: row.steps[self.metric] for row in self.rows if self.metric in row.steps}
        pairs = ", ".join(f"{label} at step {step:,}" for label, step in [*steps.items()][:8])
        lacks = [
            f"{', '.join(runs)}: no {METRICS[name]} at step {row.steps[name]:,}, failed or not "
            "evaluated, left out of the mean."
            for row in self.rows
            for name, runs in row.missing.items()
        ]
        return [f"Rows are of different steps: {pairs}.", *lacks][len({*steps.values()}) < 2 :]

    def print(self, console: Terminal, remark: str = "") -> None:
        """Print a row a setting, and what its intervals are."""
        metrics = [name for name in self.headings if name != "best_return"]
        cells = [
            [row.label, str(len(row.seeds)), *(str(row.estimates.get(n, "-")) for n in metrics)]
            for row in self.rows
        ]
        print_table(console, ["setting", "seeds", *(METRICS[name] for name in metrics)], cells)
        if self.asked:
            means = [
                [row.label, *(str(row.asked.get(t, "-")) for t in self.asked)] for row in self.rows
            ]
            console.print()
            print_table(console, ["setting", *self.asked.values()], means)
        has_intervals = any("±" in text for row in cells for text in row[2:])
        note = f"± is the {INTERVAL}." if has_intervals else "Intervals are shown from 3 seeds on."
        console.print(" ".join([note, *self.notes, remark]).rstrip())


def read_result(trial: Trial, path: Path, error: str | None = None) -> TrialResult:
    """Read the result of a trial from its run directory; `error` if the trial has failed."""
    metrics, done = read_lines(path / "metrics.jsonl", MetricsRecord), is_complete(trial, path)
    reports = read_evaluations(path)
    played = [report for report in reports if report.ranking is not None]
    return TrialResult(
        trial=trial,
        path=path,
        status="complete" if done else "open" if error is None else "failed",
        curves={
            "return": _curve(played, "mean_return"),
            "normalized_score": _curve(played, "normalized_score"),
            "loss": _curve(metrics, "loss"),
        },
        last=played[-1] if played else None,
        played={report.step: report for report in played if report.step is not None},
        problem=failure_of(reports) if done else error,
    )


def _curve(records: Iterable[Any], name: str) -> dict[int, float]:
    values = {record.step: getattr(record, name) for record in records}
    return {step: value for step, value in values.items() if value is not None}


def is_complete(trial: Trial, path: Path) -> bool:
    """Return true if a run has done all the steps of its trial and written its summary."""
    summary = read_document(path / "summary.json", RunSummary)
    return summary is not None and summary.steps == trial.recipe.train.steps


def is_played(recipe: Recipe, path: Path) -> bool:
    """Return true unless a checkpoint of a run is to be played, for the first time or again."""
    played = {report.step for report in read_evaluations(path) if report.error is None}
    due = (step for step, _ in list_checkpoints(path / "checkpoints") if recipe.evaluates_at(step))
    return played.issuperset(due)


def steps_done(path: Path) -> int:
    """Return the last logged step of a run, for the display only."""
    with suppress(InputError):
        return int((last_record(path / "metrics.jsonl") or {"step": 0})["step"])
    return 0


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, of one seed each, with its interval."""
    array = np.asarray(values, np.float64)
    half = None
    if array.size >= LEAST_SEEDS:
        low, high = mean_interval(array)
        half = (high - low) / 2
    return Estimate(mean=float(array.mean()), half=half, values=tuple(array.tolist()))


def by_label(results: Sequence[TrialResult]) -> dict[str, list[TrialResult]]:
    """Return the trials of each setting."""
    groups: dict[str, list[TrialResult]] = {}
    for result in results:
        groups.setdefault(result.trial.label, []).append(result)
    return groups


def at_one_step(
    results: Sequence[TrialResult], metric: str
) -> tuple[int, list[tuple[TrialResult, float]]]:
    """Return the values of trials at one step: the last that all have come to and some have any."""
    reached = min((r.steps for r in results), default=0)
    steps = [step for r in results for step in r.curves[metric] if step <= reached]
    step = max(steps, default=0)
    return step, [(r, r.curves[metric][step]) for r in results if step in r.curves[metric]]


def _mean_targets(reports: Sequence[EvaluationReport]) -> dict[float, Estimate]:
    """Return the mean of each target over the reports of seeds that have several."""
    returns: dict[float, list[float]] = {}
    for report in reports:
        for target in report.targets if len(report.targets) > 1 else ():
            returns.setdefault(target.target, []).append(target.mean_return)
    return {target: estimate(values) for target, values in returns.items()}


def make_table(results: Sequence[TrialResult]) -> SeedTable:
    """Return the table of trials; equal settings stay in the order of the trials."""
    rows, goals = [], False
    for label, members in by_label(results).items():
        complete = [r for r in members if r.status == "complete"]
        latest = {name: at_one_step(complete, name) for name in RANKING}
        values = {name: [value for _, value in pairs] for name, (_, pairs) in latest.items()}
        last, played = latest["return"]
        values["best_return"] = [
            max(value for step, value in r.curves["return"].items() if step <= last)
            for r, _ in played
        ]
        valued = {name: [r.trial.name for r, _ in pairs] for name, (_, pairs) in latest.items()}
        names = [r.trial.name for r in complete]
        reports = [r.played[last] for r, _ in played if last in r.played]
        goals = goals or any(report.goals for report in reports)
        row = Row(
            label=label,
            settings=members[0].trial.settings,
            trials=len(members),
            seeds=tuple(r.trial.recipe.seed for r in complete),
            failed=tuple(r.trial.name for r in members if r.status == "failed"),
            estimates={name: estimate(values[name]) for name in METRICS if values[name]},
            steps={name: step for name, (step, pairs) in latest.items() if pairs},
            missing={
                name: tuple(run for run in names if run not in present)
                for name, present in valued.items()
                if 0 < len(present) < len(names)
            },
            asked=_mean_targets(reports),
        )
        rows.append(row)
    metric = next((m for m in RANKING if any(m in row.estimates for row in rows)), "loss")
    sign = 1.0 if metric == "loss" else -1.0

    def rank(row: Row) -> float:
        return sign * row.estimates[metric].mean if metric in row.estimates else np.inf

    conditions = {each.trial.recipe.loader.condition for each in results}
    return SeedTable(
        rows=tuple(sorted(rows, key=rank)),
        metric=metric,
        goals=goals,
        advantages="advantage" in conditions,
    )
