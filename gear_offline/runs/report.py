"""The report of a run: what it learnt from, what it learnt, how to repeat it.

``report.md`` and the plots beside it are made from the files of the run directory alone, and from
the dataset where it is still there.  What is missing is left out, so a report can be written at
any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.core.files import write_file
from gear_offline.core.text import count_text, printable
from gear_offline.dataset.dataset import open_dataset
from gear_offline.dataset.scores import ReferenceScores, normalized_score
from gear_offline.errors import InputError
from gear_offline.runs.plots import (
    plot_asked_vs_achieved,
    plot_data_returns,
    plot_learning_curve,
    short,
)
from gear_offline.training.metrics import read_records

_STALENESS = ("steps", "seconds")  # of the records of evaluations


def write_report(run: str | Path, *, random_return: float | None = None) -> Path:
    """Write the plots and ``report.md`` of a run directory and return the report's path.

    Parameters
    ----------
    run
        Run directory.
    random_return
        Mean return of random actions, for a line in the table of returns.

    Raises
    ------
    InputError
        ``REPORT_EMPTY`` when there is nothing to report on.
    """
    run = Path(run)
    recipe = _recipe(run)
    metrics, evaluations = (read_records(run / f"{n}.jsonl") for n in ("metrics", "evaluations"))
    evaluations = [row for row in evaluations if "error" not in row]
    final = _final_evaluation(run, evaluations)
    if recipe is None and not metrics and final is None:
        raise InputError(
            "REPORT_EMPTY",
            "nothing here to report on",
            where=str(run),
            remedy="give the directory of a run, e.g. runs/hopper-medium-s0",
        )
    data, parts = _data(run, recipe), [f"# {run.name}\n"]
    tasks = final if final is not None and "tasks" in final else None
    plots = _learning_plot(run, metrics, evaluations if tasks is None else [])
    if tasks is not None:
        from gear_offline.runs.task_report import write_tasks

        parts.append(write_tasks(run, recipe, tasks, evaluations))
    elif final is not None:
        levels = {f"data_{name}": data[name] for name in ("mean", "best") if name in data}
        path = run / "plots" / "asked_vs_achieved.png"
        plots["Achieved against asked return"] = plot_asked_vs_achieved(path, final, **levels)
        parts.append(_returns_table(final, data, random_return))
    if "plot" in data:
        plots["Returns of the data"] = data["plot"]
    for title, picture in plots.items():
        parts.append(f"## {title}\n\n![{title}]({picture.relative_to(run).as_posix()})\n")
    parts.append(_training_section(recipe, metrics, data, evaluations))
    path = run / "report.md"
    write_file(path, "\n".join(parts).encode())
    return path


def _recipe(run: Path) -> Recipe | None:
    return load_recipe(run / "recipe.yaml") if (run / "recipe.yaml").is_file() else None


def _final_evaluation(run: Path, evaluations: list[dict[str, Any]]) -> Mapping[str, Any] | None:
    """Return what `evaluate` wrote, unless the training has evaluated later weights since."""
    last = {"run": run.name, **evaluations[-1]} if evaluations else None
    if (run / "evaluation.json").is_file():
        found: dict[str, Any] = json.loads((run / "evaluation.json").read_text())
        if last is None or (found.get("step") or 0) >= last["step"]:
            return found
    return last


def _data(run: Path, recipe: Recipe | None, plot_name: str = "data_returns") -> dict[str, Any]:
    """Return facts and plot of the dataset; empty where it is not there any more."""
    if recipe is None or recipe.data.path is None or not Path(recipe.data.path).is_dir():
        return {}
    dataset = open_dataset(recipe.data.path, verify=False)
    returns = dataset.manifest.returns
    facts: dict[str, Any] = {
        "path": Path(recipe.data.path).resolve(),
        "episodes": dataset.spec.episodes,
        "steps": dataset.spec.steps,
        "source": dataset.manifest.source,
    }
    if returns.count:
        plot = run / "plots" / f"{plot_name}.png"
        name = Path(recipe.data.path).name
        plot_data_returns(plot, dataset.returns, dataset.episodes.lengths, name=name)
        facts |= {"mean": returns.mean, "best": returns.max, "plot": plot}
    return facts


def _learning_plot(
    run: Path, metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> dict[str, Path]:
    points = [(row["step"], row["loss"]) for row in metrics if row.get("loss") is not None]
    if not points:
        return {}
    path = run / "plots" / "learning_curve.png"
    steps, losses = zip(*points, strict=True)
    plot_learning_curve(path, steps=steps, losses=losses, evaluations=evaluations, name=run.name)
    return {"Learning curve": path}


def _returns_table(
    final: Mapping[str, Any], data: Mapping[str, Any], random_return: float | None
) -> str:
    """Return the table of returns and scores, and what it was measured in."""
    pair = final.get("reference")
    scale = ReferenceScores(**pair) if pair else None

    def score(value: float) -> str:
        return "-" if scale is None else f"{normalized_score(value, scale):.1f}"

    random_row: list[tuple[str, float | None]] = [("random actions", random_return)]
    if random_return is None and scale is not None:
        random_row = [("random actions, as D4RL measured them", scale.minimum)]
    rows = [
        (label, short(value), "", score(value))
        for label, value in (
            *random_row,
            ("mean of the data", data.get("mean")),
            ("best of the data", data.get("best")),
        )
        if value is not None
    ]
    for row in final["targets"]:
        low, high = row["ci95"]
        interval = "" if low is None else f"{short(low)} to {short(high)}"
        label = f"policy, asked {short(row['target'])}"
        rows.append((label, short(row["return"]), interval, score(row["return"])))
    lines = ["| | mean return | 95 % interval | normalised score |", "|---|---:|---:|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    episodes = final["targets"][0]["episodes"]
    lines += [
        "",
        f"{final['environment']}, {count_text(episodes, 'episode')} for each asked return, "
        f"first seed {final['seed']}, weights of step {final.get('step')}; interval: "
        f"{final['confidence']}.",
    ]
    if scale is not None:
        lines.append(
            f"Score: 0 is {scale.minimum:g}, 100 is {scale.maximum:g}"
            + (f"; {scale.note}." if scale.note else ".")
        )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a dataset's text, which others wrote, as code: no markup, nothing that steers."""
    return "`" + printable(text).replace("`", "'") + "`"


def _training_section(
    recipe: Recipe | None,
    metrics: list[dict[str, Any]],
    data: Mapping[str, Any],
    evaluations: list[dict[str, Any]],
) -> str:
    lines = ["## How it was made\n"]
    if data:
        source = data["source"]
        lines.append(
            f"- data: `{data['path']}`, {count_text(data['episodes'], 'episode')}, "
            f"{count_text(data['steps'], 'step')}, from {_quoted(source.uri)} "
            f"({_quoted(source.format)}; episodes end by {_quoted(source.rule)})"
        )
    if metrics:
        lines.append(f"- training: {count_text(metrics[-1]['step'], 'step')}")
    late = [row for row in evaluations if row.get("staleness_steps")]
    if late:
        steps, seconds = (max(row[f"staleness_{unit}"] for row in late) for unit in _STALENESS)
        lines.append(
            f"- evaluations ran beside training: {len(late)} of {len(evaluations)} results came "
            f"later than their step, by {count_text(steps, 'step')} and {seconds:,.0f} s at most"
        )
    if recipe is not None:
        lines.append(
            "- again: `gear-offline train RUN/recipe.yaml --out ANOTHER`, with this directory as "
            "RUN, from where it was trained:\n"
        )
        lines.append(f"```yaml\n{recipe.to_yaml().rstrip()}\n```")
    return "\n".join(lines) + "\n"
