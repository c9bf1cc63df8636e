"""What a sweep came to: `read_sweep` reads it, at any time, from ``sweep.json`` and the runs."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from gear_offline import plots
from gear_offline.core.files import write_file
from gear_offline.core.text import count_text, printable
from gear_offline.progress import Printed
from gear_offline.runs.report import render_page
from gear_offline.sweep.results import (
    INTERVAL,
    RANKING,
    Table,
    TrialResult,
    by_label,
    estimate,
    make_table,
    read_result,
)
from gear_offline.sweep.trials import SweepDirectory


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepResult(Printed):
    """What a sweep came to; prints as a table."""

    path: Path  # directory of the sweep
    recipe: str  # its name
    trials: tuple[TrialResult, ...]  # how each stands, in the order asked for
    table: Table  # a row a setting, the best one first
    others: int  # trials of the directory that were not asked for last

    @property
    def is_complete(self) -> bool:
        """Whether every trial is complete."""
        return all(result.status == "complete" for result in self.trials)

    @property
    def remark(self) -> str:
        """What the table leaves out."""
        more = f"Not asked for last and not in the table: {count_text(self.others, 'more run')}."
        return more if self.others else ""

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        trials = [
            {
                **one.trial.model_dump(include={"name", "label", "settings"}),
                "seed": one.trial.recipe.seed,
                "status": one.status,
                "error": one.error,
                "path": str(one.path),
            }
            for one in self.trials
        ]
        whole = {"path": str(self.path), "recipe": self.recipe, "trials": trials}
        return {**whole, "others": self.others, "table": self.table.to_json()}

    def print(self, *, console: Console | None = None) -> None:
        """Print a row a setting, the best one first, and what failed."""
        console = console or Console()
        self.table.print(console, self.remark)
        for one in self.trials:
            if one.status == "failed":
                error = escape(printable(str(one.error)))
                console.print(f"{one.trial.name} failed: {error}", highlight=False)

    def write(self) -> Path:
        """Write ``sweep.md`` and its plots; return its path."""
        plot = plot_curves(self.path / "plots" / "learning_curves.png", self.trials, self.table)
        text = render_page(
            Path(__file__).with_name("sweep.md.j2"),
            cell=_cell,
            result=self,
            states=[one.status for one in self.trials],
            interval=INTERVAL,
            is_drawn=plot is not None,
        )
        write_file(self.path / "sweep.md", text.encode())
        return self.path / "sweep.md"


def read_sweep(path: str | os.PathLike[str]) -> SweepResult:
    """Return what the sweep in a directory came to, of the trials of the last call."""
    directory = SweepDirectory(path)
    file = directory.read()
    results = [
        read_result(t, directory.run_path(t), file.failures.get(t.name)) for t in file.trials
    ]
    others = {run.name for run in directory.path.glob("runs/*")} - {t.name for t in file.trials}
    return SweepResult(
        path=directory.path,
        recipe=file.recipe,
        trials=tuple(results),
        table=make_table(results),
        others=len(others),
    )


def _cell(text: str) -> str:
    """Return text of strangers for a Markdown table."""
    return " ".join(printable(html.escape(text, quote=False)).split()).replace("|", "\\|")


def plot_curves(path: Path, trials: Sequence[TrialResult], table: Table) -> Path | None:
    """Draw loss and return of the best settings over steps into `path`; None without any.

    A curve is the mean over seeds at the steps that all of them have, with its interval.
    """
    shown = [row.label for row in table.rows if row.estimates][: len(plots.SERIES)]
    if not shown:
        return None
    groups, metrics = by_label(trials), ["loss"]
    if table.metric != "loss":  # the score of one task is the same curve on another axis
        metrics.append(table.metric)
    figure = plots.new_figure()
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        for label, colour in zip(shown, plots.SERIES, strict=False):
            runs = [one.curves[metric] for one in groups[label] if one.status == "complete"]
            steps = sorted(set.intersection(*map(set, runs)))
            means = [estimate([run[step] for run in runs]) for step in steps]
            mean, half = np.array([[m.mean, m.half] for m in means], np.float64).reshape(-1, 2).T
            name = plots.shortened(label)
            plots.draw_mean(axes, steps, mean, [mean - half, mean + half], color=colour, label=name)
        plots.dress(axes, y=RANKING[metric])
        plots.thousands(axes.yaxis)
    plots.from_zero(panels[0])
    panels[-1].set_xlabel("optimizer step")
    plots.thousands(panels[-1].xaxis)
    if len(shown) > 1:
        plots.legend(panels[-1])
    figure.align_ylabels(list(panels))
    runs_text = count_text(sum(len(row.seeds) for row in table.rows), "run")
    hidden = f", the best {len(shown)} of {len(table.rows)}" if len(shown) < len(table.rows) else ""
    what = "mean over seeds, 95 % interval from 3 seeds on"
    best = table.rows[0]
    title = f"{RANKING[table.metric].capitalize()} {best.estimates[table.metric]}"
    if len(table.rows) > 1:
        title += f" with {best.label}, ranked first"
    plots.titles(figure, title, f"{runs_text}{hidden}; {what}")
    return plots.save_figure(figure, path)
