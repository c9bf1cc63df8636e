"""The look of all plots, of runs, sweeps and strategies: colours, axes, titles, numbers.

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
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FuncFormatter, LogFormatter

from gear_offline.core.files import write_file
from gear_offline.core.text import escape, printable

BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#E69F00")
INK, GREY, FAINT = "#222222", "#6B6B6B", "#D9D9D9"
SIZE_INCHES, DPI = (7.2, 4.5), 150
LONGEST_LABEL, LONGEST_LINE, WIDTH = 34, 72, 100  # characters of a name, of a title, of a legend


def new_figure() -> Figure:
    """Return an empty figure of the size that all plots have."""
    return Figure(figsize=SIZE_INCHES, dpi=DPI, facecolor="white", layout="constrained")


def titles(figure: Figure, title: str, subtitle: str) -> None:
    """Write the finding and, below it, its context."""
    text = fill(fit_text(title, 2 * LONGEST_LINE), LONGEST_LINE)
    bold: Any = {"ha": "left", "fontsize": 12, "fontweight": "bold", "parse_math": False}
    figure.suptitle(text, x=0.013, **bold)
    below: Any = {"loc": "left", "fontsize": 9, "color": GREY, "parse_math": False}
    figure.axes[0].set_title(fit_text(subtitle, 95), **below)


def fit_text(text: str, most: int = LONGEST_LABEL) -> str:
    """Return text as a picture can show it: without signs that its font lacks, the middle left out.

    It is for a `label`, which `legend` shows as it is, or for text without `parse_math`.
    """
    font, half = get_font(findfont(FontProperties())), (most - 3) // 2
    drawable = "".join(c if font.get_char_index(ord(c)) else escape(c) for c in printable(text))
    return drawable if len(drawable) <= most else f"{drawable[:half]}...{drawable[-half:]}"


def label(text: str) -> str:
    """Return the label of a curve; the blank, which `legend` drops, lets it begin with ``_``."""
    return f" {fit_text(text)}"


def dress(axes: Axes, *, x: str = "", y: str = "") -> None:
    """Name the axes and remove what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(which="both", colors=GREY, labelcolor=INK, labelsize=9, length=3)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)


def spread(count: int) -> list[int]:
    """Return the numbers of the curves to draw: all, or as many as there are colours, spread."""
    return [*map(int, np.linspace(0, count - 1, min(count, len(SERIES))))]


def draw_mean(
    axes: Axes, x: Sequence[float], mean: npt.ArrayLike, interval: npt.ArrayLike, **style: Any
) -> None:
    """Draw a curve (n,) and its interval (2, n), NaN where there is none; `style` has a colour."""
    axes.plot(x, mean, linewidth=1.8, marker="o" if len(x) <= 20 else None, markersize=4, **style)
    low, high = np.asarray(interval, np.float64)
    edge = 2.0 * (len(x) == 1)  # the area of one point is a line
    if np.isfinite(low).any():
        axes.fill_between(x, low, high, color=style["color"], alpha=0.14, linewidth=edge)


def from_zero(axes: Axes) -> None:
    """Let the y axis begin at zero, or where negative values do, with room for markers."""
    low, high = axes.dataLim.intervaly
    room = 0.05 * (max(0.0, high) - min(0.0, low))
    axes.set_ylim(low - room if low < 0 else 0.0, high + room or None)


def scale_losses(axes: Axes) -> None:
    """Show losses by their logarithm, and such as are negative or zero as they are."""
    if axes.dataLim.minposy < np.inf and axes.dataLim.intervaly[0] > 0:
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(LossFormatter(minor_thresholds=(2, 0.5), labelOnlyBase=False))
    else:
        from_zero(axes)


class LossFormatter(LogFormatter):
    """Losses in full: by exponents 0.37 and 0.38 would both be 4e-01."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.4g}" if super().__call__(x, pos) else ""


def legend(axes: Axes) -> None:
    """Name the lines that have a `label` below the axes, as many in a row as fit."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, WIDTH // (max(map(len, labels), default=0) + 8))
    how: Any = {"loc": "outside lower left", "frameon": False, "fontsize": 9, "ncols": columns}
    box = axes.get_figure().legend(handles, labels, **how)  # type: ignore[union-attr]
    for text, name in zip(box.get_texts(), labels, strict=True):
        text.set(text=name[1:], parse_math=False)


def thousands(axis: Any) -> None:
    """Write an axis's numbers with separators; from a million on in millions."""

    def text(value: float, _: int | None) -> str:
        most, ticks = max(abs(end) for end in axis.get_view_interval()), axis.get_majorticklocs()
        step = np.diff(ticks).min() if len(ticks) > 1 else most
        digits = max(6, 2 + int(np.log10(most / step)))  # that tell ticks apart
        return f"{value / 1e6:,.{digits}g} M" if most >= 1e6 and value else f"{value:,.{digits}g}"

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
    write_file(path, draw(figure, path.suffix[1:]))
    return path


def draw(figure: Figure, file_type: str = "png") -> bytes:
    """Return the content of a figure's file, a PNG or an SVG."""
    content = io.BytesIO()
    metadata: Any = None if file_type != "svg" else {"Date": None, "Creator": None}  # same bytes
    with rc_context({"svg.hashsalt": "gear-offline"}):
        figure.savefig(content, format=file_type, dpi=DPI, metadata=metadata)
    return content.getvalue()
