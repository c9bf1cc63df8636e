"""Sweeps on the CPU: their trials, and that each is what `train` would have made."""

import json
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.cli.main import main
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.core.progress import Terminal
from gear_offline.errors import GearError, InputError
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.sweep import run as sweep_run
from gear_offline.sweep.report import SweepResult, read_sweep
from gear_offline.sweep.results import steps_done
from gear_offline.sweep.sweep import option_values, run_trials, sweep
from gear_offline.sweep.trials import (
    SweepDirectory,
    make_trials,
    parse_options,
    parse_seeds,
    trial_name,
)
from gear_offline.sweep.work import Work
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
    assert "not a directory" in str(result.trials[1].problem)
    (out / "runs" / "s1").unlink()
    (out / "runs" / "s1" / "plots").mkdir(parents=True)  # a copy has left it
    (out / "runs" / "s1" / "evaluations.jsonl").touch()
    result = sweep(recipe, seeds=3, out=out, parallel=1, quiet=True)
    assert result.is_complete and result.table.rows[0].failed == ()


def test_reports_of_runs_that_share_a_process_are_written_at_the_end(
    recipe: Recipe, tmp_path: Path, monkeypatch: Patch, capfd: Captured
) -> None:
    """One that cannot be written is said, and the next call tries it again."""
    out, written = tmp_path / "sweep", list[str]()

    def write(run: Path) -> None:
        assert all((out / "runs" / name / "summary.json").exists() for name in ("s0", "s1"))
        written.append(run.name)
        if len(written) == 1:
            raise OSError("no fonts")
        (run / "report.md").touch()

    monkeypatch.setattr("gear_offline.runs.report.write_report", write)
    for _ in range(2):
        assert sweep(recipe, seeds=2, out=out, parallel=1).is_complete
    assert written == ["s0", "s1", "s0"]
    assert "s0: there is no report: no fonts" in capfd.readouterr().err
    sweep(recipe.replace({"train.steps": 22}), seeds=2, out=out, parallel=1, quiet=True)
    assert written[3:] == ["s0", "s1"], "of the new end"


@pytest.mark.usefixtures("untrained")
def test_an_environment_is_looked_at_once_a_call_however_many_runs_play_in_it(
    recipe: Recipe, tmp_path: Path, monkeypatch: Patch
) -> None:
    make = Mock(side_effect=gymnasium.make)
    monkeypatch.setattr(gymnasium, "make", make)
    for calls, seeds in enumerate((2, 5), start=1):
        sweep(recipe, seeds=seeds, out=tmp_path / "sweep", parallel=1, quiet=True)
        assert make.call_count == calls


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
        ("MODEL", {"overrides": {"model.max_timestep": [None, 3]}}),
        ("USAGE", {"overrides": {"train.device": ["cpu", "auto"]}}),
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


def test_on_a_gpu_trials_are_stacked(recipe: Recipe, tmp_path: Path, monkeypatch: Patch) -> None:
    asked: list[Work] = []

    def together(work: Work) -> None:
        asked.append(work)
        for trial in work.trials:
            work.note_steps(trial, 20)
            work.end(trial, GearError("MEMORY", "none") if trial.recipe.seed else None)

    monkeypatch.setattr(sweep_run, "train_stacks", together)
    monkeypatch.setattr(sweep_run, "resolve_device", lambda _: torch.device("cuda"))
    for parallel in (None, 1):
        result = sweep(recipe, seeds=3, out=tmp_path / "s", parallel=parallel, quiet=True)
    assert [one.status for one in result.trials] == ["open", "failed", "failed"]
    assert [work.parallel for work in asked] == [3, 1]
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
    (trial,) = make_trials("paper", {"model.layers": [5]}, naming=["model.layers"])
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
    given = {"3": [0, 1, 2], "3,5,7": [3, 5, 7], "12,": [12], "1": [0], "7,2..4": [7, 2, 3, 4]}
    assert {text: parse_seeds(text) for text in given} == given
    assert parse_seeds("2", 5) == parse_seeds(2, 5) == [5, 6] == parse_seeds([5, 6], 9)
    for text in ("", "0", "-1", "1.5", "a", ",", "1,-2", "99999999999", "1..", "3..2", "0..20000"):
        with one_error("USAGE", "seeds"):
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


# the table, its curves and texts, against small naive oracles ----------------------------------


STEPS = 30
T_95 = {3: 4.30265273, 4: 3.18244631}  # Student's t of a table, by number of values


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fill(path: Path, *, losses: list[float], returns: list[float], complete: bool = True) -> None:
    """Write what a run leaves: losses every 10 steps, returns every 15."""
    path.mkdir(parents=True)
    lost = [{"step": 10 * (n + 1), "loss": loss} for n, loss in enumerate(losses)]
    write_lines(path / "metrics.jsonl", lost)
    played = [
        {"step": 15 * (n + 1), "return": value, "normalized_score": value / 10, "targets": []}
        for n, value in enumerate(returns)
    ]
    failed = {"step": STEPS + 1, "error": "x", "return": None, "normalized_score": None}
    write_lines(path / "evaluations.jsonl", [*played, failed])
    if complete:
        (path / "summary.json").write_text(json.dumps({"steps": STEPS}))


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"train.steps": 5}, {"train.steps": [5]}),
        ({"train.steps": (5, 6)}, {"train.steps": [5, 6]}),
        ({"evaluate.targets": [3, 4]}, {"evaluate.targets": [[3, 4]]}),
        ({"evaluate.targets": [[3, 4], [5]]}, {"evaluate.targets": [[3, 4], [5]]}),
        ({"train.trackers": []}, {"train.trackers": [[]]}),
        ({"selection.percent": [5, 10]}, {"selection.percent": [5, 10]}),
        ("train.steps=5", {"train.steps": [5]}),
        (["train.steps=5,6", "seed=1"], {"train.steps": [5, 6], "seed": [1]}),
    ],
)
def test_options_are_taken_as_train_takes_them(options: Any, values: dict[str, Any]) -> None:
    assert option_values("smoke", options) == values


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Two settings with four seeds; two trials of the second setting failed."""
    base = load_recipe("paper", {"train.steps": STEPS, "optimizer.warmup_steps": 1})
    trials = make_trials(base, {"model.layers": [1, 2]}, range(4))
    names = [trials[n].name for n in (0, 5, 7)]
    failures = {name: f"MEMORY: out of memory | ({name}); a smaller <model>" for name in names}
    directory = SweepDirectory(tmp_path / "made-up-sweep")
    directory.path.mkdir()
    directory.write(directory.file_for(trials).model_copy(update={"failures": failures}))
    for n, trial in enumerate(trials):
        losses, returns = [3.0 + n, 2.0 + n, 1.0 + n], [50.0 - n, 40.0 + n]
        fill(directory.run_path(trial), losses=losses, returns=returns, complete=n not in (5, 7))
    return directory.path


def test_the_table_is_the_mean_over_seeds_with_students_interval(filled: Path) -> None:
    result = read_sweep(filled)
    second, first = result.table.rows  # the best one first
    assert (first.label, first.trials, first.seeds) == ("layers=1", 4, (0, 1, 2, 3))
    assert (second.label, second.seeds) == ("layers=2", (0, 2))
    assert second.failed == ("layers=2,s1", "layers=2,s3")
    for name, values in (
        ("return", [40.0, 41.0, 42.0, 43.0]),
        ("best_return", [50.0, 49.0, 48.0, 47.0]),
        ("normalized_score", [4.0, 4.1, 4.2, 4.3]),
        ("loss", [1.0, 2.0, 3.0, 4.0]),
    ):
        estimate = first.estimates[name]
        assert estimate.values == pytest.approx(values)
        assert estimate.mean == pytest.approx(statistics.fmean(values))
        half = T_95[4] * statistics.stdev(values) / 2
        assert estimate.half == pytest.approx(half, rel=1e-6)
    two = second.estimates["return"]
    assert (two.mean, two.half) == (45.0, None), "two seeds have no interval worth its name"
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize("goals", [False, True])
def test_each_of_several_targets_has_its_mean_over_seeds(goals: bool, filled: Path) -> None:
    for n, run in enumerate(sorted(filled.glob("runs/layers=1,*"))):
        targets = [{"target": asked, "return": asked / 10 + n} for asked in (1.0, 2500.0)]
        record = {"step": 45, "return": 250.0 + n, "targets": targets, "goals": goals}
        write_lines(run / "evaluations.jsonl", [record])
    result = read_sweep(filled)
    seeds, one = [0.1, 1.1, 2.1, 3.1], [[250.0 + n for n in range(4)]]
    row = next(row for row in result.table.rows if row.label == "layers=1")
    assert [each.values for each in row.asked.values()] == [pytest.approx(seeds), *map(tuple, one)]
    half = T_95[4] * statistics.stdev(seeds) / 2
    name = ("asked 1", "asked 2,500") if not goals else ("task 1", "task 2,500")
    page, console = result.write().read_text(), Terminal(record=True, width=80)
    result.print(console=console)
    for text in (page, console.export_text()):
        assert name[0] in text and name[1] in text and f"1.6 ± {half:.3g}" in text
    assert "| layers=2 | - | - |" in page
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.usefixtures("pictures")
def test_seeds_alone_have_a_picture_of_what_is_asked(tmp_path: Path) -> None:
    base = load_recipe("paper", {"train.steps": STEPS, "optimizer.warmup_steps": 1})
    directory = SweepDirectory(tmp_path / "seeds")
    directory.path.mkdir()
    directory.write(directory.file_for(trials := make_trials(base, {}, range(2))))
    for trial in trials:
        fill(path := directory.run_path(trial), losses=[1.0], returns=[])
        targets = [{"target": asked, "return": asked} for asked in (1.0, 25.0)]
        write_lines(path / "evaluations.jsonl", [{"step": 9, "return": 25.0, "targets": targets}])
    picture = read_sweep(directory.path).write().parent / "plots" / "asked_vs_achieved.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.name in (directory.path / "sweep.md").read_text()


def test_the_report_names_settings_runs_and_failures(filled: Path) -> None:
    result = read_sweep(filled)
    text = result.write().read_text()
    assert text.index("layers=2 | 2") < text.index("layers=1 | 4")
    assert "6 complete, 2 failed" in text and "out of memory &#124; (layers=2,s1)" in text
    assert "<model>" not in text and "a smaller" in text
    assert "[layers=1,s0](runs/layers=1,s0/report.md)" in text
    assert "plots/learning_curves.png" in text
    assert (filled / "plots" / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    console = Terminal(record=True, width=80)
    result.print(console=console)
    printed = console.export_text()
    half = T_95[4] * math.sqrt(5 / 3) / 2
    assert f"41.5 ± {half:.3g}" in printed and "layers=2,s1 failed: MEMORY" in printed
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed


def test_several_tasks_are_ranked_by_their_normalized_score(filled: Path) -> None:
    for place, path in enumerate(sorted((filled / "runs").iterdir())):
        task = {"return": 5.0, "normalized_score": 7.0}
        row = {"step": 30, "return": None, "normalized_score": 9.0 - place, "tasks": {"a": task}}
        write_lines(path / "evaluations.jsonl", [row])
    table = read_sweep(filled).table
    assert table.metric == "normalized_score"
    assert [row.label for row in table.rows] == ["layers=1", "layers=2"]
    assert "return" not in table.rows[0].estimates
    assert read_sweep(filled).write().exists()


@pytest.mark.parametrize("name", ["sweep.json", "runs/layers=1,s0/summary.json"])
def test_damaged_files_of_a_sweep_are_one_error(filled: Path, name: str) -> None:
    for content in (b"{\n", b"[" * 100_000 + b"\n", b'{"format": 3}\n', None):
        (filled / name).unlink()
        if content is None:
            os.mkfifo(filled / name)  # opening it would wait for ever
        else:
            (filled / name).write_bytes(content)
        with one_error("RUN_DAMAGED"):
            read_sweep(filled)
