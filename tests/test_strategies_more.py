"""`strategies --train`: laws that pad on a side, strategies that fail, adding more later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gear_offline.analysis.candidates import parse_candidates
from gear_offline.analysis.plan import Point, RunPoints, run_in_turn, run_together
from gear_offline.analysis.train import train_strategies
from gear_offline.config.recipe import load_recipe
from gear_offline.loaders.batch import Batch
from gear_offline.sweep.sweep import run_sweep
from gear_offline.training.learner import Learner
from tests.strategies_support import recipe_of
from tests.support import failing_code
from tests.training_support import learnt

pytestmark = pytest.mark.usefixtures("no_reports")


def train(data: Path, out: Path, names: str, *overrides: str, **options: Any) -> dict[str, Any]:
    recipe = recipe_of(data, "evaluate.episodes=0", "train.evaluate_every=null", *overrides)
    settings: dict[str, Any] = {"seeds": 1, "jobs": 0, "quiet": True} | options
    return train_strategies(recipe, parse_candidates(names, recipe), out=out, **settings)


def final(document: dict[str, Any], label: str) -> dict[str, Any]:
    (row,) = (row for row in document["strategies"] if row["label"] == label)
    return dict(row["final"])


def test_laws_of_both_paddings_are_trained_in_one_comparison(data: Path, tmp_path: Path) -> None:
    """The default strategies hold both; the same draws padded elsewhere teach the same."""
    names = "original,corl,d3rlpy"
    found = train(data, tmp_path, names, "train.steps=6", "model.dropout=0")
    assert [row["complete"] for row in found["strategies"]] == [1] * 4
    runs = tmp_path / "training" / "runs"
    sides = {path.name: load_recipe(path).loader.padding for path in runs.iterdir()}
    assert sides == {
        "uniform_steps-s0": "right",
        "original-s0": "left",
        "corl-s0": "right",
        "d3rlpy-s0": "left",
    }
    assert learnt(runs / "corl-s0")["model"] == learnt(runs / "uniform_steps-s0")["model"]
    assert final(found, "corl") == final(found, "uniform_steps")
    for probe in ("probe_all", "probe_best"):
        means = [final(found, label)[probe]["mean"] for label in ("original", "uniform_steps")]
        assert means[0] == pytest.approx(means[1], rel=1e-4), "padding is masked"
        assert final(found, "d3rlpy")[probe] != final(found, "uniform_steps")[probe]


def test_a_strategy_that_cannot_be_trained_is_named_and_the_others_go_on(
    data: Path, tmp_path: Path
) -> None:
    found = train(data, tmp_path, "min_dt,top_k:k=2", "train.steps=4", "loader.batch_size=64")
    assert [row["complete"] for row in found["strategies"]] == [1, 0, 1]
    assert "no batch of 64" in found["strategies"][1]["runs"][0]["error"]
    assert found["strategies"][1]["versus"] is None and found["strategies"][2]["versus"]
    words = ("train.steps=4", "loader.batch_size=64", "selection.strategy=min_dt")
    alone = failing_code(lambda: train(data, tmp_path / "own", "uniform_steps", *words))
    assert alone == "SELECTION", "of the recipe itself"


def test_an_error_of_torch_ends_its_run_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Learner.take

    def broken(self: Learner) -> Batch:
        if self.recipe.selection.strategy == "top_k":
            raise RuntimeError("backend failed")
        return take(self)

    monkeypatch.setattr(Learner, "take", broken)
    found = train(data, tmp_path, "top_k:k=2,uniform_episodes", "train.steps=4")
    assert [row["complete"] for row in found["strategies"]] == [1, 0, 1]
    assert "RuntimeError: backend failed" in found["strategies"][1]["runs"][0]["error"]


@pytest.mark.parametrize("engine", [run_in_turn, run_together])
def test_strategies_and_seeds_are_added_to_what_is_there(
    data: Path, tmp_path: Path, engine: RunPoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to what another engine began; nothing that is complete is trained again."""
    monkeypatch.setattr("gear_offline.sweep.sweep.run_sweep", partial(run_sweep, mode="serial"))
    steps = "train.steps=4"
    first = train(data, tmp_path, "top_k:k=2", steps)
    asked: list[str] = []

    def watched(points: Sequence[Point], out: Path) -> dict[str, str]:
        asked.extend(point.name for point in points if not point.is_complete())
        return engine(points, out)

    names = "top_k:k=2,uniform_episodes"
    more = train(data, tmp_path, names, steps, seeds=2, run_points=watched)
    assert sorted(asked) == [
        "top_k-k=2-s1",
        "uniform_episodes-s0",
        "uniform_episodes-s1",
        "uniform_steps-s1",
    ]
    assert more["resumed"] and [row["complete"] for row in more["strategies"]] == [2, 2, 2]
    for row, before in zip(more["strategies"], first["strategies"], strict=False):
        assert row["runs"][0]["points"] == before["runs"][0]["points"]
    fewer = train(data, tmp_path, "uniform_episodes", steps, run_points=watched)
    assert [row["label"] for row in fewer["strategies"]] == ["uniform_steps", "uniform_episodes"]
    asked.clear()
    train(data, tmp_path, "uniform_episodes,top_k:k=3", steps, run_points=watched)
    assert asked == ["top_k-k=3-s0"]
    words = (steps, "model.dropout=0")
    code = failing_code(lambda: train(data, tmp_path, "top_k:k=2", *words, run_points=engine))
    assert code == "RUN_RECIPE", "another model is another comparison"
