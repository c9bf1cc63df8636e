"""The results of a sweep: `read_sweep` reads them from ``sweep.json`` and the runs at any time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.artifacts.records import read_summary
from gear_offline.core.files import write_file
from gear_offline.core.progress import Printed, Terminal
from gear_offline.core.text import LEAST, count_text, short
from gear_offline.core.types import Float64Array
from gear_offline.sweep.results import (
    INTERVAL,
    RANKING,
    Estimate,
    Row,
    SeedTable,
    TrialResult,
    by_label,
    estimate,
    make_table,
    read_result,
)
from gear_offline.sweep.trials import SweepDirectory

MOST_DOTTED = 40  # steps at which each seed has a dot


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepResult(Printed):
    """The results of a sweep; prints as a table."""

    path: Path  # directory of the sweep
    recipe: str  # its name
    trials: tuple[TrialResult, ...]  # how each stands, in the order asked for
    table: SeedTable  # a row a setting, the best one first
    others: int  # trials of the directory that were not asked for last

    @property
    def is_complete(self) -> bool:
        """True if every trial is complete, and an evaluation of each has not failed."""
        return all(result.status == "complete" and not result.problem for result in self.trials)

    @property
    def remark(self) -> str:
        """A sentence on the runs that the table leaves out, or an empty text."""
        more = f"Not asked for last and not in the table: {count_text(self.others, 'more run')}."
        return more if self.others else ""

    @property
    def levels(self) -> dict[str, float]:
        """Returns of the data that all trials have, while they are there, to compare with."""
        from gear_offline.runs.report import data_levels, read_data  # matplotlib takes a moment

        recipes = [result.trial.recipe for result in self.trials]
        if not self.table.asked or any(r.data != recipes[0].data for r in recipes):
            return {}
        first = self.trials[0]
        return data_levels(first.last, read_data(recipes[0], read_summary(first.path)))

    @property
    def data(self) -> str:
        """A sentence on `levels`, or an empty text."""
        levels = ", ".join(f"{name} {short(value)}" for name, value in self.levels.items())
        return f"Returns: {levels}." if levels else ""

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        trials = [
            {
                **result.trial.model_dump(include={"name", "label", "settings"}),
                "seed": result.trial.recipe.seed,
                "status": result.status,
                "error": result.problem,
                "path": str(result.path),
            }
            for result in self.trials
        ]
        document = {"path": str(self.path), "recipe": self.recipe, "trials": trials}
        return {**document, "others": self.others, "table": self.table.to_json()}

    def print(self, *, console: Terminal | None = None) -> None:
        """Print a row a setting, the best one first, and what failed."""
        console = console or Terminal()
        self.table.print(console, " ".join(filter(None, (self.data, self.remark))))
        for result in self.trials:
            if result.problem:
                console.print(f"{result.trial.name} failed: {result.problem}")

    def write(self) -> Path:
        """Write ``sweep.md``, its page and its plots; return its path."""
        from gear_offline.runs.page import write_page
        from gear_offline.runs.report import render_page  # matplotlib takes half a second

        plot = plot_curves(self.path / "plots" / "learning_curves.png", self.trials, self.table)
        targets_plot = plot_asked(
            self.path / "plots" / "asked_vs_achieved.png", self.table, self.levels
        )
        text = render_page(
            Path(__file__).with_name("sweep.md.j2"),
            result=self,
            states=[result.status for result in self.trials],
            interval=INTERVAL,
            is_drawn=plot is not None,
            shows_asked=targets_plot is not None,
        )
        write_page(self.path / "sweep.md", text)
        return self.path / "sweep.md"


def read_sweep(path: str | os.PathLike[str]) -> SweepResult:
    """Read the results of the sweep in a directory, for the trials of the last call."""
    directory = SweepDirectory(path)
    file = directory.read()
    results = [
        read_result(t, directory.run_path(t), file.failures.get(t.name)) for t in file.trials
    ]
    more = {run.name for run in directory.path.glob("runs/*")} - {t.name for t in file.trials}
    return SweepResult(
        path=directory.path,
        recipe=file.recipe,
        trials=tuple(results),
        table=make_table(results),
        others=len(more),
    )


def plot_asked(path: Path, table: SeedTable, levels: Mapping[str, float]) -> Path | None:
    """Draw asked and achieved returns into `path`; None where no setting has several targets.

    Of several settings the best ones have a line each, of a single one also its data's `levels`.
    """
    from gear_offline.runs.report import draw_asked

    rows = [row for row in table.rows if row.asked]
    if table.goals or table.advantages or not rows:
        return None
    if len(table.rows) > 1:
        picture = _draw_settings(rows)
    else:
        achieved = {}
        for target, mean in rows[0].asked.items():
            half = np.nan if mean.half is None else mean.half
            achieved[target] = mean.values, mean.mean, (mean.mean - half, mean.mean + half)
        seeds = count_text(len(rows[0].seeds), "seed")
        picture = draw_asked(achieved, levels, rows[0].label, seeds)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, picture)
    return path


def _draw_settings(rows: Sequence[Row]) -> bytes:
    """Draw achieved over asked returns, a line a setting and a dot a seed."""
    from gear_offline.core import plots
    from gear_offline.runs.report import draw_diagonal

    figure = plots.new_figure()
    axes = figure.add_subplot()
    for row, colour in zip(rows, plots.SERIES, strict=False):
        targets = sorted(row.asked)
        means = [row.asked[target] for target in targets]
        style: Any = {"color": colour, "label": plots.label(row.label)}
        plots.draw_mean(axes, targets, *_mean_and_ends(means), **style)
        for target, mean in zip(targets, means, strict=True):
            dots = [target] * len(mean.values)
            axes.scatter(dots, mean.values, s=11, color=colour, alpha=0.35)
    draw_diagonal(axes, [target for row in rows for target in row.asked])
    highest = max(target for row in rows for target in row.asked)
    ends = sorted(row.asked[highest].mean for row in rows if highest in row.asked)
    low, high = short(ends[0]), short(ends[-1])
    finding = (
        f"Asked for {short(highest)}, they achieve {low if low == high else f'{low} to {high}'}"
    )
    subtitle = f"mean over seeds (dots), 95 % interval from {LEAST} seeds on"
    plots.titles(figure, finding, f"{count_text(len(rows), 'setting')}; {subtitle}")
    return plots.draw(figure)


def _mean_and_ends(estimates: Sequence[Estimate]) -> tuple[Float64Array, list[Float64Array]]:
    """Return means (n,) and the two ends of their intervals, NaN of a few seeds."""
    pairs = [(e.mean, e.half if len(e.values) >= LEAST else None) for e in estimates]
    mean, half = np.array(pairs, np.float64).reshape(-1, 2).T
    return mean, [mean - half, mean + half]


def plot_curves(path: Path, trials: Sequence[TrialResult], table: SeedTable) -> Path | None:
    """Draw loss and return of the best settings over steps into `path`; None without any.

    A curve is the mean over seeds at the steps that all of them have, with its interval.
    """
    from gear_offline.core import plots

    names = [row.label for row in table.rows if row.estimates][: len(plots.SERIES)]
    if not names:
        return None
    groups, metrics = by_label(trials), ["loss"]
    if table.metric != "loss":  # the score of one task is the same curve on another axis
        metrics.append(table.metric)
    figure = plots.new_figure()
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        for label, colour in zip(names, plots.SERIES, strict=False):
            runs = [r.curves[metric] for r in groups[label] if r.status == "complete"]
            steps = sorted(set.intersection(*map(set, runs)))
            values = np.array([[run[step] for run in runs] for step in steps], np.float64)
            style: Any = {"color": colour, "label": plots.label(label)}
            plots.draw_mean(axes, steps, *_mean_and_ends([*map(estimate, values)]), **style)
            if len(runs) > 1 and 0 < len(steps) <= MOST_DOTTED:
                places = np.repeat(steps, len(runs))
                axes.scatter(places, values.reshape(-1), s=11, color=colour, alpha=0.35)
        plots.dress(axes, y=RANKING[metric])
        plots.thousands(axes.yaxis)
    plots.scale_losses(panels[0])
    panels[-1].set_xlabel("optimizer step")
    panels[-1].set_xlim(left=0)
    plots.thousands(panels[-1].xaxis)
    if len(names) > 1:
        plots.legend(panels[-1])
    figure.align_ylabels(list(panels))
    runs_text = count_text(sum(len(row.seeds) for row in table.rows), "run")
    hidden = f", the best {len(names)} of {len(table.rows)}" if len(names) < len(table.rows) else ""
    subtitle = f"mean over seeds (dots), 95 % interval from {LEAST} seeds on"
    plots.titles(figure, _finding(table), f"{runs_text}{hidden}; {subtitle}")
    return plots.save_figure(figure, path)


def _finding(table: SeedTable) -> str:
    """Return the best mean and its setting; of few seeds, which rank nothing, the means' range."""
    estimates = [row.estimates[table.metric] for row in table.rows if table.metric in row.estimates]
    metric, means = RANKING[table.metric].capitalize(), sorted(m.mean for m in estimates)
    if len(estimates) == 1:
        return f"{metric} {estimates[0]}"
    if all(len(m.values) >= LEAST for m in estimates):
        return f"{metric} {estimates[0]} with {table.rows[0].label}, ranked first"
    ends = " to ".join(dict.fromkeys(map(short, (means[0], means[-1]))))
    return f"{metric} {ends} in {count_text(len(estimates), 'setting')}; too few seeds to rank"
