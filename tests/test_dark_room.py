"""The dark room, and tables that learn in it: against loops and a hand-made walk."""

from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import gear_offline as go
from gear_offline.evaluation.collect.collection import collect
from gear_offline.evaluation.dark_room import goals_of
from tests.support import Captured, one_error

ROOM = "gear_offline/DarkRoom-v0"
STEPS = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1), 4: (0, 0)}


def test_the_room_is_an_environment_of_one_goal_until_the_next_seed() -> None:
    made = gymnasium.make(ROOM)
    check_env(made.unwrapped)
    generator = np.random.default_rng(0)
    for seed in (3, None, None, 84, None, 4):
        (row, column), _ = made.reset(seed=seed)
        assert (row, column) == (4, 4)
        if seed is not None:
            goal = goals_of(9, "all")[seed % 81]
        for number in range(1, 21):
            action = int(generator.integers(5))
            row = min(max(row + STEPS[action][0], 0), 8)
            column = min(max(column + STEPS[action][1], 0), 8)
            seen, reward, terminated, truncated, _ = made.step(action)
            assert tuple(seen) == (row, column) and not terminated
            assert reward == float((row, column) == tuple(goal)) and truncated == (number == 20)


def test_goals_are_parted_and_dealt_out_evenly() -> None:
    parts = {name: set(map(tuple, goals_of(9, name).tolist())) for name in ("train", "held_out")}
    assert [len(part) for part in parts.values()] == [60, 21]
    assert parts["train"] | parts["held_out"] == {divmod(cell, 9) for cell in range(81)}
    # of NumPy's frozen generator: data of one release are those of the next
    assert goals_of(9, "held_out")[:3].tolist() == [[2, 4], [3, 0], [6, 7]]
    room, found = gymnasium.make(ROOM, goals="held_out", size=5), list[tuple[int, int]]()
    for seed in range(1000, 1000 + 3 * 7):
        for row, column in np.ndindex(5, 5):
            room.reset(seed=seed)
            walk = [int(row > 2)] * abs(row - 2) + [2 + (column > 2)] * abs(column - 2) + [4]
            if [room.step(action)[1] for action in walk][-1]:
                found.append((row, column))
    assert len(found) == 21 and sorted(found) == sorted([*set(found)] * 3)


class Chain(gymnasium.Env[Any, Any]):
    """Two states; action 1 goes from the first to the second, and from there to the end."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = 0
        return self.state, {"seed": seed}

    def step(self, action: Any) -> Any:
        self.state += int(action)
        return min(self.state, 1), float(self.state == 2), self.state == 2, False, {}


def test_values_of_a_chain_are_those_of_watkins_by_hand() -> None:
    from gear_offline.evaluation.collect.q_learning import QLearner

    learner, (one, two) = QLearner(2), np.eye(2, dtype=np.float32)
    left, right = np.array(0), np.array(1)
    learner.learn(one, right, 0.0, two, False)  # 5 -> (5 + 0.9 * 5) / 2
    assert learner.values[one.tobytes()] == pytest.approx([5.0, 4.75])
    learner.learn(two, right, 1.0, two, True)  # the end is worth nothing: (5 + 1) / 2
    assert learner.values[two.tobytes()] == pytest.approx([5.0, 3.0])
    learner.learn(two, left, 0.0, two, False)
    assert learner.values[two.tobytes()] == pytest.approx([4.75, 3.0])
    learner.replay()  # newest first: 4.75 -> 4.5125; 3 -> 2; 4.75 -> (4.75 + 0.9 * 4.5125) / 2
    assert learner.values[two.tobytes()] == pytest.approx([4.5125, 2.0])
    assert learner.values[one.tobytes()] == pytest.approx([5.0, 4.405625])


def test_a_history_is_all_that_a_learner_did(tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "q_learning", "histories": 4, "steps": 4 * 800}
    options |= {"environment_options": {"goals": "train"}, "quiet": True}
    for name, more in (("a", {}), ("b", {"processes": 2}), ("c", {"seed": 1, "steps": 200})):
        collect(ROOM, tmp_path / f"{name}.hdf5", **{**options, **more})
    a, b, c = ((tmp_path / f"{name}.hdf5").read_bytes() for name in "abc")
    assert a == b != c
    go.convert(tmp_path / "a.hdf5", tmp_path / "a", quiet=True)
    data = go.open_dataset(tmp_path / "a")
    assert data.histories is not None
    assert data.histories.tolist() == np.repeat(range(4), 40).tolist()
    goals = goals_of(9, "train")
    for number in range(4):
        best = 20 - max(int(np.abs(goals[number] - 4).sum()) - 1, 0)
        returns = data.returns[data.histories == number]
        assert returns.max() <= best and returns[-5:].min() >= best - 4
        for episode in np.flatnonzero(data.histories == number):  # the rooms played again
            cells, rewards = data[episode]["observations"], data[episode]["rewards"]
            rows, columns = cells[:, :9].argmax(1), cells[:, 9:].argmax(1)
            on_goal = (rows == goals[number][0]) & (columns == goals[number][1])
            assert (rewards[:-1] == on_goal[1:]).all() and (rows[0], columns[0]) == (4, 4)
    with h5py.File(tmp_path / "c.hdf5") as file:
        seeds = file["metadata/episode_reset_seed"][:]
    assert seeds.tolist() == np.repeat(range(1, 5), 3).tolist()


def test_a_table_learns_where_episodes_end(tmp_path: Path) -> None:
    gymnasium.register("Chain-v0", lambda **_: Chain(), max_episode_steps=6)
    report = collect(
        "Chain-v0", tmp_path / "a.hdf5", policy="q_learning", histories=1, steps=100, quiet=True
    )
    with h5py.File(report.path) as file:
        lengths = np.diff(np.flatnonzero(np.r_[True, file["terminals"][:] | file["timeouts"][:]]))
    assert (lengths[-5:] == 2).all(), "it has learnt the shortest way"


def test_what_a_table_cannot_learn_is_told(tmp_path: Path, capsys: Captured) -> None:
    learn: dict[str, Any] = {"policy": "q_learning", "histories": 2, "steps": 40, "quiet": True}
    with one_error("ENVIRONMENT", "discrete actions.*ars"):
        collect("Pendulum-v1", tmp_path / "a.hdf5", **learn)
    for more in ({"histories": None}, {"train_steps": 5}, {"quality": "expert"}):
        with one_error("USAGE"):
            collect(ROOM, tmp_path / "a.hdf5", **{**learn, **more})
    assert list(tmp_path.iterdir()) == []
    collect("CartPole-v1", tmp_path / "a.hdf5", **learn)
    said = capsys.readouterr().err
    assert said.count("met a new observation") == said.count("more steps, or use policy ars") == 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_policy_learns_in_context_goals_that_it_has_not_seen(tmp_path: Path) -> None:
    """With frozen weights later episodes of a memory return more: in a room of 4 x 4 cells."""
    room: dict[str, Any] = {"size": 4, "max_episode_steps": 8}
    options: dict[str, Any] = {"policy": "q_learning", "histories": 240, "steps": 240 * 80}
    options |= {"environment_options": {**room, "goals": "train"}, "quiet": True}
    collect(ROOM, tmp_path / "a.hdf5", **options)
    go.convert(tmp_path / "a.hdf5", tmp_path / "a", quiet=True)
    changes: dict[str, Any] = {
        "data.path": str(tmp_path / "a"), "data.collect": None, "loader.context_length": 80,
        "model.hidden_size": 64, "model.layers": 2, "train.steps": 800, "train.threads": 1,
        "loader.batch_size": 16, "optimizer.warmup_steps": 100, "evaluate.episodes": 0,
        "train.trackers": [],
    }  # fmt: skip
    run = go.train("dark-room", changes, out=tmp_path / "run", quiet=True)
    for goals, times in (("train", 1.8), ("held_out", 1.3)):
        how: dict[str, Any] = {"episodes_of_memory": 20, "sample": True, "episodes": 96}
        how |= {"environment": ROOM, "environment_options": {**room, "goals": goals}}
        (target,) = go.evaluate(run.path, quiet=True, **how).targets
        returns = np.array(target.returns).reshape(96, 20)
        assert returns[:, 10:].mean() >= times * returns[:, :5].mean() > 0.0, goals
