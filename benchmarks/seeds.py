"""The verdicts that fewer seeds would have given: power, and how often they say the opposite.

    gear-offline strategies hopper-medium --train --seeds 100 --out many
    python -m benchmarks.seeds many --out many/seeds

Each setting of a ``strategies.json`` has pairs with the baseline, one a seed.  From them so many
pairs as a smaller study has are drawn without replacement, again and again, and tested as the
page tests them: by the paired t test at 5 %, here without a correction for several settings.

Shape legend: n pairs of a study, N pairs there are, R studies.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from scipy import stats

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
        rows.append(row | {"enough": min(enough, default=None), "studies": by_size})
    return rows


def plot(rows: list[dict[str, Any]]) -> Figure:
    """Draw the power and the share of opposite means by the number of seeds."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    power, opposite = figure.subplots(1, 2)
    for row in rows:
        sizes = list(row["studies"])
        for axes, key in ((power, "right"), (opposite, "opposite")):
            shown = [row["studies"][size][key] for size in sizes]
            axes.plot(sizes, shown, marker=".", label=row["setting"])
    power.axhline(POWER, color="grey", lw=0.8, ls=":")
    power.set_title("found, with the right sign")
    opposite.set_title("mean of the opposite sign")
    for axes in (power, opposite):
        axes.set_xlabel("seeds")
        axes.set_ylim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
    opposite.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of `gear-offline strategies --train`")
    parser.add_argument("--out", type=Path, default=Path("seeds"), help="name without its end")
    arguments = parser.parse_args()
    comparison = json.loads((arguments.folder / "strategies.json").read_text())
    results = study(comparison)
    document = {
        "recipe": comparison["recipe"],
        "machine": comparison["machine"],
        "results": results,
    }
    write_file(arguments.out.with_suffix(".json"), json.dumps(document, indent=1).encode())
    plot(results).savefig(arguments.out.with_suffix(".png"), dpi=110)
    for row in results:
        five = row["studies"].get(5)
        print(
            f"{row['setting']}: {row['mean']:+,.1f} ± {row['sd']:,.1f} over {row['pairs']} pairs, "
            f"{row['enough'] or 'more'} seeds for a power of {POWER}"
            + (f"; five say the opposite in {five['opposite']:.1%}" if five else "")
        )
