"""Recorded transitions are the simulator's, whole and in order; policies act as they should."""

import itertools
from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.collect.policies import LinearPolicy, RandomPolicy
from gear_offline.collect.record import Crew, Episode, EpisodePlan, Player, stream
from gear_offline.evaluation.environments import probe
from tests.collect_environments import COUNTER, LIMIT, length_of
from tests.support import one_error


def plans_for(player: Player, seeds: list[int]) -> list[EpisodePlan]:
    facts = player.facts
    policy = RandomPolicy(facts.low, facts.high, facts.choices)
    return [
        EpisodePlan(policy=policy, reset_seed=s, noise_path=(7, s, i)) for i, s in enumerate(seeds)
    ]


def check_counter_episode(episode: Episode) -> None:
    """Every row against what the environment must have done."""
    c, length = episode.columns(probe(COUNTER)), min(length_of(episode.reset_seed), LIMIT)
    assert episode.steps == length
    steps, acted = np.arange(length, dtype=np.float32), c["actions"][:, 0]
    tag, last = np.full(length, episode.reset_seed, np.float32), steps == length - 1
    terminated = length_of(episode.reset_seed) <= LIMIT
    before = np.concatenate([[0], acted[:-1]])
    np.testing.assert_array_equal(c["observations"], np.stack([tag, steps, before], 1))
    np.testing.assert_array_equal(c["next_observations"], np.stack([tag, steps + 1, acted], 1))
    np.testing.assert_array_equal(c["rewards"], (np.arange(length) + 1.1).astype(np.float32))
    np.testing.assert_array_equal(c["terminals"], last & terminated)
    np.testing.assert_array_equal(c["timeouts"], last & (not terminated))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=12))
def test_every_transition_is_real(seeds: list[int]) -> None:
    player = Player(COUNTER)
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
    player, ways, plain = Player(COUNTER), range(200), np.zeros((1, 3))
    still = LinearPolicy(plain, np.zeros(3), np.ones(3))
    plans = [
        EpisodePlan(policy=still, reset_seed=LIMIT, noise_path=(i,), action_noise=0.5) for i in ways
    ]
    actions = np.concatenate([player.play(plan).actions for plan in plans])
    noise = np.concatenate([stream(i).standard_normal((LIMIT, 1)) for i in ways])
    np.testing.assert_array_equal(actions, np.clip(0.5 * 2.0 * noise, -2, 2).astype(np.float32))
    assert (np.abs(actions) == 2.0).any()


def test_discrete_actions_and_their_noise() -> None:
    player = Player("CartPole-v1")
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
    player, fresh = Player("Hopper-v5"), gymnasium.make("Hopper-v5")
    for plan in plans_for(player, [3, 4, 5]):
        c = player.play(plan).columns(player.facts)
        observation, _ = fresh.reset(seed=plan.reset_seed)
        for t in range(len(c["rewards"])):
            np.testing.assert_array_equal(c["observations"][t], observation.astype(np.float32))
            np.testing.assert_array_equal(
                c["infos/qpos"][t],
                fresh.unwrapped.data.qpos.astype(np.float32),  # type: ignore[attr-defined]
            )
            observation, reward, *_ = fresh.step(c["actions"][t])
            assert np.float32(reward) == c["rewards"][t]
        np.testing.assert_array_equal(c["next_observations"][-1], observation.astype(np.float32))


def test_environments_that_cannot_be_recorded_are_refused() -> None:
    for name, why in {"Unbounded": "no bounds", "Endless": "no step limit"}.items():
        with one_error("ENVIRONMENT", why):
            Player(f"{name}-v0")
    with one_error("ENVIRONMENT", "not one"):
        Player("Taxi-v4")


def test_a_policy_that_has_diverged_is_an_error() -> None:
    player = Player(COUNTER)
    broken = LinearPolicy(np.full((1, 3), np.nan), np.zeros(3), np.ones(3))
    with one_error("MODEL"):
        player.play(EpisodePlan(policy=broken, reset_seed=3, noise_path=(0,)))
