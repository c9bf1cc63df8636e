"""Environments: their names, making them, Atari's preprocessing, what other processes must know."""

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from gear_offline.core import parts
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.sources import open_source
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.collect.collection import collect
from gear_offline.evaluation.environments import (
    describe,
    explain_unregistered,
    is_atari,
    make_environment,
    pack_environment,
    probe,
    say_version,
    versioned_id,
)
from gear_offline.evaluation.rollout import Environments
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.loop import train_run
from gear_offline.runs.resolve import resolve
from tests.evaluation_support import Constant, Given, play_episodes
from tests.support import Captured, Patch, failing_code, make_dataset, one_error
from tests.training_support import TinyEnvironment, tiny_recipe


def said_of_versions(capfd: Captured) -> list[str]:
    """Return the lines that speak of a version, Gymnasium's included."""
    return [line for line in capfd.readouterr().err.splitlines() if "version" in line]


def taken(name: str, version: int) -> list[str]:
    newest = f"{name.partition(':')[2] or name}-v{version}"
    return [f"{name} names no version: the newest one here is taken, {newest}"]


needs_atari = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ale_py", "cv2")),
    reason="pip install 'gear-offline[atari]'",
)


def test_what_cannot_be_made_is_one_clear_error(monkeypatch: Patch) -> None:
    with one_error("ENVIRONMENT", r"Hopper.*my_module:Name-v0"):
        make_environment("Hoper-v5")
    facts = probe("Blackjack-v1")  # a Tuple of choices
    assert {name: kind.shape for name, kind in facts.observations.items()} == {
        "0": (32,),
        "1": (11,),
        "2": (2,),
    }
    assert failing_code(lambda: make_environment("no_module_of_mine:A-v0")) == "ENVIRONMENT"
    environment = gymnasium.make("CartPole-v1")
    facts = describe(environment, "CartPole-v1")
    assert (facts.state_size, facts.action_size, facts.discrete) == (4, 2, True)
    environment.action_space = gymnasium.spaces.Discrete(2, start=1)
    with pytest.raises(InputError, match="do not start at 0"):  # as a model's choices do
        describe(environment, "CartPole-v1")
    missing = gymnasium.error.DependencyNotInstalled("MuJoCo is not installed\nlong advice")
    monkeypatch.setattr(gymnasium, "make", Mock(side_effect=missing))
    with one_error("ENVIRONMENT", r"gear-offline\[mujoco\]") as caught:
        make_environment("Hopper-v5")
    assert "long advice" not in str(caught.value)


@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward"])
def test_an_environment_is_the_same_in_each_episode(name: str) -> None:
    raw: Any = getattr(gymnasium.wrappers, name)(gymnasium.make("Pendulum-v1"))

    def played() -> list[float]:  # by Gymnasium alone
        raw.reset(seed=0)
        seen, paid, *_ = raw.step(np.ones(1, np.float32))
        return [*seen, paid]

    assert played() != played(), "its scale goes on changing"
    with one_error("ENVIRONMENT", f"{name} goes on learning its scale.*update_running_mean"):
        describe(gymnasium.wrappers.TimeLimit(raw, 9), "Mine-v0")
    raw.update_running_mean = False
    assert played() == played() and describe(raw, "Mine-v0").state_size == 3


def test_other_processes_learn_what_this_one_knows(monkeypatch: Patch) -> None:
    monkeypatch.setattr(parts, "_permission", parts.Permission())  # of tests before
    spec = EnvSpec("GearKnown-v0", "gymnasium.envs.classic_control:CartPoleEnv", kwargs={})
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    known = pack_environment("GearKnown-v0")
    monkeypatch.delitem(gymnasium.registry, spec.id)
    assert known is not None and explain_unregistered("GearKnown-v0")
    known.learn()
    make_environment("GearKnown-v0").close()
    monkeypatch.setitem(
        gymnasium.registry, spec.id, EnvSpec(spec.id, lambda **_: TinyEnvironment())
    )
    assert pack_environment("GearKnown-v0") is None, "it is made of what this process holds"
    found = pack_environment("gymnasium:CartPole-v1")
    assert found is not None and found.module == "gymnasium"


RIGHT: dict[str, list[Any]] = {
    "reward": [1, True, np.float32(1), np.array(1.0), np.array([1.0]), [1.0]],
    "truncated": [0, np.False_, np.array(False), np.array([0])],
    "seen": [[0.0, 1, 1], np.zeros(3), np.ones(3, np.int64), (True, False, True)],
    "close": [RuntimeError("the window is gone")],
}
WRONG: dict[str, list[Any]] = {
    "reward": [None, "1", np.ones(2), np.ones((1, 1)), np.nan, np.inf, [[1.0], 2.0], 1j],
    "terminated": [None, 0.5, 2, np.zeros(2, bool), "no"],
    "seen": [0.5, np.ones(1), np.ones((1, 3)), np.ones(4), np.full(3, np.nan), None, {"a": 1}],
    "first": [np.ones(2), np.full(3, np.inf)],
    "reset": [np.zeros(3), (np.zeros(3),), (0.0, 1.0, 2.0)],
    "step": [(np.zeros(3), 1.0, False, {}), None, RuntimeError("motor is off"), SystemExit(3)],
    "info": [None, [1]],
}


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [(k, v, values is RIGHT) for values in (RIGHT, WRONG) for k in values for v in values[k]],
)
def test_each_value_of_a_strangers_environment_is_looked_at(
    name: str, value: Any, right: bool, tmp_path: Path, monkeypatch: Patch, capfd: Captured
) -> None:
    environment, out = "GearTest/Given-v0", tmp_path / "x.hdf5"
    monkeypatch.setattr(Given, "said", {name: value})

    def play() -> float:
        with Environments(environment, 1) as made:  # which checks each action
            far = Constant(np.array([-9.0, 0.3], np.float32))
            return float(play_episodes(far, made, seeds=[0], targets=[0.0]).returns[0])

    if right:
        assert play() == collect(environment, out, steps=3, quiet=True).mean_return == 3.0
        said = capfd.readouterr().err.splitlines()
        assert len(said) == 2 * (name == "close") and all("is gone" in line for line in said)
        return
    for door in (play, lambda: collect(environment, out, steps=3, quiet=True)):
        with one_error("ENVIRONMENT", environment) as caught:
            door()
        line = Path(__file__).with_name("evaluation_support.py").name + ":"
        assert (line in str(caught.value)) is isinstance(value, BaseException)
        assert caught.value.exit_code == 2 and not out.exists()


def test_a_last_observation_that_is_nan_is_played_and_not_recorded(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Nobody acts on it, but data have it as next_observations."""
    said: dict[str, Any] = {"seen": np.full(3, np.nan), "terminated": True}
    monkeypatch.setattr(Given, "said", said)
    with Environments("GearTest/Given-v0", 1) as made:
        played = play_episodes(Constant(np.zeros(2)), made, seeds=[0], targets=[0.0])
    assert played.lengths.tolist() == [1] and played.terminated.all()
    with one_error("ENVIRONMENT", "a last observation that is NaN"):
        collect("GearTest/Given-v0", tmp_path / "x.hdf5", steps=3, quiet=True)
    assert not (tmp_path / "x.hdf5").exists()


def test_ctrl_c_in_an_environment_stays_ctrl_c(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Given, "said", {"step": KeyboardInterrupt()})
    with make_environment("GearTest/Given-v0") as made, pytest.raises(KeyboardInterrupt):
        made.reset(seed=0)
        made.step(np.zeros(2))


def test_recorded_actions_are_those_that_were_applied(tmp_path: Path) -> None:
    how: dict[str, Any] = {"policy": "ars", "train_steps": 50, "processes": 1, "quiet": True}
    collect("GearTest/Given-v0", tmp_path / "x.hdf5", action_noise=2.0, steps=30, **how)
    with open_source(tmp_path / "x.hdf5") as source:
        actions = source.read("actions", 0, source.spec.steps)
    assert actions.dtype == np.float64 and all(map(Given.action_space.contains, actions))
    assert (np.abs(actions) == Given.action_space.high).any(), "noise led out of the space"


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("processes", [1, 2])
def test_collect_says_the_version_once(processes: int, tmp_path: Path, capfd: Captured) -> None:
    out = tmp_path / "x.hdf5"
    report = collect("CartPole", out, steps=300, processes=processes)
    assert said_of_versions(capfd) == taken("CartPole", 1)
    with open_source(out) as source:
        assert source.info.environment_id == report.environment_id == "CartPole-v1"
    named = out.read_bytes()
    collect("CartPole-v1", out, steps=300, processes=processes, overwrite=True)
    assert said_of_versions(capfd) == []
    assert out.read_bytes() == named
    collect("CartPole", out, steps=30, overwrite=True, quiet=True)
    assert capfd.readouterr().err == ""
    say_version("gymnasium:CartPole", quiet=False)
    assert said_of_versions(capfd) == taken("gymnasium:CartPole", 1)
    for other in ("Hopper-v4", "", "no id!", "a:b:c", "Nothing", "a/b"):
        assert versioned_id(other) == other


def test_training_and_evaluating_say_it_once_too(
    tmp_path: Path, capfd: Captured, monkeypatch: Patch, no_reports: None
) -> None:
    for version in (2, 10):
        name = f"GearOfflineVersions-v{version}"
        spec = EnvSpec(name, entry_point=lambda **_: TinyEnvironment(), max_episode_steps=6)
        monkeypatch.setitem(gymnasium.registry, name, spec)
    said = taken("GearOfflineVersions", 10)
    data = make_dataset(tmp_path / "data", [4, 3], state_dim=3, action_dim=2).path
    recipe = tiny_recipe(data, "evaluate.environment=GearOfflineVersions", "train.steps=4")
    resolve(recipe, open_dataset(data), quiet=False)
    assert said_of_versions(capfd) == said
    train_run(recipe, out=tmp_path / "run", quiet=True)
    assert said_of_versions(capfd) == []
    evaluate(tmp_path / "run")
    assert said_of_versions(capfd) == said


def test_without_ale_py_or_opencv_there_is_one_clear_error(monkeypatch: Patch) -> None:
    assert is_atari("ALE/Pong-v5") and not is_atari("Hopper-v5")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "ale_py", None)
        with pytest.raises(UnavailableError, match=r"gear-offline\[atari\]"):
            make_environment("ALE/Pong-v5")
        assert explain_unregistered("ALE/NoGame-v5") is None, "nobody can say"
    pytest.importorskip("ale_py")
    missing = gymnasium.error.DependencyNotInstalled("opencv is not installed")
    monkeypatch.setattr(gymnasium.wrappers, "AtariPreprocessing", Mock(side_effect=missing))
    with pytest.raises(UnavailableError, match=r"opencv.*gear-offline\[atari\]"):
        make_environment("ALE/Pong-v5")


@needs_atari
def test_games_are_preprocessed_as_usual() -> None:
    assert explain_unregistered("ALE/Pong-v5") is None and explain_unregistered("ALE/NoGame-v5")
    environment = make_environment("ALE/Pong-v5")
    facts = environment.facts
    assert (facts.observation_shape, facts.action_size) == ((84, 84), 6)
    assert facts.observation_dtype == np.uint8
    assert facts.step_limit == 27_000
    frame, _ = environment.reset(seed=3)
    assert frame.shape == (84, 84) and frame.dtype == np.uint8 and frame.max() > 100
    _, _, _, _, numbers = environment.step(np.zeros((), np.int64))
    assert numbers["episode_frame_number"] % 4 == numbers["frame_number"] % 4
    again, _ = environment.reset(seed=3)
    assert np.array_equal(frame, again)
    environment.close()
