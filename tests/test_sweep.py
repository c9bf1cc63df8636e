"""Sweeps on the CPU: their trials, and that each is what `train` would have made."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.cli.main import main
from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError, InputError
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.sweep import run as sweep_run
from gear_offline.sweep.jobs import Job
from gear_offline.sweep.report import SweepResult
from gear_offline.sweep.results import steps_done
from gear_offline.sweep.run import run_trials, sweep
from gear_offline.sweep.trials import (
    SweepDirectory,
    make_trials,
    parse_options,
    parse_seeds,
    trial_name,
)
from tests.support import Captured, Patch, one_error
from tests.training_support import learnt, tiny_recipe

OPTIONS = {"optimizer.learning_rate": [1e-2, 1e-3]}
pytestmark = pytest.mark.usefixtures("no_reports")


@pytest.fixture
def recipe(data: Path) -> Recipe:
    # in this process: where another test has registered the environment, `auto` starts workers
    return tiny_recipe(data, "evaluate.background=off")


@pytest.fixture
def untrained(monkeypatch: Patch) -> None:
    """Nothing is trained: the trials stay open."""
    monkeypatch.setattr(sweep_run, "_train", lambda *_, **__: None)


def table_of(result: SweepResult) -> list[tuple[Any, ...]]:
    return [(row.label, row.seeds, dict(row.estimates)) for row in result.table.rows]


def test_trials_are_those_of_train_and_stay_as_they_are(
    recipe: Recipe, tmp_path: Path, monkeypatch: Patch
) -> None:
    result = sweep(recipe, OPTIONS, seeds=2, out=tmp_path / "sweep", parallel=1, quiet=True)
    assert result.is_complete and len(result.trials) == 4
    for one in result.trials:
        alone = train_run(one.trial.recipe, out=tmp_path / one.trial.name, quiet=True)
        assert learnt(one.path) == learnt(alone)
        assert one.path == tmp_path / "sweep" / "runs" / one.trial.name
        assert one.last is not None and one.last.step == 20 and max(one.curves["loss"]) == 20
    assert (tmp_path / "sweep" / "sweep.md").exists()
    assert (tmp_path / "sweep" / "plots" / "learning_curves.png").exists()
    stamps = [os.stat(one.path / "metrics.jsonl").st_mtime_ns for one in result.trials]
    again = sweep(recipe, OPTIONS, seeds=2, out=tmp_path / "sweep", parallel=1, quiet=True)
    assert [os.stat(one.path / "metrics.jsonl").st_mtime_ns for one in again.trials] == stamps
    assert table_of(again) == table_of(result)
    # a longer one goes on where these ended, a shorter one is refused before anything is written
    longer = recipe.replace({"train.steps": 22})
    last = sweep(longer, OPTIONS, seeds=2, out=tmp_path / "sweep", parallel=1, quiet=True)
    assert [max(one.curves["loss"]) for one in last.trials] == [22] * 4
    before = (tmp_path / "sweep" / "sweep.json").read_bytes()
    with pytest.raises(InputError, match="but 22 steps are done"):
        sweep(recipe, OPTIONS, seeds=2, out=tmp_path / "sweep", quiet=True)
    with one_error("RUN_MISMATCH", "hidden_size was 8"):
        other = longer.replace({"model.hidden_size": 16})
        sweep(other, OPTIONS, seeds=2, out=tmp_path / "sweep", quiet=True)
    assert (tmp_path / "sweep" / "sweep.json").read_bytes() == before


def test_a_trial_that_fails_ends_alone_and_is_tried_again(recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    sweep(recipe, seeds=1, out=out, parallel=1, quiet=True)
    (out / "runs" / "s1").touch()
    result = sweep(recipe, seeds=3, out=out, parallel=1, quiet=True)
    assert [one.status for one in result.trials] == ["complete", "failed", "complete"]
    assert result.table.rows[0].failed == ("s1",) and result.table.rows[0].seeds == (0, 2)
    assert "not a directory" in str(result.trials[1].error)
    (out / "runs" / "s1").unlink()
    result = sweep(recipe, seeds=3, out=out, parallel=1, quiet=True)
    assert result.is_complete and result.table.rows[0].failed == ()


@pytest.mark.usefixtures("untrained")
def test_directories_that_are_not_this_sweeps(recipe: Recipe, tmp_path: Path) -> None:
    def begin(name: str) -> SweepResult:
        return sweep(recipe, OPTIONS, seeds=2, out=tmp_path / name, quiet=True)

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with one_error("OUTPUT_EXISTS"):
        begin("full")
    assert [one.status for one in begin("sweep").trials] == ["open"] * 4
    with SweepDirectory(tmp_path / "sweep").hold(), one_error("RUN_LOCKED"):
        begin("sweep")


@pytest.mark.usefixtures("untrained")
def test_nothing_starts_when_a_trial_does_not_fit(recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("MODEL", {"options": {"model.max_timestep": [None, 3]}}),
        ("USAGE", {"options": {"train.device": ["cpu", "auto"]}}),
        ("USAGE", {"parallel": 0}),
    ]
    for code, options in wrong:
        with one_error(code):
            sweep(recipe, out=out, quiet=True, **options)
        assert not out.exists()
    with pytest.raises(InputError, match="no trials"):
        run_trials([], out)


@pytest.mark.long
def test_workers_are_killed_and_stopped_and_go_on_to_the_same_table(
    data: Path, tmp_path: Path
) -> None:
    """One worker is killed, then the sweep is stopped; after that its trials end as alone."""
    out = tmp_path / "sweep"
    steps = ("train.steps=300", "train.checkpoint_every=20", "evaluate.episodes=0")
    recipe = tiny_recipe(data, *steps)
    names = [trial.name for trial in make_trials(recipe, {}, [0, 1])]
    before = children()

    def trouble() -> None:
        for name in names:
            wait_for(lambda name=name: steps_done(out / "runs" / name) > 40)  # type: ignore[misc]
        os.kill(min(children() - before), signal.SIGKILL)
        wait_for(lambda: len(children() - before) == 1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=trouble)
    thread.start()
    with pytest.raises(TrainingInterrupted) as caught:
        sweep(recipe, seeds=2, out=out, parallel=2, quiet=True)
    thread.join()
    assert caught.value.code == "INTERRUPTED" and "same command" in caught.value.remedy
    assert children() == before, "no worker stays"
    (failure,) = SweepDirectory(out).read().failures.values()
    assert "WORKER_LOST" in failure and "SIGKILL" in failure
    assert all(40 < steps_done(out / "runs" / name) < 300 for name in names)
    result = sweep(recipe, seeds=2, out=out, parallel=2, quiet=True)
    whole = sweep(recipe, seeds=2, out=tmp_path / "whole", parallel=1, quiet=True)
    assert result.is_complete and table_of(result) == table_of(whole)
    for one, other in zip(result.trials, whole.trials, strict=True):
        assert learnt(one.path) == learnt(other.path)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_on_a_gpu_all_trials_share_it(recipe: Recipe, tmp_path: Path, monkeypatch: Patch) -> None:
    asked: list[Job] = []

    def together(job: Job) -> None:
        asked.append(job)
        for trial in job.trials:
            job.moved(trial, 20)
            job.end(trial, GearError("MEMORY", "none") if trial.recipe.seed else None)

    monkeypatch.setattr(sweep_run, "train_concurrently", together)
    monkeypatch.setattr(sweep_run, "resolve_device", lambda _: torch.device("cuda"))
    for exact in (False, True, False):
        result = sweep(recipe, seeds=3, out=tmp_path / "s", exact=exact, quiet=True)
    assert [one.status for one in result.trials] == ["open", "failed", "failed"]
    assert [(job.parallel, job.exact) for job in asked] == [(3, False), (3, True), (3, True)]
    assert asked[0].folder == tmp_path / "s" / "runs"
    assert [trial.name for trial in asked[0].trials] == ["s0", "s1", "s2"]


@pytest.mark.usefixtures("untrained")
def test_a_name_among_the_options_names_the_directory(
    recipe: Recipe, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep(recipe, {"name": ["mine"]}, quiet=True).path == Path("runs/mine-sweep")


def test_the_command(data: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(tiny_recipe(data, "evaluate.episodes=0", "train.steps=6").to_yaml())
    monkeypatch.chdir(tmp_path)
    words = ["sweep", str(file), "--parallel", "1", "--seeds"]
    both = [*words, "2", "model.layers=1,2"]
    assert main([*both, "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = ["layers=1,s0", "layers=1,s1", "layers=2,s0", "layers=2,s1"]
    assert [one["name"] for one in document["trials"]] == names
    assert {row["label"] for row in document["table"]["rows"]} == {"layers=1", "layers=2"}
    assert main(both) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "runs/tiny-sweep" and "layers=2" in captured.out
    assert main([*words, "2", "model.layers=1,1"]) == 2
    assert "USAGE" in capsys.readouterr().err
    # fewer: the table covers them alone; more: what is there stays, what is new is run
    assert main([*words, "1,", "model.layers=2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "layers=2" in printed and "layers=1" not in printed
    assert "not in the table: 3 more runs." in printed
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/runs/*/metrics.jsonl")}
    assert main([*words, "3", "model.layers=1,2", "--json", "--quiet"]) == 0
    rows = json.loads(capsys.readouterr().out)["table"]["rows"]
    assert [row["seeds"] for row in rows] == [[0, 1, 2]] * 2
    assert {p: p.stat().st_mtime_ns for p in before} == before and len(before) == 4


def test_lists_are_multiplied_and_seeds_come_last() -> None:
    options = parse_options(["optimizer.learning_rate=1e-3,1e-4", "model.layers=2,3"])
    trials = make_trials("paper", options, [0, 7])
    assert len(trials) == 8
    assert trials[0].name == "learning_rate=0.001,layers=2,s0"
    assert dict(trials[0].settings) == {"model.layers": 2, "optimizer.learning_rate": 0.001}
    assert [trial.recipe.seed for trial in trials] == [0, 7] * 4
    assert {trial.recipe.optimizer.learning_rate for trial in trials[:4]} == {0.001}
    # keys with the same end are told apart
    trials = make_trials("paper", {"evaluate.seed": [1, 2]}, [0])
    assert [trial.name for trial in trials] == ["seed=1,s0", "seed=2,s0"]
    trials = make_trials("paper", {"data.path": ["a", "b"], "data.tasks": [None]}, [0])
    assert [trial.label for trial in trials] == ["path=a", "path=b"]


def test_one_value_is_a_plain_override_and_names_nothing() -> None:
    (trial,) = make_trials("paper", {"model.layers": [5]})
    assert trial.recipe.model.layers == 5
    assert (trial.name, dict(trial.settings), trial.label) == ("s0", {}, "paper")
    (trial,) = make_trials("paper", {"model.layers": [5]}, named=["model.layers"])
    assert (trial.name, dict(trial.settings)) == ("layers=5,s0", {"model.layers": 5})


def test_commas_in_brackets_and_quotes_belong_to_a_value() -> None:
    assert parse_options(["evaluate.targets=[3600, 1800],[100]", 'description="a, b",c']) == {
        "evaluate.targets": [[3600, 1800], [100]],
        "description": ["a, b", "c"],
    }


@given(st.text(alphabet="abAB/ :é.,=0123", min_size=1, max_size=150))
def test_any_label_gives_a_name_that_is_a_directory_of_its_own(label: str) -> None:
    names = {trial_name(label, 0), trial_name(label, 1), trial_name(f"{label}x", 0)}
    assert len(names) == 3
    for name in names:
        assert "/" not in name and len(name) <= 100 and not name.startswith(".")


def test_seeds() -> None:
    given = {"3": [0, 1, 2], "3,5,7": [3, 5, 7], "12,": [12], "1": [0]}
    assert {text: parse_seeds(text) for text in given} == given
    for text in ("", "0", "-1", "1.5", "a", ",", "1,-2", "99999999999"):
        with one_error("USAGE", "--seeds"):
            parse_seeds(text)


def test_trials_that_are_refused() -> None:
    wrong: list[tuple[str, list[int] | None, str]] = [
        ("train.stepz=1,2", None, "RECIPE"),
        ("train.steps=100000,many", None, "RECIPE"),
        ("model.layers", None, "USAGE"),
        ("model.layers=2,2", None, "USAGE"),
        ("model.layers=2,,3", None, "RECIPE"),
        ("model.layers=2 model.layers=3", None, "USAGE"),
        ("seed=1,2", [0], "USAGE"),
        ("", [1, 1], "USAGE"),
        ("", list(range(10_001)), "USAGE"),
    ]
    for overrides, seeds, code in wrong:
        with one_error(code):
            make_trials("paper", parse_options(overrides.split()), seeds)
