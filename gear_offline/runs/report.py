"""The report of a run: what it learnt from, what it learnt, how to repeat it.

``report.md`` and the plots beside it are made from the files of the run directory alone, and from
the dataset where it is still there.  What is missing is left out, so a report can be written at
any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.tasks import task_recipe
from gear_offline.core.files import write_file
from gear_offline.core.text import count_text, printable
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.scores import normalized_score
from gear_offline.errors import InputError
from gear_offline.evaluation.results import score_text
from gear_offline.runs.plots import (
    plot_asked_vs_achieved,
    plot_data_returns,
    plot_learning_curve,
    short,
)
from gear_offline.runs.records import (
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
    losses = {record.step: record.loss for record in metrics if record.loss is not None}
    evaluations = read_lines(run / "evaluations.jsonl", EvaluationRecord)
    evaluations = [evaluation for evaluation in evaluations if evaluation.error is None]
    final = _final_evaluation(run, evaluations)
    if recipe is None and not metrics and final is None:
        what, remedy = "nothing here to report on", "give the directory of a run"
        raise InputError("RUN_NOT_FOUND", what, where=str(run), remedy=remedy)
    data = _data(recipe)
    parts = [f"# {run.name}\n"]
    if final is not None and final.tasks:
        parts += _tasks(run, recipe, final, evaluations)
    elif final is not None:
        parts.append(_returns_table(final, final, data))
    if losses:
        curve = plot_learning_curve(
            run / "plots" / "learning_curve.png",
            steps=list(losses),
            losses=list(losses.values()),
            evaluations=evaluations,
            name=run.name,
        )
        parts.append(_picture(run, "Learning curve", curve))
    if final is None or not final.tasks:
        parts += _pictures(run, "", final, final, data)
    parts.append(_how_it_was_made(recipe, metrics, data, evaluations))
    path = run / "report.md"
    write_file(path, "\n".join(parts).encode())
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


@dataclass(frozen=True)
class _Data:
    """The dataset of a task, while it is still there, and its returns."""

    path: Path
    dataset: Dataset

    @property
    def levels(self) -> dict[str, float]:
        returns = self.dataset.manifest.returns
        if not returns.count:
            return {}
        return {"mean of the data": returns.mean, "best of the data": returns.max}


def _data(recipe: Recipe | None) -> _Data | None:
    if recipe is None or recipe.data.path is None or not Path(recipe.data.path).is_dir():
        return None
    path = Path(recipe.data.path)
    return _Data(path.resolve(), open_dataset(path, verify=False))


def _picture(run: Path, title: str, picture: Path, *, heading: str = "## ") -> str:
    headed = f"{heading}{title}\n\n" if heading else ""
    return f"{headed}![{title}]({picture.relative_to(run).as_posix()})\n"


def _pictures(
    run: Path,
    task: str,
    evaluation: EvaluationRecord | None,
    result: TaskRecord | None,
    data: _Data | None,
) -> list[str]:
    """Draw what a task achieved, and its data's returns."""
    suffix, heading = (f"-{task}", "") if task else ("", "## ")
    name, pictures = f"{task}: " if task else "", []
    if evaluation is not None and result is not None and result.targets:
        place = f" at step {evaluation.step:,}" if evaluation.step is not None else ""
        path = plot_asked_vs_achieved(
            run / "plots" / f"asked_vs_achieved{suffix}.png",
            result.targets,
            name=f"{run.name}{place} in {result.environment}",
            levels=data.levels if data is not None else {},
        )
        pictures.append(
            _picture(run, f"{name}Achieved against asked return", path, heading=heading)
        )
    if data is not None and data.levels:
        dataset = data.dataset
        path = run / "plots" / f"data_returns{suffix}.png"
        lengths = dataset.episodes.lengths
        plot_data_returns(path, dataset.returns, lengths, name=data.path.name)
        pictures.append(_picture(run, f"{name}Returns of the data", path, heading=heading))
    return pictures


def _returns_table(evaluation: EvaluationRecord, result: TaskRecord, data: _Data | None) -> str:
    """Return the table of returns and scores of a task, and what it was measured in."""
    scale = result.reference

    def score(value: float) -> str:
        return "-" if scale is None else score_text(normalized_score(value, scale))

    rows: list[tuple[str, float, str]] = []
    if scale is not None:
        rows.append(("random actions, as D4RL measured them", scale.minimum, ""))
    if data is not None:
        rows += [(label, value, "") for label, value in data.levels.items()]
    for target in result.targets:
        low, high = target.ci95
        interval = "" if low is None or high is None else f"{short(low)} to {short(high)}"
        rows.append((f"policy, asked {short(target.target)}", target.mean_return, interval))
    lines = ["| | mean return | 95 % interval | normalised score |", "|---|---:|---:|---:|"]
    lines += [f"| {label} | {short(value)} | {ci} | {score(value)} |" for label, value, ci in rows]
    episodes = count_text(len(result.targets[0].returns), "episode")
    lines += [
        "",
        f"{result.environment}, {episodes} for each asked return, first seed {result.seed}, "
        f"weights of step {evaluation.step}; interval: {evaluation.confidence}.",
    ]
    if scale is not None:
        note = f"; {scale.note}." if scale.note else "."
        lines.append(f"Score: 0 is {scale.minimum:g}, 100 is {scale.maximum:g}{note}")
    return "\n".join(lines) + "\n"


def _tasks(
    run: Path,
    recipe: Recipe | None,
    final: EvaluationRecord,
    evaluations: Sequence[EvaluationRecord],
) -> list[str]:
    """Return a table of all tasks, their scores over the training, and a section for each."""
    lines = [
        "| task | environment | best mean return | normalised score | measured on |",
        "|---|---|---:|---:|---|",
    ]
    sections = []
    for name, result in final.tasks.items():
        best = max(target.mean_return for target in result.targets)
        cells = (name, result.environment, f"{best:,.1f}", score_text(result.normalized_score))
        lines.append(f"| {' | '.join(cells)} | {result.scale or '-'} |")
        data = _data(None if recipe is None else task_recipe(recipe, name))
        sections += [f"## {name}\n", _returns_table(final, result, data)]
        sections += _pictures(run, name, final, result, data)
    lines.append(
        f"\nMean of the tasks' scores: {score_text(final.normalized_score)}. Measured on the "
        "returns of its data, a task's 0 is the worst episode there and 100 the best.\n"
    )
    if len(evaluations) > 1:
        names = list(final.tasks)
        lines += ["Scores over the training:\n", f"| step | {' | '.join(names)} | mean |"]
        lines.append("|---:|" + "---:|" * (len(names) + 1))
        for row in evaluations:
            scores = [
                row.tasks[name].normalized_score if name in row.tasks else None for name in names
            ]
            shown = [f"{row.step:,}", *map(score_text, [*scores, row.normalized_score])]
            lines.append(f"| {' | '.join(shown)} |")
        lines.append("")
    return ["\n".join(lines), *sections]


def _quoted(text: str) -> str:
    """Return a dataset's text, which others wrote, as code: no markup, nothing that steers."""
    return "`" + printable(text).replace("`", "'") + "`"


def _how_it_was_made(
    recipe: Recipe | None,
    metrics: Sequence[MetricsRecord],
    data: _Data | None,
    evaluations: Sequence[EvaluationRecord],
) -> str:
    lines = ["## How it was made\n"]
    if data is not None:
        spec, source = data.dataset.spec, data.dataset.manifest.source
        lines.append(
            f"- data: {_quoted(str(data.path))}, {count_text(spec.episodes, 'episode')}, "
            f"{count_text(spec.steps, 'step')}, from {_quoted(source.uri)} "
            f"({_quoted(source.format)}; episodes end by {_quoted(source.rule)})"
        )
    if metrics:
        lines.append(f"- training: {count_text(metrics[-1].step, 'step')}")
    late = [record for record in evaluations if record.staleness_steps]
    if late:
        steps = max(record.staleness_steps for record in late)
        seconds = max(record.staleness_seconds for record in late)
        lines.append(
            f"- evaluations ran in the background: {len(late)} of {len(evaluations)} results came "
            f"later than their step, by {count_text(steps, 'step')} and {seconds:,.0f} s at most"
        )
    if recipe is not None:
        lines.append(
            "- again: `gear-offline train RUN/recipe.yaml --out ANOTHER`, with this directory as "
            "RUN, from where it was trained:\n"
        )
        lines.append(f"```yaml\n{recipe.to_yaml().rstrip()}\n```")
    return "\n".join(lines) + "\n"
