"""The search follows the paper's text, and its result does not depend on how it is run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.collect.ars import ArsOptions, RunningMoments, Training, train, update
from gear_offline.collect.record import EVALUATE, Crew, episode_plan
from tests.collect_environments import PUSH

OPTIONS = ArsOptions(directions=6, top=3, noise=0.1, step_size=0.1, attempt_steps=2_000)


def naive_update(weight: Any, directions: Any, forward: Any, backward: Any, top: int) -> Any:
    """Algorithm 2 of the paper, lines 6 and 7, in loops, with steps of 0.3."""
    order = sorted(range(len(forward)), key=lambda k: -max(forward[k], backward[k]))[:top]
    used = [forward[k] for k in order] + [backward[k] for k in order]
    mean = sum(used) / len(used)
    sigma = (sum((r - mean) ** 2 for r in used) / len(used)) ** 0.5
    result = weight.copy()
    for k in order:
        for place in np.ndindex(result.shape):
            gain = (forward[k] - backward[k]) * directions[k][place]
            result[place] += 0.3 / (top * sigma) * gain
    return result


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7), st.data())
def test_update_is_the_papers(seed: int, count: int, data: st.DataObject) -> None:
    top = data.draw(st.integers(1, count))
    rng = np.random.default_rng(seed)
    weight, directions = rng.normal(size=(2, 3)), rng.normal(size=(count, 2, 3))
    forward, backward = rng.normal(100, 50, size=count), rng.normal(100, 50, size=count)
    found = update(weight, directions, forward, backward, top=top, step_size=0.3)
    expected = naive_update(weight, directions, forward, backward, top)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32))
def test_moments_are_those_of_all_observations(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments = RunningMoments(3)
    parts = [rng.normal(3.0, 2.0, size=(n, 3)) * [1.0, 10.0, 0.0] for n in lengths]
    for part in parts:
        moments.merge(part)
    seen = np.concatenate(parts)
    np.testing.assert_allclose(moments.mean, seen.mean(axis=0), atol=1e-9)
    expected = seen.std(axis=0, ddof=1) if len(seen) > 1 else np.ones(3)
    expected = np.where(expected < 1e-8, 1.0, expected)  # a feature that never moves
    np.testing.assert_allclose(moments.std(), expected, rtol=1e-9)


@pytest.fixture(scope="module")
def training() -> Training:
    with Crew(PUSH, processes=1) as crew:
        return train(crew, replace(OPTIONS, train_steps=6_000), 3, quiet=True)


def test_it_learns(training: Training) -> None:
    at = training.iterations[0]
    plans = [training.rollout_plan(at, number) for number in range(len(at.lengths))]
    with Crew(PUSH, processes=1) as crew:
        first = np.mean([episode.total for episode in crew.play(plans)])
    assert first < 6.0, "weights of zero must not solve it, or the test means nothing"
    assert training.best.mean_return > 8.0


def test_a_promising_attempt_gets_more_steps() -> None:
    options = replace(OPTIONS, attempt_steps=1_000, train_steps=4_000)
    with Crew(PUSH, processes=1) as crew:
        hopeful = train(crew, replace(options, promising=5.0), 3, quiet=True)
        hopeless = train(crew, replace(options, promising=100.0), 3, quiet=True)
    assert (hopeful.attempts, hopeless.attempts) == (2, 4)
    steps = sum(sum(i.lengths) for i in hopeful.iterations if i.attempt == 0)
    assert 3_000 <= steps < 3_000 + 2 * 6 * 10


def test_a_target_needs_confirmation() -> None:
    options = replace(OPTIONS, train_steps=3_000)
    with Crew(PUSH, processes=1) as crew:
        reached = train(crew, replace(options, target=6.0), 3, quiet=True)
        plans = [episode_plan(reached.best.policy, (3, EVALUATE, n), 0.0) for n in range(20)]
        returns = [episode.total for episode in crew.play(plans)]
    assert reached.best.mean_return == np.mean(returns)  # of 20 episodes, not of the usual 5
    assert reached.best is reached.snapshots[-1] and reached.best.mean_return >= 6.0
    assert all(s.mean_return < 6.0 for s in reached.snapshots[:-1])


def test_the_alive_bonus_is_taken_off_by_step() -> None:
    """A bonus shifts returns by length: with equal lengths, it changes nothing."""
    options = replace(OPTIONS, train_steps=500)
    with Crew(PUSH, processes=1) as crew:
        plain = train(crew, options, 3, quiet=True)
        shifted = train(crew, replace(options, alive_bonus=7.0), 3, quiet=True)
    np.testing.assert_allclose(plain.best.policy.weight, shifted.best.policy.weight, rtol=1e-9)
    with Crew("CartPole-v1", processes=1) as crew:
        # CartPole's reward is nothing but the bonus: without it, no direction is better
        still = train(crew, replace(options, alive_bonus=1.0), 3, quiet=True)
        moved = train(crew, options, 3, quiet=True)
    assert not still.best.policy.weight.any()
    assert moved.best.policy.weight.any()
