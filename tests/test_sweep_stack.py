"""Sweeps whose runs are stacked, on the CPU: their batches and, without dropout, their results."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError, UnavailableError
from gear_offline.runs.trainer import train
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sweep.lane import TurnRun
from gear_offline.sweep.results import steps_done
from gear_offline.sweep.stack import LARGEST, StackTurns, in_groups
from gear_offline.sweep.trials import Trial
from gear_offline.training.learner import Learner
from gear_offline.training.metrics import read_records
from gear_offline.training.stack import Stack, check_stackable, stack_key
from tests import sweep_support
from tests.sweep_support import grid, name_points, run_sweep
from tests.training_support import learnt, tiny_recipe

CPU = torch.device("cpu")
RATES = [1e-2, 1e-3]


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)


def make_recipes(data: Path, *overrides: str) -> list[Recipe]:
    fixed = ("evaluate.episodes=0", "model.hidden_size=16", "model.heads=2", "model.layers=2")
    return grid(
        tiny_recipe(data, *fixed, *overrides), {"optimizer.learning_rate": RATES}, seeds=[0, 1]
    )


def stacked(points: list[Trial], folder: Path, *, parallel: int = 4) -> dict[str, GearError | None]:
    return sweep_support.in_turns(StackTurns, points, folder, parallel=parallel)


def without_keys(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Leave out the bias of attention's keys: softmax does not depend on it.

    Its gradient is what rounding leaves of zero, and AdamW makes steps of full size of that.
    """
    if not name.endswith("c_attn.bias") or tensor.ndim == 0:
        return tensor
    query, _, value = tensor.chunk(3)
    return torch.cat([query, value])


def assert_alike(run: Path, alone: Path, *, logs: bool = True) -> None:
    """Compare two runs without dropout: sums are in another order, nothing else differs."""
    mine, theirs = learnt(run), learnt(alone)
    assert mine["step"] == theirs["step"] and mine["recipe"] == theirs["recipe"]
    for kind in ("model", "training"):
        tensors, others = load(mine[kind]), load(theirs[kind])
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            if not name.startswith("random"):
                pair = without_keys(name, tensor), without_keys(name, others[name])
                torch.testing.assert_close(*pair, rtol=1e-3, atol=2e-5, msg=name)
    if not logs:
        return
    for row, other in zip(mine["metrics"], theirs["metrics"], strict=True):
        assert row["step"] == other["step"]
        assert row["learning_rate"] == other["learning_rate"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert row["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)


def test_stacked_runs_are_those_that_are_alone(data: Path, tmp_path: Path) -> None:
    """Two rates and two seeds in one stack, logged and saved on the way."""
    recipes = make_recipes(data, "model.dropout=0")
    before = torch.get_rng_state()
    results = run_sweep(recipes, tmp_path / "sweep", mode="stacked", quiet=True)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers stay"
    assert [(r.status, r.error, r.steps) for r in results] == [("complete", None, 20)] * 4
    models = []
    for point, result in zip(name_points(recipes), results, strict=True):
        alone = train(point.recipe, out=tmp_path / point.name, quiet=True)
        assert_alike(result.path, alone)
        models.append(learnt(result.path)["model"])
    assert len(set(models)) == 4, "they do differ"
    again = run_sweep(recipes, tmp_path / "sweep", mode="stacked", quiet=True)
    assert [learnt(result.path)["model"] for result in again] == models


def test_evaluations_of_stacked_runs(data: Path, tmp_path: Path) -> None:
    recipes = grid(tiny_recipe(data, "model.dropout=0"), {}, seeds=[0, 1])
    results = run_sweep(recipes, tmp_path / "sweep", mode="stacked", quiet=True)
    for point, result in zip(name_points(recipes), results, strict=True):
        alone = train(point.recipe, out=tmp_path / point.name, quiet=True)
        mine, theirs = (read_records(p / "evaluations.jsonl") for p in (result.path, alone))
        assert [row["step"] for row in mine] == [row["step"] for row in theirs] == [7, 14, 20]


def test_an_interrupted_stack_goes_on_to_the_same_end(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout: the state of the common random numbers is saved with every run."""
    points = name_points(make_recipes(data))
    assert set(stacked(points, tmp_path / "whole").values()) == {None}
    advance, count = Stack.advance, 0

    def interrupting(self: Stack) -> dict[int, GearError]:
        nonlocal count
        count += 1
        if count == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "advance", interrupting)
        with pytest.raises(TrainingInterrupted):
            stacked(points, tmp_path / "parts")
    done = {steps_done(tmp_path / "parts" / point.name) for point in points}
    assert len(done) == 1 and 8 <= done.pop() < 20
    assert set(stacked(points, tmp_path / "parts").values()) == {None}
    for point in points:
        assert learnt(tmp_path / "parts" / point.name) == learnt(tmp_path / "whole" / point.name)


def test_a_run_that_fails_ends_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = name_points(make_recipes(data, "model.dropout=0"))
    take = Learner.take

    def poisoned(self: Learner) -> Any:
        if self.recipe.seed == 1 and self.recipe.optimizer.learning_rate == 1e-2 and self.step == 8:
            with torch.no_grad():
                self.model.embed_ln.bias.fill_(float("nan"))
        return take(self)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "take", poisoned)
        ended = stacked(points, tmp_path)
    failed = ended.pop("learning_rate=0.01,s1")
    assert failed is not None and failed.code == "LOSS_NONFINITE" and "step 9" in failed.what
    assert set(ended.values()) == {None} and len(ended) == 3
    assert steps_done(tmp_path / "learning_rate=0.01,s1") == 6
    for point in points:
        if point.name in ended:
            alone = train(point.recipe, out=tmp_path / "alone" / point.name, quiet=True)
            assert_alike(tmp_path / point.name, alone)
    # the one that failed goes on from its own checkpoint, alone
    assert stacked(points[1:2], tmp_path) == {points[1].name: None}


def test_another_stack_is_not_touched_by_one_that_lost_a_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that waits for room begins when there is some, and does all of its own steps."""
    short = make_recipes(data, "model.dropout=0")[:3]
    longer = short[0].replace(train__steps=40, seed=5)
    points = name_points([*short, longer], ["a", "b", "c", "longer"])
    take = Learner.take

    def poisoned(self: Learner) -> Any:
        if self.recipe.seed == 1 and self.step == 8:
            with torch.no_grad():
                self.model.embed_ln.bias.fill_(float("nan"))
        return take(self)

    monkeypatch.setattr(Learner, "take", poisoned)
    ended = stacked(points, tmp_path, parallel=3)
    assert [name for name, error in ended.items() if error is not None] == ["b"]
    assert [steps_done(tmp_path / p.name) for p in points] == [20, 6, 20, 40]


def test_runs_know_how_many_others_there_are(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first one on: evaluations share the machine by it."""
    begin, seen = TurnRun.begin, []

    def noted(self: TurnRun) -> None:
        seen.append(self.neighbours)
        begin(self)

    monkeypatch.setattr(TurnRun, "begin", noted)
    stacked(name_points(make_recipes(data, "train.steps=3")), tmp_path)
    assert seen == [4] * 4


def test_a_stop_while_runs_open_saves_nothing_of_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = name_points(make_recipes(data))
    build, count = Learner.__init__, 0

    def interrupting(self: Learner, *arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        build(self, *arguments, **options)

    monkeypatch.setattr(Learner, "__init__", interrupting)
    with pytest.raises(TrainingInterrupted):
        stacked(points, tmp_path)
    assert count == 2, "no further run is opened"
    assert not list(tmp_path.glob("*/checkpoints/step-*"))
    monkeypatch.setattr(Learner, "__init__", build)
    assert set(stacked(points, tmp_path).values()) == {None}


def test_runs_that_stand_at_other_steps_are_stacked_apart(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between two checkpoints of a step."""
    points = name_points(make_recipes(data, "model.dropout=0"))
    half = points[0].recipe.replace(train__steps=10)
    train(half, out=tmp_path / points[0].name, quiet=True)
    (tmp_path / points[0].name / "summary.json").unlink()
    sizes = []
    build = Stack.__init__

    def counted(self: Stack, learners: list[Learner]) -> None:
        sizes.append((len(learners), {learner.step for learner in learners}))
        build(self, learners)

    monkeypatch.setattr(Stack, "__init__", counted)
    assert set(stacked(points, tmp_path).values()) == {None}
    assert sizes == [(3, {0}), (1, {10})]
    for point in points:
        assert_alike(
            tmp_path / point.name,
            train(point.recipe, out=tmp_path / "alone" / point.name, quiet=True),
            logs=point is not points[0],  # its first ten steps were a run of their own
        )


def test_groups_are_of_runs_that_differ_in_seed_and_optimiser_alone(data: Path) -> None:
    base = tiny_recipe(data)
    changes: dict[str, list[Any]] = {"model.layers": [1, 2], "optimizer.weight_decay": [0.0, 0.1]}
    points = name_points(grid(base, changes, seeds=[0, 1, 2]))
    groups = list(in_groups(points, 4))
    assert [len(group) for group in groups] == [3, 3, 3, 3]
    assert sorted(p.name for group in groups for p in group) == sorted(p.name for p in points)
    for group in groups:
        assert len({point.recipe.model.layers for point in group}) == 1
    assert stack_key(base) == stack_key(base.replace(seed=3, optimizer__clip_norm=None))
    assert stack_key(base) != stack_key(base.replace(loader__batch_size=8))
    assert stack_key(base) != stack_key(base.replace(train__steps=21))


def test_two_stacks_share_what_one_does_not_take(data: Path, tmp_path: Path) -> None:
    few = ("model.dropout=0", "train.steps=4", "optimizer.warmup_steps=1", "model.layers=1")
    recipes = grid(tiny_recipe(data, "evaluate.episodes=0", *few), {}, seeds=range(LARGEST + 2))
    points = name_points(recipes)
    sizes = [len(group) for group in in_groups(points, LARGEST)]
    assert sizes == [LARGEST // 2 + 1] * 2
    assert set(stacked(points, tmp_path, parallel=LARGEST + 2).values()) == {None}
    assert {steps_done(tmp_path / point.name) for point in points} == {4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.accumulate=2", "micro-batches"),
        ("train.recompute=true", "computed twice"),
        ("loader.padding=left", "padded on the left"),
        ("train.weights=bf16", "bfloat16 copy"),
    ],
)
def test_recipes_that_cannot_be_stacked_are_refused(data: Path, change: str, words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        check_stackable(make_recipes(data, change)[0])
