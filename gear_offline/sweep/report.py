"""The report of a sweep: ``sweep.md``, its plots, and the table on the terminal.

Made from ``sweep.json`` and the run directories alone, so that it can be written at any time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from gear_offline.config.recipe import Recipe
from gear_offline.core.files import write_file
from gear_offline.core.text import count_text, remedies_once
from gear_offline.evaluation.split_table import SplitTable
from gear_offline.runs.plots import short
from gear_offline.sweep.directory import read_sweep
from gear_offline.sweep.points import SweepPoint, plain_label
from gear_offline.sweep.results import RunResult, read_result
from gear_offline.sweep.summary import INTERVAL, curves, summarize
from gear_offline.training.metrics import ranking

COLUMNS = {
    "return_last": "return, last",
    "return_best": "return, best",
    "score_last": "score, last",
    "score_best": "score, best",
    "loss": "loss",
}
Row = Mapping[str, Any]


def load_sweep(path: Path) -> tuple[dict[str, Any], list[SweepPoint], list[RunResult]]:
    """Return ``sweep.json``, its points and what their runs came to."""
    document = read_sweep(path)
    points = [
        SweepPoint(
            name=row["name"],
            recipe=Recipe.parse(row["recipe"], where=f"{path}/sweep.json"),
            settings=row["settings"],
        )
        for row in document["points"]
    ]
    results = [
        read_result(point, path / "runs" / point.name, error=row.get("error"))
        for point, row in zip(points, document["points"], strict=True)
    ]
    return document, points, results


def ranked(summary: Row) -> list[Row]:
    """Return the rows of a summary, the best one first."""
    rows = list(summary["rows"])
    for metric, sign in (("return_last", -1.0), ("loss", 1.0)):
        if any(row[metric] for row in rows):
            return sorted(
                rows, key=lambda row: sign * row[metric]["mean"] if row[metric] else math.inf
            )
    return rows


def write_sweep_report(path: str | Path) -> Path:
    """Write ``sweep.md`` and the plots of a sweep and return the report's path.

    Raises
    ------
    InputError
        ``SWEEP_DIRECTORY`` if there is no sweep.
    """
    path = Path(path)
    document, points, results = load_sweep(path)
    summary = summarize(points, results)
    rows = ranked(summary)
    parts = [f"# {path.name}\n", _facts(document, results), _markdown_table(rows)]
    for title, picture in _plots(path, points, results, rows).items():
        parts.append(f"## {title}\n\n![{title}]({picture.relative_to(path).as_posix()})\n")
    parts.append(_runs_table(results))
    report = path / "sweep.md"
    write_file(report, "\n".join(parts).encode())
    return report


def _plots(
    path: Path, points: Sequence[SweepPoint], results: Sequence[RunResult], rows: Sequence[Row]
) -> dict[str, Path]:
    from gear_offline.sweep.plots import plot_sweep_curves, plot_sweep_runs

    complete = [row for row in rows if row["complete"]]
    if not complete:
        return {}
    found = {
        "Learning curves": plot_sweep_curves(
            path / "plots" / "learning_curves.png",
            curves(points, results),
            order=[row["label"] for row in complete],
            name=path.name,
            runs=sum(row["complete"] for row in complete),
        )
    }
    metric, what = ("loss", "training loss")
    if any(row["return_last"] for row in complete):
        metric, what = ("return_last", "return of the last evaluation")
    if any(row[metric] for row in complete):
        found["Every run"] = plot_sweep_runs(
            path / "plots" / "runs.png", complete, metric=metric, what=what, name=path.name
        )
    return found


def _facts(document: Row, results: Sequence[RunResult]) -> str:
    states = [result.status for result in results]
    counts = ", ".join(
        f"{states.count(state)} {word}"
        for state, word in (("complete", "complete"), ("failed", "failed"), ("open", "not done"))
        if state in states
    )
    text = f"{count_text(len(results), 'run')} of `{document['recipe']}`: {counts}."
    if document.get("mode"):
        at_once = document.get("parallel") or 1
        text += f" Mode {document['mode']}, {at_once} at a time."
    return f"{text} Intervals: {INTERVAL}.{_others(document)}\n"


def _others(document: Row) -> str:
    """Return what the table leaves out, with a space before it; nothing where it has all runs."""
    count = len(document.get("others", ()))
    if not count:
        return ""
    return f" Not asked for last and not in the table: {count_text(count, 'more run')}."


def shown_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns that have something to show."""
    return [name for name in COLUMNS if any(row[name] for row in rows)]


def _cell(found: Row | None) -> str:
    if not found:
        return "-"
    low, high = found["ci95"]
    if low is None or math.isnan(low):
        return short(found["mean"])
    return f"{short(found['mean'])} ({short(low)} to {short(high)})"


def _markdown_table(rows: Sequence[Row]) -> str:
    columns = shown_columns(rows)
    lines = [
        "| setting | seeds | " + " | ".join(COLUMNS[name] for name in columns) + " |",
        "|---|---:|" + "---:|" * len(columns),
    ]
    for row in rows:
        cells = [_cell(row[name]) for name in columns]
        lines.append(f"| {_escaped(row['label'])} | {row['complete']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _errors(results: Sequence[RunResult]) -> dict[str, str]:
    """Return what ended the runs that failed, by name."""
    failed = {result.name: str(result.error) for result in results if result.status == "failed"}
    return dict(zip(failed, remedies_once(failed.values()), strict=True))


def _runs_table(results: Sequence[RunResult]) -> str:
    errors = _errors(results)
    lines = [
        "## Runs\n",
        "| run | state | steps | loss | return, last |",
        "|---|---|---:|---:|---:|",
    ]
    for result in results:
        score = None if result.evaluation_last is None else ranking(result.evaluation_last)
        error = errors.get(result.name)
        state = result.status if error is None else f"failed: {error}"
        cells = [
            f"[{result.name}](runs/{result.name}/report.md)"
            if result.status == "complete"
            else result.name,
            _escaped(state),
            f"{result.steps:,}",
            "-" if result.loss is None else f"{result.loss:.4g}",
            "-" if score is None else short(score),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def sweep_document(path: str | Path) -> dict[str, Any]:
    """Return what ``--json`` prints: the content of ``sweep.json`` without the recipes."""
    document = read_sweep(Path(path))
    rows = {
        name: [{key: value for key, value in row.items() if key != "recipe"} for row in found]
        for name, found in document.items()
        if name in ("points", "others")
    }
    return {**document, **rows, "path": os.fspath(path)}


def print_sweep(path: str | Path, *, console: Console | None = None) -> None:
    """Print the table of a sweep, one row a setting, the best one first."""
    console = Console() if console is None else console
    document, points, results = load_sweep(Path(path))
    rows = ranked(summarize(points, results))
    columns = [
        ("setting", [plain_label(row["label"]) for row in rows]),
        ("seeds", [str(row["complete"]) for row in rows]),
    ]
    for name in shown_columns(rows):
        columns.append((COLUMNS[name], [_cell(row[name]).replace(" (", "\n(") for row in rows]))
    title = f"{Path(path).name}, by setting"
    table = SplitTable(columns=columns, title=title, widest_label=console.width // 3)
    console.print(table, highlight=False)
    bracketed = any("(" in cell for _, cells in columns[2:] for cell in cells)
    note = f"In brackets: {INTERVAL}." if bracketed else "Intervals take two seeds or more."
    console.print(f"{note}{_others(document)}", highlight=False)
    for name, error in _errors(results).items():
        console.print(f"{escape(name)} failed: {escape(error)}", highlight=False)
