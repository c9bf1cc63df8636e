"""Plots of a sweep: learning curves with bands over seeds, and every run beside its mean.

Shape legend: n points of a curve, r runs of a setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from gear_offline.core.text import count_text
from gear_offline.runs.plots import (
    GREY,
    SERIES,
    dress,
    label_ends,
    new_figure,
    save_figure,
    short,
    thousands,
    titles,
)
from gear_offline.sweep.points import plain_label

MOST_CURVES = len(SERIES)  # more cannot be told apart
LABEL_CHARS = 34


def plot_sweep_curves(
    path: Path,
    curves: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]],
    *,
    order: Sequence[str],
    name: str,
    runs: int,
) -> Path:
    """Draw mean and 95 % band over seeds of loss and evaluation return.

    Parameters
    ----------
    curves
        From `gear_offline.sweep.summary.curves`.
    order
        Labels, the best one first; the first `MOST_CURVES` are drawn.
    name, runs
        What the sweep is called, and how many runs are drawn.
    """
    shown = list(order[:MOST_CURVES])
    kinds = [kind for kind in ("loss", "return") if any(curves[label][kind] for label in shown)]
    figure = new_figure()
    panels = figure.subplots(len(kinds) or 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes, kind in zip(panels, kinds, strict=False):
        ends = _bands(axes, {label: curves[label][kind] for label in shown})
        dress(axes, y="training loss" if kind == "loss" else "mean return")
        if kind == "loss":
            axes.set_ylim(bottom=0)
        thousands(axes.yaxis)
        if len(shown) > 1 and axes is panels[len(kinds) - 1]:
            label_ends(axes, ends, gap=0.11)
    dress(panels[-1], x="optimiser step", y=panels[-1].get_ylabel())
    thousands(panels[-1].xaxis)
    hidden = len(order) - len(shown)
    title = (
        f"{short_label(shown[0])} has the best mean of {len(order)} settings"
        if len(order) > 1
        else name
    )
    if len(order) > 1 and kinds:
        title += _caution([curves[label][kinds[-1]] for label in shown[:2]])
    if len(order) == 1 and kinds:
        last = curves[shown[0]][kinds[-1]][-1]
        title = f"Mean {kinds[-1]} {short(last['mean'])} after {count_text(last['step'], 'step')}"
    note = f", the best {len(shown)} of {len(order)} settings" if hidden else ""
    titles(figure, title, f"{name}: {count_text(runs, 'run')}{note}; mean and 95 % interval")
    figure.align_ylabels(list(panels))
    return save_figure(figure, path)


def _caution(pair: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return what to add where the last intervals of two curves do not tell them apart."""
    (low, high), (other_low, other_high) = (
        curve[-1]["ci95"] if curve else (np.nan, np.nan) for curve in pair
    )
    if np.isnan([low, high, other_low, other_high]).any():
        return "; no intervals"
    return "; intervals overlap" if low <= other_high and other_low <= high else ""


def _bands(
    axes: Axes, rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[tuple[float, str, str, float]]:
    ends = []
    for number, (label, curve) in enumerate(rows.items()):
        if not curve:
            continue
        colour = SERIES[number % len(SERIES)]
        at = np.array([row["step"] for row in curve], np.float64)
        mean = np.array([row["mean"] for row in curve], np.float64)
        sides = np.array([row["ci95"] for row in curve], np.float64)
        low, high = np.where(np.isnan(sides), mean[:, None], sides).T
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        marker = "o" if len(curve) <= 20 else None
        axes.plot(at, mean, color=colour, linewidth=1.8, marker=marker, markersize=4)
        ends.append((float(mean[-1]), short_label(label), colour, float(at[-1])))
    return ends


def plot_sweep_runs(
    path: Path, rows: Sequence[Mapping[str, Any]], *, metric: str, what: str, name: str
) -> Path:
    """Draw every run of each setting as a dot, with mean and 95 % interval.

    Parameters
    ----------
    rows
        Of the summary, the best one first.
    metric, what
        Key of the rows, and its name on the axis.
    name
        What the sweep is called.
    """
    shown = [row for row in rows if row[metric] is not None][:20]
    figure = new_figure()
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        found = row[metric]
        values = np.asarray(found["values"], np.float64)
        colour = SERIES[0]
        axes.scatter(
            values, np.full(values.size, place - 0.18), s=26, color=colour, alpha=0.4, linewidth=0
        )
        low, high = found["ci95"]
        if low is not None and not np.isnan(low):
            axes.plot([low, high], [place, place], color=colour, linewidth=2.4, zorder=3)
        axes.plot(
            [found["mean"]], [place], marker="o", markersize=8, color=colour,
            markeredgecolor="white", zorder=4,
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), [short_label(str(row["label"])) for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    dress(axes, x=what, grid="x")
    axes.tick_params(axis="y", length=0)
    thousands(axes.xaxis)
    if len(shown) == 1:
        axes.set_yticks([])
    best = shown[0]
    low, high = best[metric]["ci95"]
    interval = "" if low is None or np.isnan(low) else f", {short(low)} to {short(high)}"
    subject = "" if len(shown) == 1 else f"{short_label(str(best['label']))}: "
    titles(
        figure,
        f"{subject}{what} {short(best[metric]['mean'])}{interval}",
        f"{name}: each dot is a run; mean and 95 % interval over seeds",
    )
    axes.spines["left"].set_color(GREY)
    return save_figure(figure, path)


def short_label(label: str) -> str:
    """Return a label short enough to stand beside a curve.

    Options are named without their sections, and long names are cut before any value is: it is the
    values that tell settings apart.
    """
    text = plain_label(label)
    pairs = [part.partition("=") for part in text.split(", ")]
    for most in range(max(len(key) for key, *_ in pairs), 2, -1):
        if len(text) <= LABEL_CHARS:
            break
        names = [key if len(key) <= most else f"{key[: most - 1]}." for key, *_ in pairs]
        text = ", ".join(
            f"{name}={value}" if sign else key
            for name, (key, sign, value) in zip(names, pairs, strict=True)
        )
    head, tail = LABEL_CHARS // 2 - 2, LABEL_CHARS - LABEL_CHARS // 2 - 1
    return text if len(text) <= LABEL_CHARS else f"{text[:head]}...{text[-tail:]}"
