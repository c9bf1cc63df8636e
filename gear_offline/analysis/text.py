"""The columns of a comparison of strategies, as a table in the terminal, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from gear_offline.core.text import count_text
from gear_offline.evaluation.split_table import SplitTable

Row = Mapping[str, Any]
LABEL_WIDTH = 26


def short(value: float) -> str:
    """Return `value` with separators, and decimals only where it is small."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.3g}"


def _percent(key: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value = 100 * float(row[key])
        if 0 < value < 0.05:
            return f"{value:.2g} %"
        return "> 99.9 %" if 99.95 <= value < 100 else f"{value:.1f} %"

    return text


def _speed(row: Row) -> str:
    return f"{row['segments_per_second'] / 1e6:.2g} M/s"


def _moved(row: Row) -> str:
    share = row["moved_share"].get("4")
    return "-" if share is None else f"{100 * share:.1f} %"


@dataclass(frozen=True)
class Column:
    """A figure of a strategy: its heading, how it is written, and what it means."""

    title: str
    text: Callable[[Row], str]
    meaning: str


COLUMNS = (
    Column("starts drawn", _percent("coverage_starts"), "starts that were drawn at least once"),
    Column("steps shown", _percent("coverage_steps"), "steps that lay in a window at least once"),
    Column("episodes", _percent("coverage_episodes"), "episodes that were drawn at least once"),
    Column(
        "effective starts",
        lambda row: short(row["effective_segments"]),
        "how many equally likely starts would repeat as often as these: 1 over the mean "
        "probability of what is drawn, which is 1 over the sum of squared probabilities",
    ),
    Column(
        "sample worth",
        _percent("effective_sample_share"),
        "effective sample size of the draws over their number, when weights make up for the "
        "strategy's preferences among the starts that it can draw",
    ),
    Column(
        "twice in a batch",
        _percent("duplicate_starts"),
        "slots whose start is in their batch already",
    ),
    Column(
        "episode twice",
        _percent("duplicate_episodes"),
        "slots whose episode is in their batch already",
    ),
    Column("padding", _percent("padding"), "places of windows that hold no step"),
    Column(
        "mean return",
        lambda row: short(row["mean_return"]),
        "mean over draws of the return of the episode drawn",
    ),
    Column(
        "median age",
        lambda row: f"{row['age_quartiles'][1]:.2f}",
        "place in the table of the median draw: 0 is the newest step, 1 the oldest",
    ),
    Column(
        "from GPU memory",
        _percent("hbm_share"),
        "predicted share of steps read from GPU memory when the episodes that are drawn most per "
        "byte fill the budget",
    ),
    Column(
        "moved, 4 nodes",
        _moved,
        "predicted share of segments that leave their node when the table is split over four, "
        "one rank each, and every rank trains on an equal share of the batch",
    ),
    Column(
        "selecting",
        _speed,
        "segments selected a second by the CPU that made this, gathering left out",
    ),
)


def facts_line(document: Row) -> str:
    """Return what was measured, in one line."""
    data = document["data"]
    trained = "" if "training" in document else "; nothing was trained"
    return (
        f"{count_text(data['episodes'], 'episode')}, {count_text(data['steps'], 'step')}, mean "
        f"return of a step's episode {short(data['mean_return'])}. "
        f"{count_text(document['batches'], 'batch', 'batches')} of "
        f"{count_text(document['batch_size'], 'window')} of "
        f"{count_text(document['context_length'], 'step')} a strategy, "
        f"seed {document['seed']}{trained}. {document['machine']['cpu']}, "
        f"{document['machine']['date']}."
    )


def method_lines(document: Row) -> list[str]:
    """Return a line on each figure."""
    budgets = {row["hbm_budget_bytes"] for row in document["strategies"] if "error" not in row}
    lines = [f"{column.title}: {column.meaning}." for column in COLUMNS]
    if budgets:
        lines.append(
            f"Budget of GPU memory in the prediction: {max(budgets):,} bytes "
            "(loader.hbm_budget, or half of the table)."
        )
    return lines


def print_comparison(document: Row, *, console: Console | None = None) -> None:
    """Print the figures as tables, as many columns side by side as the terminal has room for."""
    console = Console() if console is None else console
    rows = [row for row in document["strategies"] if "error" not in row]
    console.print(escape(facts_line(document)), highlight=False)
    print_columns(console, COLUMNS, rows)
    for row in document["strategies"]:
        if "error" in row:
            console.print(f"{escape(row['label'])}: {escape(row['error'])}", highlight=False)


def print_columns(console: Console, columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Print columns of rows with a ``label``, as many side by side as there is room for."""
    if not rows:
        return
    cells = [(column.title, [column.text(row) for row in rows]) for column in columns]
    labels = ("strategy", [str(row["label"]) for row in rows])
    console.print()
    console.print(SplitTable(columns=[labels, *cells], widest_label=LABEL_WIDTH), highlight=False)
    console.print()
