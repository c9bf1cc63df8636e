"""Statistics against plain definitions: enumerated permutations, integrated densities, Holm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.analysis.significance import (
    holm,
    least_p,
    limits_text,
    paired,
    permutation_test,
    student_t_p,
    verdict,
)


def enumerated(differences: Sequence[float]) -> float:
    observed = abs(math.fsum(differences))
    extreme = 0
    for signs in itertools.product((1, -1), repeat=len(differences)):
        flipped = abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True)))
        extreme += flipped >= observed - 1e-9 * math.fsum(map(abs, differences))
    return extreme / float(2 ** len(differences))


def integrated(t: float, freedom: int) -> float:
    """Two tails of Student's density by Simpson's rule over the middle."""
    x = np.linspace(-t, t, 20_001)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2)
    y = scale / math.sqrt(freedom * math.pi) * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    weights = np.ones(x.size)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return 1 - float((weights * y).sum() * (x[1] - x[0]) / 3)


@given(st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=9))
def test_permutation_is_the_enumerated_one(differences: list[float]) -> None:
    assert permutation_test(differences) == enumerated(differences)


def test_permutation_by_hand() -> None:
    assert permutation_test([1.0, 2.0, 3.0]) == 2 / 8, "the least that three pairs can give"
    assert permutation_test([1.0, 2.0, -3.0]) == 1.0
    assert permutation_test([1.0, 1.0, 1.0, -1.0]) == 10 / 16
    assert permutation_test([0.1 + 0.2, -0.3]) == 1.0, "ties up to rounding are ties"


def test_many_pairs_are_sampled() -> None:
    assert permutation_test([1.0] * 40) == 1 / 65537
    even = permutation_test([1.0, -1.0] * 10)
    assert even == 1.0
    # 20 pairs, 15 of them positive: the two tails of a binomial law
    tails = 2 * sum(math.comb(20, k) for k in range(15, 21)) / 2**20
    found = permutation_test([1.0] * 15 + [-1.0] * 5)
    assert found == pytest.approx(tails, abs=4 * math.sqrt(tails / 65536))
    assert 0 < permutation_test(list(range(1, 71))) < 0.01


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 6.0])
def test_student_t(t: float, freedom: int) -> None:
    assert student_t_p(t, freedom) == pytest.approx(integrated(t, freedom), abs=1e-7)
    assert student_t_p(-t, freedom) == student_t_p(t, freedom)


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [  # 2 * scipy.stats.t.sf(t, freedom) of SciPy 1.17.1
        (0.9, 1, 0.5334754167131484),
        (2.5, 4, 0.06676654481198814),
        (10.0, 63, 1.252688012261208e-14),
        (50.0, 19, 1.2440279578064896e-21),
        (200.0, 7, 2.062190599193654e-14),
        (1e4, 4, 5.999999600000023e-16),
        (50.0, 63, 2.0390541745878146e-52),
    ],
)
def test_student_t_far_out(t: float, freedom: int, p: float) -> None:
    assert student_t_p(t, freedom) == pytest.approx(p, rel=1e-9)


def test_paired_by_hand() -> None:
    found = paired([1.1, 1.9, 3.05], [1.0, 2.0, 3.0])
    # differences 0.1, -0.1, 0.05: mean 1/60, deviation 0.104083, t(2) at 97.5 % 4.302653
    half = 4.302653 * 0.104083 / math.sqrt(3)
    assert found.mean == pytest.approx(1 / 60)
    assert (found.low, found.high) == pytest.approx((1 / 60 - half, 1 / 60 + half), rel=1e-4)
    t = 1 / 60 / (0.104083 / math.sqrt(3))
    assert found.t_p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-4), "df 2 is closed"
    assert (found.pairs, found.least_p) == (3, 0.25)
    assert found.permutation_p == enumerated([2.0, -2.0, 1.0])
    assert verdict(found, found.t_p) == "within noise"


def test_a_clear_difference_is_found_and_a_corrected_one_is_not() -> None:
    found = paired([11.0, 12.1, 13.0], [1.0, 2.0, 3.0])
    assert found.t_p is not None and found.t_p < 1e-4
    assert verdict(found, found.t_p) == "higher"
    assert verdict(paired([1.0, 2.0, 3.0], [11.0, 12.1, 13.0]), 0.01) == "lower"
    assert verdict(found, 0.05) == "within noise"
    assert found.permutation_p == 0.25, "three pairs cannot say more"


def test_edges() -> None:
    one = paired([3.0], [1.0])
    assert (one.mean, one.least_p) == (2.0, 1.0)
    assert (one.low, one.t_p, one.permutation_p) == (None, None, None)
    assert verdict(one, None) == "too few seeds"
    same = paired([1.0, 2.0], [1.0, 2.0])
    assert (same.mean, same.t_p, same.permutation_p) == (0.0, 1.0, 1.0)
    shifted = paired([1.1, 2.1, 3.1], [1.0, 2.0, 3.0])
    assert shifted.t_p is None, "equal differences say nothing of their spread"
    assert verdict(shifted, None) == "within noise"
    for new, old in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(ValueError, match="pair"):
            paired(new, old)


def test_two_pairs_get_no_word_however_small_their_p_is() -> None:
    """Two differences that happen to be close to each other have a small p whatever they are."""
    two = paired([5.0, 6.01], [4.0, 5.0])
    assert two.t_p is not None and two.t_p < 0.005 and two.permutation_p == 0.5
    assert verdict(two, two.t_p) == verdict(two, 1.0) == verdict(two, None) == "too few seeds"
    three = paired([5.0, 6.01, 6.99], [4.0, 5.0, 6.0])
    assert verdict(three, three.t_p) == "higher"


def test_holm_by_hand() -> None:
    # 0.01 * 4, 0.02 * 3, then 0.03 * 2 and max(0.06, 0.04)
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, None, 0.4]) == [0.8, None, 0.8]
    assert holm([]) == [] and holm([None]) == [None]


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


def test_what_few_seeds_can_show() -> None:
    assert "0.25" in limits_text(3) and "cannot reach" in limits_text(3)
    assert "can reach" in limits_text(6) and "normal" not in limits_text(6)
    assert "nothing" in limits_text(1)
    assert "too few" in limits_text(2, 7) and "takes 3" in limits_text(2)
    assert "too few" not in limits_text(3)
    assert "correction" not in limits_text(6)
    # 7 comparisons: 7 * 2 / 2^8 = 0.055, 7 * 2 / 2^9 = 0.027
    assert "0.0547 after correction for 7" in limits_text(8, 7)
    assert "cannot reach" in limits_text(8, 7) and "normal" in limits_text(8, 7)
    assert "can reach" in limits_text(9, 7) and "normal" not in limits_text(9, 7)
    assert "1.53e-05" in limits_text(40) and paired([1.0] * 40, [0.0] * 40).least_p == least_p(40)
