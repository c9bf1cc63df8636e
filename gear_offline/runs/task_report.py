"""The part of a run's report that is about its tasks: one section each, and the score of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import task_recipe
from gear_offline.evaluation.results import score_text
from gear_offline.runs.plots import plot_asked_vs_achieved
from gear_offline.runs.report import _data, _returns_table


def write_tasks(
    run: Path,
    recipe: Recipe | None,
    final: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
) -> str:
    """Write each task's plots, and return the report's text about them.

    Parameters
    ----------
    final
        What `gear_offline.evaluation.results.EvaluationReport.to_json` returned.
    evaluations
        The same of the training, with their steps.
    """
    lines = [
        "| task | environment | best mean return | score | measured on |",
        "|---|---|---:|---:|---|",
    ]
    sections = []
    for name, found in final["tasks"].items():
        best, score = found["return"], score_text(found["normalized_score"])
        cells = (name, found["environment"], f"{best:,.1f}", score)
        lines.append(f"| {' | '.join(cells)} | {found['scale'] or '-'} |")
        sections.append(_section(run, recipe, name, {**found, "step": final.get("step")}))
    lines.append(
        f"\nMean of the tasks' scores: {score_text(final['normalized_score'])}. Measured on "
        "the returns of its data, a task's 0 is the worst episode there and 100 the best.\n"
    )
    if len(evaluations) > 1:
        lines += [_history(final, evaluations)]
    return "\n".join([*lines, *sections])


def _section(run: Path, recipe: Recipe | None, name: str, found: Mapping[str, Any]) -> str:
    single = None if recipe is None else task_recipe(recipe, name)
    data = _data(run, single, f"data_returns-{name}")
    levels = {f"data_{key}": data[key] for key in ("mean", "best") if key in data}
    pictures = {
        "Achieved against asked return": plot_asked_vs_achieved(
            run / "plots" / f"asked_vs_achieved-{name}.png", found, **levels
        )
    }
    if "plot" in data:
        pictures["Returns of the data"] = data["plot"]
    lines = [f"## {name}\n", _returns_table(found, data, None)]
    for title, picture in pictures.items():
        lines.append(f"![{name}: {title}]({picture.relative_to(run).as_posix()})\n")
    return "\n".join(lines)


def _history(final: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the scores over the steps."""
    names = list(final["tasks"])
    lines = [f"| step | {' | '.join(names)} | mean |", "|---:|" + "---:|" * (len(names) + 1)]
    for row in evaluations:
        scores = [row["tasks"].get(name, {}).get("normalized_score") for name in names]
        cells = [f"{row['step']:,}", *map(score_text, [*scores, row["normalized_score"]])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["Scores over the training:\n", *lines, ""])
