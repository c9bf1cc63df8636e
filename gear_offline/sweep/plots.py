"""The plots of a sweep: learning curves over seeds, and every trial beside its setting's mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gear_offline.core.text import count_text
from gear_offline.runs.plots import (
    SERIES,
    dress,
    label_ends,
    new_figure,
    save_figure,
    short,
    thousands,
    titles,
)
from gear_offline.sweep.table import Curve, Table

MOST_CURVES = len(SERIES)  # more cannot be told apart
MOST_ROWS = 20
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
        ends = [
            _draw(axes, by_label[label], short_label(label), SERIES[place])
            for place, label in enumerate(shown)
            if label in by_label
        ]
        dress(axes, y=AXES[metric])
        if metric == "loss":
            axes.set_ylim(bottom=0)
        thousands(axes.yaxis)
        if len(shown) > 1 and axes is panels[-1]:
            label_ends(axes, ends, gap=0.11)
    dress(panels[-1], x="optimizer step", y=panels[-1].get_ylabel())
    thousands(panels[-1].xaxis)
    figure.align_ylabels(list(panels))
    trials = sum(len(row.seeds) for row in table.rows)
    hidden = f", the best {len(shown)} of {len(table.rows)}" if len(shown) < len(table.rows) else ""
    what = "mean over seeds, 95 % interval from 3 seeds on"
    titles(figure, _finding(table), f"{count_text(trials, 'run')}{hidden}; {what}")
    return save_figure(figure, path)


def _draw(axes: Axes, curve: Curve, name: str, colour: str) -> tuple[float, str, str, float]:
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
    axes.plot(curve.steps, mean, color=colour, linewidth=1.8, marker=marker, markersize=4)
    return float(mean[-1]), name, colour, float(curve.steps[-1])


def plot_trials(path: Path, table: Table) -> Path:
    """Draw every trial of each setting as a dot, with the mean over seeds and its interval."""
    shown = [row for row in table.rows if table.metric in row.estimates][:MOST_ROWS]
    figure = new_figure()
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        one, colour = row.estimates[table.metric], SERIES[0]
        heights = np.full(len(one.values), place - 0.18)
        axes.scatter(one.values, heights, s=26, color=colour, alpha=0.4, linewidth=0)
        axes.errorbar(
            one.mean, place, xerr=one.half, fmt="o", color=colour, markersize=8,
            markeredgecolor="white", elinewidth=2.4, zorder=3,
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), [short_label(row.label) for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    dress(axes, x=f"{AXES[table.metric]}, last", grid="x")
    axes.tick_params(axis="y", length=0)
    thousands(axes.xaxis)
    what = "each small dot is a run; large: mean over seeds, 95 % interval from 3 seeds on"
    titles(figure, _finding(table), what)
    return save_figure(figure, path)


def _finding(table: Table) -> str:
    """Return the title: which setting is best, and whether the intervals tell it from the next."""
    rows = [row for row in table.rows if table.metric in row.estimates]
    best = rows[0].estimates[table.metric]
    if len(rows) == 1:
        return f"{AXES[table.metric].capitalize()} {best} after training"
    title = f"{short_label(rows[0].label)} is best: {AXES[table.metric]} {short(best.mean)}"
    second = rows[1].estimates[table.metric]
    if best.half is None or second.half is None:
        return f"{title}; too few seeds for intervals"
    overlap = abs(best.mean - second.mean) <= best.half + second.half
    return f"{title}; intervals overlap" if overlap else title


def short_label(label: str) -> str:
    """Return a label short enough for a plot: names are cut before values, which tell it apart."""
    pairs = [part.partition("=") for part in label.split(", ")]
    text = label
    for most in range(max(len(key) for key, *_ in pairs), 2, -1):
        if len(text) <= LABEL_CHARACTERS:
            return text
        names = [key if len(key) <= most else f"{key[: most - 1]}." for key, *_ in pairs]
        text = ", ".join(
            f"{name}={value}" if sign else key
            for name, (key, sign, value) in zip(names, pairs, strict=True)
        )
    half = LABEL_CHARACTERS // 2 - 2
    return text if len(text) <= LABEL_CHARACTERS else f"{text[:half]}...{text[-half:]}"
