"""Runs that hold episodes out: what they learn from, and the loss of what is held out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gear_offline as go
from gear_offline.artifacts.json_lines import read_records
from gear_offline.artifacts.records import read_evaluations
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.data.dataset.growing import GrowingDataset
from gear_offline.runs.data import prepare_dataset
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.runs.report import write_report
from tests.ranks_support import fork_ranks, ranks_recipe
from tests.support import one_error
from tests.test_resume import interrupted_in
from tests.test_split import Episode, is_held_out, make_episodes, numbers_of, write
from tests.test_stacks import train_together, trial_of
from tests.training_support import learnt, tiny_data, tiny_recipe

pytestmark = pytest.mark.usefixtures("no_reports")
SHARE = "data.held_out=30%"
ALONE = ("evaluate.episodes=0", "train.checkpoint_every=5", "model.dropout=0.3")
EPISODES = make_episodes(40)
SIDES: dict[bool, list[Episode]] = {
    side: [e for e in EPISODES if is_held_out(e, 0.3) is side] for side in (False, True)
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "all", EPISODES, shard_bytes=900).path


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tiny_recipe(data, SHARE, *ALONE), tmp_path_factory.mktemp("r") / "run")


def validations(run: Path, name: str = "loss") -> dict[int, float]:
    lines = read_records(run / "metrics.jsonl")
    key = f"validation/{name}"
    return {line["step"]: line[key] for line in lines if key in line}


def loss_by_hand(run: Path, step: int, recipe: Recipe) -> float:
    """Return the mean squared error over all windows of what is held out, one after the other."""
    model = go.load_policy(run, checkpoint=step, device="cpu").model.eval()
    states = np.concatenate([episode["observations"] for episode in SIDES[False]])
    mean, std = states.mean(0, np.float64), states.std(0, np.float64) + 1e-6
    span, scale, total, count = recipe.loader.context_length, recipe.loader.returns_scale, 0.0, 0
    for episode in SIDES[True]:
        rewards = episode["rewards"].astype(np.float64)
        returns = np.cumsum(rewards[::-1])[::-1] / scale
        for start in range(len(rewards)):
            part = slice(start, start + span)
            steps = torch.arange(start, start + span)[None, : len(rewards[part])]
            arrays = {
                "states": (episode["observations"][part] - mean) / std,
                "actions": episode["actions"][part],
                "returns_to_go": returns[part, None],
            }
            inputs = {n: torch.tensor(a, dtype=torch.float32)[None] for n, a in arrays.items()}
            with torch.no_grad():
                found = model(**inputs, timesteps=steps, attention_mask=torch.ones_like(steps))
            errors = (found.action_preds - inputs["actions"]).square().mean(-1)
            total, count = total + float(errors.sum()), count + steps.shape[1]
    return total / count


def test_validation_loss_is_the_mean_over_all_windows_of_what_is_held_out(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = validations(run)
    assert [*found] == [5, 10, 15, 20]  # at each checkpoint, without an environment
    for step in (15, 20):
        assert found[step] == pytest.approx(loss_by_hand(run, step, load_recipe(run)), rel=1e-5)
    lines = read_records(run / "metrics.jsonl")
    assert all("loss" in line for line in lines) and len({line["step"] for line in lines}) == 7 + 2
    best = (run / "checkpoints" / "best").readlink().name
    assert int(best[5:]) == min(found, key=lambda step: found[step])
    assert go.open_run(run).recipe.data.held_out == 0.3


def test_training_sees_the_other_episodes_as_if_there_were_no_more(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    others = write(tmp_path / "others", SIDES[False]).path
    same = ("model.max_timestep=30", "loader.normalize_states=false", "train.log_every=5")
    runs = [
        train_run(tiny_recipe(data, SHARE, *ALONE, *same), tmp_path / "held"),
        train_run(tiny_recipe(others, *ALONE, *same), tmp_path / "alone"),
    ]
    held, alone = (learnt(run) for run in runs)
    for part in ("model", "training", "metrics"):
        assert held[part] == alone[part]
    count, steps = len(SIDES[True]), sum(len(e["rewards"]) for e in SIDES[True])
    assert f"{count} episodes of {steps} steps held out" in capfd.readouterr().err
    returns = [episode["rewards"].sum(dtype=np.float64) for episode in SIDES[False]]
    targets = load_recipe(runs[0]).evaluate.targets
    assert targets == pytest.approx([max(returns), np.mean(returns)], abs=1e-5)


def test_a_resumed_run_validates_as_one_that_was_not_interrupted(
    data: Path, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    recipe = tiny_recipe(data, SHARE, *ALONE)
    for stop in (8, 15):
        with interrupted_in(stop), pytest.raises(TrainingInterrupted):
            train_run(recipe, out, resume=stop > 8, quiet=True)
    train_run(recipe, out, resume=True, quiet=True)
    assert learnt(out) == learnt(run) and validations(out) == validations(run)
    with one_error("RUN_MISMATCH", "data.held_out was 0.3 .* and is 0.4 now"):
        train_run(recipe.replace({"data.held_out": 0.4}), out, resume=True, quiet=True)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_validate_together_what_one_does_alone(
    data: Path, tmp_path: Path, parallel: str
) -> None:
    changes = [SHARE, "train.validation_batches=2", "loader.batch_size=10", "model.layers=2"]
    changes += [f"train.parallel={parallel}", "model.dropout=0"]
    recipe = ranks_recipe(tmp_path / "recipe.yaml", data, *changes)
    one = train_run(load_recipe(recipe), tmp_path / "one", quiet=True)
    done = fork_ranks(2, "-m", "gear_offline", "train", recipe, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    alone, together = validations(one), validations(tmp_path / "two")
    assert [*alone] == [*together] == [10, 20] and "20 windows for validation" in done.stderr
    assert [*together.values()] == pytest.approx([*alone.values()], rel=1e-5)


class Two(go.SequenceModel):
    """Two losses; one draws, and counts in a buffer, whatever the mode."""

    def __init__(self, facts: Any, settings: Any) -> None:
        super().__init__(facts, settings)
        self.map = torch.nn.Linear(facts.state_dim, facts.action_dim)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def predict(self, batch: Any) -> Any:
        return self.map(batch.states)

    def losses(self, batch: Any) -> dict[str, Any]:
        self.calls += 1.0
        errors = (self.predict(batch) - batch.actions).square().mean(-1)
        return {"action": errors, "noise": errors * torch.rand(()) + self.calls * 0.0}


def test_validation_leaves_no_trace_in_training(data: Path, tmp_path: Path) -> None:
    found = []
    for batches in (1, 64):  # other windows, other draws
        options = ["train.log_every=5", f"train.validation_batches={batches}"]
        recipe = tiny_recipe(data, SHARE, "evaluate.episodes=0", *options)
        options_of_model = {"model": {"kind": Two}}
        whole = Recipe.parse({**recipe.to_dict(), **options_of_model})
        out = train_run(load_recipe(whole), tmp_path / str(batches), quiet=True)
        last = sorted((out / "checkpoints").glob("step-*"))[-1]
        found.append(load_file(last / "model.safetensors"))
        assert [*validations(out, "noise")] == [*validations(out, "action")] == [5, 10, 15, 20]
        sums = {
            n: loss + validations(out, "noise")[n] for n, loss in validations(out, "action").items()
        }
        assert validations(out) == pytest.approx(sums)
    first, second = found
    assert {*first} == {*second} and all(torch.equal(first[n], second[n]) for n in first)
    assert first["calls"] == 20  # as many as steps


class Actor(go.Callback):
    """Appends episodes while a run trains."""

    def __init__(self, path: Path) -> None:
        self.appender, self.made = go.Appender(path), list[Episode]()

    def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
        episodes = make_episodes(4, seed=step)
        self.made += episodes
        self.appender.append(episodes)


@pytest.mark.parametrize("limited", [False, True])
def test_what_grows_into_the_held_out_part_is_never_drawn(tmp_path: Path, limited: bool) -> None:
    path = write(tmp_path / "grows", EPISODES).path
    options = ["data.admit_every=4", "model.max_timestep=40"]
    recipe = tiny_recipe(path, SHARE, *ALONE, *options, *["data.max_size=30"] * limited)
    actor = Actor(path)
    out = train_run(recipe, tmp_path / "run", callbacks=[actor], quiet=True)
    grown = go.open_dataset(path)
    assert len(EPISODES) < len(grown)
    every = [*EPISODES, *actor.made][: len(grown)]
    expected = [int(e["number"][0]) for e in every if not is_held_out(e, 0.3)]
    with GrowingDataset(prepare_dataset(recipe, quiet=True), admits=False) as growing:  # type: ignore[arg-type]
        dataset = growing.follow(grown.admissions)
    assert numbers_of(dataset) == expected == numbers_of(go.split(path, 0.3)[0])
    facts, states = dataset.statistics["observations"], [e["observations"] for e in SIDES[False]]
    np.testing.assert_allclose(facts.mean, np.concatenate(states).mean(0, np.float64), atol=1e-12)
    assert f'"episodes": {len(expected)},' in (out / "summary.json").read_text()
    fixed = write(tmp_path / "fixed", EPISODES).path  # validated on the same windows throughout
    same = (SHARE, *ALONE, "train.steps=3", "model.max_timestep=40")
    first = train_run(tiny_recipe(fixed, *same), tmp_path / "f", quiet=True)
    replayed = recipe.replace({"train.steps": 3, "data.replay": True})
    again = train_run(replayed, tmp_path / "again", quiet=True)
    if not limited:
        assert validations(again) == pytest.approx(validations(first), rel=1e-6)


def test_each_task_holds_out_its_own(data: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", make_episodes(30, seed=1)).path
    tasks = {"a": {"path": str(data)}, "b": {"path": str(other), "returns_scale": 3.0}}
    base = tiny_recipe(data, SHARE, *ALONE, "train.validation_batches=1000").to_dict()
    base["data"] |= {"tasks": tasks, "path": None}
    recipe = Recipe.parse(base)
    joint: Any = prepare_dataset(recipe, quiet=True)
    expected = [len(go.split(path, 0.3)[0]) for path in (data, other)]
    assert [len(task.dataset) for task in joint.tasks] == expected
    found = validations(train_run(recipe, tmp_path / "run", quiet=True))
    assert len(found) == 4 and all(np.isfinite(value) for value in found.values())


def test_runs_of_a_stack_validate_each_for_itself(data: Path, tmp_path: Path) -> None:
    options = (SHARE, *ALONE, "model.dropout=0", "train.validation_batches=3")
    recipes = {f"s{seed}": tiny_recipe(data, *options, f"seed={seed}") for seed in range(2)}
    trials = [trial_of(name, recipe) for name, recipe in recipes.items()]
    assert set(train_together(trials, tmp_path / "all").values()) == {None}
    found = [validations(tmp_path / "all" / name) for name in recipes]
    for stacked, (name, recipe) in zip(found, recipes.items(), strict=True):
        alone = validations(train_run(recipe, tmp_path / name, quiet=True))
        assert stacked == pytest.approx(alone, rel=1e-4) and len(alone) == 4
    assert found[0] != found[1]


def test_a_tracker_and_the_report_have_the_validation_losses(data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data, SHARE, *ALONE, "train.trackers=[tensorboard]")
    out = train_run(recipe, tmp_path / "run", quiet=True)
    board = EventAccumulator(str(out / "tensorboard"), {"scalars": 0}).Reload()
    shown = {scalar.step: scalar.value for scalar in board.Scalars("validation/loss")}
    assert shown == pytest.approx(validations(out), rel=1e-6)
    assert len(board.Scalars("train/loss")) == len(read_records(out / "metrics.jsonl"))
    text = write_report(out).read_text()
    lowest = min(shown, key=lambda step: shown[step])
    assert f"after {lowest} steps, the lowest" in text


def test_blame_names_episodes_as_the_dataset_counts_them(run: Path) -> None:
    for row in go.blame(run, 10, 14).episodes:
        rewards = EPISODES[row.episode]["rewards"]
        assert row.episode_return == pytest.approx(rewards.sum(dtype=np.float64), abs=1e-5)
        assert row.length == len(rewards) and row.source.startswith(f"episode {row.episode} of")
        assert not is_held_out(EPISODES[row.episode], 0.3)


def test_best_is_chosen_by_what_the_recipe_says(tmp_path: Path) -> None:
    path = tiny_data(tmp_path, [4, 1, 6, 3, 5, 6, 2, 4])
    options = ("data.held_out=40%", "train.evaluate_every=5", "train.keep_checkpoints=1")
    for best in ("auto", "return", "validation/loss"):
        recipe = tiny_recipe(path, *options, f"train.best={best}", "seed=2")
        out = train_run(recipe, tmp_path / best.replace("/", "-"), quiet=True)
        losses, reports = validations(out), read_evaluations(out)
        assert [*losses] == [5, 10, 15, 20] == [report.step for report in reports]
        returns: dict[Any, Any] = {report.step: report.mean_return for report in reports}
        wanted = min(losses, key=lambda step: losses[step])
        if best != "validation/loss":
            wanted = max(returns, key=lambda step: (returns[step], step))
        assert (out / "checkpoints" / "best").readlink().name == f"step-{wanted:08d}"


def test_options_that_say_nothing_are_refused(data: Path) -> None:
    with one_error("RECIPE", "train.best=validation/loss needs data.held_out"):
        tiny_recipe(data, "train.best=validation/loss")
    with one_error("RECIPE", "held_out_by needs held_out"):
        tiny_recipe(data, "data.held_out_by=scene")
    for share in ("0", "1", "100%", "x", "10"):
        with one_error("RECIPE", "data.held_out: a share is like 10%"):
            tiny_recipe(data, f"data.held_out={share}")
    with one_error("SELECTION", "holds out none of 40 episodes"):
        prepare_dataset(tiny_recipe(data, "data.held_out=1e-9"))
    grouped = tiny_recipe(data, "data.held_out=70%", "data.held_out_by=scene")
    train: Any = prepare_dataset(grouped, quiet=True)
    held = {int(e["scene"][0]) for e in go.split(data, 0.7, by="scene")[1]}
    assert {int(e["scene"][0]) for e in train} == {0, 1, 2, 3} - held
