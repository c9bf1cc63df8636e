"""The report of a run: what it learnt from, what it learnt, how to repeat it.

``report.md``, its page ``report.html`` and the plots beside them are made from the files of the run
directory alone, and from the dataset where it is still there.  What is missing is left out, so a
report can be written at any time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gear_offline.artifacts.json_lines import read_document, read_lines
from gear_offline.artifacts.records import (
    DataSummary,
    EvaluationReport,
    Interval,
    MetricsRecord,
    RunSummary,
    TargetResult,
    TaskResult,
    read_evaluations,
    read_summary,
    score_text,
)
from gear_offline.config.files import flat
from gear_offline.config.recipe import Recipe
from gear_offline.config.strict_yaml import read_yaml
from gear_offline.core import plots
from gear_offline.core.address import is_remote, is_there
from gear_offline.core.files import write_file
from gear_offline.core.text import count_text, interval_text, markdown, short, told_apart
from gear_offline.core.types import Float64Array
from gear_offline.data.dataset.fetch import fetch_manifest
from gear_offline.data.dataset.manifest import Manifest, SourceRecord
from gear_offline.errors import InputError
from gear_offline.runs.page import write_page

MOST_NAMED = 4  # targets in a title
NEAR = 0.1  # of the largest asked return: so far from it one counts as achieved
CURVE = "plots/learning_curve.png"


def write_report(run: str | os.PathLike[str], *, final: EvaluationReport | None = None) -> Path:
    """Write the plots, ``report.md`` and its page of a run directory; return the report's path.

    It shows the evaluation `final`; by default that of the latest weights, of equals the one that
    ``evaluation.json`` holds.
    """
    run = Path(run)
    file = run / "recipe.yaml"
    recipe = Recipe.read(read_yaml(file), where=str(file)) if file.is_file() else None
    lines = list(read_lines(run / "metrics.jsonl", MetricsRecord))
    logged = {line.step: line.loss for line in lines}
    validations = {n.step: n.validation_loss for n in lines if n.validation_loss is not None}
    evaluations = [report for report in read_evaluations(run) if report.error is None]
    summary = read_summary(run)
    if final is None:
        stored = read_document(run / "evaluation.json", EvaluationReport)
        candidates = [r for r in (stored, *evaluations) if r is not None]
        final = max(candidates, key=lambda r: r.step or 0, default=None)  # the first of equals
    if recipe is None and not logged and final is None:
        problem, remedy = "nothing here to report on", "give the directory of a run"
        raise InputError("RUN_NOT_FOUND", problem, where=str(run), remedy=remedy)
    data = read_data(recipe, summary)
    sections, pictures = list[dict[str, Any]](), dict[str, bytes]()
    if losses := {step: loss for step, loss in logged.items() if loss is not None}:
        pictures[CURVE] = _draw_learning_curve(run.name, losses, validations, evaluations)
    at = "" if final is None or final.step is None else f" at step {final.step:,}"
    for result in final.tasks if final else ():
        task_data = read_data(recipe.of_task(result.name)) if recipe and result.name else data
        levels, picture = data_levels(result, task_data), None
        if result.targets and not result.goals and result.condition == "return":
            picture = f"plots/asked_vs_achieved{f'-{result.name}' if result.name else ''}.png"
            title = f"{run.name}{at} in {result.environment}"
            pictures[picture] = _draw_asked_vs_achieved(title, result, levels)
        section = {"result": result, "levels": levels, "picture": picture, "episodes": None}
        if result.episodes_of_memory > 1:
            section["episodes"] = plot = (
                f"plots/episodes{f'-{result.name}' if result.name else ''}.png"
            )
            pictures[plot] = _draw_episodes(f"{run.name}{at} in {result.environment}", result)
        sections.append(section)
    text = render_page(
        Path(__file__).with_name("report.md.j2"),
        name=run.name,
        recipe=recipe,
        steps=next(reversed(logged), None),
        validations=validations,
        evaluations=evaluations,
        final=final,
        sections=sections,
        data=data,
        choice=summary and summary.choice,
        settings=_own_settings(recipe) if recipe else {},
        curve=CURVE if losses else None,
    )
    for name, content in pictures.items():
        (run / name).parent.mkdir(exist_ok=True)
        write_file(run / name, content)
    write_page(run / "report.md", text)
    return run / "report.md"


def _own_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe that differ from the defaults, by their dotted names."""
    settings = flat(recipe.model_dump(mode="json", exclude_defaults=True, exclude={"parts"}))
    return {n: v for n, v in settings.items() if n not in ("name", "description")}


def render_page(template: Path, **values: Any) -> str:
    """Return the page that a template makes of `values`; their text is no markup there."""
    return _template(template).render(**values)


@cache
def _template(template: Path) -> Template:
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        finalize=_plain_markdown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": count_text, "interval": interval_text}
    environment.filters |= {"score": score_text, "short": short}
    return environment.get_template(template.name)


def _plain_markdown(value: Any) -> Any:
    """Return text as Markdown that shows it; what a macro or the filter `safe` made stays."""
    return Markup(markdown(value)) if type(value) is str else value


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The facts of a dataset in a report."""

    path: str  # or address
    source: SourceRecord
    summary: DataSummary


def read_data(recipe: Recipe | None, summary: RunSummary | None = None) -> DataFacts | None:
    """Read the manifest of a recipe's dataset, while it is there.

    Only the `summary` of its run knows data that were appended to, or are held out in part.
    """
    if recipe is None or (data := recipe.data).path is None or not is_there(data.path):
        return None
    path, folder = str(Path(data.path).resolve()), Path(data.path)
    if is_remote(data.path):
        path, folder = data.path, fetch_manifest(data.path)
    manifest, facts = Manifest.read(folder), summary.data if summary else None
    if facts is None and (data.admissions, data.admit_every, data.held_out) == (None,) * 3:
        returns = manifest.returns
        facts = DataSummary(
            episodes=manifest.episodes,
            steps=manifest.steps,
            return_mean=returns.mean if returns.count else None,
            return_max=returns.max if returns.count else None,
        )
    if facts is None:
        return None
    return DataFacts(path=path, source=manifest.source, summary=facts)


def data_levels(result: TaskResult | None, data: DataFacts | None) -> dict[str, float]:
    """Return returns of a task's data to compare with; goals have none."""
    if data is None or (result and result.goals):
        return {}
    levels = data.summary.return_mean, data.summary.return_max
    names = "mean of the data", "best of the data"
    return {name: level for name, level in zip(names, levels, strict=True) if level is not None}


# the plots: each one PNG of 1080 x 675 pixels ---------------------------------------------------


def _draw_learning_curve(
    run: str,
    losses: Mapping[int, float],
    validations: Mapping[int, float],
    evaluations: Sequence[EvaluationReport],
) -> bytes:
    """Draw losses by step, of training and of what is held out, and one task's returns."""
    steps, y = list(losses), np.array(list(losses.values()))
    points = [
        (row.step or 0, target, row.interval(target))
        for row in evaluations
        for target in row.targets
    ]
    figure = plots.new_figure()
    panels = figure.subplots(2 if points else 1, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(steps, y, color=plots.BLUE, linewidth=1.8, marker="o" if y.size == 1 else None)
    if validations:
        panels[0].lines[0].set_label(" training")
        line: Any = {"color": plots.ORANGE, "linewidth": 1.8, "marker": "o", "markersize": 4}
        panels[0].plot([*validations], [*validations.values()], **line, label=" validation")
        plots.legend(panels[0])
    plots.dress(panels[0], y="loss" if validations else "training loss")
    plots.scale_losses(panels[0])
    title = f"Loss {short(y[-1])} after {count_text(steps[-1], 'step')}, {short(y[0])} at first"
    subtitle = f"{run}: mean loss of the logged steps"
    if points:
        goals = any(row.goals for row in evaluations)
        words = ("task", "success") if goals else ("asked", "mean return")
        if all(row.condition == "nothing" for row in evaluations):
            words = ("", "mean return")
        left_out = _plot_returns(panels[1], points, *words)
        subtitle += f"; {left_out} more curves of returns left out" if left_out else ""
        best = max(row.mean_return for row in evaluations if row.mean_return is not None)
        title = f"{title}; best {words[1]} {short(best)}"
    panels[-1].set_xlabel("optimizer step")
    plots.ticks_to(panels[-1], float(steps[-1]))
    plots.titles(figure, title, subtitle)
    figure.align_ylabels(list(panels))
    return plots.draw(figure)


def _plot_returns(
    axes: Axes, points: Sequence[tuple[int, TargetResult, Interval]], asked_as: str, axis_name: str
) -> int:
    """Draw a line a target, and its 95 % interval, through what was played at steps.

    Targets of the same curve, such as tasks that all succeed, share a line.  Return how many
    curves are left out.
    """
    targets = sorted({target.target for _, target, _ in points}, reverse=True)
    curves = defaultdict[tuple[tuple[int, float, Interval], ...], list[str]](list)
    for value, text in zip(targets, told_apart(targets), strict=True):
        curve = tuple((n, t.mean_return, ends) for n, t, ends in points if t.target == value)
        curves[curve].append(text)
    indices = plots.spread(len(curves))
    for index, colour in zip(indices, plots.SERIES, strict=False):
        curve, names = list(curves.items())[index]
        steps, means, intervals = zip(*curve, strict=True)
        ends = np.array(intervals, np.float64).T
        label = plots.label(f"{asked_as} {', '.join(names)}" if asked_as else axis_name)
        plots.draw_mean(axes, steps, means, ends, color=colour, label=label)
    plots.from_zero(axes)
    plots.dress(axes, y=axis_name)
    plots.thousands(axes.yaxis)
    plots.legend(axes)
    return len(curves) - len(indices)


def _draw_episodes(name: str, result: TaskResult) -> bytes:
    """Draw the mean return of each episode of memories, with its interval, a line a target."""
    figure = plots.new_figure()
    axes = figure.add_subplot()
    for target, asked, colour in zip(result.targets, result.asked, plots.SERIES, strict=False):
        means = [each.mean_return for each in target.by_episode]
        ends = np.array([each.ci95 for each in target.by_episode], np.float64).T
        label = plots.label(f"asked {asked}")
        numbers = range(1, len(means) + 1)
        plots.draw_mean(axes, numbers, means, ends, color=colour, label=label)
    plots.from_zero(axes)
    plots.dress(axes, x="episode of the memory", y="return")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plots.legend(axes)
    first, *_, last = (each.mean_return for each in result.targets[0].by_episode)
    finding = f"Return {short(first)} in the first episode, {short(last)} in the last"
    memories = count_text(result.targets[0].episodes, "memory", "memories")
    plots.titles(figure, finding, f"{name}: mean and 95 % interval of {memories}")
    return plots.draw(figure)


def _draw_asked_vs_achieved(name: str, result: TaskResult, levels: Mapping[str, float]) -> bytes:
    """Draw achieved over asked returns, with every episode."""
    achieved = {t.target: (t.returns, t.mean_return, result.interval(t)) for t in result.targets}
    episodes = count_text(len(result.targets[0].returns), "episode")
    return draw_asked(achieved, levels, name, f"{episodes} each")


def draw_asked(
    achieved: Mapping[float, tuple[Sequence[float], float, Interval]],
    levels: Mapping[str, float],
    name: str,
    of: str,
) -> bytes:
    """Draw achieved over asked returns: dots, means, 95 % intervals and named levels.

    `achieved` has the dots, mean and interval of each asked return; `of` says what the dots are.
    """
    targets = np.array(sorted(achieved))
    means = np.array([achieved[target][1] for target in targets])
    figure = plots.new_figure()
    axes = figure.add_subplot()
    for target in targets:
        returns = achieved[target][0]
        axes.scatter([target] * len(returns), returns, s=11, color=plots.BLUE, alpha=0.25)
    ends = np.array([achieved[target][2] for target in targets], np.float64)
    bars: Any = {"yerr": np.abs(ends.T - means), "capsize": 4} if np.isfinite(ends).all() else {}
    axes.errorbar(targets, means, color=plots.BLUE, linewidth=2, marker="o", **bars)
    for (label, level), colour in zip(levels.items(), (plots.ORANGE, plots.GREEN), strict=False):
        axes.axhline(
            level, color=colour, linewidth=1.5, label=plots.label(f"{label}: {short(level)}")
        )
    draw_diagonal(axes, targets)
    finding = _verdict(targets, means)
    shown_as = "mean and 95 % interval" if bars else "mean"
    rule = f"; achieved: within {100 * NEAR:.0f} % of the largest" if len(targets) > 1 else ""
    plots.titles(figure, finding, f"{name}: {shown_as} of {of}{rule}")
    return plots.draw(figure)


def _verdict(targets: Float64Array, means: Float64Array) -> str:
    """Say which asked returns are achieved, up to `NEAR` of the largest."""
    near = np.abs(means - targets) <= NEAR * np.abs(targets).max()
    if len(targets) == 1 or not near.any():
        return f"Asked for {_numbers(targets)}, it achieves {_numbers(means)}"
    if near.all():
        return f"What is asked for, {_numbers(targets)}, is achieved"
    if len(targets) > 2 * MOST_NAMED:
        return f"{near.sum()} of {len(targets)} asked returns are achieved"
    which = [" and ".join(map(short, targets[each])) for each in (near, ~near)]
    return f"Asked for {which[0]} it achieves them, for {which[1]} not"


def draw_diagonal(axes: Axes, targets: npt.ArrayLike) -> None:
    """Draw achieved = asked, and name both axes."""
    low, high = min(0.0, float(np.min(targets))), max(0.0, float(np.max(targets)))
    room = 0.08 * (high - low) or 1.0
    line: Any = {"linestyle": "--", "linewidth": 1.2, "label": plots.label("achieved = asked")}
    corners = (low - room if low < 0 else 0.0, high + room)
    axes.plot(corners, corners, color=plots.GREY, **line)
    axes.set_xlim(*corners)
    plots.dress(axes, x="asked return", y="achieved return")
    plots.thousands(axes.xaxis)
    plots.thousands(axes.yaxis)
    plots.legend(axes)


def _numbers(values: Float64Array) -> str:
    """Return each of a few numbers; of more, or of equal ones, lowest and highest."""
    if 1 < len(values) <= MOST_NAMED:
        return ", ".join(map(short, values))
    low, high = short(float(values.min())), short(float(values.max()))
    return low if low == high else f"{low} to {high}"
