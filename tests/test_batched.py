"""Environments of one device, against Gymnasium's own, stepped one by one."""

import importlib.util
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import gear_offline as go
from gear_offline.core.parts import admit
from gear_offline.data.dataset.scores import RewardEdit
from gear_offline.evaluation.batched import (
    BatchedEnvironment,
    DLPackEnvironment,
    find_batched,
    make_batched,
)
from gear_offline.evaluation.batched_play import BatchedPlay
from gear_offline.evaluation.collect.collection import collect
from gear_offline.evaluation.dark_room import MOVES, goals_of
from gear_offline.evaluation.environments import make_environment, probe
from gear_offline.evaluation.rollout import Environments
from gear_offline.models.decision_transformer import build_model
from gear_offline.models.policy import Policy
from gear_offline.runs.loop import TrainingInterrupted
from tests.evaluation_support import play_episodes
from tests.gpu_support import NEEDS_CUPY, NEEDS_GPU
from tests.support import Captured, one_error
from tests.test_resume import interrupted_in
from tests.training_support import learnt

ROOM = "gear_offline/DarkRoom-v0"
CPU = torch.device("cpu")

REACH = '''
"""Points that move to 1: the class of several, and the same in arrays of a library."""
import gymnasium
import numpy as np
import torch

import gear_offline as go

{imports}


class Points(go.BatchedEnvironment):
    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, count, device, speed=0.1):
        super().__init__(count, device)
        self.place, self.speed = torch.zeros(count, 1, device=device), speed

    def reset(self, starts, where):
        self.place.copy_(torch.where(where[:, None], starts[:, None] % 5 - 2.0, self.place))
        return self.place.clone()

    def step(self, actions):
        self.place.add_(self.speed * actions)
        far = (self.place[:, 0] - 1).abs()
        return self.place.clone(), -far, far < 0.05, far > 50


class Arrays(go.DLPackEnvironment):
    observation_space, action_space = Points.observation_space, Points.action_space
    from_dlpack = staticmethod({numbers}.from_dlpack)

    def reset_arrays(self, state, starts, where):
        begun = starts[:, None] % 5 - {float32}(2.0)
        place = {numbers}.where(where[:, None], begun, 0 if state is None else state)
        return (place := place.astype({float32})), place

    def step_arrays(self, state, actions):
        place = state + {float32}(0.1) * actions
        far = abs(place[:, 0] - 1)
        return place, place, -far, far < 0.05, far > 50
'''


def written(folder: Path, library: str = "numpy") -> str:
    """Write the file of an own environment, of arrays of a library; return its name."""
    names = {"numpy": ("import numpy as xp", "np.float32"), "jax": ("", "xp.float32")}
    imports, float32 = names[library]
    if library == "jax":
        imports = "import jax.dlpack\nimport jax.numpy as xp\n"
    text = REACH.format(imports=imports, numbers="xp", float32=float32)
    (folder / f"reach_{library}.py").write_text(text)
    return str(folder / f"reach_{library}.py")


def make(environment_id: str, count: int, **options: Any) -> BatchedEnvironment:
    return make_batched(environment_id, options, count, CPU)


@pytest.mark.parametrize("options", [{}, {"goals": "held_out", "size": 5}])
def test_each_of_a_batch_does_what_gymnasium_does(options: dict[str, Any]) -> None:
    batched, generator = make(ROOM, 7, **options), np.random.default_rng(0)
    flatten = gymnasium.wrappers.FlattenObservation
    alone = [flatten(gymnasium.make(ROOM, **options)) for _ in range(7)]
    every, seeds = np.ones(7, bool), np.arange(1000, 1007)
    for episode in range(3):
        where = every if episode == 0 else generator.random(7) < 0.5
        starts = batched.starts(seeds)
        seen = batched.reset(starts, torch.from_numpy(where))
        for number in np.flatnonzero(where):
            begun: Any = alone[number].reset(seed=int(seeds[number]))
            assert np.allclose(seen[number], begun[0], rtol=1e-6, atol=1e-6)
        for _ in range(12):
            space: Any = batched.action_space
            space.seed(int(generator.integers(1 << 30)))
            actions = np.array([space.sample() for _ in range(7)])
            results = batched.step(torch.from_numpy(actions))
            for one, action, *mine in zip(alone, actions, *results, strict=True):
                now, reward, *ends, _ = one.unwrapped.step(action)
                expected: Any = gymnasium.spaces.flatten(one.unwrapped.observation_space, now)
                assert np.allclose(mine[0], expected, rtol=1e-6, atol=1e-6)
                assert float(mine[1]) == pytest.approx(float(reward), rel=1e-6)
                assert [bool(end) for end in mine[2:]] == ends
        seeds = seeds + 100


@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_arrays_of_a_library_are_an_environment_by_dlpack(tmp_path: Path, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    name, seeds = written(tmp_path, library), np.array([3, 8, 5])
    admit([f"{name}:Points", f"{name}:Arrays"])
    points, arrays = (make(f"{name}:{kind}", 3) for kind in ("Points", "Arrays"))
    assert isinstance(arrays, DLPackEnvironment) and not arrays.captured and points.captured
    every = torch.ones(3, dtype=torch.bool)
    for where in (every, torch.tensor([False, True, False])):
        first, second = (each.reset(each.starts(seeds), where) for each in (points, arrays))
        assert torch.equal(first, second)
        for step in range(20):
            actions = torch.full((3, 1), 0.1 * step - 0.5)
            for mine, theirs in zip(points.step(actions), arrays.step(actions), strict=True):
                assert torch.allclose(mine, theirs) and mine.dtype == theirs.dtype
        seeds = seeds + 1


def test_a_batched_class_is_named_as_any_environment(tmp_path: Path) -> None:
    """One of them is Gymnasium's: it is checked, recorded, and its options are those of make."""
    name = f"{written(tmp_path)}:Points"
    how: dict[str, Any] = {"environment_options": {"speed": 0.5, "max_episode_steps": 9}}
    collect(name, tmp_path / "a.hdf5", steps=60, quiet=True, **how)
    go.convert(tmp_path / "a.hdf5", tmp_path / "a", quiet=True)
    data = go.open_dataset(tmp_path / "a")
    assert data.episodes.lengths.max() == 9 and set(data[0]) >= {"observations", "actions"}
    seen, actions = data[0]["observations"], data[0]["actions"]
    assert np.allclose(seen[1:], seen[:-1] + 0.5 * actions[:-1])
    with make_environment(name, {"max_episode_steps": 9}) as made:
        check_env(made.raw.unwrapped)
    with one_error("ENVIRONMENT", "making it raised TypeError.*sped"):
        options = {"sped": 1.0, "max_episode_steps": 9}
        collect(name, tmp_path / "b.hdf5", steps=60, quiet=True, environment_options=options)


def test_wrappers_have_no_batched_environment() -> None:
    assert find_batched(ROOM, {"additional_wrappers": []}) is None
    assert find_batched("CartPole-v1", {}) is None


def room_policy(seed: int, **options: Any) -> Policy:
    """A Decision Transformer without training, sure of what it does."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"state_dim": 6, "action_dim": 5, "context_length": 6}
    model = build_model(max_timestep=20, hidden_size=16, layers=1, heads=1, discrete=True, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    scales: dict[str, Any] = {"state_mean": [0.1] * 6, "state_std": [0.3] * 6}
    scales |= {"returns_scale": 10.0, "context_length": 6, "gamma": 0.9}
    return Policy(model, **scales, **options)


@pytest.mark.parametrize("environments", [2, 5, 40])
def test_lists_of_episodes_are_played_as_one_by_one(environments: int) -> None:
    edits = (RewardEdit(scale=2.0, shift=-0.5, high=1.0),)
    seeds, targets = [*range(1000, 1018)] * 2, [20.0] * 18 + [3.0] * 18
    with Environments(ROOM, 4, options={"size": 3}) as made:
        policy = room_policy(30, reward_edits=edits)
        expected = play_episodes(policy, made, seeds=seeds, targets=targets, keep_actions=2)
        facts = made.facts
    assert len(set(expected.returns)) > 3, "the episodes differ, so mixing them up would show"
    told, policy = list[int](), room_policy(30, reward_edits=edits)
    rooms = make(ROOM, environments, size=3)
    play = BatchedPlay(policy, rooms, facts, total=36, keep=2)
    for _ in range(2):  # a second list begins anew
        played = play.play(seeds, targets, told.append)
        assert played.returns.tolist() == expected.returns.tolist()
        assert played.lengths.tolist() == [20] * 36 and not played.terminated.any()
        for mine, theirs in zip(played.actions, expected.actions, strict=True):
            assert (mine == theirs).all()
    assert sum(told) == 72


def test_evaluate_plays_an_own_class_as_a_plain_loop(tmp_path: Path) -> None:
    """Episodes that end at different steps, cut ones, and an environment that others take up."""
    name, options = f"{written(tmp_path)}:Points", {"speed": 0.5, "max_episode_steps": 30}
    how: dict[str, Any] = {"environment_options": options, "quiet": True}
    collect(name, tmp_path / "a.hdf5", steps=900, **how)
    words: dict[str, Any] = {
        "data.path": str(tmp_path / "a"),
        "data.source": str(tmp_path / "a.hdf5"),
    }
    words |= {"evaluate.environment": name, "loader.returns_scale": 9.0, "evaluate.episodes": 0}
    run = go.train("smoke", words, out=tmp_path / "run", quiet=True)
    report = run.evaluate(environment=name, targets=(-1.0, -30.0), episodes=24, **how)
    policy = run.policy(device="cpu")
    with make_environment(name, options) as environment:
        for target in report.targets:
            for episode in range(24):
                seen, _ = environment.reset(seed=1000 + episode)
                policy.reset(target.target)
                rewards, over = list[float](), False
                while not over:
                    action = np.clip(policy.act(seen[None])[0], -1.0, 1.0)
                    seen, reward, ended, cut, _ = environment.step(action)
                    rewards.append(reward)
                    policy.observe_reward([reward], actions=action[None])
                    over = ended or cut
                assert target.returns[episode] == pytest.approx(sum(rewards), rel=1e-4)
                assert target.lengths[episode] == len(rewards)
                assert target.terminated[episode] == ended
    assert len({*report.targets[0].lengths}) > 1


WRONG = """

class Column(Points):
    def step(self, actions):
        seen, rewards, ended, cut = super().step(actions)
        return seen, rewards[:, None], ended, cut


class OneOfAll(Points):
    def reset(self, starts, where):
        return super().reset(starts, where)[:1]


class Empty(Points):
    def step(self, actions):
        seen, rewards, ended, cut = super().step(actions)
        return seen, rewards * float("nan"), ended | True, cut


class Begun(Points):
    def reset(self, starts, where):  # what is no matter of the mask's is anything
        return torch.where(where[:, None], super().reset(starts, where), 7.0)

    def step(self, actions):
        results = super().step(actions)
        actions.zero_()
        return results
"""


def test_what_an_own_class_gives_is_looked_at(tmp_path: Path) -> None:
    """No shape is stretched, no NaN counts, and the last reward is a reward."""
    file = written(tmp_path)
    Path(file).write_text(Path(file).read_text() + WRONG)
    names = {name: f"{file}:{name}" for name in ("Points", "Column", "OneOfAll", "Empty", "Begun")}
    admit([*names.values()])
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"state_dim": 1, "action_dim": 1, "context_length": 3}
    model = build_model(max_timestep=20, hidden_size=16, layers=1, heads=1, **sizes)
    scales: dict[str, Any] = {"state_mean": None, "state_std": None}
    scales |= {"returns_scale": 9.0, "context_length": 3}

    def played(name: str, count: int = 5) -> tuple[list[float], Any]:
        facts = probe(names[name], {"max_episode_steps": 12})
        environments = make(names[name], count)
        play = BatchedPlay(Policy(model, **scales), environments, facts, total=5, keep=1)
        results = play.play(range(5), [-3.0] * 5)
        return results.returns.tolist(), results.actions[0]

    with one_error("ENVIRONMENT", r"step\(\) gave .*\(5, 1\) on cpu.* not"):
        played("Column")
    with one_error("ENVIRONMENT", r"reset\(\) gave \(1, 1\) on cpu, not \(5, 1\) on cpu"):
        played("OneOfAll")
    for count in (2, 5):  # with 5 each reward is an environment's last
        with one_error("ENVIRONMENT", "a reward that is NaN"):
            played("Empty", count)
    (mine, actions), (theirs, expected) = played("Begun"), played("Points")
    assert mine == theirs and len({*mine}) == 5
    assert (actions == expected).all() and actions.any()


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.gpu
@NEEDS_GPU
def test_a_gpu_plays_what_the_cpu_plays(draws: bool) -> None:
    """One graph a step: the same rooms, other last bits; drawn ones are the same twice."""
    seeds, targets, device = list(range(300)), [20.0] * 300, torch.device("cuda")
    facts, results = probe(ROOM, {"size": 3}), list[Any]()
    for where, count in ((CPU, 40), (device, 40), (device, 300), (device, 300)):
        rooms, policy = make_batched(ROOM, {"size": 3}, count, where), room_policy(30, device=where)
        play = BatchedPlay(policy, rooms, facts, total=300, draws=draws)
        results.append(play.play(seeds, targets, seed=7).returns)
        assert np.array_equal(play.play(seeds, targets, seed=7).returns, results[-1])
    assert np.array_equal(results[2], results[3])
    if not draws:
        assert (results[0] == results[1]).mean() > 0.95 < (results[1] == results[2]).mean()


ACTING = ("data.admit_every=4", "data.actors=8", "train.steps=14", "train.checkpoint_every=5",
          "train.log_every=5", "evaluate.episodes=0", "data.max_size=20", "data.remover=min_heap",
          "train.trackers=[]", "loader.context_length=5", "model.hidden_size=16", "model.layers=1",
          "train.threads=1", "loader.batch_size=8", "optimizer.warmup_steps=2",
          "evaluate.environment_options={goals: one, size: 3, max_episode_steps: 6}")  # fmt: skip


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random walks in a small room."""
    folder = tmp_path_factory.mktemp("walks")
    how: dict[str, Any] = {"goals": "one", "size": 3, "max_episode_steps": 6}
    collect(ROOM, folder / "a.hdf5", steps=120, quiet=True, environment_options=how)
    columns = ["observations", "actions", "rewards", "terminals", "timeouts"]
    go.convert(folder / "a.hdf5", folder / "a", columns=columns, quiet=True)
    return folder / "a"


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU, NEEDS_CUPY])]


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_acts_by_itself_repeats_bit_for_bit(
    walks: Path, tmp_path: Path, device: str, capsys: Captured
) -> None:
    def train(name: str, *words: str, **how: Any) -> Path:
        data = tmp_path / name / "data"
        if not data.exists():
            shutil.copytree(walks, data)
        own = (f"data.path={data}", "data.collect=null", f"train.device={device}")
        run = go.train("online-room", [*ACTING, *own, *words], out=tmp_path / name / "run", **how)
        return run.path

    first = train("first")
    assert "order and replay are exact" in capsys.readouterr().err
    again, stopped = train("again", quiet=True), pytest.raises(TrainingInterrupted)
    with interrupted_in(7), stopped:
        train("resumed", quiet=True)
    resumed = train("resumed", quiet=True, resume=True)
    assert learnt(first)["model"] == learnt(again)["model"] == learnt(resumed)["model"]
    other = train("other", "seed=1", quiet=True)
    assert learnt(first)["model"] != learnt(other)["model"]
    data = go.open_dataset(tmp_path / "first" / "data")
    assert len(data) == 20 + 4 * 8  # looks before steps 0, 4, 8 and 12
    goal = goals_of(3, "one")[0]
    for number in range(len(data)):  # what was appended are walks in that room
        cells, rewards = data[number]["observations"], data[number]["rewards"]
        places = np.stack([cells[:, :3].argmax(1), cells[:, 3:].argmax(1)], 1)
        assert places[0].tolist() == [1, 1] and len(rewards) == 6
        assert np.array_equal(rewards[:-1], (places[1:] == goal).all(1))
        moves = MOVES[data[number]["actions"].reshape(-1)]
        assert np.array_equal(places[1:], np.clip(places + moves, 0, 2)[:-1])
    shutil.copytree(tmp_path / "first" / "data", tmp_path / "replayed" / "data")
    replayed = train("replayed", "data.replay=true", quiet=True)
    assert learnt(first)["model"] == learnt(replayed)["model"]


KILLED = """
import os, signal, sys
import gear_offline as go

append, count = go.Appender.append, 0
def killed(self, episodes):
    global count
    path = append(self, episodes)
    count += 1
    if count == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return path
go.Appender.append = killed
go.train("online-room", sys.argv[3:], out=sys.argv[2], quiet=True)
"""


def test_a_run_killed_behind_its_actors_is_as_one_that_was_not(
    walks: Path, tmp_path: Path, capsys: Captured
) -> None:
    """What it had appended and not admitted counts once; a run on grown data says who acted."""
    weights, own = list[Any](), list[str]()
    for name, number in (("whole", 0), ("first", 1), ("second", 2)):
        data, out = tmp_path / name / "data", tmp_path / name / "run"
        shutil.copytree(walks, data)
        own = [*ACTING, f"data.path={data}", "data.collect=null", "train.device=cpu"]
        if number:
            command = [sys.executable, "-c", KILLED, str(number), str(out), *own]
            assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        go.train("online-room", own, out=out, resume=bool(number), quiet=True)
        weights.append(learnt(out)["model"])
        assert len(go.open_dataset(data)) == 20 + 4 * 8
    assert weights[0] == weights[1] == weights[2]
    capsys.readouterr()
    go.train("online-room", [*own, "seed=1"], out=tmp_path / "other", quiet=True)
    told = capsys.readouterr().err
    assert "looks up to step 12 are as" in told and "give another data.path" in told


def test_who_cannot_act_by_itself_is_told(walks: Path, tmp_path: Path) -> None:
    words = [*ACTING[:-1], f"data.path={walks}", "data.collect=null", "train.device=cpu"]
    name, options = "evaluate.environment=", "evaluate.environment_options="
    cases = [
        (f"{name}CartPole-v1", "{}", "no environments that step on one device"),
        (f"{name}{ROOM}", "{size: 3, max_episode_steps: -1}", "no time limit"),
    ]
    for environment, how, problem in cases:
        with one_error("RECIPE", problem):
            own = [*words, environment, f"{options}{how}"]
            go.train("online-room", own, out=tmp_path / "run", quiet=True)
    go.convert(walks, tmp_path / "more", map=lambda e: {"seen": e["rewards"]}, quiet=True)
    with one_error("COLUMN", "the data have seen, which no episode that is played has"):
        own = [*ACTING, f"data.path={tmp_path}/more", "data.collect=null", "train.device=cpu"]
        go.train("online-room", own, out=tmp_path / "other", quiet=True)
    assert not (tmp_path / "other").exists()
    with one_error("RECIPE", "actors.*need admit_every"):
        go.load_recipe("online-room", ["data.admit_every=null", "data.max_size=null"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_finds_a_hidden_goal_by_what_it_plays(tmp_path: Path) -> None:
    """Walks at random rarely meet the goal; those of a run that acts by itself go there."""
    words = [f"data.path={tmp_path}/data", "data.actors=256", "train.steps=600", "train.threads=1",
             "train.trackers=[]", "evaluate.episodes=5"]  # fmt: skip
    run = go.train("online-room", words, out=tmp_path / "run", quiet=True)
    returns = go.open_dataset(tmp_path / "data").returns
    assert returns[:500].mean() < 0.5 < 10.0 < returns[-256:].mean() <= 14.0
    assert run.evaluate(episodes=5, quiet=True).mean_return == 14.0
