"""Mixtures: exact probabilities, schedules in integers, parts that learn, options."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.sampling.mixture import Mixture
from gear_offline.sampling.selection import learner_of, make_selection, misfit
from gear_offline.sampling.thresholds import WHOLE
from tests.law_support import CONTEXT, Key, exact_law, facts, keys, p_value

LENGTHS = [1, 7, 2, 9, 5, 3]
PARTS: list[dict[str, Any]] = [
    {"strategy": "uniform_steps"},
    {"strategy": "top_k", "k": 2},
    {"strategy": "uniform_episodes"},
    {"strategy": "stratified_return", "strata": 3},
]


def weighted(*weights: float) -> list[dict[str, Any]]:
    return [{**part, "weight": w} for part, w in zip(PARTS, weights, strict=False)]


def make(**options: Any) -> Mixture:
    law = make_selection("mixture", facts(LENGTHS), context_length=CONTEXT, **options)
    assert isinstance(law, Mixture)
    return law


def mixed(weights: list[Fraction]) -> dict[Key, float]:
    """The weighted mean of the parts' laws."""
    found: Counter[Key] = Counter()
    for part, weight in zip(PARTS, weights, strict=False):
        options = {key: value for key, value in part.items() if key != "strategy"}
        for key, p in exact_law(part["strategy"], facts(LENGTHS), **options).items():
            found[key] += float(weight) * p  # type: ignore[assignment]
    return dict(found)


def test_frequencies_and_probabilities() -> None:
    """Chi-square over all segments at significance 1e-4."""
    law = make(parts=weighted(2, 0.5, 1, 1.5))
    exact = mixed([Fraction(4, 10), Fraction(1, 10), Fraction(2, 10), Fraction(3, 10)])
    drawn = law.select_many(seed=6, first_step=0, steps=500, count=60)
    named = keys(drawn, LENGTHS)
    for key, p in set(zip(named, drawn.probability.reshape(-1).tolist(), strict=True)):
        assert p == pytest.approx(exact[key], rel=1e-12)
    counts = Counter(named)
    cells = sorted(exact)
    found = np.array([counts[cell] for cell in cells])
    assert p_value(found, np.array([exact[cell] for cell in cells]) * len(named)) > 1e-4


def test_the_choice_of_a_part_is_independent_of_what_it_draws() -> None:
    """Two halves of one law are the law: pairs of slots fill the table evenly, at 1e-4."""
    half = {"strategy": "uniform_steps", "weight": 1}
    drawn = make(parts=[half, half]).select_many(seed=1, first_step=0, steps=300, count=90)
    rows = np.cumsum([0, *LENGTHS])[drawn.episodes] + drawn.starts
    assert p_value(np.bincount(rows.reshape(-1)), np.full(27, rows.size / 27)) > 1e-4
    np.testing.assert_allclose(drawn.probability, 1 / 27, rtol=1e-12)


SCHEDULE = [{"step": 10, "weights": [1, 0]}, {"step": 20, "weights": [0, 1]}]


@given(st.integers(0, 30))
def test_a_schedule_is_linear_in_integers(step: int) -> None:
    law = make(parts=PARTS[:2], schedule=SCHEDULE)
    moved = min(max(step - 10, 0), 10)
    assert law.cumulative(step) == [WHOLE - -(-WHOLE * moved // 10), WHOLE]


def test_a_schedule_moves_the_law_and_its_probabilities() -> None:
    law = make(parts=PARTS[:2], schedule=SCHEDULE)
    plain = make_selection("uniform_steps", facts(LENGTHS)).select(seed=0, step=3, count=50)
    best = make_selection("top_k", facts(LENGTHS), k=2)
    first = law.select(seed=0, step=3, count=50)
    assert np.array_equal(first.starts, plain.starts)
    np.testing.assert_allclose(first.probability, 1 / 27)
    last = law.select(seed=0, step=2**60, count=50)
    expected = best.select(seed=0, step=2**60, count=50)
    assert np.array_equal(last.episodes, expected.episodes)
    np.testing.assert_allclose(last.probability, expected.probability, rtol=1e-12)
    exact = mixed([Fraction(3, 10), Fraction(7, 10)])
    middle = law.select(seed=0, step=17, count=4000)
    for key, p in set(zip(keys(middle, LENGTHS), middle.probability.tolist(), strict=True)):
        assert p == pytest.approx(exact[key], rel=1e-12)
    many = law.select_many(seed=0, first_step=0, steps=30, count=40)
    assert np.array_equal(many[17].starts, middle.starts[:40])


def test_a_part_that_learns() -> None:
    parts = [{"strategy": "prioritized", "weight": 1, "alpha": 1.0}, *weighted(1)]
    law = make(parts=parts)
    assert law.learns and learner_of(law) is law
    assert learner_of(make(parts=weighted(1, 1))) is None
    law.update(np.array([[1, 3]], dtype=np.int64), np.array([90.0], dtype=np.float32))
    drawn = law.select(seed=0, step=0, count=2000)
    chosen = (drawn.episodes == 1) & (drawn.starts == 3)
    share = 90 / (90 + 26)
    assert chosen.mean() == pytest.approx(share / 2 + 1 / 54, abs=0.04)
    np.testing.assert_allclose(drawn.probability[chosen], share / 2 + 1 / 54, rtol=2e-3)
    fresh = make(parts=parts)
    fresh.load_state(law.state())
    assert fresh.updates == law.updates == 1
    again = fresh.select(seed=0, step=0, count=2000)
    assert np.array_equal(again.starts, drawn.starts)
    assert law.importance(drawn.probability, step=0).max() == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "missing"),
        ({"parts": []}, "parts must be a list"),
        ({"parts": "uniform_steps"}, "parts must be a list"),
        ({"parts": [3]}, r"parts\[0\] must be"),
        ({"parts": [{"strategy": "uniform_step", "weight": 1}]}, r"parts\[0\].strategy"),
        ({"parts": [{"strategy": "uniform_steps"}]}, r"parts\[0\].weight must be given"),
        ({"parts": weighted(1, -1)}, "weights of the parts must be"),
        ({"parts": weighted(0, 0)}, "not all zero"),
        ({"parts": [{"strategy": "top_k", "weight": 1, "k": 0}]}, "k must be an integer"),
        ({"parts": [{"strategy": "top_k", "weight": 1, "q": 0}]}, "'q'"),
        ({"parts": [{"strategy": "fifo", "weight": 1}]}, "treats slots and steps alike"),
        ({"parts": [{"strategy": "mixture", "weight": 1, "parts": weighted(1)}]}, "mixture"),
        ({"parts": weighted(1, 1), "schedule": SCHEDULE}, "left out where there is a schedule"),
        ({"parts": PARTS[:2], "schedule": []}, "schedule must be"),
        ({"parts": PARTS[:2], "schedule": [{"step": 0}]}, r"schedule\[0\] must be"),
        ({"parts": PARTS[:2], "schedule": [SCHEDULE[1], SCHEDULE[0]]}, "above the step before"),
        ({"parts": PARTS[:2], "schedule": [{"step": 0, "weights": [1]}]}, "list of 2 numbers"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make(**options)
    assert caught.value.code == "SELECTION_OPTIONS"
    assert misfit("mixture", options)[0], "recipes are checked by the same rules, without data"


def test_tuples_and_numpy_numbers_are_taken_as_json_gives_them_back() -> None:
    schedule: list[dict[str, Any]] = [
        {"step": 0, "weights": [1, 0]},
        {"step": 9, "weights": [0.25, 0.5]},
    ]
    law = make(
        parts=({"strategy": "uniform_steps"}, {"strategy": "top_k", "k": np.int64(2)}),
        schedule=tuple({**point, "weights": tuple(point["weights"])} for point in schedule),
    )
    parts = [{"strategy": "uniform_steps"}, {"strategy": "top_k", "k": 2}]
    assert json.loads(json.dumps(law.options)) == law.options
    assert law.options == {"parts": parts, "schedule": schedule}
    arrays = make(parts=PARTS[:2], schedule=[{"step": 0, "weights": np.array([1, 2])}])
    assert arrays.options["schedule"] == [{"step": 0, "weights": [1, 2]}]
