"""Prioritised selection: exact integer sums, deterministic updates, importance weights, state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.kernels.philox import draws
from gear_offline.sampling.prioritized import HostPriorities, Prioritized, importance_weights
from tests.sampling_support import p_value, prioritized
from tests.support import one_error

LENGTHS = [5, 1, 8, 3]
STEPS = sum(LENGTHS)
NAMES = np.array([(e, s) for e, n in enumerate(LENGTHS) for s in range(n)], dtype=np.int64)


def make(**options: Any) -> Prioritized:
    return prioritized(LENGTHS, **options)


def losses_of(values: list[float]) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=300).filter(any),
    st.lists(st.tuples(st.integers(0, 299), st.integers(0, 2**50)), max_size=40),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20),
)
def test_the_tree_is_a_list_of_cumulative_sums(
    masses: list[int], changes: list[tuple[int, int]], numbers: list[int]
) -> None:
    tree = HostPriorities(np.array([0, len(masses)]), np.ones(1, np.uint64), first=1)
    tree.load_state(np.array(masses), 0)
    new = {item % len(masses): mass for item, mass in changes}
    if new and sum(new.values()) + sum(masses) > 0:
        named = sorted(new)
        values = np.array([new[item] for item in named], np.uint64)
        tree.set(np.array(named, np.int64), values)
        masses = [new.get(item, mass) for item, mass in enumerate(masses)]
    assert tree.state()["masses"].tolist() == masses and tree.total == sum(masses)
    if not any(masses):
        return
    bounds = np.cumsum(np.array(masses, dtype=object)).tolist()
    asked = sorted({n % bounds[-1] for n in numbers} | {0, bounds[-1] - 1})
    asked += [b - d for b in bounds for d in (0, 1) if 0 <= b - d < bounds[-1]]
    found = tree.find(np.array(asked, dtype=np.uint64)).tolist()
    assert found == [next(i for i, b in enumerate(bounds) if n < b) for n in asked]


def test_all_starts_are_alike_before_any_update() -> None:
    law = make()
    assert law.loss_sampler is law and law.updates == 0
    drawn = law.sample(0, 0, 10, 1700)
    counts = np.bincount(np.cumsum([0, *LENGTHS])[drawn.episodes.reshape(-1)]
                         + drawn.starts.reshape(-1), minlength=STEPS)  # fmt: skip
    assert p_value(counts, np.full(STEPS, drawn.episodes.size / STEPS)) > 1e-4
    np.testing.assert_allclose(drawn.probability, 1 / STEPS, rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_frequencies_follow_the_losses(alpha: float) -> None:
    """Losses over twelve orders of magnitude; chi-square at 1e-4 over cells of 5 and more."""
    law = make(alpha=alpha, epsilon=0.0, largest=1e6)
    losses = losses_of([10.0 ** (12 * i / (STEPS - 1) - 6) for i in range(STEPS)])
    law.update(NAMES, losses)
    ideal = losses.astype(np.float64) ** alpha
    ideal /= ideal.sum()
    drawn = law.sample(3, 0, 30, 1000)
    rows = np.cumsum([0, *LENGTHS])[drawn.episodes] + drawn.starts
    np.testing.assert_allclose(drawn.probability, ideal[rows], rtol=2e-3)  # 11 significant bits
    exact = law.masses / np.float64(law.masses.sum())
    np.testing.assert_allclose(exact, ideal, rtol=2e-3)
    counts = np.bincount(rows.reshape(-1), minlength=STEPS)
    often = exact * rows.size >= 5
    cells, expected = counts[often], exact[often] * rows.size
    assert cells.sum() > 0.999 * rows.size
    assert p_value(cells, expected * (cells.sum() / expected.sum())) > 1e-4


def test_draws_are_those_of_cumulative_integer_sums() -> None:
    """Pins the stream: floor(draw * total / 2^64) falls into a start's range of masses."""
    law = make(alpha=1.0)
    law.update(NAMES[[3, 9]], losses_of([7.0, 0.01]))
    first, _ = draws(seed=21, stream=0, first_step=4, steps=1, count=64)
    bounds = np.cumsum(law.masses.astype(object)).tolist()
    drawn = law.sample(21, 4, 1, 64)[0]
    for number, e, s in zip(first[0].tolist(), drawn.episodes, drawn.starts, strict=True):
        value = number * bounds[-1] // 2**64
        row = next(i for i, bound in enumerate(bounds) if value < bound)
        assert NAMES[row].tolist() == [e, s]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, STEPS - 1), st.floats(0, 200, width=32)), min_size=1, max_size=30
    ),
    st.randoms(use_true_random=False),
)
def test_updates_do_not_depend_on_the_order_within_a_batch(
    pairs: list[tuple[int, float]], random: Any
) -> None:
    """Of a segment named twice the larger loss counts."""
    one, other, oracle = make(), make(), make()
    shuffled = list(pairs)
    random.shuffle(shuffled)
    for law, order in ((one, pairs), (other, shuffled)):
        law.update(NAMES[[row for row, _ in order]], losses_of([loss for _, loss in order]))
    for row, loss in {r: max(v for q, v in pairs if q == r) for r, _ in pairs}.items():
        oracle.update(NAMES[[row]], losses_of([loss]))
    assert one.masses.tolist() == other.masses.tolist() == oracle.masses.tolist()


def test_masses_are_the_documented_formula() -> None:
    law = make(alpha=0.7, epsilon=0.25, largest=50.0)
    most = 2**58  # 17 of them are less than 2^63, 17 of 2^59 are not
    for loss in (0.0, 1.0, 3.5, 49.0, 1000.0):
        law.update(NAMES[:1], losses_of([loss]))
        ideal = most * (min(loss + 0.25, 50.0) / 50.0) ** 0.7
        assert int(law.masses[0]) == pytest.approx(ideal, rel=1e-3)
    assert int(law.masses[0]) == most
    assert int(make(alpha=16.0, largest=1e9, initial=1e-9).masses[0]) == 1, "never nothing"


def test_importance_weights() -> None:
    p = np.array([0.1, 0.2, 0.4])
    np.testing.assert_allclose(importance_weights(p, segments=10), [1.0, 0.5, 0.25])
    np.testing.assert_allclose(importance_weights(p, segments=10, beta=0.0), 1.0)
    law = make(beta=0.5, beta_steps=100)
    np.testing.assert_allclose(law.importance(p, step=0), [1.0, 0.5**0.5, 0.5])
    np.testing.assert_allclose(law.importance(p, step=100), [1.0, 0.5, 0.25])
    np.testing.assert_allclose(law.importance(p, step=10**9), [1.0, 0.5, 0.25])
    assert make(beta=0.5).importance(p, step=10**9)[2] == pytest.approx(0.5)


def test_state_continues_bit_for_bit() -> None:
    law, fresh = make(), make()
    law.update(NAMES[::2], losses_of([float(i) for i in range(len(NAMES[::2]))]))
    fresh.load_state(law.state())
    assert fresh.updates == 1
    for one in (law, fresh):
        one.update(NAMES[1:4], losses_of([0.5, 0.0, 3.0]))
    assert law.masses.tolist() == fresh.masses.tolist()
    a, b = (one.sample(1, 5, 1, 100)[0] for one in (law, fresh))
    assert np.array_equal(a.episodes, b.episodes) and np.array_equal(a.starts, b.starts)


@pytest.mark.parametrize(
    "change",
    [
        {"masses": None},
        {"updates": None},
        {"masses": np.ones(3, np.int64)},
        {"masses": np.zeros(STEPS, np.int64)},
        {"masses": np.full(STEPS, 2**62, np.int64)},
        {"masses": np.ones(STEPS, np.float64)},
        {"updates": np.array([-1])},
    ],
)
def test_states_that_are_none_change_nothing(change: dict[str, Any]) -> None:
    law = make()
    before = law.masses.tolist()
    state = {key: v for key, v in {**law.state(), **change}.items() if v is not None}
    with one_error("LOADER_STATE"):
        law.load_state(state)
    assert law.masses.tolist() == before


@pytest.mark.parametrize(
    ("segments", "losses"),
    [
        ([[0, 0]], [math.nan]),
        ([[0, 0]], [math.inf]),
        ([[0, 0]], [-1.0]),
        ([[0, 0]], [1.0, 2.0]),
        ([[0, 5]], [1.0]),
        ([[0, -1]], [1.0]),
        ([[4, 0]], [1.0]),
        ([[-1, 0]], [1.0]),
        ([[0, 0, 0]], [1.0]),
    ],
)
def test_updates_that_are_refused_change_nothing(
    segments: list[list[int]], losses: list[float]
) -> None:
    law = make()
    before = law.masses.tolist()
    with one_error("SELECTION"):
        law.update(np.array(segments, dtype=np.int64), losses_of(losses))
    assert law.masses.tolist() == before and law.updates == 0


def test_an_empty_update_and_minus_zero() -> None:
    law = make()
    law.update(np.zeros((0, 2), np.int64), losses_of([]))
    law.update(NAMES[:1], losses_of([-0.0]))
    assert law.updates == 2 and int(law.masses[0]) < int(law.masses[1])
