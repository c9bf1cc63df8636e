"""The three plots of a run: learning curve, returns of the data, achieved against asked.

Each function takes numbers, writes one PNG of 1080 x 675 pixels and returns its path.

Shape legend: E episodes, n points of a curve, m episodes of one target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from gear_offline.core.text import count_text, short
from gear_offline.core.types import Float64Array
from gear_offline.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SERIES,
    SKY,
    draw_mean,
    dress,
    histogram_edges,
    legend,
    new_figure,
    save_figure,
    thousands,
    ticks_to,
    titles,
)
from gear_offline.training.records import EvaluationRecord, TargetRecord


def plot_data_returns(
    path: Path, returns: npt.ArrayLike, lengths: npt.ArrayLike, *, name: str
) -> Path:
    """Draw how `returns` (E,) of the data's episodes of `lengths` (E,) steps are spread."""
    values, steps = np.asarray(returns, np.float64), np.asarray(lengths, np.float64)
    mean, best = float(values.mean()), float(values.max())
    edges = histogram_edges(values, 40)
    figure = new_figure()
    axes = figure.add_subplot()
    shares = np.histogram(values, edges)[0] * 100 / values.size
    axes.bar(edges[:-1], shares, np.diff(edges), align="edge", color=SKY, label="of episodes")
    shares = np.histogram(values, edges, weights=steps)[0] * 100 / steps.sum()
    axes.stairs(shares, edges, color=INK, linewidth=1.5, label="of steps")
    axes.axvline(mean, color=ORANGE, linewidth=1.8, label=f"mean {short(mean)}")
    axes.axvline(best, color=GREEN, linewidth=1.8, label=f"best {short(best)}")
    dress(axes, x="return of an episode", y="share (%)")
    thousands(axes.xaxis)
    legend(axes)
    titles(
        figure,
        f"Half of the episodes return less than {short(float(np.median(values)))}, "
        f"the best {short(best)}",
        f"{name}: {count_text(values.size, 'episode')}, {count_text(int(steps.sum()), 'step')}",
    )
    return save_figure(figure, path)


def plot_learning_curve(
    path: Path,
    *,
    steps: npt.ArrayLike,
    losses: npt.ArrayLike,
    evaluations: Sequence[EvaluationRecord] = (),
    name: str,
) -> Path:
    """Draw the training loss (n,) and the returns of evaluations over optimiser steps (n,)."""
    x, y = np.asarray(steps, np.float64), np.asarray(losses, np.float64)
    # of several tasks none is drawn: their units differ
    points = [(row.step or 0, target) for row in evaluations for target in row.targets]
    figure = new_figure()
    panels = figure.subplots(2 if points else 1, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(x, y, color=BLUE, linewidth=1.8, marker="o" if x.size == 1 else None)
    dress(panels[0], y="training loss")
    if y.min() > 0 and y.max() / y.min() > 20:
        panels[0].set_yscale("log")
    else:
        panels[0].set_ylim(0, 1.05 * float(y.max()) if y.max() > 0 else None)
    title = f"Loss {short(y[0])} to {short(y[-1])} in {count_text(int(x[-1]), 'step')}"
    if points:
        goals = any(row.goals for row in evaluations)
        _plot_returns(
            panels[1], points, *(("task", "success") if goals else ("asked", "mean return"))
        )
        best = max(target.mean_return for _, target in points)
        title = f"{title}; best {'success' if goals else 'mean return'} {short(best)}"
    panels[-1].set_xlabel("optimizer step")
    ticks_to(panels[-1], float(x[-1]))
    titles(figure, title, f"{name}: mean loss of the logged steps")
    figure.align_ylabels(list(panels))
    return save_figure(figure, path)


def _plot_returns(
    axes: Axes, points: Sequence[tuple[int, TargetRecord]], asked_as: str, named: str
) -> None:
    """Draw a line a target, and its 95 % interval, through what was played at steps."""
    for index, asked in enumerate(sorted({t.target for _, t in points}, reverse=True)):
        steps, targets = zip(*(one for one in points if one[1].target == asked), strict=True)
        means = [target.mean_return for target in targets]
        intervals = np.array([t.ci95 for t in targets], np.float64).T  # None becomes NaN
        style = {"color": SERIES[index % len(SERIES)], "label": f"{asked_as} {short(asked)}"}
        draw_mean(axes, steps, means, intervals, **style)
    lowest, highest = min(0.0, axes.get_ylim()[0]), axes.get_ylim()[1]
    axes.set_ylim(lowest, highest + 0.04 * (highest - lowest))  # room for the marker
    dress(axes, y=named)
    thousands(axes.yaxis)
    legend(axes)


def plot_asked_vs_achieved(
    path: Path, targets: Sequence[TargetRecord], *, name: str, levels: Mapping[str, float]
) -> Path:
    """Draw achieved over asked returns, with every episode, 95 % intervals and named levels."""
    targets = sorted(targets, key=lambda target: target.target)
    asked = np.array([target.target for target in targets])
    means = np.array([target.mean_return for target in targets])
    figure = new_figure()
    axes = figure.add_subplot()
    for target in targets:
        places = np.full(len(target.returns), target.target)
        axes.scatter(places, target.returns, s=11, color=BLUE, alpha=0.25)
    halves = [0.0 if t.ci95[1] is None else t.ci95[1] - t.mean_return for t in targets]
    axes.errorbar(asked, means, yerr=halves, color=BLUE, linewidth=2, marker="o", capsize=4)
    for (label, level), colour in zip(levels.items(), (ORANGE, GREEN), strict=False):
        axes.axhline(level, color=colour, linewidth=1.5, label=f"{label}\n{short(level)}")
    low, high = min(0.0, float(asked.min())), max(0.0, float(asked.max()))
    room = 0.08 * (high - low) or 1.0
    ends = (low - room if low < 0 else 0.0, high + room)
    axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=1.2, label="achieved = asked")
    axes.set_xlim(*ends)
    dress(axes, x="asked return", y="achieved return")
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    legend(axes)
    episodes = count_text(len(targets[0].returns), "episode")
    titles(
        figure,
        f"Asked for {_span(asked)}, it achieves {_span(means)}",
        f"{name}: mean and 95 % interval of {episodes} each",
    )
    return save_figure(figure, path)


def _span(values: Float64Array) -> str:
    first, last = short(float(values[0])), short(float(values[-1]))
    return first if first == last else f"{first} to {last}"
