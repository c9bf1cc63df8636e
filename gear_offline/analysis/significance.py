"""Is one thing better than another?  Paired tests over seeds, and what few seeds can show.

Runs of the same seed are pairs: they begin with the same weights and are played from the same
start states.  Two tests look at the differences of the pairs:

- the paired t test, which takes the differences for draws of a normal law;
- the exact sign-flip permutation test, which only takes them for symmetric around zero when there
  is no effect.  With n pairs its p cannot be below 2 / 2^n: 0.25 for three.

Several things compared with one baseline get Holm's correction of the t tests.  Intervals are
those of each comparison by itself, without correction.

Shape legend: n pairs, one a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr

from gear_offline.evaluation.results import mean_interval

Float64Array = npt.NDArray[np.float64]
Verdict = Literal["higher", "lower", "within noise", "too few seeds"]

LEVEL = 0.05  # of significance
LEAST_PAIRS = 3  # for a word: the spread of two is one difference, which is small by chance
EXACT_PAIRS = 16  # up to here every assignment of signs is looked at
FLIPS = 1 << 16  # assignments drawn for more pairs
FLIP_SEED = 20_261_121


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What the differences of n pairs say.

    Attributes
    ----------
    pairs
        n.
    mean
        Of the differences, new minus baseline.
    low, high
        95 % Student t interval of the mean difference; None with one pair.
    t_p
        Two-sided p of the paired t test; None with one pair, or when all differences are equal
        (then nothing is known of their spread).
    permutation_p
        Two-sided p of the sign-flip test; None with one pair.
    least_p
        The smallest p that the permutation test can give with so many pairs.
    """

    pairs: int
    mean: float
    low: float | None
    high: float | None
    t_p: float | None
    permutation_p: float | None
    least_p: float


def paired(new: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Compare n results with those of the baseline for the same seeds, in the same order.

    Raises
    ------
    ValueError
        The two are not equally long, or empty.
    """
    if len(new) != len(baseline) or not new:
        raise ValueError(f"{len(new)} results do not pair with {len(baseline)}")
    differences = np.asarray(new, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    pairs, mean = differences.size, float(differences.mean())
    if pairs < 2:
        return Paired(
            pairs=pairs, mean=mean, low=None, high=None, t_p=None, permutation_p=None, least_p=1.0
        )
    low, high = mean_interval(differences)
    return Paired(
        pairs=pairs,
        mean=mean,
        low=low,
        high=high,
        t_p=_t_test(differences),
        permutation_p=permutation_test(differences),
        least_p=least_p(pairs),
    )


def least_p(pairs: int) -> float:
    """Return the smallest p that the permutation test can give with so many pairs."""
    return 2.0 / 2**pairs if pairs <= EXACT_PAIRS else 1.0 / (FLIPS + 1)


def _t_test(differences: Float64Array) -> float | None:
    """Return the two-sided p of a mean of zero for `differences` (n,), n >= 2."""
    mean, spread = float(differences.mean()), float(differences.std(ddof=1))
    # equal differences are not exactly equal after a subtraction of floats
    if spread <= 1e-12 * float(np.abs(differences).max()):
        return 1.0 if mean == 0.0 else None
    return student_t_p(mean / (spread / math.sqrt(differences.size)), differences.size - 1)


def student_t_p(t: float, freedom: int) -> float:
    """Return the probability that Student's t with `freedom` degrees lies beyond ±`t`."""
    return float(2.0 * stdtr(freedom, -abs(t)))


def permutation_test(differences: npt.ArrayLike) -> float:
    """Return the two-sided p of the sign-flip test of `differences` (n,).

    Up to 16 pairs all 2^n assignments of signs are counted; for more, 65,536 drawn ones and the
    observed one.
    """
    values = np.asarray(differences, dtype=np.float64)
    pairs = values.size
    if pairs <= EXACT_PAIRS:
        codes = np.arange(1 << pairs)
    else:
        codes = np.random.default_rng(FLIP_SEED).integers(1 << 62, size=FLIPS)
    sums = np.zeros(codes.size)
    for place, value in enumerate(values.tolist()):
        # 62 random bits serve 62 pairs; more pairs use them again, shuffled
        bits = codes >> (place % 62) & 1
        if place >= 62:
            bits = np.roll(bits, place)
        sums += np.where(bits == 1, value, -value)
    observed = abs(float(values.sum()))
    slack = 1e-9 * float(np.abs(values).sum())  # ties, whatever the order of summation
    extreme = int((np.abs(sums) >= observed - slack).sum())
    if pairs <= EXACT_PAIRS:
        return extreme / codes.size
    return (extreme + 1) / (codes.size + 1)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p values adjusted by Holm's step-down method; None stays and does not count."""
    known = sorted((p, place) for place, p in enumerate(values) if p is not None)
    found: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, place) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        found[place] = highest
    return found


def verdict(result: Paired, adjusted_p: float | None) -> Verdict:
    """Say in a word what a comparison shows, after correction; of three pairs and more."""
    if result.pairs < LEAST_PAIRS:
        return "too few seeds"
    if adjusted_p is None or adjusted_p >= LEVEL:
        return "within noise"
    return "higher" if result.mean > 0 else "lower"


def limits_text(pairs: int, comparisons: int = 1) -> str:
    """Return a sentence or two on what so many pairs can show.

    Parameters
    ----------
    pairs
        Seeds of each thing.
    comparisons
        Things that are compared with the baseline, so many tests are corrected for.
    """
    if pairs < 2:
        return "One seed: differences say nothing about how a strategy does in general."
    if pairs < LEAST_PAIRS:
        return (
            f"{pairs} seeds are too few to call a difference higher or lower, whatever a test says "
            f"of them: that takes {LEAST_PAIRS}, and more are better."
        )
    least = least_p(pairs)
    corrected = min(1.0, least * comparisons)
    reach = "cannot reach 0.05" if corrected >= LEVEL else "can reach 0.05"
    several = (
        f", or {corrected:.3g} after correction for {comparisons} comparisons,"
        if comparisons > 1
        else ""
    )
    few = (
        " So a difference that is called higher or lower rests on the t test's "
        "assumption of normal differences, and one within noise may still be real."
        if corrected >= LEVEL
        else ""
    )
    return (
        f"{pairs} seeds: the exact paired permutation test cannot give a p below "
        f"{least:.3g}{several} and so {reach}.{few}"
    )
