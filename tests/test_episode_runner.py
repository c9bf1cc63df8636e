"""The fixed list of episodes: each is played once, as a plain loop would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest

from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.episode_runner import make_environment, run_episodes, space_sizes
from gear_offline.evaluation.evaluate import (
    evaluate_policy,
)
from tests.evaluation_support import Constant, Remembering


def one_by_one(
    policy: Remembering, environment_id: str, seeds: Sequence[int], targets: Sequence[float]
) -> tuple[list[float], list[int]]:
    """The oracle: a loop over episodes with one environment, as in Gymnasium's own manual."""
    environment = gymnasium.make(environment_id)
    returns, lengths = [], []
    for seed, target in zip(seeds, targets, strict=True):
        observation, _ = environment.reset(seed=seed)
        total, step, over = 0.0, 0, False
        while not over:
            action: Any = policy.one(observation, target - total, step)
            space = environment.action_space
            if isinstance(space, gymnasium.spaces.Box):
                action = np.clip(action, space.low, space.high).astype(np.float32)
            observation, reward, ended, cut, _ = environment.step(action)
            total, step, over = total + float(reward), step + 1, ended or cut
        returns.append(total)
        lengths.append(step)
    environment.close()
    return returns, lengths


@pytest.mark.parametrize("environments", [1, 3, 20])
@pytest.mark.parametrize(
    ("environment_id", "discrete"),
    [("Pendulum-v1", False), ("CartPole-v1", True), ("InvertedPendulum-v5", False)],
)
def test_batch_of_environments_gives_the_episodes_of_a_plain_loop(
    environment_id: str, discrete: bool, environments: int
) -> None:
    states, actions, found = space_sizes(make_environment(environment_id))
    assert found is discrete
    weights = np.random.default_rng(3).normal(size=(states + 2, actions))
    seeds, targets = [5, 6, 7, 5, 6, 7], [10.0, 10.0, 10.0, -400.0, -400.0, -400.0]
    expected = one_by_one(Remembering(weights, discrete=discrete), environment_id, seeds, targets)
    assert len(set(expected[0])) >= 3, "the episodes differ, so mixing them up would show"
    played = run_episodes(
        Remembering(weights, discrete=discrete),
        environment_id=environment_id,
        seeds=seeds,
        targets=targets,
        environments=environments,
    )
    assert played.returns.tolist() == expected[0]
    assert played.lengths.tolist() == expected[1]


def test_each_listed_episode_is_played_once_however_long_it_is() -> None:
    seeds = [3, 6, 0, 13, 2, 6, 20, 1, 0, 5]
    ended: list[int] = []
    played = run_episodes(
        Constant(np.full(3, 9.0)),  # far outside: the environment checks that it was clipped
        environment_id="GearTest/Counted-v0",
        seeds=seeds,
        targets=[0.0] * len(seeds),
        environments=4,
        on_episode=ended.append,
    )
    lengths = [seed % 7 + 1 for seed in seeds]
    assert played.lengths.tolist() == lengths
    assert played.returns.tolist() == [n * (n + 1) / 2 for n in lengths]
    assert played.terminated.all()
    assert sum(ended) == len(seeds)


def test_short_episodes_do_not_crowd_out_long_ones() -> None:
    # Taking the first 28 episodes that finish in 4 self-resetting environments would give the
    # short ones more weight; the mean over seeds 0..27 is exactly that of 1..7 steps.
    report = evaluate_policy(
        Constant(np.zeros(3)),
        environment_id="GearTest/Counted-v0",
        targets=[1.0],
        episodes=28,
        environments=4,
    )
    assert report.results[0].lengths.mean() == 4.0


def test_episodes_without_a_limit_are_cut_and_not_called_terminated() -> None:
    played = run_episodes(
        Constant(np.zeros(3)),
        environment_id="GearTest/Endless-v0",
        seeds=[0, 1],
        targets=[0.0, 0.0],
        environments=2,
        max_steps=7,
    )
    assert played.lengths.tolist() == [7, 7]
    assert not played.terminated.any()


def test_action_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        run_episodes(
            Constant(np.array([0.0, np.nan, 0.0])),
            environment_id="GearTest/Counted-v0",
            seeds=[0],
            targets=[0.0],
            environments=1,
        )
    assert caught.value.code == "POLICY_NONFINITE"


@pytest.mark.parametrize(("name", "what"), [("Broken", "a reward"), ("Blind", "an observation")])
def test_what_an_environment_gives_that_is_not_a_number_is_not_the_policys_fault(
    name: str, what: str
) -> None:
    with pytest.raises(InputError, match=f"the environment gave {what} .* NaN") as caught:
        run_episodes(
            Remembering(np.ones((4, 3))),
            environment_id=f"GearTest/{name}-v0",
            seeds=[2],
            targets=[0.0],
            environments=1,
        )
    assert caught.value.code == "ENVIRONMENT_NONFINITE"
    assert caught.value.where == f"GearTest/{name}-v0"


def test_environment_that_cannot_be_made_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InputError) as unknown:
        make_environment("Hoper-v5")
    assert unknown.value.code == "ENVIRONMENT_UNKNOWN"
    assert "Hopper" in str(unknown.value) and "my_module:Name-v0" in unknown.value.remedy
    with pytest.raises(UnavailableError) as absent:
        make_environment("no_module_of_mine:Corridor-v0")
    assert absent.value.code == "ENVIRONMENT_PACKAGE"
    assert "PYTHONPATH" in absent.value.remedy and ".;" not in str(absent.value)
    with pytest.raises(InputError) as nested:
        space_sizes(make_environment("GearTest/Nested-v0"))
    assert nested.value.code == "ENVIRONMENT_SPACE"

    def refuse(*_: Any, **__: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled("MuJoCo is not installed\nlong advice")

    monkeypatch.setattr(gymnasium, "make", refuse)
    with pytest.raises(UnavailableError) as missing:
        make_environment("Hopper-v5")
    assert missing.value.code == "ENVIRONMENT_PACKAGE"
    assert "pip install 'gear-offline[mujoco]'" in missing.value.remedy
    assert "long advice" not in str(missing.value)


def test_discrete_actions_that_do_not_start_at_0_are_refused() -> None:
    """A model's choices are counted from 0."""
    environment = gymnasium.make("CartPole-v1")
    assert space_sizes(environment) == (4, 2, True)
    environment.action_space = gymnasium.spaces.Discrete(2, start=1)
    with pytest.raises(InputError, match="do not start at 0") as caught:
        space_sizes(environment)
    assert caught.value.code == "ENVIRONMENT_SPACE"


def test_importing_the_runner_loads_no_torch() -> None:
    code = "import sys, gear_offline.evaluation.episode_runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
