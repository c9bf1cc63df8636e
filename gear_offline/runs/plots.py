"""The three plots of a run: learning curve, returns of the data, achieved against asked.

Each function takes numbers, writes one PNG of 1080 x 675 pixels and returns its path.  Colours are
those of Okabe and Ito, which people with the common kinds of colour blindness can tell apart.

Shape legend: E episodes, n points of a curve, m episodes of one target.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gear_offline.core.text import count_text
from gear_offline.runs.records import EvaluationRecord, TargetRecord

BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#E69F00")
INK, GREY, FAINT = "#222222", "#6B6B6B", "#D9D9D9"
SIZE_INCHES, DPI = (7.2, 4.5), 150
LONGEST_TITLE = 95  # characters that fit the width


def new_figure() -> Figure:
    """Return an empty figure of the size that all plots have."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def titles(figure: Figure, title: str, subtitle: str) -> None:
    """Write the finding and, below it, what it was found in."""
    figure.suptitle(_shortened(title, 72), x=0.013, ha="left", fontsize=12, fontweight="bold")
    figure.axes[0].set_title(_shortened(subtitle), loc="left", fontsize=9, color=GREY)


def _shortened(text: str, most: int = LONGEST_TITLE) -> str:
    """Return text of at most `most` characters: what is amid a longer one is left out."""
    if len(text) <= most:
        return text
    return f"{text[: most // 3]}...{text[most // 3 - most + 3 :]}"


def dress(axes: Axes, *, x: str = "", y: str = "", grid: str = "y") -> None:
    """Name the axes and take away what is no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor=INK, labelsize=9, length=3)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    if grid:
        axes.grid(axis=grid, color=FAINT, linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def legend(axes: Axes) -> None:
    """Name the lines that have labels, beside the axes."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def short(value: float) -> str:
    """Return `value` with separators, and decimals only where it is small."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.3g}"


def thousands(axis: Any) -> None:
    """Write an axis's numbers with separators; from a million on in millions."""

    def text(value: float, _: int | None) -> str:
        in_millions = max(abs(end) for end in axis.get_view_interval()) >= 1e6
        return f"{value / 1e6:,.4g} M" if in_millions and value else f"{value:,.6g}"

    axis.set_major_formatter(FuncFormatter(text))


def ticks_to(axes: Axes, last: float) -> None:
    """Let the steps of a run end with a tick at its last step."""
    inner = [tick for tick in axes.get_xticks() if 0 <= tick < 0.92 * last]
    axes.set_xticks([*inner, last])
    axes.set_xlim(0, 1.02 * last)
    thousands(axes.xaxis)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as its name says, .png or .svg, so that a reader finds all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format=path.suffix[1:], dpi=DPI)
    os.replace(partial, path)
    return path


def histogram_edges(values: npt.NDArray[np.float64], bins: int) -> npt.NDArray[np.float64]:
    """Return the (bins + 1,) edges of a picture of finite `values` (n,), n >= 1.

    Values that are equal but for the rounding of their sums lie in the middle of a wider range:
    NumPy refuses one that spans fewer floats than there are bins.
    """
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = max(0.5, 1e-6 * abs(low))
        low, high = low - room, high + room
    return np.linspace(low, high, bins + 1)


def plot_data_returns(
    path: Path, returns: npt.ArrayLike, lengths: npt.ArrayLike, *, name: str
) -> Path:
    """Draw how `returns` (E,) of the data's episodes of `lengths` (E,) steps are spread."""
    values, steps = np.asarray(returns, np.float64), np.asarray(lengths, np.float64)
    finite = np.isfinite(values)
    values, steps, left_out = values[finite], steps[finite], int((~finite).sum())
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
    without = f", without {left_out:,} whose return is NaN or infinite" if left_out else ""
    titles(
        figure,
        f"Half of the episodes return less than {short(float(np.median(values)))}, "
        f"the best {short(best)}",
        f"{name}: {count_text(values.size, 'episode')}, "
        f"{count_text(int(steps.sum()), 'step')}{without}",
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
        _plot_returns(panels[1], points)
        best = max(target.mean_return for _, target in points)
        title = f"{title}; best mean return {short(best)}"
    panels[-1].set_xlabel("optimiser step")
    ticks_to(panels[-1], float(x[-1]))
    titles(figure, title, f"{name}: mean loss of the logged steps")
    figure.align_ylabels(list(panels))
    return save_figure(figure, path)


def _plot_returns(axes: Axes, points: Sequence[tuple[int, TargetRecord]]) -> None:
    """Draw a line a target, and its 95 % interval, through what was played at steps."""
    for index, asked in enumerate(sorted({t.target for _, t in points}, reverse=True)):
        steps, targets = zip(*(one for one in points if one[1].target == asked), strict=True)
        style: Any = {"color": SERIES[index % len(SERIES)], "marker": "o", "markersize": 4.5}
        means = [target.mean_return for target in targets]
        axes.plot(steps, means, linewidth=1.8, label=f"asked {short(asked)}", **style)
        low, high = np.array([t.ci95 for t in targets], np.float64).T  # None becomes NaN
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.13, linewidth=0)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    dress(axes, y="mean return")
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


def _span(values: npt.NDArray[np.float64]) -> str:
    first, last = short(float(values[0])), short(float(values[-1]))
    return first if first == last else f"{first} to {last}"
