"""Recorded transitions are the simulator's, whole and in order; policies act as they should."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.evaluation.collect.ars import ArsOptions, RunningMoments, Training, train, update
from gear_offline.evaluation.collect.policies import LinearPolicy, RandomPolicy
from gear_offline.evaluation.collect.record import (
    EVALUATE,
    Crew,
    Episode,
    EpisodePlan,
    Player,
    episode_plan,
    stream,
)
from gear_offline.evaluation.environments import make_environment
from tests.collect_environments import COUNTER, LIMIT, PUSH, length_of
from tests.support import one_error


def plans_for(player: Player, seeds: list[int]) -> list[EpisodePlan]:
    facts = player.facts
    policy = RandomPolicy(facts.low, facts.high, facts.choices)
    return [
        EpisodePlan(policy=policy, reset_seed=s, noise_path=(7, s, i)) for i, s in enumerate(seeds)
    ]


def check_counter_episode(episode: Episode) -> None:
    """Every row against what the environment must have done."""
    c, length = episode.columns(), min(length_of(episode.reset_seed), LIMIT)
    assert episode.steps == length
    steps, acted = np.arange(length, dtype=np.float32), c["actions"][:, 0]
    tag, last = np.full(length, float(episode.reset_seed)), steps == length - 1
    terminated = length_of(episode.reset_seed) <= LIMIT
    before = np.concatenate([[0], acted[:-1]])
    np.testing.assert_array_equal(c["observations"], np.stack([tag, steps, before], 1))
    np.testing.assert_array_equal(c["next_observations"], np.stack([tag, steps + 1, acted], 1))
    np.testing.assert_array_equal(c["rewards"], np.arange(length) + 1.1)
    np.testing.assert_array_equal(c["terminals"], last & terminated)
    np.testing.assert_array_equal(c["timeouts"], last & (not terminated))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=12))
def test_every_transition_is_real(seeds: list[int]) -> None:
    player = Player(make_environment(COUNTER))
    for plan in plans_for(player, seeds):
        episode = player.play(plan)
        assert episode.reset_seed == plan.reset_seed
        check_counter_episode(episode)
        assert episode.total == pytest.approx(np.sum(np.arange(episode.steps) + 1.1))


@pytest.mark.parametrize("processes", [1, 2])
def test_short_episodes_do_not_crowd_out_long_ones(processes: int) -> None:
    policy = RandomPolicy(np.full(1, -1, np.float32), np.ones(1, np.float32))

    def endless() -> Iterator[EpisodePlan]:
        for i in itertools.count():
            yield EpisodePlan(policy=policy, reset_seed=i, noise_path=(i,))

    with Crew(COUNTER, processes=processes) as crew:
        for _ in range(2):  # the crew is of use after a list that nobody read to its end
            episodes = crew.play(endless())
            assert [e.reset_seed for e in itertools.islice(episodes, 30)] == list(range(30))


def test_noise_is_scaled_by_half_ranges_and_clipped() -> None:
    player, ways, plain = Player(make_environment(COUNTER)), range(200), np.zeros((1, 3))
    still = LinearPolicy(plain, np.zeros(3), np.ones(3))
    plans = [
        EpisodePlan(policy=still, reset_seed=LIMIT, noise_path=(i,), action_noise=0.5) for i in ways
    ]
    actions = np.concatenate([player.play(plan).actions for plan in plans])
    noise = np.concatenate([stream(i).standard_normal((LIMIT, 1)) for i in ways])
    np.testing.assert_array_equal(actions, np.clip(0.5 * 2.0 * noise, -2, 2).astype(np.float32))
    assert (np.abs(actions) == 2.0).any()


def test_discrete_actions_and_their_noise() -> None:
    player = Player(make_environment("CartPole-v1"))
    left = LinearPolicy(np.zeros((2, 4)), np.zeros(4), np.ones(4), discrete=True)
    for noise, expected in ((0.0, {0}), (1.0, {0, 1})):
        plans = [
            EpisodePlan(policy=left, reset_seed=i, noise_path=(i,), action_noise=noise)
            for i in range(6)
        ]
        columns = [player.play(plan).actions for plan in plans]
        assert all(column.dtype == np.int64 and column.ndim == 1 for column in columns)
        assert set(np.concatenate(columns).tolist()) == expected


def test_an_episode_can_be_replayed_exactly_from_its_seed_and_actions() -> None:
    pytest.importorskip("mujoco", reason="needs pip install 'gear-offline[mujoco]'")
    player, fresh = Player(make_environment("Hopper-v5")), gymnasium.make("Hopper-v5")
    for plan in plans_for(player, [3, 4, 5]):
        c = player.play(plan).columns()
        observation, _ = fresh.reset(seed=plan.reset_seed)
        for t in range(len(c["rewards"])):
            np.testing.assert_array_equal(c["observations"][t], observation)
            np.testing.assert_array_equal(
                c["infos/qpos"][t],
                fresh.unwrapped.data.qpos.astype(np.float32),  # type: ignore[attr-defined]
            )
            observation, reward, *_ = fresh.step(c["actions"][t])
            assert reward == c["rewards"][t]
        np.testing.assert_array_equal(c["next_observations"][-1], observation)


def test_environments_that_cannot_be_recorded_are_refused() -> None:
    with one_error("ENVIRONMENT", "no bounds"):
        Player(make_environment("Unbounded-v0"))
    endless = Player(make_environment("Endless-v0"))
    with one_error("ENVIRONMENT", "not ended within 10,000 steps"):
        endless.play(plans_for(endless, [3])[0])
    player, taxi = Player(make_environment("Taxi-v4")), gymnasium.make("Taxi-v4")
    episode = player.play(plans_for(player, [3])[0])
    first, _ = taxi.reset(seed=3)  # choices are one-hot vectors
    np.testing.assert_array_equal(episode.columns()["observations"][0], np.eye(500)[first])


def test_a_policy_that_has_diverged_is_an_error() -> None:
    player = Player(make_environment(COUNTER))
    broken = LinearPolicy(np.full((1, 3), np.nan), np.zeros(3), np.ones(3))
    with one_error("MODEL"):
        player.play(EpisodePlan(policy=broken, reset_seed=3, noise_path=(0,)))


# the search follows the paper, and its result does not depend on how it is run -----------------


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
