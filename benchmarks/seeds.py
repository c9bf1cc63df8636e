"""The verdicts that fewer seeds would have given: power, and how often they say the opposite.

    gear-offline strategies hopper-medium --train --seeds 100 --out many
    python -m benchmarks.seeds many --out many

It writes MANY.json and MANY.png, and prints the table of a page.  ``--beside BC=FOLDER ...`` names
the same study of other models: a second table compares each of their settings with that of `many`.

Each setting of a ``strategies.json`` has pairs with the baseline, one a seed.  From their seeds so
many as a smaller study has are drawn with replacement, again and again, the same for all settings,
and tested as the page tests them: by the paired t test at 5 %, with Holm's correction and without.

Shape legend: C settings, N pairs there are, n pairs of a study, R studies.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from bisect import bisect_left
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from scipy import stats

from gear_offline.analysis.significance import difference, holm
from gear_offline.core import plots
from gear_offline.core.files import write_file
from gear_offline.core.system import clean_commit
from gear_offline.sweep.results import estimate

SIZES = (3, 5, 8, 10, 15, 20, 30, 50)
STUDIES = 10_000
LEVEL = 0.05
POWER = 0.8  # by custom
SEED = 20261127


def shares(
    differences: npt.ArrayLike, pairs: int, *, studies: int = STUDIES
) -> list[dict[str, float]]:
    """Return for each setting how often studies of so many pairs have each verdict.

    Parameters
    ----------
    differences
        (C, N) results of settings less those of the baseline, by seed; means are the truth.
    pairs
        n.
    studies
        R.

    Returns
    -------
    list of dict
        ``right``: a significant difference of the true sign; ``corrected``: the same after Holm's
        correction for C settings; ``wrong``: a significant one of the other sign; ``opposite``: a
        mean of the other sign, significant or not; ``exaggeration``: the mean of significant
        differences of the true sign by the truth.
    """
    values = np.asarray(differences, np.float64)
    truth = values.mean(1)
    random = np.random.default_rng(SEED)
    drawn = values[:, random.integers(values.shape[1], size=(studies, pairs))]  # (C, R, n)
    means = drawn.mean(2) * np.sign(truth)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):  # of equal differences
        t = means / (drawn.std(2, ddof=1) / np.sqrt(pairs))
    p = 2 * stats.t.sf(np.abs(t), pairs - 1)
    order, count = np.argsort(p, axis=0), len(values)
    raised = np.take_along_axis(p, order, 0) * np.arange(count, 0, -1)[:, None]
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(raised, 0), 0)
    shown = []
    for row in range(count):
        right = (p[row] < LEVEL) & (means[row] > 0)
        exaggeration = means[row][right].mean() / abs(truth[row]) if right.any() else np.nan
        each = {
            "right": right,
            "corrected": right & (adjusted[row] < LEVEL),
            "wrong": (p[row] < LEVEL) & (means[row] < 0),
            "opposite": means[row] < 0,
            "exaggeration": exaggeration,
        }
        shown.append({name: float(np.mean(value)) for name, value in each.items()})
    return shown


def needed(effect: float) -> int:
    """Return the pairs with which the t test has a power of 80 %.

    `effect` is the mean of the differences by their standard deviation; they are taken as normal.
    """

    def power(pairs: int) -> float:
        critical, shift = stats.t.ppf(1 - LEVEL / 2, pairs - 1), abs(effect) * np.sqrt(pairs)
        return float(stats.nct.sf(critical, pairs - 1, shift))

    sizes = range(2, 10_000)
    return sizes[min(bisect_left(sizes, POWER, key=power), len(sizes) - 1)]


def study(document: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the baseline of a ``strategies.json``, and a row for each other setting."""
    baseline, *others = (each for each in document["outcomes"] if each["final"])
    results = [
        dict(zip(each["seeds"], each["final"]["values"], strict=True))
        for each in (baseline, *others)
    ]
    seeds = sorted(set.intersection(*map(set, results)))
    values = np.array([[result[seed] for seed in seeds] for result in results])
    differences = values[1:] - values[0]
    by_size = {n: shares(differences, n) for n in SIZES if n <= len(seeds)}
    random = np.random.default_rng(SEED)
    rows = []
    for place, (other, own) in enumerate(zip(others, differences, strict=True)):
        row = {"setting": other["label"], "baseline": baseline["label"], "pairs": len(seeds)}
        row |= {"mean": float(own.mean()), "sd": float(own.std(ddof=1))}
        row |= {"final": other["final"], "versus": other["versus"]}
        row["studies"] = {size: each[place] for size, each in by_size.items()}
        again = own[random.integers(len(own), size=(STUDIES, len(own)))]
        with np.errstate(divide="ignore", invalid="ignore"):
            effects = np.abs(again.mean(1) / again.std(1, ddof=1))
            effect = abs(row["mean"]) / np.float64(row["sd"])
        low, high = np.percentile(effects, [2.5, 97.5])
        row["needed"] = [needed(each) for each in (effect, high, low)]
        rows.append(row)
    return baseline, rows


def plot(baseline: dict[str, Any], rows: list[dict[str, Any]]) -> Figure:
    """Draw the differences and, of those that all pairs show, the power by the number of seeds."""
    figure = plots.new_figure()
    left, right = figure.subplots(1, 2)
    looks = product(("-", "--"), plots.SERIES)  # a strategy has its own, in all pictures
    for place, (row, (style, colour)) in enumerate(zip(rows, looks, strict=False)):
        versus, shows = row["versus"], row["versus"]["verdict"] in ("higher", "lower")
        style, colour = (style, colour) if shows else ("-", plots.GREY)
        look = {"color": colour, "linestyle": style, "linewidth": 1.8}
        left.plot([versus["low"], versus["high"]], [place] * 2, **look)
        left.plot(row["mean"], place, marker="o", markersize=5, color=colour)
        if shows:
            counts, shares = map(int, row["studies"]), [s["right"] for s in row["studies"].values()]
            right.plot([*counts], shares, marker="o", markersize=4, **look)
            right.plot([], [], label=plots.label(row["setting"]), **look)  # its dashes are seen
    left.axvline(0, color=plots.GREY, linewidth=0.8)
    left.set_yticks(range(len(rows)), [plots.fit_text(row["setting"], 24) for row in rows])
    left.invert_yaxis()
    plots.dress(left, x="difference of returns, 95 %")
    left.grid(visible=False)
    plots.dress(right, x="seeds", y="share of studies: right sign, p < 0.05")
    right.axhline(POWER, color=plots.GREY, linewidth=0.8, linestyle=":")
    right.set_ylim(0, 1.03)
    plots.legend(right)
    best = max(rows, key=lambda row: float(row["mean"]))
    share = best["mean"] / baseline["final"]["mean"]
    title = f"{best['setting']}: {100 * share:+.0f} % beside {baseline['label']}"
    if best["versus"]["verdict"] == "higher":
        title += f"; {best['needed'][0]} seeds show it"
    below = f"{best['pairs']} seeds; right: share of smaller studies that find the difference"
    plots.titles(figure, title, below)
    return figure


def table(baseline: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table of a page, in Markdown."""
    lines = [
        "| strategy | return (95 %) | difference (95 %) | p, Holm | seeds for power 80 % (95 %) "
        "| five seeds: significant | after Holm | exaggerated | wrong sign | mean of wrong sign |",
        f"|---|{'---:|' * 9}",
        f"| {baseline['label']}, the baseline | {_mean(baseline['final'])} |{' |' * 8}",
    ]
    for row in rows:
        versus, five = row["versus"], row["studies"].get(5)
        shows = versus["verdict"] in ("higher", "lower")
        mean = f"{row['mean']:+,.0f} ({versus['low']:+,.0f} to {versus['high']:+,.0f})"
        cells = [row["setting"], _mean(row["final"]), f"**{mean}**" if shows else mean]
        cells += [f"{versus['holm_p']:.2g}", *[""] * 6]
        if shows and five:
            few, least, most = row["needed"]
            cells[4:] = [f"{few} ({least} to {most})", f"{five['right']:.0%}"]
            cells += [f"{five['corrected']:.0%}", f"x {five['exaggeration']:.1f}"]
            cells += [f"{five[key]:.1%}" for key in ("wrong", "opposite")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def beside(folders: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each setting of each other model, paired by seed with that of the first.

    `folders` are the ``strategies.json`` by the models' names; rows have the results of the seeds
    that both have, and their difference with Holm's correction for all rows.
    """
    results = {
        (name, each["label"]): dict(zip(each["seeds"], each["final"]["values"], strict=True))
        for name, document in folders.items()
        for each in document["outcomes"]
        if each["final"]
    }
    first, *others = folders
    rows = []
    for (name, label), own in results.items():
        if name == first and not any((other, label) in results for other in others):
            continue
        base = results[first, label]
        seeds = sorted(own.keys() & base.keys())
        values = [[result[seed] for seed in seeds] for result in (own, base)]
        row = {"model": name, "setting": label, "final": asdict(estimate(values[0]))}
        rows.append(row | {"versus": None if name == first else difference(*values)})
    adjusted = holm([row["versus"] and row["versus"].t_p for row in rows])
    for row, p in zip(rows, adjusted, strict=True):
        row["versus"] = row["versus"] and asdict(row["versus"].apply_correction(p))
    return rows


def beside_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of several models, in Markdown."""
    first = rows[0]["model"]
    heads = ["model", "strategy", "seeds", "return (95 %)"]
    heads += [f"{first}, these seeds", "less it (95 %)", "p, Holm"]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'---:|' * 5}"]
    for row in rows:
        count, versus = len(row["final"]["values"]), row["versus"]
        cells = [row["model"], row["setting"], f"{count}", _mean(row["final"]), "", "", ""]
        if versus:
            mean = f"{versus['mean']:+,.0f} ({versus['low']:+,.0f} to {versus['high']:+,.0f})"
            shows = versus["verdict"] in ("higher", "lower")
            other = f"{row['final']['mean'] - versus['mean']:,.0f}"
            cells[4:] = [other, f"**{mean}**" if shows else mean, f"{versus['holm_p']:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(result: dict[str, Any]) -> str:
    return f"{result['mean']:,.0f} ± {result['half']:,.0f}"


def read(folder: str | Path) -> dict[str, Any]:
    """Return the ``strategies.json`` of a study."""
    document: dict[str, Any] = json.loads(Path(folder, "strategies.json").read_text())
    return document


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of `gear-offline strategies --train`")
    parser.add_argument("--out", type=Path, default=Path("seeds"), help="name without its end")
    words: Any = {"nargs": "*", "default": [], "metavar": "MODEL=FOLDER"}
    parser.add_argument("--name", default="dt", help="of the model in FOLDER, for --beside")
    parser.add_argument("--beside", **words, help="the study of other models")
    arguments = parser.parse_args()
    commit, comparison = clean_commit(), read(arguments.folder)
    baseline, results = study(comparison)
    command = f"python -m benchmarks.seeds {shlex.join(sys.argv[1:])}"
    document: dict[str, Any] = {"commit": commit, "command": command}
    document |= {key: comparison[key] for key in ("recipe", "machine")}
    document |= {"baseline": baseline, "results": results}
    others = {name: read(place) for name, _, place in (x.partition("=") for x in arguments.beside)}
    models = beside({arguments.name: comparison} | others) if others else []
    document |= {"models": models} if models else {}
    write_file(arguments.out.with_suffix(".json"), json.dumps(document).encode())
    plots.save_figure(plot(baseline, results), arguments.out.with_suffix(".png"))
    print(table(baseline, results))
    if models:
        print(f"\n{beside_table(models)}")
