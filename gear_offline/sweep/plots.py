"""The plot of a sweep: learning curves over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from gear_offline.core.text import count_text
from gear_offline.runs.plots import (
    SERIES,
    dress,
    new_figure,
    save_figure,
    short,
    thousands,
    titles,
)
from gear_offline.sweep.table import Curve, Table

MOST_CURVES = len(SERIES)  # more cannot be told apart
LABEL_CHARACTERS = 34
AXES = {"return": "mean return", "normalized_score": "normalized score", "loss": "training loss"}


def plot_curves(path: Path, table: Table, curves: Mapping[str, Mapping[str, Curve]]) -> Path:
    """Draw loss and return over steps: the mean over seeds with its interval, or each seed.

    `curves` are by metric and label; the best settings are drawn.
    """
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
            axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    dress(panels[-1], x="optimizer step", y=panels[-1].get_ylabel())
    thousands(panels[-1].xaxis)
    figure.align_ylabels(list(panels))
    trials = sum(len(row.seeds) for row in table.rows)
    hidden = f", the best {len(shown)} of {len(table.rows)}" if len(shown) < len(table.rows) else ""
    what = "mean over seeds, 95 % interval from 3 seeds on"
    titles(figure, _finding(table), f"{count_text(trials, 'run')}{hidden}; {what}")
    return save_figure(figure, path)


def _draw(axes: Axes, curve: Curve, name: str, colour: str) -> None:
    estimates = curve.estimates()
    mean = np.array([one.mean for one in estimates])
    marker = "o" if len(curve.steps) <= 20 else None
    if estimates[0].half is None:
        for seed in curve.values if len(curve.values) > 1 else ():
            axes.plot(curve.steps, seed, color=colour, linewidth=0.7, alpha=0.6)
    else:
        half = np.array([one.half for one in estimates])
        axes.fill_between(
            curve.steps, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0
        )
    style: Any = {"color": colour, "linewidth": 1.8, "marker": marker, "markersize": 4}
    axes.plot(curve.steps, mean, label=name, **style)


def _finding(table: Table) -> str:
    """Return the title: which setting is best, and whether the intervals tell it from the next."""
    rows = [row for row in table.rows if table.metric in row.estimates]
    best = rows[0].estimates[table.metric]
    if len(rows) == 1:
        return f"{AXES[table.metric].capitalize()} {best} after training"
    title = f"{shortened(rows[0].label)} is best: {AXES[table.metric]} {short(best.mean)}"
    second = rows[1].estimates[table.metric]
    if best.half is None or second.half is None:
        return f"{title}; too few seeds for intervals"
    overlap = abs(best.mean - second.mean) <= best.half + second.half
    return f"{title}; intervals overlap" if overlap else title


def shortened(label: str) -> str:
    """Return a label that has room beside a curve: its ends tell it apart."""
    half = LABEL_CHARACTERS // 2 - 2
    return label if len(label) <= LABEL_CHARACTERS else f"{label[:half]}...{label[-half:]}"
