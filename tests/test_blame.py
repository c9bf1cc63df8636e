"""A spike of the loss: which data made it, and a run without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gear_offline as go
from gear_offline.dataset.dataset import open_dataset
from gear_offline.runs.loop import TrainingInterrupted, train
from gear_offline.runs.prepare import resolve
from gear_offline.training.learner import Learner
from gear_offline.training.stack import check_stackable
from tests.support import one_error
from tests.test_resume import interrupted_in
from tests.training_support import learnt, tiny_recipe

pytestmark = pytest.mark.usefixtures("no_plots")
QUIET = ("evaluate.episodes=0", "train.keep_checkpoints=9")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """The segments of each step's batch, by step."""
    batches: dict[int, Any] = {}
    take = Learner.take

    def noting(self: Learner) -> Any:
        batch = take(self)
        batches[self.step] = batch.segments.numpy().copy()
        return batch

    monkeypatch.setattr(Learner, "take", noting)
    yield batches


def test_a_run_begins_with_a_checkpoint_of_another_and_skips(
    data: Path, tmp_path: Path, taken: dict[int, Any]
) -> None:
    before = train(tiny_recipe(data, *QUIET), out=tmp_path / "run", quiet=True)
    whole, seen = learnt(before), dict(taken)
    with one_error("USAGE", "name a run"):
        go.train("paper", {"data.path": str(data)}, checkpoint=5)
    with one_error("RUN_NOT_FOUND", "there are: 5, 10, 15, 20"):
        go.train(str(before), checkpoint=6)
    with one_error("RUN_MISMATCH", r"train\.skip was \[\] when the run began and is \[\[4, 9\]\]"):
        go.train(str(before), {"train.skip": [[4, 9]]}, checkpoint=5, quiet=True)
    with one_error("RUN_MISMATCH", "but 20 steps are done"):
        go.train(str(before), {"train.steps": 19}, checkpoint="last", quiet=True)
    same = go.train(str(before), checkpoint=5, out=tmp_path / "same", quiet=True)
    assert learnt(same.path) == whole, "nothing is changed"
    taken.clear()
    skipping = {"train.skip": [[8, 10], [14, 14]]}
    run = go.train(str(before), skipping, checkpoint=5, quiet=True)
    assert run.path == tmp_path / "run-from-5" and run.steps == 20
    assert learnt(before) == whole
    assert learnt(run.path)["metrics"][:2] == whole["metrics"][:2]
    left = [*range(5, 8), *range(11, 14), *range(15, 20)]
    for step, batch in zip(range(5, 16), left, strict=True):
        np.testing.assert_array_equal(taken[step], seen[batch])
    with one_error("OUTPUT_EXISTS"):
        go.train(str(before), skipping, checkpoint=5, quiet=True)
    with one_error("USAGE", "resume that other run without it"):
        go.train(str(before), checkpoint=5, resume=True)
    assert go.train(str(run.path), {"train.steps": 22}, resume=True, quiet=True).steps == 22


@pytest.mark.parametrize("stop", [4, 7, 8, 9])
def test_a_run_that_skips_is_resumed_bit_for_bit(data: Path, tmp_path: Path, stop: int) -> None:
    recipe, run = tiny_recipe(data, *QUIET, "train.skip=[[3, 4], [9, 11]]"), tmp_path / "run"
    whole = learnt(train(recipe, out=tmp_path / "whole", quiet=True))
    with interrupted_in(stop), pytest.raises(TrainingInterrupted):
        train(recipe, out=run, quiet=True)
    with one_error("RUN_MISMATCH", r"train\.skip was \[\[3, 4\]"):
        train(recipe.replace({"train.skip": [[3, 5], [9, 11]]}), out=run, resume=True, quiet=True)
    train(recipe, out=run, resume=True, quiet=True)
    assert learnt(run) == whole


def test_what_cannot_skip_says_so(data: Path, tmp_path: Path) -> None:
    for wrong in "[[5, 4]]", "[[3, 4], [5, 6]]", "[[7, 8], [3, 4]]", "[[-1, 4]]", "[3, 4]":
        with one_error("RECIPE", "skip"):
            tiny_recipe(data, f"train.skip={wrong}")
    skipping = tiny_recipe(data, *QUIET, "train.skip=[[3, 4]]")
    with one_error("SELECTION", "prioritized draws depends on the losses"):
        learning = skipping.replace({"selection.strategy": "prioritized"})
        train(learning, out=tmp_path / "run", quiet=True)
    with one_error("UNAVAILABLE", r"train\.skip"):
        check_stackable(skipping)


def test_a_captured_step_is_told_to_skip(data: Path) -> None:
    """The GPU counts its batches by itself: that of the next replay is set before it."""
    recipe, sizes = resolve(tiny_recipe(data, *QUIET, "train.skip=[[2, 4], [6, 6]]"), open_(data))
    learner = Learner(recipe, sizes, open_(data), torch.device("cpu"))
    counter, filled = [0], []

    def replay() -> None:
        filled.append(counter[0])
        counter[0] += 1

    part: Any = SimpleNamespace(
        batches=SimpleNamespace(set_step=lambda s: counter.__setitem__(0, s))
    )
    captured: Any = SimpleNamespace(replay=replay)
    learner._gradients, learner._part, learner._captured = None, part, captured
    for _ in range(5):
        learner.advance()
    assert filled == [0, 1, 5, 7, 8] and (learner.step, learner.loader.step) == (5, 9)


def open_(data: Path) -> Any:
    return open_dataset(data, verify=False)
