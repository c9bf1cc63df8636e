"""The example of learners with (s, a, r, s', done): transitions, values, acting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
import torch

import gear_offline as go
from examples.td_learning import Greedy, Learner, main, stream, transitions
from gear_offline.convert.conversion import convert
from gear_offline.dataset.dataset import Dataset
from tests.support import ArraySource

# Episodes: terminated, cut, terminated after one step, cut after one step, cut.
LENGTHS = [3, 4, 1, 1, 4]
TERMINATED = [True, False, True, False, False]


def chain(folder: Path, actions: npt.NDArray[Any]) -> Dataset:
    """Reward 1 a step.  What is cut stays in one state for ever; what terminates counts down."""
    states = [3, 2, 1, *[0] * 4, 1, *[0] * 5]  # steps to the end; 0: there is none
    columns = {
        "observations": np.eye(4, dtype=np.float32)[states],
        "actions": actions,
        "rewards": np.ones(len(states), np.float32),
    }
    convert(ArraySource(columns, LENGTHS, terminated=TERMINATED), folder / "chain")
    return go.open_dataset(folder / "chain")


def continuous() -> npt.NDArray[Any]:
    return np.linspace(-1, 1, 26, dtype=np.float32).reshape(13, 2)


@pytest.mark.parametrize("context_length", [2, 5])
def test_transitions_are_those_of_the_arrays(tmp_path: Path, context_length: int) -> None:
    dataset = chain(tmp_path, continuous())
    loader = go.GearLoader(
        dataset, batch_size=200, context_length=context_length, device="cpu", seed=3
    )
    batch = next(loader)
    found = transitions(batch, torch.from_numpy(dataset.terminated.copy()))
    seen = set()
    for slot, (episode, start) in enumerate(batch.segments.tolist()):
        arrays = dataset[episode]
        last = start == LENGTHS[episode] - 1
        seen.add((episode, start))
        np.testing.assert_array_equal(found.states[slot], arrays["observations"][start])
        np.testing.assert_array_equal(found.actions[slot], arrays["actions"][start])
        assert found.rewards[slot] == arrays["rewards"][start]
        assert bool(found.terminated[slot]) == (last and TERMINATED[episode])
        assert bool(found.known[slot]) == (not last or TERMINATED[episode])
        after = np.zeros(4) if last else arrays["observations"][start + 1]
        np.testing.assert_array_equal(found.next_states[slot], after)
    assert len(seen) == sum(LENGTHS)
    left = go.GearLoader(dataset, batch_size=4, context_length=2, padding="left", device="cpu")
    with pytest.raises(ValueError, match="padding='right'"):
        next(stream(left))


@pytest.mark.parametrize("discrete", [False, True])
def test_values_are_those_of_the_chain(tmp_path: Path, discrete: bool) -> None:
    """A cut is not an end: 1 + g + g^2 ... = 2 where it was cut, 1.75, 1.5 and 1 before an end."""
    actions = np.zeros(13, np.int64) if discrete else np.zeros((13, 1), np.float32)
    dataset = chain(tmp_path, actions)
    loader = go.GearLoader(dataset, batch_size=32, context_length=2, device="cpu")
    torch.manual_seed(0)
    learner = Learner(
        dataset, hidden=16, learning_rate=1e-2, gamma=0.5, expectile=0.5, slow_rate=0.1
    )
    for _, data in zip(range(300), stream(loader), strict=False):
        learner.step(data)
    data = transitions(loader.batch_at(0), torch.from_numpy(dataset.terminated.copy()))
    states = data.states.argmax(1)
    expected = torch.tensor([2.0, 1.0, 1.5, 1.75])
    with torch.no_grad():
        values = learner._values_of(learner.critics, data)
    assert set(states.tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(values, expected[states].expand(2, -1), rtol=0, atol=0.05)


def test_cloning_takes_the_action_of_the_data(tmp_path: Path) -> None:
    actions = np.asarray([2, 2, 0, *[1] * 4, 0, *[1] * 5])
    dataset = chain(tmp_path, actions)
    loader = go.GearLoader(
        dataset, batch_size=32, context_length=2, normalize_states=True, device="cpu"
    )
    torch.manual_seed(0)
    learner = Learner(dataset, hidden=16, learning_rate=1e-2, cloning=True)
    for _, data in zip(range(200), stream(loader), strict=False):
        assert learner.step(data).keys() == {"policy"}
    taken = Greedy(learner, dataset).act(dataset.read("observations", 0, 13))
    np.testing.assert_array_equal(taken, actions)


def cartpole_episodes() -> list[dict[str, object]]:
    environment = gymnasium.make("CartPole-v1")
    environment.action_space.seed(0)
    episodes: list[dict[str, object]] = []
    for seed in range(6):
        states, actions, rewards, ended = [environment.reset(seed=seed)[0]], [], [], False
        while not ended:
            actions.append(int(environment.action_space.sample()))
            state, reward, ended, _, _ = environment.step(actions[-1])
            states.append(state)
            rewards.append(float(reward))
        episodes.append(
            {"observations": states, "actions": actions, "rewards": rewards, "terminated": True}
        )
    return episodes


@pytest.mark.parametrize("cloning", [[], ["--cloning"]])
def test_the_program_trains_and_plays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cloning: list[str]
) -> None:
    source = go.from_episodes(cartpole_episodes(), environment="CartPole-v1")
    convert(source, tmp_path / "data")
    main([str(tmp_path / "data"), "--steps", "3", "--episodes", "2", *cloning])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 3: policy ")
    assert ("critic" in shown[0]) == (not cloning)
    assert shown[-1].startswith("CartPole-v1: ")
