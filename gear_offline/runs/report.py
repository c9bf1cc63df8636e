"""The report of a run: what it learnt from, what it learnt, how to repeat it.

``report.md`` and the plots beside it are made from the files of the run directory alone, and from
the dataset where it is still there.  What is missing is left out, so a report can be written at
any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, Template

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.tasks import task_recipe
from gear_offline.core.files import write_file
from gear_offline.core.hub import is_there
from gear_offline.core.text import count_text, printable, short
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.scores import ReferenceScores, normalized_score
from gear_offline.errors import InputError
from gear_offline.evaluation.results import score_text
from gear_offline.runs.plots import (
    plot_asked_vs_achieved,
    plot_data_returns,
    plot_learning_curve,
)
from gear_offline.training.records import (
    EvaluationRecord,
    MetricsRecord,
    TaskRecord,
    read_document,
    read_lines,
)


def write_report(run: str | Path) -> Path:
    """Write the plots and ``report.md`` of a run directory and return the report's path."""
    run = Path(run)
    recipe = load_recipe(run / "recipe.yaml") if (run / "recipe.yaml").is_file() else None
    metrics = read_lines(run / "metrics.jsonl", MetricsRecord)
    evaluations = read_lines(run / "evaluations.jsonl", EvaluationRecord)
    evaluations = [evaluation for evaluation in evaluations if evaluation.error is None]
    final = _final_evaluation(run, evaluations)
    if recipe is None and not metrics and final is None:
        what, remedy = "nothing here to report on", "give the directory of a run"
        raise InputError("RUN_NOT_FOUND", what, where=str(run), remedy=remedy)
    tasks = {} if final is None else final.tasks
    data = None if tasks else _dataset(recipe)
    sections = [
        _section(run, name, final, result, _dataset(recipe and task_recipe(recipe, name)))
        for name, result in tasks.items()
    ] or [_section(run, "", final, final, data)]
    losses = {record.step: record.loss for record in metrics if record.loss is not None}
    curve = None
    if losses:
        curve = "plots/learning_curve.png"
        plot_learning_curve(
            run / curve,
            steps=list(losses),
            losses=list(losses.values()),
            evaluations=evaluations,
            name=run.name,
        )
    text = _template().render(
        name=run.name,
        recipe=recipe,
        metrics=metrics,
        evaluations=evaluations,
        final=final,
        sections=sections,
        data=data,
        curve=curve,
    )
    path = run / "report.md"
    write_file(path, text.encode())
    return path


def _final_evaluation(
    run: Path, evaluations: Sequence[EvaluationRecord]
) -> EvaluationRecord | None:
    """Return what `evaluate` wrote, unless the training has evaluated later weights since."""
    written = read_document(run / "evaluation.json", EvaluationRecord)
    last = evaluations[-1] if evaluations else None
    if written is not None and (last is None or (written.step or 0) >= (last.step or 0)):
        return written
    return last


def _dataset(recipe: Recipe | None) -> Dataset | None:
    """Return the dataset of a recipe, while it is still there."""
    if recipe is None or recipe.data.path is None or not is_there(recipe.data.path):
        return None
    return open_dataset(recipe.data.path, verify=False)


@dataclass(frozen=True)
class _Section:
    """What the report says of one task, or of a run of one, whose `task` is empty."""

    task: str
    result: TaskRecord | None
    levels: dict[str, float]  # returns to compare with, by what they are
    pictures: dict[str, str]  # files by title


def _section(
    run: Path,
    task: str,
    final: EvaluationRecord | None,
    result: TaskRecord | None,
    data: Dataset | None,
) -> _Section:
    """Draw what a task achieved and its data's returns."""
    suffix, prefix = (f"-{task}", f"{task}: ") if task else ("", "")
    levels, pictures = dict[str, float](), dict[str, str]()
    goals = result is not None and result.goals
    if data is not None and data.manifest.returns.count and not goals:
        returns = data.manifest.returns
        levels = {"mean of the data": returns.mean, "best of the data": returns.max}
    if final is not None and result is not None and result.targets and not goals:
        place = f" at step {final.step:,}" if final.step is not None else ""
        file = f"plots/asked_vs_achieved{suffix}.png"
        name = f"{run.name}{place} in {result.environment}"
        plot_asked_vs_achieved(run / file, result.targets, name=name, levels=levels)
        pictures[f"{prefix}Achieved against asked return"] = file
    if data is not None and levels:
        file = f"plots/data_returns{suffix}.png"
        lengths = data.episodes.lengths
        plot_data_returns(run / file, data.returns, lengths, name=Path(data.path).resolve().name)
        pictures[f"{prefix}Returns of the data"] = file
    return _Section(task, result, levels, pictures)


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "short": short,
        "score": _score,
        "score_text": score_text,
        "interval": _interval,
        "count": count_text,
        "quoted": _quoted,
        "absolute": lambda path: str(Path(path).resolve()),
    }
    return environment.get_template("report.md.j2")


def _score(value: float, scale: ReferenceScores | None) -> str:
    return "-" if scale is None else score_text(normalized_score(value, scale))


def _interval(ends: tuple[float | None, float | None]) -> str:
    low, high = ends
    return "" if low is None or high is None else f"{short(low)} to {short(high)}"


def _quoted(text: str) -> str:
    """Return a dataset's text, which others wrote, as code: no markup, nothing that steers."""
    return "`" + printable(text).replace("`", "'") + "`"
