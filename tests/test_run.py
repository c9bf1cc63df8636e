"""Runs in Python: trained with options, opened again, asked for what they found."""

import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import gear_offline as go
from gear_offline.runs.run import EvaluateOptions
from tests.training_support import tiny_recipe

pytestmark = pytest.mark.usefixtures("no_plots")


def test_training_takes_options_and_gives_a_run(whole: Path, data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data, "evaluate.episodes=0")
    (tmp_path / "mine.yaml").write_text(recipe.to_yaml())
    options: list[Any] = [{"train.steps": 4}, "train.steps=4", ["train.steps=4", "seed=0"]]
    for number, changes in enumerate(options):
        given = (recipe, tmp_path / "mine.yaml", str(tmp_path / "mine.yaml"))[number]
        run = go.train(given, changes, out=tmp_path / str(number), quiet=True)
        assert (run.name, run.steps, run.recipe.train.steps) == (str(number), 4, 4)
        assert run == go.open_run(run) and Path(run) == run.path
    assert go.train(run, "train.steps=5", out=run, resume=True, quiet=True).steps == 5
    assert run.best is None and run.last is None
    with pytest.raises(go.InputError, match=r"unknown option 'train\.stepz'"):
        go.train("smoke", {"train.stepz": 4})


def test_a_run_tells_what_it_found(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = go.open_run(whole)
    assert run.metrics["step"].tolist() == [3, 6, 9, 12, 15, 18, 20]
    assert run.evaluations.set_index("step").loc[20, "return"] == run.last.mean_return
    assert run.best.mean_return == run.evaluations["return"].max()
    assert "steps 20 of 20; best return" in repr(run)
    page = run._repr_html_()
    assert "20 of 20" in page and "data:image/png;base64," in page
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [record["step"] for record in run.metrics] == [3, 6, 9, 12, 15, 18, 20]


def test_a_run_acts_and_is_evaluated(whole: Path, tmp_path: Path) -> None:
    run: Any = go.open_run(str(whole))
    best = run.policy(checkpoint="best", device="cpu")
    at = run.policy(checkpoint=run.best.step, device="cpu")
    for mine, other in zip(best.model.parameters(), at.model.parameters(), strict=True):
        assert mine.equal(other)
    report = run.evaluate(episodes=1, targets=5.0, out=tmp_path / "found.json", quiet=True)
    assert report.step == 20 and (tmp_path / "found.json").is_file()


def test_a_run_names_the_options_of_its_evaluation() -> None:
    """Editors and type checkers know them."""
    assert ["run", *EvaluateOptions.__annotations__] == [*signature(go.evaluate).parameters]


def test_a_damaged_run_is_shown_as_such(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nstepz: 3\n")
    assert "unknown option 'stepz'" in repr(go.open_run(tmp_path))
    assert "unknown option" in go.open_run(tmp_path)._repr_html_()
