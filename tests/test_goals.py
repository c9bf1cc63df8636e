"""Goals: their law against one written out by hand, their states, who may ask; a maze of them."""

import json
import shutil
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import gear_offline as go
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.core import parts
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.evaluation.maze import WALLS, cell_of, way_to
from gear_offline.evaluation.play import evaluate_tasks
from gear_offline.evaluation.tasks import EvaluationTask
from gear_offline.loaders.batch import split_steps
from gear_offline.loaders.loader import GearLoader
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.runs.resolve import resolve
from tests.gpu_support import same
from tests.image_support import image_columns
from tests.kernels_on_cpu import gpu_gather, on_cpu
from tests.one_process import open_ranks
from tests.sampling_support import p_value
from tests.support import Patch, hopper_columns, last_words, make_dataset, one_error
from tests.test_resume import interrupted_in
from tests.training_support import learnt

LENGTHS = [6, 1, 9, 3]
SPAN = 3
OPTIONS: dict[str, Any] = {"batch_size": 8, "context_length": SPAN, "device": "cpu"}
MIXED = {"current": 0.2, "future": 0.5, "final": 0.1, "random": 0.2, "discount": 0.75}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    columns = hopper_columns(sum(LENGTHS))
    del columns["rewards"]  # goals need none
    return make_dataset(tmp_path_factory.mktemp("goals"), LENGTHS, columns=columns)


def law(goals: dict[str, Any], episode: int, start: int) -> dict[tuple[int, int], float]:
    """The probability of every goal of a segment, from the definition in the docs."""
    now, last = min(start + SPAN, LENGTHS[episode]) - 1, LENGTHS[episode] - 1
    found: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    found[episode, now] += Fraction(goals.get("current", 0))
    found[episode, last] += Fraction(goals.get("final", 0))
    for each, length in enumerate(LENGTHS):
        for step in range(length):
            found[each, step] += Fraction(goals.get("random", 0)) / sum(LENGTHS)
    future, later = Fraction(goals.get("future", 0)), last - now
    keep = None if goals.get("discount") is None else Fraction(goals["discount"])
    for k in range(1, later + 1):
        share = Fraction(1, later) if keep is None else (1 - keep) * keep ** (k - 1)
        found[episode, now + k] += future * share
    beyond = Fraction(later == 0) if keep is None else keep**later  # the episode's end
    found[episode, last] += future * beyond
    whole = sum(Fraction(goals.get(name, 0)) for name in ("current", "future", "final", "random"))
    return {goal: float(chance / whole) for goal, chance in found.items() if chance}


@settings(max_examples=30)
@given(
    shares=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.5]), min_size=4, max_size=4).filter(any),
    discount=st.none() | st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**62),
)
def test_probabilities_are_those_of_the_law(
    dataset: Dataset, shares: list[float], discount: float | None, seed: int, step: int
) -> None:
    names = ("current", "future", "final", "random")
    goals: dict[str, Any] = {**dict(zip(names, shares, strict=True)), "discount": discount}
    loader = GearLoader(dataset, goals=goals, seed=seed, **OPTIONS)
    segments, drawn = loader.segments_at(step), loader.goals_at(step)
    plain = GearLoader(dataset, seed=seed, **OPTIONS)
    assert plain.batch_at(step).segments.tolist() == loader.batch_at(step).segments.tolist()
    named = zip(segments.episodes, segments.starts, drawn.episodes, drawn.starts, strict=True)
    for (episode, start, other, goal), chance in zip(named, drawn.probability, strict=True):
        expected = law(goals, int(episode), int(start))[int(other), int(goal)]
        assert chance == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("goals", [MIXED, {"future": 1.0}, {"future": 1.0, "discount": 0.5}])
def test_frequencies(dataset: Dataset, goals: dict[str, Any]) -> None:
    """Chi-square over the goals of one segment at significance 1e-4; the seed is fixed."""
    loader = GearLoader(dataset, goals=goals, seed=1, **OPTIONS | {"batch_size": 60_000})
    segments, drawn = loader.segments_at(0), loader.goals_at(0)
    chosen = (segments.episodes == 2) & (segments.starts == 1)
    seen = Counter(zip(drawn.episodes[chosen].tolist(), drawn.starts[chosen].tolist(), strict=True))
    expected = law(goals, 2, 1)
    assert set(seen) == set(expected)
    counts = np.array([seen[goal] for goal in expected])
    assert p_value(counts, np.array(list(expected.values())) * counts.sum()) > 1e-4


@pytest.mark.parametrize("frames", [False, True])
def test_goals_are_states_of_the_dataset(
    dataset: Dataset, tmp_path: Path, kernels: Any, frames: bool
) -> None:
    """Prepared as the states are, in any block or rank, by the GPU's kernels as by the CPU.

    On a GPU: tests/test_loader_gpu.py.
    """
    options: dict[str, Any] = {**OPTIONS, "goals": MIXED, "normalize_states": not frames}
    if frames:
        dataset = make_dataset(tmp_path, LENGTHS, columns=image_columns(sum(LENGTHS), (4, 5)))
        options["frame_stack"] = 2
    loader = GearLoader(dataset, **options)
    whole = GearLoader(dataset, **options | {"batch_size": 4000, "context_length": 1}).batch_at(0)
    states = {tuple(name): whole.states[i, 0] for i, name in enumerate(whole.segments.tolist())}
    ranks = open_ranks(dataset, (0, 0), "auto", **options)
    for step in range(5):
        batch, drawn = next(loader), loader.goals_at(step)
        assert batch.goals is not None and batch.goals is batch["goals"]
        for slot, name in enumerate(zip(drawn.episodes, drawn.starts, strict=True)):
            assert torch.equal(batch.goals[slot, 0], states[name])
        assert torch.equal(loader.batch_at(step)["goals"], batch.goals)
        assert torch.equal(torch.cat([next(rank)["goals"] for rank in ranks]), batch.goals)
    assert batch.model_inputs()["goals"] is batch.goals
    segments, goals = loader.segments_at(3)[None], loader.goals_at(3)[None]
    with on_cpu(kernels):
        engines = [
            gpu_gather(loader.rows.memory, rank_batch=8, context_length=k) for k in (SPAN, 1)
        ]
        windows, reached = engines[0].gather(segments), engines[1].gather(goals)
    found = {"goals": reached.tensors()["states"]}
    same(split_steps(windows, "right", None, found)[0], loader.batch_at(3))


LAW = """
import numpy as np

def soon(facts, episodes, steps, draws):
    last = facts.episodes.lengths[episodes] - 1
    return np.minimum(steps + (3 * draws[:, 0]).astype(int), last)

def elsewhere(facts, episodes, steps, draws):
    assert facts.column("observations") is facts.column("observations"), "read once"
    others = (episodes + 1) % facts.episodes.episodes
    return others, (draws[:, 1] * facts.episodes.lengths[others]).astype(int)

def by_chance(facts, episodes, steps, draws):
    return np.random.default_rng().integers(0, facts.episodes.lengths[episodes])

def ranked(facts, episodes, steps, draws):
    return steps if len(steps) == 1 else steps * 0

def beyond(facts, episodes, steps, draws):
    return steps + 1000

def of_floats(facts, episodes, steps, draws):
    return steps * 1.0

def failing(facts, episodes, steps, draws):
    raise KeyError("nothing")
"""


def test_a_law_of_ones_own(dataset: Dataset, tmp_path: Path, monkeypatch: Patch) -> None:
    """Each goal is what the law makes of its own segment, in any block, rank or loader."""
    monkeypatch.chdir(tmp_path)
    Path("law.py").write_text(LAW)
    loader = GearLoader(dataset, goals={"kind": "law.py:soon"}, **OPTIONS)
    segments, goals = loader.segments_at(7), loader.goals_at(7)
    last = np.array(LENGTHS)[segments.episodes] - 1
    now = np.minimum(segments.starts + SPAN - 1, last)
    assert (goals.episodes == segments.episodes).all() and np.isnan(goals.probability).all()
    assert ((goals.starts >= now) & (goals.starts <= np.minimum(now + 2, last))).all()
    many = loader.goals_at(8), GearLoader(dataset, goals={"kind": "law.py:soon"}, **OPTIONS)
    assert (many[0].starts == many[1].goals_at(8).starts).all()
    ranks = open_ranks(dataset, (0, 0), "auto", goals={"kind": "law.py:elsewhere"}, **OPTIONS)
    other = GearLoader(dataset, goals={"kind": "law.py:elsewhere"}, **OPTIONS)
    drawn = other.goals_at(0)
    assert (drawn.episodes == (other.segments_at(0).episodes + 1) % len(LENGTHS)).all()
    assert torch.equal(torch.cat([next(rank)["goals"] for rank in ranks]), next(other)["goals"])
    with one_error("LOADER_STATE", "goals is"):
        other.load_state_dict(loader.state_dict())
    for name, words in (
        ("by_chance", "it draws other goals each time"),
        ("ranked", "depends on other segments"),
        ("beyond", "draws step 10.. of episode 0"),
        ("of_floats", r"it returns float64 \(4,\)"),
        ("failing", "drawing raised KeyError.*law.py:"),
        ("nothing", "has no 'nothing'"),
    ):
        with one_error("LOADER_OPTION", words):
            GearLoader(dataset, goals={"kind": f"law.py:{name}"}, **OPTIONS)
    with one_error("LOADER_OPTION", "kind draws all goals"):
        GearLoader(dataset, goals={"kind": "law.py:soon", "future": 1.0}, **OPTIONS)


def test_a_law_that_only_a_run_names_is_not_run(
    dataset: Dataset, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("law.py").write_text(LAW)
    named = {"data.path": str(dataset.path), "loader.goals.kind": "law.py:soon"}
    recipe = load_recipe("maze-goals", named)
    assert recipe.loader.goals is not None and recipe.loader.goals.future == 0, "gives way"
    assert {Path(name).name for name in recipe.parts} == {"law.py:soon"}
    assert GearLoader.from_recipe(recipe, device="cpu").goals_at(0).episodes.size == 128
    monkeypatch.setattr(parts, "_permission", parts.Permission())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    stranger = load_recipe(Recipe.read(recipe.to_dict() | {"parts": {}}))
    with one_error("LOADER_OPTION", "that only a run.*loader.goals.kind=.*law.py:soon"):
        GearLoader.from_recipe(stranger, device="cpu")


def test_who_may_ask_for_goals(dataset: Dataset, tmp_path: Path) -> None:
    for goals, words in (
        ({"futur": 1.0}, "unknown option 'goals.futur', did you mean 'goals.future'"),
        ({"zzzzzz": 1.0}, "there are goals.kind, goals.current, goals.future, goals.final"),
        ({}, "must not be all 0"),
        ({"future": 1.0, "discount": 1.0}, "goals.discount: .* less than 1"),
        ("future", "goals: "),
    ):
        with one_error("LOADER_OPTION", words):
            GearLoader(dataset, goals=goals, **OPTIONS)  # type: ignore[arg-type]
    for name, value in (("placement", "disk"), ("sharding", "shard"), ("extra_columns", ["goals"])):
        more: dict[str, Any] = {name: value}
        with one_error("LOADER_OPTION", "goals"):
            GearLoader(dataset, goals=MIXED, **OPTIONS, **more)
    loader, plain = (GearLoader(dataset, goals=g, **OPTIONS) for g in (MIXED, None))
    with one_error("LOADER_STATE", "goals is"):
        plain.load_state_dict(loader.state_dict())
    plain.load_state_dict({k: v for k, v in plain.state_dict().items() if k != "goals"})
    loader.load_state_dict(loader.state_dict())
    with one_error("LOADER_OPTION", "goals=None"):
        plain.goals_at(0)
    assert next(plain).goals is None


# the maze -------------------------------------------------------------------------------------


def test_the_maze_is_an_environment_with_tasks_as_those_of_ogbench() -> None:
    made = gymnasium.make("gear_offline/Maze-v0", render_mode="rgb_array")
    check_env(made.unwrapped)
    for task, _ in enumerate(made.unwrapped.task_infos, start=1):  # type: ignore[attr-defined]
        (seen, told), (again, _) = (made.reset(seed=task, options={"task_id": task}) for _ in "ab")
        assert (seen == again).all() and seen in made.observation_space
        way, success, steps = way_to(cell_of(told["goal"])), False, 0
        while not success:
            seen, reward, success, cut, facts = made.step(np.array(way[cell_of(seen)]) - seen)
            assert reward == facts["success"] == float(success) and not cut
            steps += 1
        assert np.linalg.norm(seen - told["goal"]) <= 0.5 and steps > 10
    (seen, told), ended = made.reset(seed=0), False
    assert told == {}, "without a task there is no goal"
    while not ended:  # walls hold, and only the limit of steps ends it
        seen, reward, over, ended, _ = made.step(made.action_space.sample())
        assert WALLS[cell_of(seen)[0]][cell_of(seen)[1]] == "." and not (reward or over)
    assert np.asarray(made.render()).shape == (216, 216, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, shorter."""
    folder = tmp_path_factory.mktemp("maze")
    return train_run(recipe_in(folder), out=folder / "run", quiet=True)


def recipe_in(folder: Path, *more: str) -> Recipe:
    short = ["data.collect.steps=8000", "train.steps=250", "train.checkpoint_every=125"]
    short += ["train.evaluate_every=250", "evaluate.background=off", "evaluate.episodes=8"]
    short += ["loader.batch_size=64", "optimizer.warmup_steps=10", f"data.path={folder / 'play'}"]
    return load_recipe("maze-goals", last_words(*short, *more))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_trained_policy_reaches_goals_and_a_run_is_resumed_bit_for_bit(
    run: Path, tmp_path: Path
) -> None:
    """Far more often than actions at random, from the folder of the policy alone too."""
    found = go.evaluate(run, quiet=True, device="cpu")
    (task,) = found.tasks
    assert [target.target for target in task.targets] == [1, 2, 3, 4, 5]
    chance = evaluate_tasks(
        lambda _: Random(), [EvaluationTask(**{**TASK, "episodes": 8})]
    ).mean_return
    assert found.mean_return is not None and chance is not None
    assert found.mean_return >= chance + 0.15 and chance <= 0.1
    document = json.loads((run / "evaluation.json").read_text())
    assert document["goals"] and document["return"] == found.mean_return
    assert "| policy, task 5 |" in (run / "report.md").read_text()

    folder = go.load_policy(run, device="cpu").save(tmp_path / "policy")
    shutil.rmtree(run / "plots")
    again = go.evaluate(folder, episodes=8, quiet=True, device="cpu")
    assert again.to_json()["targets"] == document["targets"]
    policy = go.load_policy(folder, device="cpu")
    with one_error("USAGE", "no goal"):
        policy.reset()
    with one_error("MODEL", "2 elements"):
        policy.reset(np.zeros(3))
    policy.reset(np.array([1.0, 7.0]))
    assert policy.act(np.ones((1, 2))).shape == (1, 2) and policy.targets.tolist() == [[1.0, 7.0]]

    short = ["train.steps=20", "train.checkpoint_every=10", "train.evaluate_every=20"]
    recipe = recipe_in(run.parent, *short, "evaluate.episodes=1")
    whole = train_run(recipe, out=tmp_path / "whole", quiet=True)
    with interrupted_in(15), pytest.raises(TrainingInterrupted):
        train_run(recipe, out=tmp_path / "run", quiet=True)
    train_run(recipe, out=tmp_path / "run", resume=True, quiet=True)
    assert learnt(tmp_path / "run") == learnt(whole)


def test_recipes_of_goals(dataset: Dataset, tmp_path: Path) -> None:
    maze = "evaluate.environment=gear_offline/Maze-v0"
    recipe = recipe_in(tmp_path, f"data.path={dataset.path}", "data.collect=null", maze)
    _, sizes = resolve(recipe.replace("evaluate.episodes=0"), dataset, quiet=True)
    assert sizes.state_dim == 11, "data without rewards"
    with one_error("ENVIRONMENT", "no tasks with goals"):
        resolve(recipe.replace("evaluate.environment=Hopper-v5"), dataset, quiet=True)
    small = make_dataset(tmp_path / "small", LENGTHS, state_dim=2, action_dim=2)
    for wrong in (6, 0, 1.5):
        with one_error("USAGE", f"Maze-v0 has no task {wrong}.*whole numbers from 1 to 5"):
            resolve(recipe.replace({"evaluate.targets": [1, wrong]}), small, quiet=True)
    with one_error("RECIPE", "loader.goals and data.tasks exclude"):
        load_recipe("multitask-smoke", {"loader.goals": {"future": 1.0}})
    images = make_dataset(tmp_path, LENGTHS, columns=image_columns(sum(LENGTHS), (36, 36)))
    with one_error("COLUMN", "goals are vectors"):
        resolve(recipe, images, quiet=True)
    task = EvaluationTask(**{**TASK, "environment": "Pendulum-v1"})
    with one_error("ENVIRONMENT", r"info\['goal'\]"):
        evaluate_tasks(lambda _: Random(), [task])


TASK: dict[str, Any] = {
    "environment": "gear_offline/Maze-v0",
    "targets": (1, 2, 3, 4, 5),
    "goals": True,
}


class Random:
    """Acts at random, whatever the goal."""

    def reset(self, indices: Any, targets: Any) -> None:
        self.generator = np.random.default_rng(0)

    def act(self, observations: Any, indices: Any = None) -> Any:
        return self.generator.uniform(-1, 1, (len(observations), 2))

    def observe_reward(self, rewards: Any, indices: Any = None) -> None: ...
