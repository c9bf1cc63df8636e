"""Recorded transitions are the simulator's, whole and in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.collect.environment import describe
from gear_offline.collect.makers import random_policy
from gear_offline.collect.policy import LinearPolicy
from gear_offline.collect.rollout import Episode, EpisodePlan, Player
from gear_offline.collect.streams import reset_seed, stream
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.environments import make_environment
from tests.collect_environments import COUNTER, LIMIT, length_of


def plans_for(player: Player, seeds: list[int], noise: float = 0.0) -> list[EpisodePlan]:
    policy = random_policy(player.facts)
    return [
        EpisodePlan(policy=policy, reset_seed=s, noise_path=(7, s, i), action_noise=noise)
        for i, s in enumerate(seeds)
    ]


def check_counter_episode(episode: Episode) -> None:
    """Every row against what the environment must have done."""
    c, length = episode.columns, min(length_of(episode.reset_seed), LIMIT)
    assert episode.steps == length
    steps = np.arange(length, dtype=np.float32)
    acted = c["actions"][:, 0]
    np.testing.assert_array_equal(c["observations"][:, 0], np.float32(episode.reset_seed))
    np.testing.assert_array_equal(c["next_observations"][:, 0], np.float32(episode.reset_seed))
    np.testing.assert_array_equal(c["observations"][:, 1], steps)
    np.testing.assert_array_equal(c["next_observations"][:, 1], steps + 1)
    np.testing.assert_array_equal(c["next_observations"][:, 2], acted)
    np.testing.assert_array_equal(c["observations"][1:, 2], acted[:-1])
    np.testing.assert_array_equal(c["rewards"], (np.arange(length) + 1.1).astype(np.float32))
    terminated = length_of(episode.reset_seed) <= LIMIT
    last = np.arange(length) == length - 1
    np.testing.assert_array_equal(c["terminals"], last & terminated)
    np.testing.assert_array_equal(c["timeouts"], last & (not terminated))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 2**20), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_every_transition_is_real_and_in_order(seeds: list[int], environments: int) -> None:
    player = Player(COUNTER, environments)
    episodes = list(player.record(plans_for(player, seeds)))
    assert [e.reset_seed for e in episodes] == seeds
    for episode in episodes:
        check_counter_episode(episode)
    alone = Player(COUNTER, 1)
    for one, episode in zip(plans_for(alone, seeds), episodes, strict=True):
        (same,) = alone.record([one])
        for name, column in episode.columns.items():
            np.testing.assert_array_equal(column, same.columns[name])


def test_both_flags_on_the_last_row_count_as_terminal() -> None:
    seed = LIMIT - 1
    assert length_of(seed) == LIMIT
    environment = make_environment(COUNTER)
    environment.reset(seed=seed)
    for _ in range(LIMIT):
        _, _, terminated, truncated, _ = environment.step(np.zeros(1, np.float32))
    assert terminated and truncated, "the environment must set both for this test to mean anything"
    player = Player(COUNTER, 2)
    (episode,) = player.record(plans_for(player, [seed]))
    assert episode.columns["terminals"][-1] and not episode.columns["timeouts"].any()


def test_short_episodes_do_not_crowd_out_long_ones() -> None:
    player = Player(COUNTER, 4)

    def endless() -> Iterator[EpisodePlan]:
        policy = random_policy(player.facts)
        for i in itertools.count():
            yield EpisodePlan(policy=policy, reset_seed=i, noise_path=(i,))

    first = [e.reset_seed for e in itertools.islice(player.record(endless()), 30)]
    assert first == list(range(30))


def test_scores_agree_with_records() -> None:
    player = Player(COUNTER, 3)
    plans = plans_for(player, [5, 3, 14, 0, 9])
    for episode, score in zip(player.record(plans), player.score(plans), strict=True):
        assert score.steps == score.count == episode.steps
        assert score.total_reward == episode.simulated_return
        seen = episode.columns["observations"].astype(np.float64)
        np.testing.assert_allclose(score.mean, seen.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(score.squares, ((seen - seen.mean(0)) ** 2).sum(0), atol=1e-5)


def test_noise_is_scaled_by_half_ranges_and_clipped() -> None:
    player = Player(COUNTER, 1)
    still = LinearPolicy(np.zeros((1, 3)), np.zeros(3), np.ones(3))
    plans = [
        EpisodePlan(policy=still, reset_seed=LIMIT, noise_path=(i,), action_noise=0.5)
        for i in range(200)
    ]
    actions = np.concatenate([e.columns["actions"] for e in player.record(plans)]).ravel()
    expected = np.concatenate(
        [np.clip(0.5 * 2.0 * stream(i).standard_normal((LIMIT, 1)), -2.0, 2.0) for i in range(200)]
    ).ravel()
    np.testing.assert_array_equal(actions, expected.astype(np.float32))
    assert (np.abs(actions) == 2.0).any()


def test_discrete_actions_and_their_noise() -> None:
    player = Player("CartPole-v1", 2)
    assert player.facts.discrete and player.facts.action_size == 2
    left = LinearPolicy(np.zeros((2, 4)), np.zeros(4), np.ones(4), discrete=True)
    for noise, expected in ((0.0, {0}), (1.0, {0, 1})):
        plans = [
            EpisodePlan(policy=left, reset_seed=i, noise_path=(i,), action_noise=noise)
            for i in range(6)
        ]
        for episode in player.record(plans):
            assert episode.columns["actions"].dtype == np.int64
            assert episode.columns["actions"].ndim == 1
        seen = np.concatenate([e.columns["actions"] for e in player.record(plans)])
        assert set(seen.tolist()) == expected


@pytest.mark.parametrize("environment_id", ["Hopper-v5", "InvertedPendulum-v5"])
def test_recorded_states_and_actions_give_the_recorded_results(environment_id: str) -> None:
    """The oracle: put the simulator into the recorded state, apply the action, compare."""
    pytest.importorskip("mujoco", reason="needs pip install 'gear-offline[mujoco]'")
    player = Player(environment_id, 3)
    fresh = gymnasium.make(environment_id)
    fresh.reset(seed=0)
    for episode in player.record(plans_for(player, [11, 12, 13, 14])):
        c = episode.columns
        for t in range(episode.steps):
            position = c["infos/qpos"][t].astype(np.float64)
            fresh.unwrapped.set_state(position, c["infos/qvel"][t].astype(np.float64))  # type: ignore[attr-defined]
            observation, reward, terminated, _, _ = fresh.unwrapped.step(c["actions"][t])
            # float32 states, and the contact solver's warm start is not part of the state
            np.testing.assert_allclose(observation, c["next_observations"][t], atol=2e-3)
            assert float(reward) == pytest.approx(float(c["rewards"][t]), abs=2e-3)
            assert terminated == bool(c["terminals"][t])


def test_an_episode_can_be_replayed_exactly_from_its_seed_and_actions() -> None:
    pytest.importorskip("mujoco", reason="needs pip install 'gear-offline[mujoco]'")
    player = Player("Hopper-v5", 2)
    fresh = gymnasium.make("Hopper-v5")
    for episode in player.record(plans_for(player, [3, 4, 5])):
        c = episode.columns
        observation, _ = fresh.reset(seed=episode.reset_seed)
        for t in range(episode.steps):
            np.testing.assert_array_equal(c["observations"][t], observation.astype(np.float32))
            observation, reward, *_ = fresh.step(c["actions"][t])
            assert np.float32(reward) == c["rewards"][t]
        np.testing.assert_array_equal(c["next_observations"][-1], observation.astype(np.float32))


def test_a_policy_that_diverged_is_an_error() -> None:
    player = Player(COUNTER, 1)
    broken = LinearPolicy(np.full((1, 3), np.nan), np.zeros(3), np.ones(3))
    with pytest.raises(GearError) as caught:
        list(player.record([EpisodePlan(policy=broken, reset_seed=3, noise_path=(0,))]))
    assert caught.value.code == "POLICY_NONFINITE"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Unbounded-v0", "no bounds"), ("Endless-v0", "no step limit"), ("Taxi-v4", "not one")],
)
def test_environments_that_cannot_be_recorded_are_refused(name: str, reason: str) -> None:
    environment = make_environment(name)
    with pytest.raises(InputError, match=reason) as caught:
        describe(environment, name)
    assert caught.value.code == "COLLECT_ENVIRONMENT"


def test_streams_depend_on_their_whole_path_only() -> None:
    drawn = {
        path: (reset_seed(*path), stream(*path).random())
        for path in [(0, 1), (0, 2), (1, 1), (0, 1, 0), (0, 1, 1), (1, 0, 1)]
    }
    assert len(set(drawn.values())) == len(drawn)
    assert drawn[(0, 1, 1)] == (reset_seed(0, 1, 1), stream(0, 1, 1).random())
