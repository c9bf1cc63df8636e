"""A comparison of strategies as tables on the terminal and as one HTML page.

The page needs no network and no script; its plots are SVG pictures inside it.  All plots of one
kind have the same axes, so that strategies can be compared by eye.
"""

from __future__ import annotations

import io
import json
import math
import re
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape

from gear_offline.analysis.compare import Comparison, Difference, Outcome
from gear_offline.analysis.sampling import Data, Draws
from gear_offline.core.files import write_file, writing
from gear_offline.core.text import count_text, printable, short
from gear_offline.plots import BLUE, FAINT, GREY, INK, ORANGE, dress, shortened, thousands
from gear_offline.progress import print_table

TALLEST = 2.5  # times the data's own tallest bar: higher ones are cut, and it is said
MAIN = {  # what the terminal shows; the page has all
    *("steps shown", "effective starts", "duplicate starts", "padding", "mean return"),
    *("return", "IQM", "difference", "p", "verdict"),
}


def drawn_cells(draws: Draws) -> dict[str, str]:
    """Return what a strategy drew by heading; page.html.j2 says what the headings mean."""
    return {
        "starts drawn": _percent(draws.coverage_starts),
        "steps shown": _percent(draws.coverage_steps),
        "episodes": _percent(draws.coverage_episodes),
        "effective starts": short(draws.effective_segments),
        "effective sample size": _percent(draws.effective_sample_share),
        "duplicate starts": _percent(draws.duplicate_starts),
        "duplicate episodes": _percent(draws.duplicate_episodes),
        "padding": _percent(draws.padding),
        "mean return": short(draws.mean_return),
        "median age": f"{draws.median_age:.2f}",
        "selecting": f"{draws.segments_per_second / 1e6:.2g} M/s",
    }


def learned_cells(outcome: Outcome) -> dict[str, str]:
    """Return what a trained strategy came to, by heading."""
    versus = outcome.versus or Difference(pairs=0, mean=math.nan)
    difference = "-" if outcome.versus is None else f"{versus.mean:+,.3g}"
    if abs(versus.mean) >= 100:
        difference = f"{versus.mean:+,.0f}"
    return {
        "return": "-" if outcome.final is None else str(outcome.final),
        "IQM": "-" if outcome.iqm is None else short(outcome.iqm),
        "95 % of IQM": _interval(outcome.iqm_low, outcome.iqm_high),
        "score": "-" if outcome.score is None else str(outcome.score),
        "difference": difference,
        "95 % of difference": _interval(versus.low, versus.high),
        "p": _p(versus.holm_p),
        "p (permutation)": _p(versus.permutation_p),
        "verdict": "baseline" if outcome.versus is None else versus.verdict,
    }


def _percent(share: float) -> str:
    if 0 < share < 0.0005:
        return f"{100 * share:.2g} %"
    return "> 99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.1f} %"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{short(low)} to {short(high)}"


def _p(value: float | None) -> str:
    return "-" if value is None else "< 0.001" if value < 0.001 else f"{value:.2g}"


def facts_text(comparison: Comparison) -> str:
    """Return what was measured, in one line."""
    data = comparison.data
    return (
        f"{count_text(data.episodes, 'episode')}, {count_text(data.steps, 'step')}; "
        f"{count_text(comparison.batches, 'batch', 'batches')} of {comparison.batch_size} windows "
        f"of {comparison.context_length} steps per strategy, seed {comparison.seed}. "
        f"{comparison.machine['cpu']}, {comparison.machine['date']}."
    )


def problems(comparison: Comparison) -> list[str]:
    """Return a line on each strategy that could not run and each run that failed."""
    lines = [f"{one.label}: {one.error}" for one in comparison.strategies if one.error is not None]
    failures = [failure for outcome in comparison.outcomes for failure in outcome.failures]
    return lines + [f"{run}: {error}" for run, error in failures]


def print_comparison(comparison: Comparison, *, console: Console | None = None) -> None:
    """Print the verdict, then what strategies came to, else what they drew: its main columns."""
    console = console or Console()
    console.print(escape(comparison.verdict), highlight=False, style="bold")
    rows = {one.label: learned_cells(one) for one in comparison.outcomes} or _drawn(comparison)
    headings = [name for name in next(iter(rows.values()), {}) if name in MAIN]
    cells = [[label, *(row[name] for name in headings)] for label, row in rows.items()]
    print_table(console, ["strategy", *headings], cells)
    console.print(escape(facts_text(comparison)), highlight=False, style="dim")
    for line in problems(comparison):
        console.print(escape(printable(line)), highlight=False)


def _drawn(comparison: Comparison) -> dict[str, dict[str, str]]:
    rows = comparison.strategies
    return {one.label: drawn_cells(one.draws) for one in rows if one.draws is not None}


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write ``strategies.json`` and ``strategies.html``."""
    text = json.dumps(comparison.to_json(), indent=1, allow_nan=False) + "\n"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "strategies.json", text.encode())
        write_file(folder / "strategies.html", render(comparison).encode())


def render(comparison: Comparison) -> str:
    """Return the page of a comparison."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda label: re.sub(r"(?<=[_=])", "\u200b", str(label))
    data, outcomes = comparison.data, comparison.outcomes
    draws = {one.label: one.draws for one in comparison.strategies if one.draws is not None}
    everyone = list(draws.values())
    played = [outcome for outcome in outcomes if outcome.final is not None]
    return environment.get_template("page.html.j2").render(
        comparison=comparison,
        name=data.path.rstrip("/").rpartition("/")[2],
        facts=facts_text(comparison),
        problems=problems(comparison),
        drawn=_drawn(comparison),
        learned={outcome.label: learned_cells(outcome) for outcome in outcomes},
        pictures={label: _drawn_picture(one, data, everyone) for label, one in draws.items()},
        final_picture=_final_picture(played) if played else None,
    )


def _source(figure: Any) -> str:
    """Return a figure as the source of an image: SVG with text as text, the same for the same."""
    content = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "gear-offline"}
    with matplotlib.rc_context(settings):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{b64encode(content.getvalue()).decode()}"


def _drawn_picture(draws: Draws, data: Data, everyone: Sequence[Draws]) -> str:
    """Draw what one strategy drew: returns, and coverage over batches."""
    figure = Figure(figsize=(4.2, 3.8), facecolor="white", layout="constrained")
    returns, coverage = figure.subplots(2, 1)
    returns.stairs(_percents(data.returns), data.edges, fill=True, color="#B8BEC5")
    returns.stairs(_percents(draws.returns), data.edges, color=BLUE, linewidth=1.8)
    dress(returns, x="return of the episodes drawn (grey: the data)", y="%")
    highest = max(max(*one.returns, *data.returns) for one in everyone)
    cut = 106 * min(TALLEST * max(data.returns), highest)
    returns.set_ylim(0, cut)
    if 100 * max(draws.returns) > cut:
        returns.text(
            0.99, 0.97, f"cut: the highest is {100 * max(draws.returns):.0f} %", ha="right",
            va="top", fontsize=9, color=GREY, transform=returns.transAxes, backgroundcolor="white",
        )  # fmt: skip
    for other in everyone:
        batches, seen = zip(*other.coverage, strict=True)
        colour, width, layer = (BLUE, 1.8, 3) if other is draws else (FAINT, 1.0, 2)
        points = (0, *batches), _percents((0, *seen))
        coverage.plot(*points, color=colour, linewidth=width, zorder=layer)
    dress(coverage, x="batches; share of all starts drawn so far", y="%")
    coverage.set_ylim(0, 106)
    for axes in (returns, coverage):
        thousands(axes.xaxis)
    return _source(figure)


def _percents(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def _final_picture(outcomes: Sequence[Outcome]) -> str:
    """Draw each seed's last return, and the mean with its interval, one row a strategy."""
    size = (7.2, 0.9 + 0.42 * len(outcomes))
    axes = Figure(figsize=size, facecolor="white", layout="constrained").add_subplot()
    for place, outcome in enumerate(outcomes):
        final = outcome.final
        assert final is not None, "only what was played is drawn"
        colour = BLUE if outcome.versus is not None else ORANGE
        axes.errorbar(
            final.mean, place, xerr=final.half, fmt="|", markersize=16, color=colour,
            markeredgewidth=2.5, elinewidth=5, alpha=0.55,
        )  # fmt: skip
        axes.plot(
            final.values, [place] * len(final.values), "o", markersize=5.5,
            markerfacecolor="white", markeredgecolor=INK, markeredgewidth=1,
        )  # fmt: skip
    baseline = outcomes[0]
    if baseline.versus is None and baseline.final is not None:
        axes.axvline(baseline.final.mean, color=GREY, linewidth=1, linestyle="--", zorder=0)
    axes.set_yticks(range(len(outcomes)), [shortened(outcome.label) for outcome in outcomes])
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    dress(axes, x="last return: seeds, mean, 95 % interval from 3 seeds on", grid="x")
    thousands(axes.xaxis)
    return _source(axes.figure)
