"""Playing a model of several tasks in the environment of each, and one score of all.

A task's score is the normalised one of its reference scores.  A task without reference scores is
measured on the returns of its own data: 0 is the worst episode, 100 the best.  Which of the two it
was is said wherever the number stands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group

from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import environments_of, tasks_in
from gear_offline.core.files import write_file
from gear_offline.core.text import count_text
from gear_offline.errors import InputError
from gear_offline.evaluation.episode_runner import ActingPolicy
from gear_offline.evaluation.evaluate import evaluate_policy
from gear_offline.evaluation.results import EvaluationReport, evaluation_table
from gear_offline.evaluation.split_table import SplitTable
from gear_offline.models.multitask import ModelTask

BY_REFERENCE, BY_DATA = "reference scores", "returns of its data"


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskResult:
    """What one task's policy achieved.

    Attributes
    ----------
    report
        Of its environment.
    worst, best
        Returns of the worst and the best episode of its data.
    """

    report: EvaluationReport
    worst: float
    best: float

    @property
    def scale(self) -> str:
        """What the score is measured on."""
        return BY_DATA if self.report.reference is None else BY_REFERENCE

    @property
    def score(self) -> float | None:
        """Of the best of the asked returns; None where the data have one return only."""
        best = self.report.best
        if self.report.reference is not None:
            return self.report.normalized(best)
        if not self.best > self.worst:
            return None
        return 100.0 * (best.mean - self.worst) / (self.best - self.worst)


@dataclass(frozen=True, kw_only=True, eq=False)
class TasksReport:
    """The results of all tasks of one model.

    Attributes
    ----------
    tasks
        By name, those that were played.
    """

    tasks: Mapping[str, TaskResult]

    @property
    def score(self) -> float | None:
        """Mean of the tasks' scores; None if one of them has none."""
        scores = [result.score for result in self.tasks.values()]
        found = [score for score in scores if score is not None]
        return sum(found) / len(found) if len(found) == len(scores) else None

    def replace(self, **values: Any) -> TasksReport:
        """Return the report with attributes of every task's report changed."""
        return TasksReport(
            tasks={
                name: replace(result, report=replace(result.report, **values))
                for name, result in self.tasks.items()
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able document."""
        first = next(iter(self.tasks.values())).report
        return {
            "run": first.run,
            "step": first.step,
            "device": first.device,
            "score": self.score,
            "targets": [],  # each task has its own
            "tasks": {
                name: {
                    "score": result.score,
                    "scale": result.scale,
                    "data_worst": result.worst,
                    "data_best": result.best,
                    **result.report.to_json(),
                }
                for name, result in self.tasks.items()
            },
        }

    def write(self, path: Path) -> None:
        """Write `to_json` to `path`, whole or not at all."""
        write_file(path, (json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n").encode())


def plays(recipe: Recipe) -> bool:
    """Return whether there is an environment to evaluate in, and episodes to play."""
    return recipe.evaluate.episodes > 0 and bool(environments_of(recipe))


def evaluate_tasks(
    policy_of: Callable[[str], ActingPolicy],
    recipe: Recipe,
    tasks: Sequence[ModelTask],
    *,
    only: Sequence[str] = (),
    targets: Sequence[float] | float | None = None,
    episodes: int | None = None,
    seed: int | None = None,
    quiet: bool = True,
) -> TasksReport:
    """Play every task that has an environment, one after the other.

    Parameters
    ----------
    policy_of
        Gives the policy of a task.
    recipe
        Resolved.
    tasks
        Of the model.
    only
        Names of tasks; none: all.
    targets, episodes, seed
        In place of the recipe's.

    Raises
    ------
    InputError
        ``EVALUATE_OPTION`` if no task has an environment; those of
        `gear_offline.evaluation.evaluate.evaluate_policy`.
    """
    shared = recipe.evaluate
    found: dict[str, TaskResult] = {}
    for task in tasks:
        settings = tasks_in(recipe)[task.name]
        if settings.environment is None or (only and task.name not in only):
            continue
        count = (shared.episodes or 10) if episodes is None else episodes
        report = evaluate_policy(
            policy_of(task.name),
            environment_id=settings.environment,
            targets=(settings.targets or ()) if targets is None else targets,
            episodes=count,
            environments=min(shared.environments, count),
            seed=shared.seed if seed is None else seed,
            reference=settings.reference,
            quiet=quiet,
        )
        found[task.name] = TaskResult(report=report, worst=task.return_worst, best=task.return_best)
    if not found:
        raise InputError(
            "EVALUATE_OPTION",
            "no task has an environment to play in",
            where="data.tasks",
            remedy="name it: data.tasks.TASK.environment",
        )
    return TasksReport(tasks=found)


def chosen_tasks(recipe: Recipe, environment: str | None, targets: object) -> tuple[str, ...]:
    """Return the tasks that `evaluate --environment` means; by default all.

    Raises
    ------
    InputError
        ``EVALUATE_OPTION`` for an environment of no task, and for targets that are asked of
        several tasks at once.
    """
    tasks = tasks_in(recipe)
    named = [name for name, task in tasks.items() if environment in (None, name, task.environment)]
    places = ", ".join(f"{name} ({task.environment})" for name, task in tasks.items())
    if not named:
        raise InputError(
            "EVALUATE_OPTION",
            f"{environment} is the environment of no task",
            where="--environment",
            remedy=f"tasks: {places}",
        )
    if targets is not None and len(named) > 1:
        raise InputError(
            "EVALUATE_OPTION",
            "the same returns cannot be asked of several tasks",
            where="--targets",
            remedy=f"say which task with --environment: {places}",
        )
    return tuple(named)


def tasks_table(report: TasksReport) -> Group:
    """Return the report for the terminal: a table a task, and the mean score."""
    tables: list[SplitTable | str] = []
    for name, result in report.tasks.items():
        table = evaluation_table(result.report)
        table = replace(table, title=f"{name}: {table.title}")
        if result.scale == BY_DATA and result.score is not None:
            caption = (
                f"score {result.score:.1f} on the {BY_DATA}: 0 is {result.worst:,.6g}, "
                f"100 is {result.best:,.6g}"
            )
            table = replace(table, caption=caption)
        tables += [table, ""]
    return Group(
        *tables,
        f"mean score of {count_text(len(report.tasks), 'task')}: {score_text(report.score)}",
    )


def outcome(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return what to say of an evaluation's document: the best of its targets, and all of it."""
    if "tasks" in document:
        means = {
            name: max(float(target["mean"]) for target in found["targets"])
            for name, found in document["tasks"].items()
        }
        text = f"mean score {score_text(document['score'])}"
        return text, f"{'; '.join(f'{name} {mean:,.4g}' for name, mean in means.items())}; {text}"
    targets = document["targets"]
    best = max(targets, key=lambda target: float(target["mean"]))
    score = "" if best["normalized"] is None else f", score {best['normalized']:.1f}"
    text = f"return {best['mean']:,.4g}{score}"
    pairs = "; ".join(f"asked {t['target']:,.4g}, got {t['mean']:,.4g}" for t in targets)
    if len(targets) == 1:
        return text, pairs + score
    # not "best return": a reader takes that for the best so far
    return text, f"{pairs}; best of {len(targets)} targets: {text}"


def score_text(score: float | None) -> str:
    """Return a score to print; ``-`` where there is none."""
    return "-" if score is None or not math.isfinite(score) else f"{score:.1f}"


def print_tasks(report: TasksReport, *, console: Console | None = None) -> None:
    """Print the report, one table a task."""
    (console or Console()).print(tasks_table(report))
