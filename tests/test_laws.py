"""Every law: pure, exact, with the probability that the definition gives, on odd tables too."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.sampling.selection import (
    Segments,
    Selection,
    WeightedEpisodes,
    make_selection,
    selection_names,
)
from tests.law_support import CONTEXT, exact_law, facts, keys, p_value

# A law and options for it; every registered law is here.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("uniform_steps", {}),
    ("uniform_episodes", {}),
    ("return_weighted", {}),
    ("return_weighted", {"rule": "softmax", "temperature": 0.5, "unit": "episodes"}),
    ("return_weighted", {"rule": "rank", "temperature": 2.0}),
    ("return_weighted", {"rule": "percentile"}),
    ("top_percent", {"percent": 35.0}),
    ("top_percent", {"percent": 50, "of": "episodes", "unit": "episodes"}),
    ("top_k", {"k": 2}),
    ("top_k", {"k": 3, "unit": "episodes"}),
    ("stratified_return", {"strata": 3}),
    ("stratified_return", {"strata": 2, "unit": "episodes"}),
    ("shuffled_epochs", {}),
    ("prioritized", {}),
    ("original", {}),
    ("huggingface", {}),
    ("corl", {}),
    ("min_dt", {}),
    ("d3rlpy", {}),
]
IN_ORDER: list[tuple[str, dict[str, Any]]] = [("fifo", {}), ("lifo", {})]
MIXTURE = {
    "parts": [
        {"strategy": "uniform_steps", "weight": 1},
        {"strategy": "top_k", "weight": 3, "k": 1},
    ]
}
ALL = [*CASES, *IN_ORDER, ("mixture", MIXTURE)]
NAMED = [pytest.param(n, o, id="-".join([n, *map(str, o.values())][:4])[:40]) for n, o in ALL]
LENGTHS = [1, 7, 2, 9, 5, 3]
TABLES = st.lists(st.integers(1, 12), min_size=2, max_size=9)


def make(name: str, options: dict[str, Any], lengths: list[int], **more: Any) -> Selection:
    return make_selection(name, facts(lengths, **more), context_length=CONTEXT, **options)


def same(one: Segments, other: Segments) -> bool:
    parts: list[tuple[Any, Any]] = [
        (one.episodes, other.episodes),
        (one.starts, other.starts),
        (one.probability, other.probability),
    ]
    assert (one.lengths is None) == (other.lengths is None)
    if one.lengths is not None and other.lengths is not None:
        parts.append((one.lengths, other.lengths))
    return all(np.array_equal(a, b) for a, b in parts)


def test_every_law_is_tested() -> None:
    assert {name for name, _ in ALL} == set(selection_names())


@pytest.mark.parametrize(("name", "options"), NAMED)
@settings(max_examples=15, deadline=None)
@given(
    lengths=TABLES,
    seed=st.integers(0, 2**64 - 1),
    first_step=st.integers(0, 2**63 - 10),
    cut=st.integers(1, 5),
    count=st.integers(1, 2),
)
def test_pure_function_for_any_chunking(
    name: str,
    options: dict[str, Any],
    lengths: list[int],
    seed: int,
    first_step: int,
    cut: int,
    count: int,
) -> None:
    lengths = [n + 1 for n in lengths]
    law = make(name, options, lengths)
    whole = law.select_many(seed=seed, first_step=first_step, steps=6, count=count)
    assert whole.shape == (6, count)
    assert whole.episodes.dtype == whole.starts.dtype == np.int64
    assert whole.probability.dtype == np.float64
    for first in (0, cut):
        steps = cut if first == 0 else 6 - cut
        part = law.select_many(seed=seed, first_step=first_step + first, steps=steps, count=count)
        assert same(part, whole[first : first + steps])
    again = make(name, dict(law.options), lengths)
    assert same(again.select(seed=seed, step=first_step + 5, count=count), whole[5])
    assert json.loads(json.dumps(dict(law.options))) == dict(law.options)
    table = np.array(lengths)
    assert (whole.episodes >= 0).all() and (whole.episodes < len(lengths)).all()
    assert (whole.starts >= 0).all() and (whole.starts < table[whole.episodes]).all()
    assert (whole.probability > 0).all() and (whole.probability <= 1).all()


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_numpy_integers_draw_as_plain_ones(name: str, options: dict[str, Any]) -> None:
    law = make(name, options, [3, 9, 1, 7])
    seed, step, count = 2**31 + 7, 2**61 + 3, 2
    drawn = law.select(seed=np.uint32(seed), step=np.int64(step), count=np.int64(count))  # type: ignore[arg-type]
    assert same(drawn, law.select(seed=seed, step=step, count=count))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_frequencies_and_probabilities_are_those_of_the_law(
    name: str, options: dict[str, Any]
) -> None:
    """Chi-square over all segments at significance 1e-4; the seed is fixed."""
    data = facts(LENGTHS, [3.0, 1.0, 3.0, -2.0, 8.5, 0.0])
    law = make_selection(name, data, context_length=CONTEXT, **options)
    exact = exact_law(name, data, **options)
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-12)
    count = 3 if name == "min_dt" else 50  # of six episodes; and 50 is no divisor of 27 steps
    drawn = law.select_many(seed=11, first_step=7, steps=30_000 // count, count=count)
    named = keys(drawn, LENGTHS)
    assert set(named) <= set(exact), "nothing outside of the law is drawn"
    probability = drawn.probability.reshape(-1).tolist()
    for key, p in dict(zip(named, probability, strict=True)).items():
        assert p == pytest.approx(exact[key], rel=1e-12)
    cells = sorted(exact)
    counts, seen = Counter(named), len(named)
    expected = np.array([exact[cell] for cell in cells])
    found = np.array([counts[cell] for cell in cells])
    small = expected * seen < 5  # softmax leaves some that are all but never drawn
    if small.any():
        found = np.append(found[~small], found[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if name == "shuffled_epochs":  # without replacement: closer than chance
        np.testing.assert_allclose(found / seen, expected, rtol=0.05)
    else:
        assert p_value(found, expected * seen) > 1e-4


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), lengths=TABLES)
def test_probabilities_of_any_table_with_ties(
    name: str, options: dict[str, Any], data: st.DataObject, lengths: list[int]
) -> None:
    """Few different returns, so that most tables have ties, at the cuts as well."""
    count = len(lengths)
    some = st.sampled_from([-2.0, 0.0, 0.5, 3.0])
    returns = data.draw(st.lists(some, min_size=count, max_size=count))
    ended = [True, *data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))]
    table = facts(lengths, returns, ended)
    law = make_selection(name, table, context_length=CONTEXT, **options)
    exact = exact_law(name, table, **options)
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-12)
    drawn = law.select_many(
        seed=data.draw(st.integers(0, 2**64 - 1)), first_step=1, steps=60, count=2
    )
    named, found = keys(drawn, lengths), drawn.probability.reshape(-1).tolist()
    assert found == pytest.approx([exact.get(key, 0.0) for key in named], rel=1e-12)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_density_is_the_probability_that_selecting_returns(
    name: str, options: dict[str, Any]
) -> None:
    law = make(name, options, LENGTHS)
    if not hasattr(law, "density"):
        assert name in ("shuffled_epochs", "min_dt", "d3rlpy")
        return
    drawn = law.select_many(seed=3, first_step=0, steps=4, count=30)
    np.testing.assert_allclose(law.density(drawn), drawn.probability, rtol=1e-15)


@pytest.mark.parametrize(("name", "options"), NAMED)
@pytest.mark.parametrize("returns", [[2.0], [-1e300]])
def test_one_episode_of_one_step(name: str, options: dict[str, Any], returns: list[float]) -> None:
    law = make(name, options, [1], returns=returns, terminated=[True])
    drawn = law.select_many(seed=5, first_step=2**40, steps=3, count=1)
    assert not drawn.episodes.any() and not drawn.starts.any()
    np.testing.assert_array_equal(drawn.probability, 1.0)


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_a_table_without_episodes_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        make(name, options, [])
    assert caught.value.code == "SELECTION_EMPTY"


@pytest.mark.parametrize(
    ("name", "options"), [case for case in CASES if case[0] not in ("d3rlpy", "min_dt")]
)
def test_all_returns_alike(name: str, options: dict[str, Any]) -> None:
    """Ties: earlier episodes come first where some are left out, all count alike elsewhere."""
    data = facts(LENGTHS, [4.0] * 6)
    law = make_selection(name, data, context_length=CONTEXT, **options)
    drawn = law.select_many(seed=1, first_step=0, steps=20, count=200)
    exact = exact_law(name, data, **options)
    assert set(keys(drawn, LENGTHS)) == set(exact)
    if name == "top_k":
        assert set(drawn.episodes.reshape(-1).tolist()) == set(range(options["k"]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "options"),
    [("return_weighted", {}), ("top_k", {"k": 1}), ("top_percent", {}), ("stratified_return", {})],
)
def test_returns_that_are_no_numbers(name: str, options: dict[str, Any], bad: float) -> None:
    with pytest.raises(InputError) as caught:
        make(name, options, [2, 3], returns=[1.0, bad])
    assert caught.value.code == "SELECTION_WEIGHTS"


@pytest.mark.parametrize("rule", ["softmax", "percentile", "rank"])
def test_returns_and_temperatures_at_the_ends_of_what_numbers_can_be(rule: str) -> None:
    """Returns whose difference is no finite number, and a quotient that is none."""
    options: dict[str, Any] = {"rule": rule, "unit": "episodes"}
    data = facts([1, 1, 1], [-1.7e308, 0.0, 1.7e308])
    warm = make_selection("return_weighted", data, temperature=1.0, **options)
    shares = {
        "softmax": [math.exp(x) for x in (-1.0, -0.5, 0.0)],
        "percentile": [math.exp(x) for x in (-2 / 3, -1 / 3, 0.0)],
        "rank": [1 / 3, 1 / 2, 1.0],
    }[rule]
    every = Segments(
        episodes=np.arange(3), starts=np.zeros(3, dtype=np.int64), probability=np.zeros(3)
    )
    expected = np.array(shares) / sum(shares)
    assert isinstance(warm, WeightedEpisodes)
    np.testing.assert_allclose(warm.density(every), expected, rtol=1e-12)
    cold = make_selection("return_weighted", data, temperature=1e-320, **options)
    assert isinstance(cold, WeightedEpisodes)
    assert cold.density(every).tolist() == [0.0, 0.0, 1.0]


def test_laws_that_need_more_than_lengths_say_so() -> None:
    index = EpisodeIndex(np.array([3, 4], dtype=np.int64))
    for name, missing in (("top_percent", "returns"), ("min_dt", "context length")):
        with pytest.raises(InputError, match=missing) as caught:
            make_selection(name, index)
        assert caught.value.code == "SELECTION_DATA"


def test_d3rlpy_without_any_transition() -> None:
    with pytest.raises(InputError) as caught:
        make("d3rlpy", {}, [1, 1], terminated=[False, False])
    assert caught.value.code == "SELECTION_EMPTY"


def test_min_dt_takes_each_episode_once_an_epoch_and_drops_the_incomplete_batch() -> None:
    law = make("min_dt", {}, [5, 6, 7, 8, 9, 10, 11])
    left_out = set()
    for epoch in range(40):
        drawn = law.select_many(seed=2, first_step=2 * epoch, steps=2, count=3)
        seen = drawn.episodes.reshape(-1).tolist()
        assert len(set(seen)) == 6
        left_out |= set(range(7)) - set(seen)
    assert left_out == set(range(7)), "others each time"
    with pytest.raises(InputError) as caught:
        law.select(seed=0, step=0, count=8)
    assert caught.value.code == "SELECTION_BATCH"


@pytest.mark.parametrize("batch", [1, 4, 6, 7])
def test_stratified_batches_take_equally_from_strata(batch: int) -> None:
    data = facts([3] * 9, [float(e) for e in range(9)])
    law = make_selection("stratified_return", data, strata=3)
    for step in range(30):
        counts = np.bincount(law.select(seed=0, step=step, count=batch).episodes // 3, minlength=3)
        assert counts.max() - counts.min() <= 1 and counts.sum() == batch


def test_orders() -> None:
    for name, expected in (("fifo", [0, 1, 2, 3, 4]), ("lifo", [4, 3, 2, 1, 0])):
        law = make(name, {}, [2, 3])
        drawn = law.select_many(seed=9, first_step=0, steps=5, count=2)
        rows = np.array([0, 2])[drawn.episodes] + drawn.starts
        assert rows.reshape(-1).tolist() == expected * 2
        assert (drawn.probability == 1).all()
        far = law.select(seed=9, step=2**62, count=3)
        rows = (np.array([0, 2])[far.episodes] + far.starts).tolist()
        assert rows == [expected[(2**62 * 3 + slot) % 5] for slot in range(3)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_episode_weights_tell_the_placement_what_is_likely(
    name: str, options: dict[str, Any]
) -> None:
    law = make(name, options, LENGTHS)
    weights = getattr(law, "episode_weight", None)
    if weights is None:
        assert name not in ("uniform_episodes", "return_weighted", "top_percent", "top_k")
        return
    exact = exact_law(name, facts(LENGTHS), **options)
    share = [sum(p for (e, _, _), p in exact.items() if e == episode) for episode in range(6)]
    np.testing.assert_allclose(weights / weights.sum(), share, rtol=1e-12, atol=1e-18)
