"""A comparison of strategies as a table on the terminal and as one HTML page.

The page needs no network and no script; its picture is inside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.figure import Figure

from gear_offline.analysis.sampling import Draws
from gear_offline.analysis.significance import Comparison, Outcome
from gear_offline.core import plots
from gear_offline.core.files import write_file, writing
from gear_offline.core.progress import Terminal, print_table
from gear_offline.core.text import count_text, interval_text, short
from gear_offline.runs.page import make_page
from gear_offline.runs.report import render_page

MAIN = {  # what the terminal shows; the page has all
    *("steps shown", "effective starts", "duplicate starts", "padding", "mean return"),
    *("return", "difference", "p", "verdict"),
}
DASHES = ("-", "--", ":")  # of strategies beyond the number of colours


def drawn_cells(draws: Draws) -> dict[str, str]:
    """Return the figures of a strategy's draws by heading; page.md.j2 explains the headings."""
    return {
        "starts drawn": _percent(draws.coverage_starts),
        "steps shown": _percent(draws.coverage_steps),
        "effective starts": short(draws.effective_segments),
        "effective sample size": _percent(draws.effective_sample_share),
        "duplicate starts": _percent(draws.duplicate_starts),
        "padding": _percent(draws.padding),
        "mean return": short(draws.mean_return),
        "median age": f"{draws.median_age:.2f}",
    }


def learned_cells(outcome: Outcome) -> dict[str, str]:
    """Return the results of a trained strategy by heading."""
    versus = outcome.versus
    return {
        "return": str(outcome.final or "-"),
        "score": str(outcome.score or "-"),
        "difference": ("+" if versus.mean > 0 else "") + short(versus.mean) if versus else "-",
        "95 % of difference": interval_text((versus.low, versus.high)) if versus else "-",
        "p": _p(versus.holm_p) if versus else "-",
        "verdict": versus.verdict if versus else "baseline",
    }


def _percent(share: float) -> str:
    if 0 < share < 0.0005:
        return f"{100 * share:.2g} %"
    return "> 99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.1f} %"


def _p(value: float | None) -> str:
    return "-" if value is None else "< 0.001" if value < 0.001 else f"{value:.2g}"


def _collect_draws(comparison: Comparison) -> dict[str, Draws]:
    return {s.label: s.draws for s in comparison.strategies if s.draws is not None}


def _remarks(comparison: Comparison) -> list[str]:
    """Describe the measurement, then each strategy and each run that failed, a line each."""
    data = comparison.data
    measured = (
        f"{count_text(data.episodes, 'episode')}, {count_text(data.steps, 'step')}; "
        f"{count_text(comparison.batches, 'batch', 'batches')} of {comparison.batch_size} windows "
        f"of {comparison.context_length} steps per strategy, seed {comparison.seed}. "
        f"{comparison.machine['cpu']}, {comparison.machine['date']}."
    )
    left_out = [(s.label, s.error) for s in comparison.strategies if s.error is not None]
    failed = [failure for outcome in comparison.outcomes for failure in outcome.failures]
    return [measured, *(f"{name}: {error}" for name, error in (*left_out, *failed))]


def print_comparison(comparison: Comparison, *, console: Terminal | None = None) -> None:
    """Print the verdict and the main columns of results, else of draws."""
    console = console or Terminal()
    console.print(comparison.verdict, style="bold")
    rows = {outcome.label: learned_cells(outcome) for outcome in comparison.outcomes}
    rows = rows or {
        label: drawn_cells(draws) for label, draws in _collect_draws(comparison).items()
    }
    headings = [name for name in next(iter(rows.values()), {}) if name in MAIN]
    cells = [[label, *(row[name] for name in headings)] for label, row in rows.items()]
    print_table(console, ["strategy", *headings], cells)
    for line in _remarks(comparison):
        console.print(line, style="dim")


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write ``strategies.json`` and ``strategies.html``."""
    text = json.dumps(comparison.to_json(), indent=1, allow_nan=False) + "\n"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "strategies.json", text.encode())
        write_file(folder / "strategies.html", render(comparison).encode())


def render(comparison: Comparison) -> str:
    draws = _collect_draws(comparison)
    with TemporaryDirectory(prefix="gear-") as folder:
        if draws:
            plots.save_figure(_plot_draws(comparison), Path(folder, "draws.png"))
        text = render_page(
            Path(__file__).with_name("page.md.j2"),
            comparison=comparison,
            name=comparison.data.path.rstrip("/").rpartition("/")[2],
            remarks=_remarks(comparison),
            drawn={label: drawn_cells(each) for label, each in draws.items()},
            learned={outcome.label: learned_cells(outcome) for outcome in comparison.outcomes},
        )
        return make_page(text, Path(folder))


def _plot_draws(comparison: Comparison) -> Figure:
    """Draw the distribution of drawn returns and the coverage, a line a strategy."""
    figure, data = plots.new_figure(), comparison.data
    returns, coverage = figure.subplots(2, 1)
    edges = np.array(data.edges[1:])
    returns.fill_between(edges, 100 * np.cumsum(data.returns), color=plots.FAINT, label="the data")
    for index, (label, draws) in enumerate(_collect_draws(comparison).items()):
        count = len(plots.SERIES)
        colour, dash = plots.SERIES[index % count], DASHES[index // count % len(DASHES)]
        returns.plot(edges, 100 * np.cumsum(draws.returns), dash, color=colour)
        batches, shares = zip(*draws.coverage, strict=True)
        points = (0, *batches), 100 * np.array([0, *shares])
        coverage.plot(*points, dash, color=colour, label=plots.label(label))
    plots.dress(returns, x="return of the episode (grey: the data)", y="% of draws up to it")
    plots.dress(coverage, x="batches", y="% of starts drawn so far")
    plots.legend(coverage)
    for axes in (returns, coverage):
        axes.set_ylim(0, 106)
        plots.thousands(axes.xaxis)
    return figure
