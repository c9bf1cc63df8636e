"""Training on several tasks: what is learnt, saved, resumed, played, reported; one task or many."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import torch

import gear_offline as go
from gear_offline.analysis.planning.workload import make_workload
from gear_offline.analysis.strategies import compare_strategies
from gear_offline.artifacts.checkpoint import chosen_checkpoint
from gear_offline.artifacts.json_lines import read_records
from gear_offline.artifacts.trained import TrainedModel, load_policy, trained_model
from gear_offline.batches.tables.joint import JointDataset
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.errors import GearError
from gear_offline.loaders.options import recipe_sampler
from gear_offline.runs.data import prepare_dataset
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.loop import train_run
from gear_offline.runs.resolve import resolve
from tests.image_support import image_columns
from tests.support import Captured, Patch, failing_code, make_dataset, one_error
from tests.task_support import advance, make_learner, make_parts, tasks_recipe
from tests.test_parallel_training import trained
from tests.training_support import (
    ENVIRONMENT,
    FakePool,
    TinyEnvironment,
    learnt,
    measured,
    register_importable,
    tiny_data,
    tiny_recipe,
)

WIDE = "GearOfflineWide-v0"


class WideEnvironment(TinyEnvironment):
    """The tiny environment with more of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-9, 9, (5,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._state = self.np_random.normal(size=5).astype(np.float32)
        return self._state, {}


def tiny_tasks(folder: Path, *overrides: str) -> Recipe:
    """Return a recipe over two tiny environments, with data that fit them."""
    entry = "tests.test_multitask_training:WideEnvironment"
    if WIDE not in gymnasium.registry:
        gymnasium.register(WIDE, entry, max_episode_steps=6)
    tiny = tiny_data(folder / "tiny")
    register_importable()
    wide = make_dataset(
        folder / "wide", [4, 6, 2], state_dim=5, action_dim=3, environment_id=WIDE, seed=1
    )
    tasks = {
        "tiny": {"path": str(tiny), "weight": 2.0, "reference": "hopper-medium-v2"},
        "wide": {"path": str(wide.path), "returns_scale": 5.0, "targets": [3.0]},
    }
    return tiny_recipe(tiny, *overrides).replace({"data.path": None, "data.tasks": tasks})


@pytest.fixture(scope="module", autouse=True)
def beside() -> Iterator[None]:
    """What is played beside the training is played in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.runs.evaluations.WorkerPool", FakePool)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    return train_run(tiny_tasks(folder, "evaluate.background=on"), out=folder / "run", quiet=True)


def test_a_run_says_what_each_task_achieved(run: Path) -> None:
    rows = read_records(run / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [7, 14, 20]
    last = rows[-1]
    tiny, wide = (last["tasks"][name] for name in ("tiny", "wide"))
    assert (tiny["environment"], wide["environment"]) == (ENVIRONMENT, WIDE)
    assert [row["target"] for row in wide["targets"]] == [3.0]
    best = max(row["return"] for row in tiny["targets"])
    assert tiny["scale"] == "reference scores"
    assert tiny["normalized_score"] == pytest.approx(
        100 * (best + 20.272305) / (3234.3 + 20.272305)
    )
    assert wide["scale"] == "returns of its data"
    low, high = wide["data_worst"], wide["data_best"]
    assert wide["normalized_score"] == pytest.approx(
        100 * (wide["targets"][0]["return"] - low) / (high - low)
    )
    assert last["normalized_score"] == pytest.approx(
        (tiny["normalized_score"] + wide["normalized_score"]) / 2
    )
    best_row = max(rows, key=lambda row: row["normalized_score"])
    assert json.loads((run / "summary.json").read_text())["evaluation_best"] == best_row
    assert (run / "checkpoints" / "best").resolve().name.endswith(f"{best_row['step']:08d}")
    report = (run / "report.md").read_text()
    for text in ("| tiny |", "## wide", "asked_vs_achieved-tiny.png", "Scores over the training"):
        assert text in report, text
    assert (run / "plots" / "asked_vs_achieved-wide.png").is_file()


def _scale(episode: Any) -> Any:
    return {**episode, "rewards": episode["rewards"] * 0.1}


def test_a_task_whose_rewards_were_edited_has_no_score(tmp_path: Path) -> None:
    """What is played earns the environment's own rewards: their scale is another."""
    recipe = tiny_tasks(tmp_path, "evaluate.background=off")
    wide = (recipe.data.tasks or {})["wide"].path
    go.convert(str(wide), tmp_path / "scaled", map=_scale, quiet=True)
    recipe = recipe.replace({"data.tasks.wide.path": str(tmp_path / "scaled")})
    last = read_records(train_run(recipe, out=tmp_path / "run", quiet=True) / "evaluations.jsonl")[
        -1
    ]
    assert last["tasks"]["wide"]["normalized_score"] is None is last["normalized_score"]
    assert last["tasks"]["tiny"]["normalized_score"] is not None


def test_the_recipe_of_a_run_says_everything(run: Path) -> None:
    recipe = load_recipe(run)
    tasks = recipe.data.tasks
    assert tasks is not None
    assert (tasks["tiny"].environment, tasks["tiny"].returns_scale) == (ENVIRONMENT, 10.0)
    assert (tasks["wide"].environment, tasks["wide"].returns_scale) == (WIDE, 5.0)
    assert len(tasks["tiny"].targets or ()) == 2
    dataset = prepare_dataset(recipe, quiet=True)
    assert resolve(recipe, dataset, quiet=True)[0] == recipe


def test_a_run_is_evaluated_task_by_task(run: Path, capsys: Captured) -> None:
    """As a process beside the training played it."""
    assert json.loads((run / "summary.json").read_text())["evaluation"]["background"]
    report = evaluate(run, episodes=2, device="cpu", quiet=True)
    assert list(report.named) == ["tiny", "wide"]
    played = json.loads((run / "evaluation.json").read_text())
    last = read_records(run / "evaluations.jsonl")[-1]
    for name in ("tiny", "wide"):
        mine, theirs = (found["tasks"][name]["targets"] for found in (played, last))
        assert [row["returns"] for row in mine] == [row["returns"] for row in theirs]
    assert played["normalized_score"] == last["normalized_score"]
    report.print()
    said = capsys.readouterr().out
    assert "\nmean score of 2 tasks" in said and "tiny: run at step 20" in said
    one = evaluate(run, environment=WIDE, targets=[1.0, 2.0], episodes=1, quiet=True)
    assert [(name, len(task.targets)) for name, task in one.named.items()] == [("wide", 2)]
    assert list(one.to_json()["tasks"]) == ["wide"]
    assert failing_code(lambda: evaluate(run, targets=[1.0])) == "USAGE"
    assert failing_code(lambda: evaluate(run, environment="No-v0")) == "USAGE"


def test_a_checkpoint_knows_its_tasks(run: Path) -> None:
    policy = load_policy(run, "wide", device="cpu")
    assert (policy.state_dim, policy.action_dim) == (5, 3)
    assert (policy.returns_scale, policy.context_length) == (5.0, 3)
    recipe = load_recipe(run)
    dataset = prepare_dataset(recipe, quiet=True)
    assert isinstance(dataset, JointDataset)
    statistics = dataset.tasks[1].dataset.statistics["observations"]
    task = trained_model(chosen_checkpoint(run)).model.facts.tasks[1]
    np.testing.assert_array_equal(task.state_mean, statistics.mean)
    np.testing.assert_array_equal(task.state_std, statistics.std)
    assert failing_code(lambda: load_policy(run)) == "RECIPE"
    assert failing_code(lambda: load_policy(run, "nowhere")) == "RECIPE"
    config = json.loads((run / "checkpoints" / "best" / "config.json").read_text())
    assert [task["name"] for task in config["tasks"]] == ["tiny", "wide"]


def test_a_run_that_was_stopped_ends_as_one_that_was_not(run: Path, tmp_path: Path) -> None:
    again = load_recipe(run)
    out = tmp_path / "run"
    train_run(again.replace({"train.steps": 10}), out=out, quiet=True)
    train_run(again, out=out, resume=True, quiet=True)
    mine, theirs = learnt(out), learnt(run)
    for key in ("step", "model", "training", "config", "recipe"):
        assert mine[key] == theirs[key], key
    with one_error("RUN_MISMATCH"):
        train_run(again.replace({"data.tasks.wide.weight": 3.0}), out=out, resume=True, quiet=True)


def test_one_task_learns_what_a_recipe_without_tasks_learns(tmp_path: Path) -> None:
    data = tiny_data(tmp_path)
    plain = tiny_recipe(data, "evaluate.episodes=0")
    only = plain.replace({"data.path": None, "data.tasks": {"only": {"path": str(data)}}})
    alone = train_run(plain, out=tmp_path / "plain", quiet=True)
    one = train_run(only, out=tmp_path / "one", quiet=True)
    for key in ("model", "training", "metrics"):
        assert learnt(one)[key] == learnt(alone)[key], key
    acted = []
    for run in (one, alone):
        policy = load_policy(run, device="cpu")
        policy.reset([0], [3.0])
        acted.append(policy.act(np.ones((1, policy.state_dim))))
        assert len(policy.model.facts.tasks) == 0
    np.testing.assert_array_equal(acted[0], acted[1])


def test_each_task_may_have_a_strategy_of_its_own(tmp_path: Path) -> None:
    own = {"data.tasks.walk.selection": {"strategy": "top_k", "k": 1}}
    found = tasks_recipe(make_parts(tmp_path)).replace({**own, "data.tasks.point.weight": 0.0})
    dataset = prepare_dataset(found, quiet=True)
    assert isinstance(dataset, JointDataset)
    drawn = recipe_sampler(found, dataset).sample(0, 0, 1, 500)[0].episodes
    first, second = dataset.first_episodes[1:3]
    walk = set(drawn[(drawn >= first) & (drawn < second)].tolist())
    assert walk == {int(first + dataset.tasks[1].dataset.returns.argmax())}
    assert drawn.max() < second and len(set(drawn[drawn < first].tolist())) == 4


def test_strategies_are_compared_in_every_task(tmp_path: Path, monkeypatch: Patch) -> None:
    recipe = tasks_recipe(make_parts(tmp_path), "evaluate.episodes=1")
    recipe = recipe.replace({"data.tasks.walk.selection": {"strategy": "top_k", "k": 2}})
    asked = Mock(side_effect=GearError("MEMORY", "enough for this test"))
    monkeypatch.setattr("gear_offline.analysis.strategies.run_trials", asked)
    names = "top_k:k=1,shuffled_epochs"
    compared = partial(compare_strategies, recipe, strategies=names, out=tmp_path / "o", quiet=True)
    rows = {row.strategy: row for row in compared().strategies}
    assert "cannot be mixed" in str(rows["shuffled_epochs"].error)
    assert rows["uniform_steps"].error is None and rows["top_k"].error is None
    assert failing_code(lambda: compared(train=True, seeds=1)) == "MEMORY"
    own, best = (trial.recipe for trial in asked.call_args.args[0])
    assert own.data.tasks["walk"].selection is not None
    assert best.selection.strategy == "top_k"
    assert all(task.selection is None for task in best.data.tasks.values())


def test_micro_batches_know_their_tasks(tmp_path: Path) -> None:
    recipe = tasks_recipe(make_parts(tmp_path), "model.dropout=0.0", "train.log_every=10")
    whole, parts = make_learner(recipe), make_learner(recipe.replace({"train.accumulate": 3}))
    for _ in range(6):
        advance(whole)
        advance(parts)
    torch.testing.assert_close(parts.window.rows[:6], whole.window.rows[:6], rtol=1e-4, atol=1e-6)


def test_a_plan_counts_the_joint_table(tmp_path: Path) -> None:
    recipe = tasks_recipe(make_parts(tmp_path))
    found = make_workload(recipe)
    assert found.steps == 60 + 74 + 21 and found.row_bytes == 4 * 28  # 17 + 6 + 2, to 16 bytes
    assert (found.sizes.state_dim, found.sizes.action_dim) == (17, 6)
    missing = recipe.replace({"data.tasks.hop.path": "nowhere"})
    assert failing_code(lambda: make_workload(missing)) == "DATASET_NOT_FOUND"


def test_tasks_of_frames_share_an_encoder(tmp_path: Path) -> None:
    parts = {
        name: make_dataset(
            tmp_path / name, [9, 6], columns=image_columns(15, (36, 36), seed=seed),
            environment_id=None,
        )
        for seed, name in enumerate(("one", "two"))
    }  # fmt: skip
    recipe = tasks_recipe(
        parts, "loader.frame_stack=2", "loader.normalize_states=false", "loader.batch_size=6"
    )
    learner = make_learner(recipe)
    advance(learner)
    batch = learner.loader.batch_at(0)
    assert batch.states.shape == (6, 4, 2, 36, 36) and batch.states.dtype == torch.uint8
    policy = TrainedModel(learner.model, recipe, learner.loader.window).policy("two")
    policy.reset([0], [1.0])
    assert policy.act(np.zeros((1, 36, 36), np.uint8)).shape == (1,)
    learner.model.train()
    advance(learner)
    assert torch.isfinite(learner.window.rows[:2]).all()
    with one_error("LOADER_OPTION", r"loader\.normalize_states=false"):
        prepare_dataset(recipe.replace({"loader.normalize_states": True}))


def test_two_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    recipe = tasks_recipe(make_parts(tmp_path), "model.dropout=0.0")
    path = tmp_path / "several.yaml"
    path.write_text(recipe.to_yaml())
    alone = train_run(recipe, out=tmp_path / "alone", quiet=True)
    trained(2, path, tmp_path / "run", 20)
    one, several = measured(alone), measured(tmp_path / "run")
    assert [row["step"] for row in several] == [5, 10, 15, 20]
    for mine, theirs in zip(several, one, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
