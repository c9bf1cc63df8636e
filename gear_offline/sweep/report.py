"""The report of a sweep: ``sweep.md``, its plots, and the table on the terminal.

All of it is made from ``sweep.json`` and the run directories, so it can be written at any time.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes
from rich.console import Console
from rich.markup import escape

from gear_offline.core.files import write_file
from gear_offline.core.text import count_text, printable, short
from gear_offline.plots import (
    SERIES,
    draw_mean,
    dress,
    legend,
    new_figure,
    save_figure,
    shortened,
    thousands,
    titles,
)
from gear_offline.progress import print_table
from gear_offline.sweep.directory import SweepDirectory
from gear_offline.sweep.results import (
    INTERVAL,
    RANKING,
    Curve,
    Table,
    TrialResult,
    make_curves,
    make_table,
    read_result,
)

MOST_CURVES = len(SERIES)  # more cannot be told apart
AXES = {"return": "mean return", "normalized_score": "normalized score", "loss": "training loss"}
HEADINGS = {
    "return": "return",
    "best_return": "best return",
    "normalized_score": "score",
    "loss": "loss",
}


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep came to."""

    path: Path  # directory of the sweep
    recipe: str  # its name
    trials: tuple[TrialResult, ...]  # how each stands, in the order asked for
    table: Table  # a row a setting, the best one first
    others: int  # trials of the directory that were not asked for last

    @property
    def is_complete(self) -> bool:
        """Whether every trial is complete."""
        return all(result.status == "complete" for result in self.trials)

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        trials = []
        for one in self.trials:
            trial = one.trial
            named = {"name": trial.name, "label": trial.label, "seed": trial.recipe.seed}
            state = {"status": one.status, "error": one.error, "path": str(one.path)}
            trials.append({**named, "settings": dict(trial.settings), **state})
        return {
            "path": str(self.path),
            "recipe": self.recipe,
            "trials": trials,
            "others": self.others,
            "table": self.table.to_json(),
        }


def read_sweep(path: str | os.PathLike[str]) -> SweepResult:
    """Return what the sweep in a directory came to, of the trials that were asked for last."""
    directory = SweepDirectory(path)
    file = directory.read()
    asked = [trial for trial in file.trials if trial.asked]
    results = [read_result(t, directory.run_path(t), file.failures.get(t.name)) for t in asked]
    return SweepResult(
        path=directory.path,
        recipe=file.recipe,
        trials=tuple(results),
        table=make_table(results),
        others=len(file.trials) - len(asked),
    )


def write_sweep_report(result: SweepResult) -> Path:
    """Write ``sweep.md`` and the plots of a sweep; return the report's path."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": _cell, "count": count_text, "short": short}
    states = [one.status for one in result.trials]
    plot = result.path / "plots" / "learning_curves.png"
    text = environment.get_template("sweep.md.j2").render(
        result=result,
        states=states,
        counts=[f"{states.count(s)} {s}" for s in ("complete", "failed", "open") if s in states],
        headings=_headings(result.table),
        interval=INTERVAL,
        others=_others(result),
        is_drawn=plot_results(plot, result.trials, result.table) is not None,
    )
    report = result.path / "sweep.md"
    write_file(report, text.encode())
    return report


def _others(result: SweepResult) -> str:
    if not result.others:
        return ""
    return f" Not asked for last and not in the table: {count_text(result.others, 'more run')}."


def _headings(table: Table) -> dict[str, str]:
    """Return the headings of the metrics that some trial has."""
    return {n: text for n, text in HEADINGS.items() if any(n in r.estimates for r in table.rows)}


def _cell(text: str) -> str:
    """Return text of strangers for a Markdown table."""
    return " ".join(printable(html.escape(text, quote=False)).split()).replace("|", "\\|")


def print_sweep(result: SweepResult, *, console: Console | None = None) -> None:
    """Print the table of a sweep, one row a setting, the best one first."""
    console = Console() if console is None else console
    print_settings(result.table, console, _others(result))
    for one in result.trials:
        if one.status == "failed":
            error = escape(printable(str(one.error)))
            console.print(f"{one.trial.name} failed: {error}", highlight=False)


def print_settings(table: Table, console: Console, remark: str = "") -> None:
    """Print a row a setting, and what its intervals are."""
    headings = _headings(table)
    headings.pop("best_return", None)
    cells = [
        [row.label, str(len(row.seeds)), *(str(row.estimates.get(n, "-")) for n in headings)]
        for row in table.rows
    ]
    print_table(console, ["setting", "seeds", *headings.values()], cells)
    has_intervals = any(
        one.half is not None for row in table.rows for one in row.estimates.values()
    )
    what = f"± is the {INTERVAL}." if has_intervals else "Intervals are shown from 3 seeds on."
    console.print(f"{what}{remark}", highlight=False)


# learning curves over seeds ------------------------------------------------------------------


def plot_results(path: Path, trials: Sequence[TrialResult], table: Table) -> Path | None:
    """Draw loss and return of the best settings over steps into `path`; None without any.

    A curve is the mean over seeds with its interval, or each seed.
    """
    curves = {metric: make_curves(trials, metric) for metric in ("loss", *RANKING[:2])}
    if curves["return"]:
        del curves["normalized_score"]  # the same curve on another axis
    curves = {metric: by_label for metric, by_label in curves.items() if by_label}
    if not curves:
        return None
    shown = [row.label for row in table.rows if row.estimates][:MOST_CURVES]
    figure = new_figure()
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (metric, by_label) in zip(panels, curves.items(), strict=True):
        for place, label in enumerate(shown):
            if label in by_label:
                _draw(axes, by_label[label], shortened(label), SERIES[place])
        dress(axes, y=AXES[metric])
        if metric == "loss":
            axes.set_ylim(bottom=0)
        thousands(axes.yaxis)
        if len(shown) > 1 and axes is panels[-1]:
            legend(axes)
    dress(panels[-1], x="optimizer step", y=panels[-1].get_ylabel())
    thousands(panels[-1].xaxis)
    figure.align_ylabels(list(panels))
    runs = sum(len(row.seeds) for row in table.rows)
    hidden = f", the best {len(shown)} of {len(table.rows)}" if len(shown) < len(table.rows) else ""
    what = "mean over seeds, 95 % interval from 3 seeds on"
    titles(figure, _finding(table), f"{count_text(runs, 'run')}{hidden}; {what}")
    return save_figure(figure, path)


def _draw(axes: Axes, curve: Curve, name: str, colour: str) -> None:
    estimates = curve.estimates()
    mean, half = np.array([[one.mean, one.half] for one in estimates], np.float64).T
    if len(curve.values) > 1 and estimates[0].half is None:
        axes.plot(curve.steps, curve.values.T, color=colour, linewidth=0.7, alpha=0.6)
    draw_mean(axes, curve.steps, mean, [mean - half, mean + half], color=colour, label=name)


def _finding(table: Table) -> str:
    """Return the title: which setting is best, and whether the intervals tell it from the next."""
    rows = [row for row in table.rows if table.metric in row.estimates]
    best = rows[0].estimates[table.metric]
    if len(rows) == 1:
        return f"{AXES[table.metric].capitalize()} {best} after training"
    title = f"{shortened(rows[0].label)} is best: {AXES[table.metric]} {short(best.mean)}"
    second = rows[1].estimates[table.metric]
    if best.half is None or second.half is None:
        return f"{title}; too few seeds to tell"
    overlap = abs(best.mean - second.mean) <= best.half + second.half
    return f"{title}; intervals overlap" if overlap else title
