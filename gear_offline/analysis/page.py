"""A comparison of strategies as tables on the terminal and as one HTML page.

The page needs no network and no script; its plots are SVG pictures inside it.  All plots of one
kind have the same axes, so that strategies can be compared by eye.
"""

from __future__ import annotations

import io
import json
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape

from gear_offline.analysis.compare import Comparison, Outcome
from gear_offline.analysis.sampling import Data, Draws
from gear_offline.core.files import write_file, writing
from gear_offline.core.text import count_text, printable, remedies_once
from gear_offline.runs.plots import BLUE, FAINT, GREY, INK, ORANGE, dress, short, thousands
from gear_offline.sweep.report import print_table

TALLEST = 2.5  # times the data's own tallest bar: higher ones are cut, and it is said
COLUMNS_AT_ONCE = 5  # beside the name of the strategy, on the terminal


@dataclass(frozen=True)
class Column:
    """A figure of a strategy: its heading, how it is written, what it means.

    `main` columns are those that the terminal shows without ``--all``.
    """

    title: str
    text: Callable[[Any], str]
    meaning: str
    main: bool = False


def _percent(name: str) -> Callable[[Draws], str]:
    def text(draws: Draws) -> str:
        value = 100 * float(getattr(draws, name))
        if 0 < value < 0.05:
            return f"{value:.2g} %"
        return "> 99.9 %" if 99.95 <= value < 100 else f"{value:.1f} %"

    return text


def _moved(draws: Draws) -> str:
    share = draws.moved_share["4"]
    return "-" if share is None else f"{100 * share:.1f} %"


DRAWN = (
    Column("starts drawn", _percent("coverage_starts"), "starts that were drawn at least once"),
    Column(
        "steps shown",
        _percent("coverage_steps"),
        "steps that lay in a window at least once",
        main=True,
    ),
    Column("episodes", _percent("coverage_episodes"), "episodes that were drawn at least once"),
    Column(
        "effective starts",
        lambda draws: short(draws.effective_segments),
        "how many equally likely starts would repeat as often as these: 1 over the mean "
        "probability of what is drawn",
        main=True,
    ),
    Column(
        "effective sample size",
        _percent("effective_sample_share"),
        "of the draws over their number, when weights make up for the strategy's preferences among "
        "the starts that it can draw",
    ),
    Column(
        "duplicate starts",
        _percent("duplicate_starts"),
        "slots whose start is in their batch already",
        main=True,
    ),
    Column(
        "duplicate episodes",
        _percent("duplicate_episodes"),
        "slots whose episode is in their batch already",
    ),
    Column("padding", _percent("padding"), "places of windows that hold no step", main=True),
    Column(
        "mean return",
        lambda draws: short(draws.mean_return),
        "mean over draws of the return of the episode drawn",
        main=True,
    ),
    Column(
        "median age",
        lambda draws: f"{draws.age_quartiles[1]:.2f}",
        "place in the table of the median draw: 0 is the newest step, 1 the oldest",
    ),
    Column(
        "from GPU memory",
        _percent("hbm_share"),
        "predicted share of steps read from GPU memory when the episodes that are drawn most per "
        "byte fill the budget (loader.hbm_budget, or half of the table)",
    ),
    Column(
        "cross-node traffic",
        _moved,
        "predicted share of segments that leave their node when the table is split over four, one "
        "rank each",
    ),
    Column(
        "selecting",
        lambda draws: f"{draws.segments_per_second / 1e6:.2g} M/s",
        "segments selected per second by the CPU that made this, without gathering",
    ),
)


def _final(outcome: Outcome) -> str:
    return "-" if outcome.final is None else str(outcome.final)


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{short(low)} to {short(high)}"


def _versus(name: str, text: Callable[[float], str]) -> Callable[[Outcome], str]:
    def cell(outcome: Outcome) -> str:
        value = None if outcome.versus is None else getattr(outcome.versus, name)
        return "-" if value is None else text(value)

    return cell


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{short(value)}"


LEARNED = (
    Column(
        "return",
        _final,
        "mean over seeds of the last evaluation, for the target return that served the run best, ± "
        "half of its 95 % Student t interval (from 3 seeds on)",
        main=True,
    ),
    Column(
        "IQM",
        lambda outcome: "-" if outcome.iqm is None else short(outcome.iqm),
        "interquartile mean over seeds (of several tasks, over their normalized scores too)",
        main=True,
    ),
    Column(
        "95 % of IQM",
        lambda outcome: _interval(outcome.iqm_low, outcome.iqm_high),
        "percentile interval of the interquartile mean, by stratified bootstrap over seeds",
    ),
    Column(
        "score",
        lambda outcome: "-" if outcome.score is None else str(outcome.score),
        "normalized score on D4RL's scale of 0 to 100",
    ),
    Column(
        "difference",
        _versus("mean", _signed),
        "mean over seeds of the return minus that of the baseline with the same seed",
        main=True,
    ),
    Column(
        "95 % of difference",
        lambda o: "-" if o.versus is None else _interval(o.versus.low, o.versus.high),
        "Student t interval of the difference by itself: not corrected over the strategies",
    ),
    Column(
        "p",
        _versus("holm_p", _p),
        "paired t test of the difference, with Holm's correction over the strategies",
        main=True,
    ),
    Column(
        "p (permutation)",
        _versus("permutation_p", _p),
        "paired sign-flip permutation test of the difference, without correction",
    ),
    Column(
        "verdict",
        lambda o: "baseline" if o.versus is None else o.versus.verdict,
        "higher or lower where the corrected t test says p < 0.05 of three seeds or more",
        main=True,
    ),
)


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
    errors = remedies_once(error for _, error in failures)
    return lines + [f"{run}: {error}" for (run, _), error in zip(failures, errors, strict=True)]


def print_comparison(
    comparison: Comparison, *, everything: bool = False, console: Console | None = None
) -> None:
    """Print the verdict, then one table; with `everything` all columns, in several tables."""
    console = Console() if console is None else console
    console.print(escape(comparison.verdict), highlight=False, style="bold")
    drawn = [(one.label, one.draws) for one in comparison.strategies if one.draws is not None]
    learned = [(outcome.label, outcome) for outcome in comparison.outcomes]
    if learned:
        _print_columns(console, LEARNED, learned, everything)
    if drawn and (everything or not learned):
        _print_columns(console, DRAWN, drawn, everything)
    console.print(escape(facts_text(comparison)), highlight=False, style="dim")
    for line in problems(comparison):
        console.print(escape(printable(line)), highlight=False)


def _print_columns(
    console: Console, columns: Sequence[Column], rows: Sequence[tuple[str, Any]], everything: bool
) -> None:
    shown = [column for column in columns if everything or column.main]
    for first in range(0, len(shown), COLUMNS_AT_ONCE):
        part = shown[first : first + COLUMNS_AT_ONCE]
        cells = [[label, *(column.text(row) for column in part)] for label, row in rows]
        print_table(console, ["strategy", *(column.title for column in part)], cells)
        console.print()


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
    rows = {one.label: one.draws for one in comparison.strategies if one.draws is not None}
    everyone = list(rows.values())
    data = comparison.data
    pictures = {label: _drawn_picture(one, data, everyone) for label, one in rows.items()}
    played = [outcome for outcome in comparison.outcomes if outcome.final is not None]
    return environment.get_template("page.html.j2").render(
        comparison=comparison,
        name=data.path.rstrip("/").rpartition("/")[2],
        facts=facts_text(comparison),
        problems=problems(comparison),
        drawn_columns=DRAWN,
        learned_columns=LEARNED,
        rows=rows,
        pictures=pictures,
        final_picture=_final_picture(played) if played else None,
        curve_picture=_curve_picture(played) if played else None,
    )


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), facecolor="white", layout="constrained")


def _source(figure: Figure) -> str:
    """Return a figure as the source of an image: SVG with text as text, the same for the same."""
    content = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "gear-offline"}
    with matplotlib.rc_context(settings):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{b64encode(content.getvalue()).decode()}"


def _drawn_picture(draws: Draws, data: Data, everyone: Sequence[Draws]) -> str:
    """Draw what one strategy drew: returns, coverage over batches, places in the table."""
    figure = _figure(4.2, 5.4)
    returns, coverage, ages = figure.subplots(3, 1)
    tallest = 100 * min(
        TALLEST * max(data.returns), max(max(*one.returns, *data.returns) for one in everyone)
    )
    returns.stairs(
        [100 * share for share in data.returns],
        data.edges,
        fill=True,
        color="#B8BEC5",
        label="data",
    )
    returns.stairs([100 * share for share in draws.returns], data.edges, color=BLUE, linewidth=1.8)
    _finish(returns, "return of the episodes drawn (grey: the data)", tallest, draws.returns)
    thousands(returns.xaxis)
    for other in everyone:
        batches, seen, _ = zip(*other.coverage, strict=True)
        mine = other is draws
        coverage.plot(
            (0, *batches),
            (0, *(100 * share for share in seen)),
            color=BLUE if mine else FAINT,
            linewidth=1.8 if mine else 1.0,
            zorder=3 if mine else 2,
        )
    _finish(coverage, "batches; share of all starts drawn so far", 100)
    thousands(coverage.xaxis)
    even = 100 / len(draws.ages)
    tallest = min(TALLEST * even, 100 * max(max(one.ages) for one in everyone))
    places = [(i + 0.5) / len(draws.ages) for i in range(len(draws.ages))]
    ages.bar(places, [100 * share for share in draws.ages], 0.8 / len(draws.ages), color=BLUE)
    ages.axhline(even, color=GREY, linewidth=1, linestyle="--")
    ages.set_xticks([0, 1], ["oldest", "newest"])
    _finish(ages, "place in the table", max(tallest, 1.5 * even), draws.ages)
    return _source(figure)


def _finish(axes: Axes, text: str, tallest: float, shares: Sequence[float] = ()) -> None:
    """Name a panel; where its bars are cut, say how high the highest one is."""
    dress(axes, x=text, y="%")
    axes.set_ylim(0, 1.06 * tallest)
    if shares and 100 * max(shares) > 1.06 * tallest:
        axes.text(
            0.99, 0.97, f"cut: the highest is {100 * max(shares):.0f} %", ha="right", va="top",
            fontsize=9, color=GREY, transform=axes.transAxes, backgroundcolor="white",
        )  # fmt: skip


def _final_picture(outcomes: Sequence[Outcome]) -> str:
    """Draw each seed's last return, and the mean with its interval, one row a strategy."""
    figure = _figure(7.2, 0.9 + 0.42 * len(outcomes))
    axes = figure.add_subplot()
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
    axes.set_yticks(range(len(outcomes)), [_short(outcome.label) for outcome in outcomes])
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    dress(axes, x="last return: seeds, mean, 95 % interval from 3 seeds on", grid="x")
    thousands(axes.xaxis)
    return _source(figure)


def _curve_picture(outcomes: Sequence[Outcome]) -> str:
    """Draw the mean over seeds of each strategy over steps, the baseline dashed."""
    figure = _figure(7.2, 4.0)
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for place, outcome in enumerate(outcomes):
        if outcome.curve is None:
            continue
        means = outcome.curve.values.mean(axis=0)
        colour = INK if outcome.versus is None else colours[place % len(colours)]
        style = "--" if outcome.versus is None else "-"
        axes.plot(
            outcome.curve.steps, means, style, marker="o", markersize=3.5, color=colour,
            linewidth=1.8, label=_short(outcome.label),
        )  # fmt: skip
    dress(axes, x="optimizer step", y="mean return over seeds")
    thousands(axes.xaxis)
    thousands(axes.yaxis)
    axes.legend(fontsize=9, frameon=False, loc="best")
    return _source(figure)


def _short(label: str) -> str:
    return label if len(label) <= 34 else f"{label[:16]}...{label[-15:]}"
