"""The three pictures of a run: learning curve, returns of the data, achieved against asked.

Each function takes numbers, writes one PNG of 1080 x 675 pixels and returns its path.  Colours
are those of Okabe and Ito, which people with the common kinds of colour blindness can tell apart;
what a line means stands beside it rather than in a legend.  Titles say what was found.

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
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gear_offline.core.text import count_text

BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#E69F00")
INK, GREY, FAINT = "#222222", "#6B6B6B", "#D9D9D9"
SIZE_INCHES, DPI = (7.2, 4.5), 150
TEXT_SHARE, LEAST_SIZE = 0.974, 7.0  # of the width, for titles; smaller letters are not read


def histogram_edges(values: npt.NDArray[np.float64], bins: int) -> npt.NDArray[np.float64]:
    """Return the (bins + 1,) edges of a picture of finite `values` (n,), n >= 1.

    Values that are equal but for the rounding of their sums lie in the middle of a wider range:
    NumPy refuses one that spans fewer floats than there are bins.
    """
    low, high = float(values.min()), float(values.max())
    if nearly_equal(values):
        room = max(0.5, 1e-6 * abs(low))
        low, high = low - room, high + room
    return np.linspace(low, high, bins + 1)


def nearly_equal(values: npt.NDArray[np.float64]) -> bool:
    """Return whether finite `values` (n,), n >= 1, differ by no more than rounding."""
    low, high = float(values.min()), float(values.max())
    return high - low <= 1e-12 * max(abs(low), abs(high))


def new_figure() -> Figure:
    """Return an empty figure of the size that all plots have."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, *, x: str = "", y: str = "", grid: str = "y") -> None:
    """Name the axes and take away what is no information."""
    axes.set_facecolor("white")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor=INK, labelsize=10, length=3)
    axes.set_xlabel(x, fontsize=10.5, color=INK)
    axes.set_ylabel(y, fontsize=10.5, color=INK)
    if grid:
        axes.grid(axis=grid, color=FAINT, linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def titles(figure: Figure, title: str, subtitle: str) -> None:
    """Write the finding and, below it, what it was found in, flush with the left edge."""
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0.0, 0.0, 1.0, 0.885))
    _written(figure, 0.945, title, size=13, fontweight="bold", color=INK)
    _written(figure, 0.896, subtitle, size=9.5, color=GREY)


def _written(figure: Figure, height: float, text: str, *, size: float, **style: Any) -> None:
    """Write a line that fits the width: smaller where it is long, and cut amid where very long."""
    line, most = figure.text(0.013, height, text, fontsize=size, **style), len(text)
    room = TEXT_SHARE * figure.bbox.width
    while (width := line.get_window_extent().width) > room:
        if size > LEAST_SIZE:
            size = max(min(0.98, room / width) * size, LEAST_SIZE)
            line.set_fontsize(size)
            continue
        # at the smallest size: more and more amid it is left out
        most = min(most - 2, int(most * room / width))
        line.set_text(f"{text[: most // 3]}...{text[most // 3 - most + 3 :]}")


def thousands(axis: Any) -> None:
    """Write an axis's numbers with separators, and with the decimals that tell them apart.

    From a million on in millions: numbers below an axis would run into each other.
    """

    def text(value: float, _: int | None) -> str:
        ticks = axis.get_majorticklocs()
        step = float(ticks[1] - ticks[0]) if len(ticks) > 1 else 1.0
        largest, unit = np.abs(ticks).max() if len(ticks) else 0.0, ""
        if largest >= 1e12:
            return f"{value:.4g}"
        if largest >= 1e6:
            value, step, unit = value / 1e6, step / 1e6, " M" if value else ""
        if not 0 < step < 1 or (abs(value) < 100 and not unit):
            return f"{short(value)}{unit}"
        return f"{value:,.{_decimals(step)}f}{unit}"

    axis.set_major_formatter(FuncFormatter(text))


def _decimals(step: float) -> int:
    """Return the decimals with which multiples of a step below 1 are whole."""
    least = int(np.ceil(-np.log10(step)))
    return next((n for n in (least, least + 1) if abs(round(step, n) - step) < 1e-6 * step), least)


def short(value: float) -> str:
    """Return `value` with separators, and decimals only where it is small."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.3g}"


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure so that a reader finds all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=DPI)
    os.replace(partial, path)
    return path


def plot_data_returns(
    path: Path, returns: npt.ArrayLike, lengths: npt.ArrayLike, *, name: str
) -> Path:
    """Draw how the returns of the data are spread, over episodes and over steps.

    Parameters
    ----------
    returns
        (E,) returns of the episodes; those that are not finite are left out, and it is said.
    lengths
        (E,) steps of the episodes.
    name
        What the data is called.
    """
    values, steps = np.asarray(returns, np.float64), np.asarray(lengths, np.float64)
    keep = np.isfinite(values)
    values, steps, left_out = values[keep], steps[keep], int((~keep).sum())
    mean, best, half = float(values.mean()), float(values.max()), float(np.median(values))
    edges = histogram_edges(values, 40)
    figure = new_figure()
    axes = figure.add_subplot()
    percent = [100 * np.histogram(values, edges, weights=w / w.sum())[0] for w in
               (np.ones_like(steps), steps)]  # fmt: skip
    axes.bar(edges[:-1], percent[0], width=np.diff(edges), align="edge", color=SKY, alpha=0.85,
             edgecolor="white", linewidth=0.6)  # fmt: skip
    axes.stairs(percent[1], edges, color=INK, linewidth=1.5)
    top = float(max(p.max() for p in percent)) * 1.2
    # at two heights, so that the names do not meet when the values do
    for value, text, colour, height in ((best, "best", GREEN, 0.945), (mean, "mean", ORANGE, 0.87)):
        axes.axvline(value, color=colour, linewidth=1.8, ymax=height - 0.01)
        right = value > edges[0] + 0.8 * (edges[-1] - edges[0])
        axes.text(
            value, top * height, f"{text} {short(value)}", color=colour, fontsize=10.5,
            ha="right" if right else "left", va="bottom", fontweight="bold",
        )  # fmt: skip
    axes.set_ylim(0, top)
    dress(axes, x="return of an episode", y="share (%)")
    thousands(axes.xaxis)
    titles(
        figure,
        f"Every episode returns {short(best)}"
        if nearly_equal(values)
        else f"Half of the episodes return less than {short(half)}, the best {short(best)}",
        f"{name}: {count_text(values.size, 'episode')}, {count_text(int(steps.sum()), 'step')}"
        + (f", without {left_out:,} whose return is NaN or infinite" if left_out else "")
        + ".  Bars: share of episodes; line: share of steps.",
    )
    return save_figure(figure, path)


def plot_learning_curve(
    path: Path,
    *,
    steps: npt.ArrayLike,
    losses: npt.ArrayLike,
    evaluations: Sequence[Mapping[str, Any]] = (),
    name: str,
) -> Path:
    """Draw training loss and evaluation returns over optimiser steps.

    Parameters
    ----------
    steps, losses
        (n,) each.
    evaluations
        Each ``{"step": int, "targets": [{"target", "mean", "ci95"}, ...]}``.
    name
        What the run is called.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(losses, np.float64)
    figure = new_figure()
    panels = figure.subplots(2 if evaluations else 1, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].plot(x, y, color=BLUE, linewidth=1.8, marker="o" if x.size == 1 else None)
    dress(panels[0], y="training loss")
    if y.size and y.min() > 0 and y.max() / y.min() > 20:
        panels[0].set_yscale("log")
    else:
        panels[0].set_ylim(0, 1.05 * float(y.max()) if y.size and y.max() > 0 else None)
    found = f"loss {short(y[0])} to {short(y[-1])}" if y.size else "no losses yet"
    title = f"{found[0].upper()}{found[1:]} in {count_text(int(x[-1]) if x.size else 0, 'step')}"
    if evaluations:
        best = _plot_returns(panels[1], evaluations)
        title = f"{title}; best mean return {short(best)}"
    dress(panels[-1], x="optimiser step", y="mean return" if evaluations else "training loss")
    thousands(panels[-1].xaxis)
    panels[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    titles(figure, title, f"{name}: mean loss of the logged steps")
    figure.align_ylabels(list(panels))
    return save_figure(figure, path)


def _plot_returns(axes: Axes, evaluations: Sequence[Mapping[str, Any]]) -> float:
    """Draw one line a target; returns the highest mean."""
    targets = sorted({float(t["target"]) for row in evaluations for t in row["targets"]})
    shades, ends, best = SERIES, [], -np.inf
    for index, target in enumerate(reversed(targets)):
        points = [
            (row["step"], t["return"], t.get("ci95") or (None, None))
            for row in evaluations
            for t in row["targets"]
            if float(t["target"]) == target
        ]
        colour = shades[index % len(shades)]
        at, mean = np.array([p[0] for p in points]), np.array([p[1] for p in points], np.float64)
        low = np.array([p[1] if p[2][0] is None else p[2][0] for p in points], np.float64)
        high = np.array([p[1] if p[2][1] is None else p[2][1] for p in points], np.float64)
        axes.fill_between(at, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(at, mean, color=colour, linewidth=1.8, marker="o", markersize=4.5)
        ends.append((float(mean[-1]), f"asked {short(target)}", colour, float(at[-1])))
        best = max(best, float(mean.max()))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    label_ends(axes, ends)
    thousands(axes.yaxis)
    axes.set_title(
        "evaluation: mean return and 95 % interval", loc="left", fontsize=9.5, color=GREY
    )
    return best


def label_ends(
    axes: Axes, ends: list[tuple[float, str, str, float]], *, gap: float = 0.125
) -> None:
    """Write each line's name behind its last point, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = sorted(ends)
    heights = apart([(value - low) / (high - low) for value, *_ in ends], gap)
    for (value, text, colour, at), height in zip(ends, heights, strict=True):
        axes.annotate(
            text, (at, value), xytext=(1.012, height),
            textcoords="axes fraction", color=colour, fontsize=10, va="center", linespacing=1.1,
            annotation_clip=False,
        )  # fmt: skip


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return rising `heights` moved to be at least `gap` apart, and none above 1 by it.

    Names above the axes would make the layout shrink the picture below them.
    """
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + gap) if places else height)
    highest = max([1.0, *heights])
    for index in reversed(range(len(places))):
        places[index] = min(places[index], highest)
        highest = places[index] - gap
    return places


def plot_asked_vs_achieved(
    path: Path,
    evaluation: Mapping[str, Any],
    *,
    data_mean: float | None = None,
    data_best: float | None = None,
) -> Path:
    """Draw the achieved return over the asked one, with every episode and the 95 % interval.

    Parameters
    ----------
    evaluation
        What `EvaluationReport.to_json` returns.
    data_mean, data_best
        Mean and highest return of the data's episodes, drawn as levels.
    """
    rows = sorted(evaluation["targets"], key=lambda row: float(row["target"]))
    asked = np.array([row["target"] for row in rows], np.float64)
    means = np.array([row["return"] for row in rows], np.float64)
    figure = new_figure()
    axes = figure.add_subplot()
    everything = [*asked, 0.0, *(value for row in rows for value in row["returns"])]
    everything += [level for level in (data_mean, data_best) if level is not None]
    margin = 0.04 * ((max(everything) - min(everything)) or 1.0)
    low = min(everything) - (margin if min(everything) < 0 else 0.0)
    high = max(everything) + margin
    axes.set_xlim(low, high)
    # intervals of few episodes may be far wider than everything else
    sides = [end for row in rows for end in row["ci95"] if end is not None]
    floor = max(min([low, *(end - margin for end in sides)]), low - (high - low))
    ceiling = min(max([high, *(end + margin for end in sides)]), high + (high - low))
    axes.set_ylim(floor, ceiling)
    axes.plot([low, high], [low, high], color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
    ends = [(high, "achieved\n= asked", GREY, high)]
    for level, text, colour in (
        (data_mean, "mean of the\ndata", ORANGE),
        (data_best, "best of the\ndata", GREEN),
    ):
        if level is not None:
            axes.axhline(level, color=colour, linewidth=1.5)
            ends.append((level, f"{text} {short(level)}", colour, high))
    spread = 0.2 * margin
    for row in rows:
        returns = np.asarray(row["returns"], np.float64)
        shift = np.linspace(-1, 1, returns.size) * spread if returns.size > 1 else np.zeros(1)
        axes.scatter(row["target"] + shift, returns, s=11, color=BLUE, alpha=0.28, linewidth=0)
    bars = np.array(
        [[0.0, 0.0] if row["ci95"][0] is None else np.abs(np.array(row["ci95"]) - row["return"])
         for row in rows]
    ).T  # fmt: skip
    axes.errorbar(
        asked, means, yerr=bars, color=BLUE, linewidth=2, marker="o", markersize=7, capsize=4,
        markeredgecolor="white", zorder=4,
    )  # fmt: skip
    label_ends(axes, ends, gap=0.12)
    dress(axes, x="asked return", y="achieved return")
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    count = min(len(row["returns"]) for row in rows)
    place = f" at step {evaluation['step']:,}" if evaluation.get("step") is not None else ""
    titles(
        figure,
        asked_finding(asked, means, bars.max(axis=0)),
        f"{evaluation.get('run') or 'policy'}{place} in {evaluation['environment']}: mean and 95 % "
        f"interval of {count_text(count, 'episode')} for each asked return",
    )
    return save_figure(figure, path)


def asked_finding(
    asked: npt.ArrayLike, means: npt.ArrayLike, halves: npt.ArrayLike | None = None
) -> str:
    """Return in one line what achieved returns `means` (n,) say about following `asked` (n,).

    A difference between the first and the last that their intervals leave open, or of less than a
    hundredth of what was asked, is not called one; `halves` (n,) are half of each interval.
    """
    order = np.argsort(np.asarray(asked, np.float64))
    wanted = np.asarray(asked, np.float64)[order]
    got = np.asarray(means, np.float64)[order]
    half = np.zeros_like(got) if halves is None else np.asarray(halves, np.float64)[order]
    if wanted[0] == wanted[-1]:
        return f"Asked for {short(wanted[0])}, it achieves {short(got[0])}"
    span = f"{short(got[0])} to {short(got[-1])} for {short(wanted[0])} to {short(wanted[-1])}"
    least = max(float(np.hypot(half[0], half[-1])), 0.01 * float(wanted[-1] - wanted[0]))
    if 0 < abs(got[-1] - got[0]) <= least:
        return f"Asked for more or less, no clear difference: {span}"
    if (np.diff(got) > 0).all():
        return f"Asked for more, it achieves more: {span}"
    if got[-1] > got[0]:
        return f"It follows the asked return in part: {span}"
    return f"It does not follow the asked return: {span}"
