"""Is one setting better than another?  Paired t tests over seeds, with Holm's correction.

Trials of one seed are pairs: they begin with the same weights and are played from the same start
states.  The test takes the differences of the pairs for draws of a normal distribution.

Shape legend: n seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from scipy import stats

from gear_offline.analysis.sampling import Candidate, Data
from gear_offline.artifacts.records import failure_of, read_evaluations
from gear_offline.core.text import Document, count_text
from gear_offline.sweep.results import Estimate, TrialResult, at_one_step, by_label, estimate

VERDICTS = ("higher", "lower", "no difference", "too few seeds")
LEVEL = 0.05  # of significance
LEAST_PAIRS = 3  # for a verdict: the spread of two is one difference, which is small by chance


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences of n pairs, setting minus baseline, and their test.

    Nothing is known of their spread with one pair, or where all of them are equal.
    """

    pairs: int  # n
    mean: float
    low: float | None = None  # 95 % Student t interval of the mean, not corrected
    high: float | None = None
    t_p: float | None = None  # two-sided p of the paired t test
    holm_p: float | None = None  # ... after Holm's correction
    verdict: str = "too few seeds"  # one of `VERDICTS`, after correction

    def apply_correction(self, p: float | None) -> Difference:
        """Return the difference with the corrected `p` of its t test, and the verdict."""
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
        complete_scores = [score for score in scores if score is not None]
        names = {result.trial.name for result, _ in latest}
        lacking = [result for result in complete if result.trial.name not in names]
        failed = [result for result in members if result.status == "failed"]
        failures = [(result.trial.name, str(result.problem)) for result in failed]
        for result in lacking:
            unplayed = [report for report in read_evaluations(result.path) if report.error]
            why = failure_of(unplayed) or f"no {metric} at step {step:,}"
            failures.append((result.trial.name, why))
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
                score=estimate(complete_scores)
                if complete_scores and len(complete_scores) == len(latest)
                else None,
                versus=versus,
                failures=tuple(failures),
            )
        )
    adjusted = holm([None if o.versus is None else o.versus.t_p for o in outcomes])
    return metric, [
        replace(o, versus=o.versus and o.versus.apply_correction(p))
        for o, p in zip(outcomes, adjusted, strict=True)
    ]


def difference(results: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Compare n results with those of the baseline for the same seeds, in the same order."""
    differences = np.asarray(results, np.float64) - np.asarray(baseline, np.float64)
    pairs, mean = differences.size, float(differences.mean())
    if pairs < 2:
        return Difference(pairs=pairs, mean=mean)
    result = Difference(pairs=pairs, mean=mean)
    # equal differences are not exactly equal after a subtraction of floats
    if np.ptp(differences) <= 1e-12 * float(np.abs(differences).max()):
        return replace(result, low=mean, high=mean, t_p=1.0 if mean == 0.0 else None)
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(0.95)
    return replace(result, low=float(low), high=float(high), t_p=float(test.pvalue))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p values adjusted by Holm's step-down method; None stays and does not count."""
    p_values = sorted(p for p in values if p is not None)
    raised = [min(1.0, p * (len(p_values) - rank)) for rank, p in enumerate(p_values)]
    adjusted = dict(zip(p_values, accumulate(raised, max), strict=True))
    return [None if p is None else adjusted[p] for p in values]


def verdict_text(outcomes: Sequence[Outcome]) -> str:
    """Summarise a comparison in a sentence or two."""
    compared = [(o.label, o.versus) for o in outcomes if o.versus is not None]
    if not compared:
        return "Nothing is compared: no seed is complete with the baseline and another strategy."
    pairs = max(versus.pairs for _, versus in compared)
    seeds = count_text(pairs, "seed")
    if pairs < LEAST_PAIRS:
        return f"{seeds} cannot tell strategies apart: that takes {LEAST_PAIRS}, better more."
    clauses = []
    for verdict in VERDICTS:
        if labels := [label for label, versus in compared if versus.verdict == verdict]:
            clauses.append(f"{verdict}: {', '.join(labels)}")
    return f"Against {outcomes[0].label}, {'; '.join(clauses)} ({seeds}, paired t test, Holm)."
