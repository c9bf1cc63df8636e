"""The table and the picture of results of `benchmarks.ogbench` and `benchmarks.gcbc`.

    python -m benchmarks.ogbench_page ogbench.json gcbc.json --out docs/studies/ogbench

It writes OGBENCH.json and OGBENCH.png, and prints the table.  Seeds of one model in several files
are joined.  Shares of successes are in percent, with the 95 % Student t interval over seeds.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.ogbench import MODELS, text_of
from gear_offline.artifacts.records import mean_interval
from gear_offline.core import plots
from gear_offline.core.files import write_file
from gear_offline.core.system import clean_commit
from gear_offline.sweep.results import LEAST_SEEDS

FACTS = ("commit", "command", "machine", "ogbench")  # of a document, kept with each of its rows
JOINED = ("seeds", "success", "tasks", "loss", "curve")
Row = dict[str, Any]


def join(documents: Sequence[dict[str, Any]]) -> list[Row]:
    """Return a row a set, model and number of steps, with the seeds of all."""
    rows = dict[tuple[Any, ...], Row]()
    of_all = [{key: d[key] for key in FACTS if key in d} for d in documents]
    for row in (of | row for of, d in zip(of_all, documents, strict=True) for row in d["results"]):
        key = row["set"], row["model"], row["steps"]
        if key not in rows:
            rows[key] = row | {name: [] for name in JOINED}
        for name in JOINED:
            rows[key][name] = rows[key][name] + row.get(name, [])
    order = [*dict.fromkeys(["gcbc of OGBench", *MODELS, *(row["model"] for row in rows.values())])]
    return sorted(rows.values(), key=lambda r: (r["set"], order.index(r["model"]), r["steps"]))


def table(rows: Sequence[Row]) -> str:
    """Return rows as Markdown: success of all tasks, of each, and loss."""
    tasks = max(len(row["tasks"][0]) for row in rows)
    heads = [
        "set",
        "model",
        "steps",
        "seeds",
        "success, %",
        *(f"task {n + 1}" for n in range(tasks)),
    ]
    lines = [f"| {' | '.join([*heads, 'loss'])} |", f"|---|---|{'---:|' * (len(heads) - 1)}"]
    for row in rows:
        each = [f"{100 * share:.0f}" for share in np.mean(row["tasks"], axis=0)]
        cells = [row["set"], row["model"], f"{row['steps']:,}", str(len(row["seeds"]))]
        cells += [text_of(row["success"]), *each, text_of(row["loss"], digits=4, scale=1.0)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row]) -> Figure:
    """Draw the mean success of each model on each set, with its interval and a dot a seed."""
    ranked = sorted((row for row in rows if row["set"] == rows[0]["set"]), key=_success)
    ends = [f"{100 * _success(row):.0f} % by {row['model']}" for row in (ranked[-1], ranked[0])]
    title = f"{rows[0]['set'].rsplit('-')[-1]}: {'; '.join(dict.fromkeys(ends))}"
    figure, names = plots.new_figure(), [*dict.fromkeys(row["set"] for row in rows)]
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        own = [row for row in rows if row["set"] == name]
        for place, row in enumerate(own):
            shares = 100 * np.array(row["success"])
            axes.bar(place, shares.mean(), 0.7, color=plots.BLUE, alpha=0.35)
            axes.scatter([place - 0.15] * shares.size, shares, s=11, color=plots.BLUE, alpha=0.6)
            if shares.size >= LEAST_SEEDS:
                axes.vlines(place, *mean_interval(shares), color=plots.INK, linewidth=1.5)
        plots.dress(axes, x=name, y="" if axes is not panels[0] else "success, %")
        steps = len({row["steps"] for row in own}) > 1
        labels = [row["model"] + (f", {row['steps']:,}" if steps else "") for row in own]
        axes.set_xticks(range(len(own)), labels, rotation=30, ha="right")
        axes.set_ylim(bottom=0)
    counts = {len(row["seeds"]) for row in rows}
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    plots.titles(
        figure,
        title,
        f"episodes that succeed: mean over {seeds} seeds (dots), line: its 95 % interval",
    )
    return figure


def _success(row: Row) -> float:
    return float(np.mean(row["success"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("ogbench"), help="name without its end")
    chosen = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in chosen.files]
    results = join(documents)
    command = f"python -m benchmarks.ogbench_page {shlex.join(sys.argv[1:])}"
    page = {"commit": clean_commit(), "command": command, "results": results}
    write_file(chosen.out.with_suffix(".json"), json.dumps(page).encode())
    plots.save_figure(plot(results), chosen.out.with_suffix(".png"))
    print(table(results))
