"""Sweeps on a GPU: runs that overlap on streams end with the bits of runs that are alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError
from gear_offline.runs.loop import TrainingInterrupted, train
from gear_offline.sweep.concurrent import RngStream
from gear_offline.sweep.results import TrialResult
from gear_offline.sweep.run import run_trials
from gear_offline.sweep.trials import Trial, make_trials
from gear_offline.tables import placement
from gear_offline.training.learner import Learner
from gear_offline.training.stack import Stack
from tests.gpu_support import INDUCTOR, NEEDS_CUPY, ON_GPU
from tests.support import make_dataset
from tests.training_support import learnt, tiny_recipe

pytestmark = [*ON_GPU, NEEDS_CUPY, INDUCTOR]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("sweep"), [30, 7, 44, 12]).path


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)


def run_all(
    trials: Sequence[Trial], out: Path, *, exact: bool, parallel: int | None = None
) -> tuple[TrialResult, ...]:
    return run_trials(trials, out, exact=exact, parallel=parallel, quiet=True).trials


def recipe(data: Path, *overrides: str) -> Recipe:
    return tiny_recipe(
        data,
        *("train.device=cuda", "train.graph=on", "train.precision=fp32", "train.compile=off"),
        *("evaluate.episodes=0", "model.hidden_size=32", "model.heads=2", "model.layers=2"),
        *("loader.batch_size=16", "loader.context_length=8", "train.steps=60"),
        *("train.log_every=7", "train.checkpoint_every=20", *overrides),
    )


@pytest.mark.parametrize(
    "overrides",
    [(), ("train.precision=bf16", "train.deterministic=true")],
    ids=["float32", "bfloat16, deterministic"],
)
def test_overlapping_runs_are_those_that_are_alone(
    data: Path, tmp_path: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = []
    place = placement.place_table

    def counted(*arguments: Any, **options: Any) -> Any:
        placed.append(place(*arguments, **options))
        return placed[-1]

    trials = make_trials(recipe(data, *overrides), {}, [0, 1, 2, 3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(placement, "place_table", counted)
        results = run_all(trials, tmp_path / "sweep", exact=True, parallel=3)
    assert [(r.status, r.error) for r in results] == [("complete", None)] * 5
    assert len(placed) == 1, "one table for all runs"
    for trial, result in zip(trials, results, strict=True):
        alone = train(trial.recipe, out=tmp_path / trial.name, quiet=True)
        assert learnt(result.path) == learnt(alone)
    assert len({learnt(result.path)["model"] for result in results}) == 5, "they do differ"


def test_shapes_and_failures_side_by_side(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose loss becomes NaN ends alone; the others, of several shapes, end as alone."""
    advance = Learner.advance

    def poisoned(self: Learner) -> None:
        if self.recipe.seed == 1 and self.recipe.model.hidden_size == 16 and self.step == 25:
            with torch.no_grad():
                self.model.embed_ln.bias.fill_(float("nan"))
        advance(self)

    trials = make_trials(recipe(data), {"model.hidden_size": [16, 32]}, [0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "advance", poisoned)
        results = run_all(trials, tmp_path / "sweep", exact=True)
    assert [result.status for result in results] == ["complete", "failed", "complete", "complete"]
    assert str(results[1].error).startswith("LOSS_NONFINITE: the loss of step 26")
    for result in (results[0], results[2], results[3]):
        alone = train(result.trial.recipe, out=tmp_path / result.trial.name, quiet=True)
        assert learnt(result.path) == learnt(alone)
    again = run_all(trials, tmp_path / "sweep", exact=True)
    assert [result.status for result in again] == ["complete"] * 4
    alone = train(again[1].trial.recipe, out=tmp_path / "again", quiet=True)
    assert learnt(again[1].path) == learnt(alone)


STACKABLE = ("model.dropout=0", "evaluate.episodes=0")


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        ((), 1e-4),
        (("train.graph=off",), 1e-4),
        (("train.precision=bf16", "train.compile=on"), 2e-2),
    ],
    ids=["float32", "launched one by one", "bfloat16, compiled"],
)
def test_stacked_runs_are_those_that_are_alone(
    data: Path, tmp_path: Path, overrides: tuple[str, ...], tolerance: float
) -> None:
    """Without dropout; sums are in another order, so last bits differ, and more with each step."""
    changes: dict[str, list[Any]] = {"optimizer.learning_rate": [1e-3, 3e-4]}
    trials = make_trials(recipe(data, *STACKABLE, *overrides), changes, [0, 1, 2])
    results = run_all(trials, tmp_path / "sweep", exact=False, parallel=4)
    runs = [learnt(train(trial.recipe, out=tmp_path / trial.name, quiet=True)) for trial in trials]
    assert [(r.status, r.error) for r in results] == [("complete", None)] * 6
    models = []
    for alone, result in zip(runs, results, strict=True):
        mine = learnt(result.path)
        models.append(mine["model"])
        assert mine["step"] == alone["step"] == 60
        for number, (row, other) in enumerate(zip(mine["metrics"], alone["metrics"], strict=True)):
            assert row["step"] == other["step"]
            assert row["learning_rate"] == other["learning_rate"]
            near = tolerance * (1 + number)
            assert row["loss"] == pytest.approx(other["loss"], rel=near)
            assert row["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=10 * near)
    assert len(set(models)) == 6, "they do differ"


def test_an_interrupted_stack_goes_on_to_the_same_end(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, bit for bit: it is drawn from seed and step, or saved with every run."""
    overrides = ("train.precision=bf16", "train.deterministic=true", "train.checkpoint_every=10")
    trials = make_trials(recipe(data, *overrides), {}, [0, 1, 2])
    whole = run_all(trials, tmp_path / "whole", exact=False)
    advance, count = Stack.advance, 0

    def interrupting(self: Stack) -> dict[int, GearError]:
        nonlocal count
        count += 1
        if count == 33:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "advance", interrupting)
        with pytest.raises(TrainingInterrupted):
            run_all(trials, tmp_path / "parts", exact=False)
    parts = run_all(trials, tmp_path / "parts", exact=False)
    for one, other in zip(whole, parts, strict=True):
        assert one.status == other.status == "complete"
        assert learnt(one.path) == learnt(other.path)


@pytest.mark.parametrize("options", [(), ("train.log_every=1", "train.steps=110")])
def test_a_failure_in_a_stack(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """The graph goes on with the run that failed, far past the end of its window of metrics."""
    advance = Stack.advance

    def poisoned(self: Stack) -> dict[int, GearError]:
        if self.learners[0].step == 25:
            with torch.no_grad():
                self.learners[1].model.embed_ln.bias.fill_(float("nan"))
        return advance(self)

    trials = make_trials(recipe(data, *STACKABLE, *options), {}, [0, 1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(Stack, "advance", poisoned)
        results = run_all(trials, tmp_path / "sweep", exact=False)
    assert [result.status for result in results] == ["complete", "failed", "complete"]
    assert str(results[1].error).startswith("LOSS_NONFINITE: the loss of step 26")
    again = run_all(trials, tmp_path / "sweep", exact=False)
    assert [result.status for result in again] == ["complete"] * 3
    for trial, result in zip(trials, again, strict=True):
        alone = learnt(train(trial.recipe, out=tmp_path / trial.name, quiet=True))
        losses = [[row["loss"] for row in run["metrics"]] for run in (learnt(result.path), alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=2e-3)  # they become small


def test_streams_draw_what_a_seeded_device_draws() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.random.fork_rng([device]):
        torch.manual_seed(7)
        expected = [torch.rand(5, device=device) for _ in range(3)]
        streams = [RngStream(device), RngStream(device)]
        before = torch.cuda.get_rng_state(device)
        drawn: list[list[torch.Tensor]] = [[], []]
        for turn in range(3):
            for stream, mine in zip(streams, drawn, strict=True):
                with stream.use():
                    if turn == 0:
                        torch.manual_seed(7)
                    mine.append(torch.rand(5, device=device))
        torch.cuda.synchronize()
        assert torch.equal(torch.cuda.get_rng_state(device), before)
    for mine in drawn:
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
