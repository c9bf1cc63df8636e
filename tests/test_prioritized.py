"""Prioritised selection: exact integer sums, deterministic updates, importance weights, state."""

import gc
import math
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.sampling import Prioritized
from gear_offline.kernels.draws import draws
from tests.kernels_on_cpu import on_cpu
from tests.sampling_support import prioritized
from tests.support import one_error

LENGTHS = [5, 1, 8, 3]
STEPS = sum(LENGTHS)
NAMES = np.array([(e, s) for e, n in enumerate(LENGTHS) for s in range(n)], dtype=np.int64)


def make(**options: Any) -> Prioritized:
    return prioritized(LENGTHS, **options)


def losses_of(values: list[float]) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


@settings(max_examples=60)
@given(
    st.sampled_from([1, 5, 300, 5000, 100_000]),  # the last one in more than one level
    st.sampled_from([2, 2**45]),
    st.lists(st.tuples(st.integers(0, 99_999), st.floats(0, 200, width=32)), max_size=40),
    st.integers(0, 2**64 - 1),
)
def test_draws_are_those_of_cumulative_integer_sums(
    size: int, most: int, changes: list[tuple[int, float]], seed: int
) -> None:
    """Pins the stream: floor(draw * total / 2^64) falls into a start's range of masses."""
    law, masses = (
        prioritized([size], alpha=1.0),
        np.random.default_rng(seed).integers(1, most, size),
    )
    law.load_state({"masses": masses, "updates": np.array([3])})
    if changes:
        starts = np.array([item % size for item, _ in changes])
        names = np.stack([0 * starts, starts], axis=1)
        law.update(names, losses_of([loss for _, loss in changes]))
        others = np.delete(np.arange(size), starts)
        assert law.masses[others].tolist() == masses[others].tolist()
    first, _ = draws(seed=seed, stream=0, first_step=4, steps=1, count=64)
    bounds = np.cumsum(law.masses.astype(object))
    asked = np.array([number * bounds[-1] // 2**64 for number in first[0].tolist()], object)
    drawn = law.sample(seed, 4, 1, 64)[0]
    assert drawn.starts.tolist() == np.searchsorted(bounds, asked, side="right").tolist()
    shares = (law.masses / np.float64(bounds[-1]))[drawn.starts]
    np.testing.assert_allclose(drawn.probability, shares, rtol=1e-15)


@settings(max_examples=40)
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
    np.testing.assert_allclose(make(beta=0.0).importance(p, step=0), 1.0)
    law = make(beta=0.5, beta_steps=100)
    np.testing.assert_allclose(law.importance(p, step=0), [1.0, 0.5**0.5, 0.5])
    np.testing.assert_allclose(law.importance(p, step=100), [1.0, 0.5, 0.25])
    np.testing.assert_allclose(law.importance(p, step=10**9), [1.0, 0.5, 0.25])
    assert make(beta=0.5).importance(p, step=10**9)[2] == pytest.approx(0.5)


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


@pytest.mark.parametrize("place", ["host", "kernel"])
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *(((2, 5), bad) for bad in (math.nan, math.inf, -math.inf, -1.0, -1e-30)),
        *((name, 1.0) for name in ((-1, 0), (4, 0), (0, 5), (0, -1), (0, 2**62), (2**62, 0))),
    ],
)
def test_updates_that_are_refused_change_nothing(
    kernels: Any, place: str, name: tuple[int, int], loss: float
) -> None:
    """On the host an error; nobody waits for the device to say it."""
    law, names = make(), np.array([(0, 4), name, (0, 0)], dtype=np.int64)
    before, losses = law.masses.tolist(), losses_of([0.5, loss, 2.0])
    if place == "host":
        with one_error("SELECTION"):
            law.update(names, losses)
    else:
        with on_cpu(kernels) as device:
            law.on_device(device).update_from_host(names, losses)
    assert law.masses.tolist() == before and law.updates == 0


def test_other_shapes_an_empty_update_and_minus_zero() -> None:
    law = make()
    for segments, losses in (([[0, 0]], [1.0, 2.0]), ([[0, 0, 0]], [1.0]), ([[0, 0]], [])):
        with one_error("SELECTION"):  # of other shapes
            law.update(np.array(segments, dtype=np.int64), losses_of(losses))
    law.update(np.zeros((0, 2), np.int64), losses_of([]))
    law.update(NAMES[:1], losses_of([-0.0]))
    assert law.updates == 2 and int(law.masses[0]) < int(law.masses[1])


def test_priorities_are_given_back_at_once() -> None:
    """A table that grows makes others: of 10^9 steps they are 8.5 GB."""
    sampler = make()
    gone = weakref.ref(sampler)
    gc.disable()
    try:
        del sampler
        assert gone() is None, "nothing waits for the garbage collector"
    finally:
        gc.enable()
