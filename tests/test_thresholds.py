"""Weighted choice by integers: exact sums, exact counts of draws, huge tables, wild weights."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.sampling.thresholds import WHOLE, Thresholds, masses_of, sum_exactly
from gear_offline.sampling.weighted import WeightedEpisodes
from tests.law_support import p_value

WEIGHT = st.just(0.0) | st.floats(1e-300, 1e300) | st.integers(1, 5).map(float)


def ends(table: Thresholds) -> list[int]:
    """Return cumulative masses, the last one 2^64, as Python integers."""
    found = [int(value) for value in table.table]
    return [WHOLE if item >= table.last else value for item, value in enumerate(found)]


@settings(max_examples=200, deadline=None)
@given(st.lists(WEIGHT, min_size=1, max_size=12).filter(any))
@example([1.0])
@example([0.0, 2.0, 0.0])
@example([1.0, 1e-12, 1e12])
@example([2.0, 1e-05])  # 1e-05 has lost nearly a whole unit of the scaled weights
def test_masses_are_the_weights_to_the_last_places(weights: list[float]) -> None:
    masses = [int(mass) for mass in masses_of(np.array(weights))]
    positive = [w for w in weights if w]
    if len(positive) == 1:
        masses[weights.index(positive[0])] += WHOLE
    assert sum(masses) == WHOLE
    total = sum(Fraction(w) for w in weights)
    for weight, mass in zip(weights, masses, strict=True):
        assert (mass > 0) == (weight > 0)
        ideal = Fraction(weight) / total * WHOLE
        assert abs(mass - ideal) <= ideal * Fraction(1, 2**50) + 6


def test_twelve_orders_of_magnitude() -> None:
    weights = np.array([10.0**exponent for exponent in range(-6, 7)])
    table = Thresholds(weights)
    found = table.probability(np.arange(13))
    np.testing.assert_allclose(found, weights / weights.sum(), rtol=1e-6)
    # Ratios of the larger ones are exact to float64's last places.
    np.testing.assert_allclose(found[3:], (weights / weights.sum())[3:], rtol=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(WEIGHT, min_size=1, max_size=40).filter(any), st.lists(st.integers(0, WHOLE - 1)))
def test_every_draw_finds_the_item_whose_range_holds_it(
    weights: list[float], values: list[int]
) -> None:
    table = Thresholds(np.array(weights))
    bounds = ends(table)
    edges = {0, WHOLE - 1, *(b for b in bounds if b < WHOLE), *(b - 1 for b in bounds if b)}
    draws = sorted({*values, *edges})
    found = table.find(np.array(draws, dtype=np.uint64))
    for value, item in zip(draws, found.tolist(), strict=True):
        assert item == next(i for i, bound in enumerate(bounds) if value < bound)
        assert weights[item] > 0, "what has no weight is never drawn, whatever the draw"


@settings(max_examples=50, deadline=None)
@given(st.lists(WEIGHT, min_size=1, max_size=30).filter(any))
def test_probability_is_mass_over_two_to_the_64(weights: list[float]) -> None:
    table = Thresholds(np.array(weights))
    bounds = [0, *ends(table)]
    for item, found in enumerate(table.probability(np.arange(len(weights))).tolist()):
        exact = Fraction(bounds[item + 1] - bounds[item], WHOLE)
        assert Fraction(found) == exact or abs(Fraction(found) / exact - 1) < Fraction(1, 2**52)


def test_more_items_than_float32_can_count() -> None:
    """2^24 + 5 equal weights: no item is lost, the last ones are reached."""
    count = 2**24 + 5
    table = Thresholds(np.ones(count))
    step = np.uint64(WHOLE // count)
    last = np.arange(count - 8, count, dtype=np.uint64)
    assert table.find(last * (step + np.uint64(1))).tolist() == list(range(count - 8, count))
    assert table.find(np.array([WHOLE - 1], dtype=np.uint64)).tolist() == [count - 1]
    np.testing.assert_allclose(table.probability(np.array([0, count - 1])), 1 / count, rtol=1e-12)
    draws = np.random.default_rng(0).integers(0, 2**64, size=100_000, dtype=np.uint64)
    cells = np.bincount(table.find(draws) >> 20, minlength=17)
    expected = np.append(np.full(16, 2**20), 5.0) / count * draws.size
    assert p_value(cells[:16], expected[:16]) > 1e-4


def test_weights_and_starts_of_a_law_over_many_orders() -> None:
    """A law over episodes whose weights span 1 to 1e12 draws the heavy ones as it should."""
    lengths = np.array([3, 1, 2, 4], dtype=np.int64)
    law = WeightedEpisodes(EpisodeIndex(lengths), np.array([1.0, 1e12, 3e12, 1e-3]))
    drawn = law.select_many(seed=1, first_step=0, steps=10, count=10_000)
    counts = np.bincount(drawn.episodes.reshape(-1), minlength=4)
    assert counts[0] == counts[3] == 0
    assert p_value(counts[1:3], np.array([0.25, 0.75]) * drawn.episodes.size) > 1e-4
    density = law.density(drawn)
    np.testing.assert_array_equal(density, drawn.probability)


def test_sum_exactly_beyond_64_bits() -> None:
    values = np.full(1000, 2**64 - 1, dtype=np.uint64)
    assert sum_exactly(values) == 1000 * (2**64 - 1)


@pytest.mark.parametrize(
    ("weights", "code"),
    [
        (np.array([1.0, np.nan]), "SELECTION_WEIGHTS"),
        (np.array([1.0, np.inf]), "SELECTION_WEIGHTS"),
        (np.array([1.0, -1.0]), "SELECTION_WEIGHTS"),
        (np.zeros(3), "SELECTION_EMPTY"),
    ],
)
def test_weights_that_are_no_law(weights: npt.NDArray[np.float64], code: str) -> None:
    with pytest.raises(InputError) as caught:
        Thresholds(weights)
    assert caught.value.code == code
