"""How all plots look, of runs, sweeps and strategies: colours, axes, titles, numbers.

Colours are those of Okabe and Ito, which people with the common kinds of colour blindness can tell
apart.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gear_offline.core.files import write_file

BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#E69F00")
INK, GREY, FAINT = "#222222", "#6B6B6B", "#D9D9D9"
SIZE_INCHES, DPI = (7.2, 4.5), 150
LONGEST_LABEL, LONGEST_LINE = 34, 72  # characters that have room beside a curve, in a title


def new_figure() -> Figure:
    """Return an empty figure of the size that all plots have."""
    return Figure(figsize=SIZE_INCHES, dpi=DPI, facecolor="white", layout="constrained")


def titles(figure: Figure, title: str, subtitle: str) -> None:
    """Write the finding and, below it, what it was found in."""
    figure.suptitle(fill(title, LONGEST_LINE), x=0.013, ha="left", fontsize=12, fontweight="bold")
    figure.axes[0].set_title(shortened(subtitle, 95), loc="left", fontsize=9, color=GREY)


def shortened(text: str, most: int = LONGEST_LABEL) -> str:
    """Return text of at most `most` characters: what is amid a longer one is left out."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


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


def draw_mean(
    axes: Axes, x: Sequence[int], mean: npt.ArrayLike, interval: npt.ArrayLike, **style: Any
) -> None:
    """Draw a curve (n,) and its interval (2, n), NaN where there is none; `style` has a colour."""
    axes.plot(x, mean, linewidth=1.8, marker="o" if len(x) <= 20 else None, markersize=4, **style)
    low, high = np.asarray(interval, np.float64)
    edge = 2.0 * (len(x) == 1)  # the area of one point is a line
    axes.fill_between(x, low, high, color=style["color"], alpha=0.14, linewidth=edge)


def from_zero(axes: Axes) -> None:
    """Let the y axis begin at zero, or where negative values do, with room for markers."""
    low, high = axes.dataLim.intervaly
    room = 0.05 * (high - min(0.0, low))
    axes.set_ylim(low - room if low < 0 else 0.0, high + room or None)


def legend(axes: Axes) -> None:
    """Name the lines that have labels, beside the axes."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


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
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=DPI)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content.getvalue())
    return path
