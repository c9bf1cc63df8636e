"""Statistics of comparisons, against numbers computed by hand."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gear_offline.analysis.significance import (
    Outcome,
    compare,
    difference,
    holm,
    verdict_text,
)
from gear_offline.config.recipe import load_recipe
from gear_offline.sweep.results import TrialResult
from gear_offline.sweep.trials import Trial


def test_differences_are_tested_by_pairs() -> None:
    """By hand: t = 2 / (1 / sqrt(3)) of 2 degrees, whose 97.5 % quantile is 4.30265."""
    tested = difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert tested.mean == 2.0 and tested.t_p == pytest.approx(0.0741799, abs=1e-7)
    half = 4.3026527 / math.sqrt(3)
    assert (tested.low, tested.high) == pytest.approx((2.0 - half, 2.0 + half), abs=1e-6)


def test_edges() -> None:
    one = difference([3.0], [1.0])
    assert (one.mean, one.low, one.t_p) == (2.0, None, None)
    same = difference([1.0, 2.0], [1.0, 2.0])
    assert (same.mean, same.t_p) == (0.0, 1.0)
    shifted = difference([1.1, 2.1, 3.1], [1.0, 2.0, 3.0])
    assert shifted.t_p is None, "equal differences say nothing of their spread"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_rule_rejects(values: list[float]) -> None:
    adjusted = holm(values)
    ordered = sorted(range(len(values)), key=lambda i: values[i])
    rejected = set()
    for rank, place in enumerate(ordered):
        if values[place] * (len(values) - rank) >= 0.05:
            break
        rejected.add(place)
    assert {i for i, p in enumerate(adjusted) if p is not None and p < 0.05} == rejected
    # by hand: 0.01 * 4, 0.02 * 3, then 0.03 * 2 and max(0.06, 0.04)
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, None, 0.4]) == [0.8, None, 0.8]
    assert holm([]) == [] and holm([None]) == [None]


def outcomes_of(
    returns: dict[str, list[float]], failed: tuple[str, int] | None = None
) -> list[Outcome]:
    recipe, found = load_recipe("paper"), []
    rows = [(label, *row) for label, values in returns.items() for row in enumerate(values)]
    for label, seed, value in rows:
        one, is_failed = recipe.replace({"seed": seed}), (label, seed) == failed
        result = TrialResult(
            trial=Trial(name=f"{label},s{seed}", label=label, recipe=one, settings={}),
            path=Path(label),
            status="failed" if is_failed else "complete",
            problem="MEMORY: x" if is_failed else None,
            curves={"return": {1: 0.0, 2: value}, "loss": {1: 1.0}},
            last=None,
        )
        found.append(result)
    metric, outcomes = compare(found)
    assert metric == "return"
    return outcomes


def test_only_whole_pairs_are_compared() -> None:
    plain, good = [1.0, 2.0, 3.0, 4.0], [11.0, 12.1, 13.0, 99.0]
    base, up, same = outcomes_of({"base": plain, "up": good, "same": plain}, ("up", 3))
    assert base.versus is None and base.final is not None and base.final.mean == 2.5
    assert up.seeds == (0, 1, 2) and up.failures == (("up,s3", "MEMORY: x"),)
    assert up.versus is not None and same.versus is not None
    test = stats.ttest_rel(good[:3], plain[:3])
    assert up.versus.t_p == pytest.approx(test.pvalue)
    assert up.versus.holm_p == pytest.approx(2 * test.pvalue) and up.versus.verdict == "higher"
    assert same.versus.verdict == "no difference"


def test_what_a_comparison_says_first() -> None:
    plain = [1.0, 2.0, 3.0]
    up, down = [11.0, 12.1, 13.0], [-11.0, -12.1, -13.3]
    text = verdict_text(outcomes_of({"base": plain, "up": up, "down": down, "same": plain}))
    assert text.startswith("Against base, higher: up; lower: down; no difference: same (3 seeds")
    few = verdict_text(outcomes_of({"base": plain[:2], "up": up[:2]}))
    assert few.startswith("2 seeds cannot")
    assert verdict_text(outcomes_of({"base": plain})).startswith("Nothing is compared")
