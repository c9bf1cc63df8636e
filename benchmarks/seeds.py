"""The verdicts that fewer seeds would have given: power, and how often they say the opposite.

    gear-offline strategies hopper-medium --train --seeds 100 --out many
    python -m benchmarks.seeds many --out docs/studies/many

It writes MANY.json and MANY.png, and prints the table of a page.

Each setting of a ``strategies.json`` has pairs with the baseline, one a seed.  From them so many
pairs as a smaller study has are drawn without replacement, again and again, and tested as the
page tests them: by the paired t test at 5 %, here without a correction for several settings.

Shape legend: n pairs of a study, N pairs there are, R studies.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from scipy import stats

from gear_offline import plots
from gear_offline.core.files import write_file

SIZES = (3, 5, 8, 10, 15, 20, 30, 50)
STUDIES = 10_000
LEVEL = 0.05
POWER = 0.8  # by custom
SEED = 20261127


def shares(differences: npt.ArrayLike, pairs: int, *, studies: int = STUDIES) -> dict[str, float]:
    """Return how often studies of so many pairs have each verdict.

    Parameters
    ----------
    differences
        (N,) results of a setting less those of the baseline, by seed; their mean is the truth.
    pairs
        n, at most N.
    studies
        R.

    Returns
    -------
    dict
        ``right``: a significant difference of the true sign; ``wrong``: a significant one of the
        other sign; ``opposite``: a mean of the other sign, significant or not.
    """
    values = np.asarray(differences, np.float64)
    random = np.random.default_rng(SEED)
    order = random.permuted(np.broadcast_to(np.arange(values.size), (studies, values.size)), axis=1)
    drawn = values[order[:, :pairs]] * np.sign(values.mean())
    means = drawn.mean(1)
    with np.errstate(divide="ignore", invalid="ignore"):  # of equal differences
        t = means / (drawn.std(1, ddof=1) / np.sqrt(pairs))
    critical = stats.t.ppf(1 - LEVEL / 2, pairs - 1)
    right, wrong, opposite = (
        float(each.mean()) for each in (t > critical, t < -critical, means < 0)
    )
    return {"right": right, "wrong": wrong, "opposite": opposite}


def study(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each setting of a ``strategies.json`` that has pairs with the baseline."""
    baseline, *others = (each for each in document["outcomes"] if each["final"])
    known = dict(zip(baseline["seeds"], baseline["final"]["values"], strict=True))
    rows = []
    for other in others:
        values = dict(zip(other["seeds"], other["final"]["values"], strict=True))
        differences = [values[seed] - known[seed] for seed in values if seed in known]
        sizes = [size for size in SIZES if 2 * size <= len(differences)]
        by_size = {size: shares(differences, size) for size in sizes}
        enough = [size for size, share in by_size.items() if share["right"] >= POWER]
        row = {"setting": other["label"], "baseline": baseline["label"], "pairs": len(differences)}
        row |= {"mean": float(np.mean(differences)), "sd": float(np.std(differences, ddof=1))}
        row |= {"final": other["final"], "versus": other["versus"]}
        rows.append(row | {"enough": min(enough, default=None), "studies": by_size})
    return rows


def plot(rows: list[dict[str, Any]]) -> Figure:
    """Draw the differences and, of those that all pairs show, the power by the number of seeds."""
    figure = plots.new_figure()
    left, right = figure.subplots(1, 2)
    looks = product(("-", "--"), plots.SERIES)
    for place, row in enumerate(rows):
        versus, shows = row["versus"], row["versus"]["verdict"] in ("higher", "lower")
        style, colour = next(looks) if shows else ("-", plots.GREY)
        look = {"color": colour, "linestyle": style, "linewidth": 1.8}
        left.plot([versus["low"], versus["high"]], [place] * 2, **look)
        left.plot(row["mean"], place, marker="o", markersize=5, color=colour)
        if shows:
            shares = [study["right"] for study in row["studies"].values()]
            right.plot(list(row["studies"]), shares, marker="o", markersize=4, **look)
    left.axvline(0, color=plots.GREY, linewidth=0.8)
    left.set_yticks(range(len(rows)), [plots.shown(row["setting"], 24) for row in rows])
    left.invert_yaxis()
    plots.dress(left, x="difference of returns, 95 %")
    left.grid(visible=False)
    plots.dress(right, x="seeds", y="studies that find the difference")
    right.axhline(POWER, color=plots.GREY, linewidth=0.8, linestyle=":")
    right.set_ylim(0, 1.03)
    return figure


def table(baseline: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table of a page, in Markdown."""
    lines = [
        "| strategy | return (95 %) | difference (95 %) | p, Holm | seeds for a power of 80 % "
        "| five seeds: significant | opposite sign | both |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        f"| {baseline['label']}, the baseline | {_mean(baseline['final'])} | | | | | | |",
    ]
    for row in rows:
        versus, five = row["versus"], row["studies"].get(5)
        shows = versus["verdict"] in ("higher", "lower")
        mean = f"{row['mean']:+,.0f} ({versus['low']:+,.0f} to {versus['high']:+,.0f})"
        cells = [row["setting"], _mean(row["final"]), f"**{mean}**" if shows else mean]
        cells += [f"{versus['holm_p']:.2g}", *[""] * 4]
        if shows and five:
            shares = (f"{five[key]:.1%}" for key in ("right", "opposite", "wrong"))
            cells[4:] = [str(row["enough"] or "more"), *shares]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(estimate: dict[str, Any]) -> str:
    return f"{estimate['mean']:,.0f} ± {estimate['half']:,.0f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of `gear-offline strategies --train`")
    parser.add_argument("--out", type=Path, default=Path("seeds"), help="name without its end")
    arguments = parser.parse_args()
    comparison = json.loads((arguments.folder / "strategies.json").read_text())
    results = study(comparison)
    baseline = comparison["outcomes"][0]
    document = {key: comparison[key] for key in ("recipe", "machine")}
    document |= {"baseline": baseline, "results": results}
    write_file(arguments.out.with_suffix(".json"), json.dumps(document).encode())
    plots.save_figure(plot(results), arguments.out.with_suffix(".png"))
    print(table(baseline, results))
