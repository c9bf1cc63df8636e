"""Is one setting better than another?  Paired tests over seeds, and the interquartile mean.

Trials of one seed are pairs: they begin with the same weights and are played from the same start
states.  Two tests look at the differences of the pairs:

- The paired t test takes the differences for draws of a normal distribution.
- The sign-flip permutation test only takes them for symmetric around zero when there is no effect.
  With n pairs its p cannot be below 2 / 2^n: 0.25 for three.

Several settings compared with one baseline get Holm's correction of the t tests.

Shape legend: n seeds, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from scipy import stats

from gear_offline.analysis.sampling import Candidate, Data
from gear_offline.core.text import Document, count_text
from gear_offline.core.types import Float64Array
from gear_offline.sweep.results import Estimate, TrialResult, at_one_step, by_label, estimate

VERDICTS = ("higher", "lower", "no difference", "too few seeds")
LEVEL = 0.05  # of significance
LEAST_PAIRS = 3  # for a verdict: the spread of two is one difference, which is small by chance
MOST_FLIPS = 1 << 16  # up to 16 pairs every assignment of signs is looked at
BOOTSTRAPS = 10_000
SEED = 20_261_121  # of flips and bootstraps: the same results give the same figures


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences of n pairs, setting minus baseline, and their tests.

    Nothing is known of their spread with one pair, or where all of them are equal.
    """

    pairs: int  # n
    mean: float
    low: float | None = None  # 95 % Student t interval of the mean, not corrected
    high: float | None = None
    t_p: float | None = None  # two-sided p of the paired t test
    holm_p: float | None = None  # ... after Holm's correction
    permutation_p: float | None = None  # two-sided p of the sign-flip test, not corrected
    verdict: str = "too few seeds"  # one of `VERDICTS`, after correction

    def corrected(self, p: float | None) -> Difference:
        """Return it with the corrected `p` of its t test, and what that says."""
        verdict = "higher" if self.mean > 0 else "lower"
        if self.pairs < LEAST_PAIRS:
            verdict = "too few seeds"
        elif p is None or p >= LEVEL:
            verdict = "no difference"
        return replace(self, holm_p=p, verdict=verdict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of one setting's complete trials, by their last evaluations."""

    label: str
    seeds: tuple[int, ...]
    final: Estimate | None  # return, or mean normalized score of several tasks
    score: Estimate | None  # on D4RL's scale
    iqm: float | None  # interquartile mean over seeds and tasks, with its 95 % bootstrap interval
    iqm_low: float | None
    iqm_high: float | None
    versus: Difference | None  # from the baseline; None for the baseline itself
    failures: tuple[tuple[str, str], ...]  # (run, error)


@dataclass(frozen=True, kw_only=True)
class Comparison(Document):
    """The draws of strategies and, if trained, their results; ``strategies.json`` holds it."""

    recipe: str
    seed: int
    batch_size: int
    context_length: int
    batches: int
    data: Data
    machine: dict[str, Any]
    strategies: tuple[Candidate, ...]  # the recipe's own one, the baseline, first
    metric: str = "return"  # trained ones are compared by it, or by the normalized_score of tasks
    outcomes: tuple[Outcome, ...] = ()  # of trained ones
    verdict: str = ""  # the result in a sentence or two


def compare(trials: Sequence[TrialResult]) -> tuple[str, list[Outcome]]:
    """Return the metric and the outcome of each setting; the first setting is the baseline.

    The metric is the return of the last evaluation, or the mean normalized score of several tasks.
    """
    has_returns = any(result.curves["return"] for result in trials)
    metric = "return" if has_returns else "normalized_score"
    baseline: dict[int, float] = {}
    outcomes: list[Outcome] = []
    for label, members in by_label(trials).items():
        complete = [result for result in members if result.status == "complete"]
        step, latest = at_one_step(complete, metric)
        values = {result.trial.recipe.seed: value for result, value in latest}
        scores = [result.curves.get("normalized_score", {}).get(step) for result, _ in latest]
        known = [score for score in scores if score is not None]
        rows = np.array([_scores(result) or [value] for result, value in latest], np.float64)
        there = {result.trial.name for result, _ in latest}
        lacking = [result for result in complete if result.trial.name not in there]
        failures = [(result.trial.name, str(result.error)) for result in members if result.error]
        why = f"no {metric} at step {step:,}"
        failures += [(result.trial.name, result.unplayed or why) for result in lacking]
        middle = iqm_interval(rows) if values else (None, None, None)
        pairs = [seed for seed in values if seed in baseline]
        versus = None
        if pairs:
            versus = difference([values[s] for s in pairs], [baseline[s] for s in pairs])
        if not outcomes:
            baseline = values
        outcomes.append(
            Outcome(
                label=label,
                seeds=tuple(values),
                final=estimate(list(values.values())) if values else None,
                score=estimate(known) if known and len(known) == len(latest) else None,
                iqm=middle[0],
                iqm_low=middle[1],
                iqm_high=middle[2],
                versus=versus,
                failures=tuple(failures),
            )
        )
    adjusted = holm([None if o.versus is None else o.versus.t_p for o in outcomes])
    return metric, [
        replace(o, versus=o.versus and o.versus.corrected(p))
        for o, p in zip(outcomes, adjusted, strict=True)
    ]


def _scores(trial: TrialResult) -> list[float]:
    """Return the normalized scores of several tasks."""
    tasks = trial.last.named.values() if trial.last else ()
    return [task.normalized_score for task in tasks if task.normalized_score is not None]


def difference(new: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Compare n results with those of the baseline for the same seeds, in the same order."""
    differences = np.asarray(new, np.float64) - np.asarray(baseline, np.float64)
    pairs, mean = differences.size, float(differences.mean())
    if pairs < 2:
        return Difference(pairs=pairs, mean=mean)
    flips = stats.permutation_test(
        (differences,),
        np.sum,
        permutation_type="samples",
        n_resamples=MOST_FLIPS,
        rng=np.random.default_rng(SEED),
    )
    result = Difference(pairs=pairs, mean=mean, permutation_p=float(flips.pvalue))
    # equal differences are not exactly equal after a subtraction of floats
    if np.ptp(differences) <= 1e-12 * float(np.abs(differences).max()):
        return replace(result, low=mean, high=mean, t_p=1.0 if mean == 0.0 else None)
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(0.95)
    return replace(result, low=float(low), high=float(high), t_p=float(test.pvalue))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p values adjusted by Holm's step-down method; None stays and does not count."""
    known = sorted(p for p in values if p is not None)
    raised = [min(1.0, p * (len(known) - rank)) for rank, p in enumerate(known)]
    adjusted = dict(zip(known, accumulate(raised, max), strict=True))
    return [None if p is None else adjusted[p] for p in values]


def iqm_interval(scores: Float64Array) -> tuple[float, float | None, float | None]:
    """Return the interquartile mean of `scores` (n, T) and its 95 % interval, as rliable does.

    The mean is that of the middle half of all scores.  The percentile bootstrap draws n seeds anew
    for each task (Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical
    Precipice", NeurIPS 2021).  There is no interval of fewer than three seeds.
    """

    def middle(*tasks: Float64Array, axis: int = -1) -> Float64Array:
        return np.asarray(stats.trim_mean(np.concatenate(tasks, axis), 0.25, axis=axis))

    if len(scores) < LEAST_PAIRS:
        return float(middle(*scores.T)), None, None
    rng, how = np.random.default_rng(SEED), {"method": "percentile", "n_resamples": BOOTSTRAPS}
    low, high = stats.bootstrap(scores.T, middle, rng=rng, **how).confidence_interval
    return float(middle(*scores.T)), float(low), float(high)


def verdict_text(outcomes: Sequence[Outcome]) -> str:
    """Return in a sentence or two what a comparison shows."""
    compared = [(o.label, o.versus) for o in outcomes if o.versus is not None]
    if not compared:
        return "Nothing is compared: no seed is complete with the baseline and another strategy."
    pairs = max(versus.pairs for _, versus in compared)
    seeds = count_text(pairs, "seed")
    if pairs < LEAST_PAIRS:
        return f"{seeds} cannot tell strategies apart: that takes {LEAST_PAIRS}, better more."
    parts = []
    for verdict in VERDICTS:
        if labels := [label for label, versus in compared if versus.verdict == verdict]:
            parts.append(f"{verdict}: {', '.join(labels)}")
    text = f"Against {outcomes[0].label}, {'; '.join(parts)} ({seeds}, paired t test, Holm)."
    if 2.0 / 2**pairs * len(compared) >= LEVEL:
        text += (
            " The permutation test, which does not take differences for normal, cannot reach "
            f"p < {LEVEL} with so few."
        )
    return text
