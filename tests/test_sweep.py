"""Sweeps on the CPU: a run is what `train` would have made, however runs share the machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.cli.main import main
from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError, InputError, UnavailableError
from gear_offline.runs.trainer import train
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sweep.directory import SweepDirectory
from gear_offline.sweep.modes import choose
from gear_offline.sweep.points import SweepPoint, grid, name_points
from gear_offline.sweep.processes import Worker
from gear_offline.sweep.results import is_complete, steps_done
from gear_offline.sweep.sweep import run_sweep
from gear_offline.sweep.turns import Turns
from gear_offline.training.learner import Learner
from gear_offline.training.seeding import torch_threads
from tests import sweep_support
from tests.training_support import learnt, tiny_recipe

CPU = torch.device("cpu")
RATES = [1e-2, 1e-3]


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)


@pytest.fixture(scope="module")
def recipes(data: Path) -> list[Recipe]:
    """Two learning rates with two seeds each, evaluated on the way."""
    # in place: where another test has registered the environment, `auto` starts processes
    recipe = tiny_recipe(data, "evaluate.background=off")
    return grid(recipe, {"optimizer.learning_rate": RATES}, seeds=[0, 1])


@pytest.fixture(scope="module")
def solo(recipes: list[Recipe], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run is when it is alone, by name."""
    folder = tmp_path_factory.mktemp("solo")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.runs.report.write_report", lambda run: run)
        for point in name_points(recipes):
            found[point.name] = learnt(train(point.recipe, out=folder / point.name, quiet=True))
    return found


def in_turns(points: tuple[SweepPoint, ...], folder: Path) -> dict[str, GearError | None]:
    return sweep_support.in_turns(Turns, points, folder, parallel=3)


def test_runs_that_take_turns_are_those_that_are_alone(
    recipes: list[Recipe], solo: dict[str, Any], tmp_path: Path
) -> None:
    points = name_points(recipes)
    before = torch.get_rng_state()
    with torch_threads(2):  # not what the recipe says: sums would have other last bits
        assert in_turns(points, tmp_path) == dict.fromkeys(solo)
        assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers stay"
    for name, expected in solo.items():
        assert learnt(tmp_path / name) == expected
    assert len({expected["model"] for expected in solo.values()}) == 4, "they do differ"


def test_a_run_that_fails_ends_alone(
    recipes: list[Recipe],
    solo: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = name_points(recipes)
    advance = Learner.advance

    def poisoned(self: Learner) -> None:
        if self.recipe.seed == 1 and self.recipe.optimizer.learning_rate == 1e-2 and self.step == 8:
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("nan"))
                self.model.embed_ln.bias.fill_(float("nan"))
        advance(self)

    monkeypatch.setattr(Learner, "advance", poisoned)
    ended = in_turns(points, tmp_path)
    failed = ended.pop("learning_rate=0.01,s1")
    assert failed is not None and failed.code == "LOSS_NONFINITE" and "step 9" in failed.what
    assert set(ended.values()) == {None} and len(ended) == 3
    for name in ended:
        assert learnt(tmp_path / name) == solo[name]


def test_an_interrupted_sweep_goes_on_to_the_same_end(
    recipes: list[Recipe],
    solo: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance, count = Learner.advance, 0

    def interrupting(self: Learner) -> None:
        nonlocal count
        count += 1
        if count == 30:
            os.kill(os.getpid(), signal.SIGTERM)
        advance(self)

    points = name_points(recipes)
    monkeypatch.setattr(Learner, "advance", interrupting)
    with pytest.raises(TrainingInterrupted):
        in_turns(points, tmp_path)
    monkeypatch.setattr(Learner, "advance", advance)
    assert not all(is_complete(point, tmp_path / point.name) for point in points)
    assert any(steps_done(tmp_path / point.name) for point in points)
    assert in_turns(points, tmp_path) == dict.fromkeys(solo)
    for name, expected in solo.items():
        assert learnt(tmp_path / name) == expected


def test_a_sweep_in_series_and_what_it_leaves(
    recipes: list[Recipe], solo: dict[str, Any], tmp_path: Path
) -> None:
    results = run_sweep(recipes, tmp_path / "sweep", mode="serial", quiet=True)
    assert [result.status for result in results] == ["complete"] * 4
    for result in results:
        assert learnt(result.path) == solo[result.name]
        assert result.path == tmp_path / "sweep" / "runs" / result.name
        assert result.steps == 20 and result.loss is not None
        assert result.evaluation_last is not None and result.evaluation_last["step"] == 20
    document = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert document["summary"]["rows"][0]["seeds"] == [0, 1]
    assert (tmp_path / "sweep" / "sweep.md").exists()
    assert len(list((tmp_path / "sweep" / "plots").glob("*.png"))) == 2
    # again: nothing is trained
    stamps = [os.stat(result.path / "metrics.jsonl").st_mtime_ns for result in results]
    again = run_sweep(recipes, tmp_path / "sweep", mode="serial", quiet=True, report=False)
    assert [os.stat(result.path / "metrics.jsonl").st_mtime_ns for result in again] == stamps
    assert [result.loss for result in again] == [result.loss for result in results]
    # a longer one goes on where these ended
    longer = [recipe.replace(train__steps=22) for recipe in recipes]
    last = run_sweep(longer, tmp_path / "sweep", mode="serial", quiet=True, report=False)
    assert [result.steps for result in last] == [22] * 4
    # a shorter one is refused, as by `train`, before anything is written
    before = (tmp_path / "sweep" / "sweep.json").read_bytes()
    with pytest.raises(InputError, match="but 22 steps are done") as caught:
        run_sweep(recipes, tmp_path / "sweep", mode="serial", quiet=True)
    assert caught.value.code == "RUN_RECIPE"
    assert (tmp_path / "sweep" / "sweep.json").read_bytes() == before


def test_a_sweep_is_summed_up_without_writing_its_file_for_each_run(
    recipes: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has all recipes: of a thousand runs it would be written a thousand times."""
    monkeypatch.setattr("gear_offline.sweep.sweep.Sweep._run", lambda *_: None)
    write, writes = SweepDirectory._write, 0

    def counted(self: SweepDirectory) -> None:
        nonlocal writes
        writes += 1
        write(self)

    monkeypatch.setattr(SweepDirectory, "_write", counted)
    found = []
    for count in (1, 4):
        writes = 0
        out = tmp_path / str(count)
        run_sweep(recipes[:count], out, mode="serial", quiet=True, report=False)
        found.append(writes)
        rows = json.loads((out / "sweep.json").read_text())["points"]
        assert [row["status"] for row in rows] == ["open"] * count
    assert found[0] == found[1]


def test_directories_that_are_not_this_sweeps(
    recipes: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.sweep.sweep.Sweep._run", lambda *_: None)

    def code_of(out: Path, points: list[Recipe]) -> str:
        with pytest.raises(InputError) as caught:
            run_sweep(points, out, quiet=True, report=False)
        return caught.value.code

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert code_of(tmp_path / "full", recipes) == "SWEEP_DIRECTORY"
    assert code_of(tmp_path / "full" / "mine.txt", recipes) == "SWEEP_DIRECTORY"
    out = tmp_path / "sweep"
    results = run_sweep(recipes, out, quiet=True, report=False)
    assert [result.status for result in results] == ["open"] * 4
    assert code_of(out, [r.replace(model__hidden_size=16) for r in recipes]) == "SWEEP_EXISTS"
    run_sweep([r.replace(train__checkpoint_every=4) for r in recipes], out, quiet=True)
    (out / "sweep.json").write_text("{")
    assert code_of(out, recipes) == "SWEEP_DIRECTORY"


def told(out: Path) -> dict[str, list[str]]:
    """Return the names of the points that a sweep's file tells of."""
    document = json.loads((out / "sweep.json").read_text())
    return {key: [row["name"] for row in document[key]] for key in ("points", "others")}


def test_some_of_the_points_are_a_sweep_of_their_own(
    recipes: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.sweep.sweep.Sweep._run", lambda *_: None)
    out = tmp_path / "sweep"

    def names(points: list[Recipe]) -> list[str]:
        return [result.name for result in run_sweep(points, out, quiet=True, report=False)]

    first, second, third, fourth = names(recipes)
    text = json.loads((out / "sweep.json").read_text())
    text["points"][3]["error"] = "LOSS_NONFINITE: of step 7"
    (out / "sweep.json").write_text(json.dumps(text))
    assert names(recipes[:2]) == [first, second], "named as before, although one rate is left"
    assert told(out) == {"points": [first, second], "others": [third, fourth]}
    assert names(recipes[1:3]) == [second, third]
    new = [recipes[3].replace(seed=7)]
    assert names(new) == ["learning_rate=0.001,s7"]
    assert len(told(out)["others"]) == 4, "nothing of those before is forgotten"
    results = run_sweep(recipes, out, quiet=True, report=False)
    assert results[3].error == "LOSS_NONFINITE: of step 7"
    assert told(out) == {
        "points": [first, second, third, fourth],
        "others": ["learning_rate=0.001,s7"],
    }


def test_points_that_differ_in_something_else_are_refused_whatever_is_asked_for(
    recipes: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no run of these names is there yet: a name would not tell what it is."""
    monkeypatch.setattr("gear_offline.sweep.sweep.Sweep._run", lambda *_: None)
    out = tmp_path / "sweep"
    run_sweep(recipes, out, quiet=True, report=False)
    run_sweep(recipes[:1], out, quiet=True, report=False)
    before = told(out)
    wide = [recipe.replace(model__hidden_size=16) for recipe in recipes]
    for points, words in (
        (wide[:1], "model.hidden_size of learning_rate=0.01,s0 was 8 and is 16"),
        (wide[3:], "model.hidden_size of learning_rate=0.01,s0 was 8 and is 16"),
        ([wide[0].replace(seed=9)], "model.hidden_size of learning_rate=0.01,s0 was 8 and is 16"),
        ([*recipes[:1], *wide[:1]], "model.hidden_size was the same for all"),
    ):
        with pytest.raises(InputError) as caught:
            run_sweep(points, out, quiet=True, report=False)
        assert caught.value.code == "SWEEP_EXISTS" and words in caught.value.what
    assert told(out) == before


def test_nothing_starts_when_a_point_does_not_fit(recipes: list[Recipe], tmp_path: Path) -> None:
    wrong = recipes[1].replace(model__max_timestep=3)
    with pytest.raises(InputError) as caught:
        run_sweep([recipes[0], wrong], tmp_path / "sweep", quiet=True)
    assert caught.value.code == "TIMESTEP_RANGE"
    assert not (tmp_path / "sweep").exists()
    with pytest.raises(InputError) as caught:
        run_sweep([recipes[0], recipes[1].replace(train__device="auto")], tmp_path / "sweep")
    assert caught.value.code == "SWEEP_POINTS"


def test_the_mode_is_chosen_by_the_machine(
    recipes: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    points, cuda = name_points(recipes), torch.device("cuda")

    def chosen(device: torch.device, cores: int, **options: Any) -> tuple[str, int, int | None]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        found = choose(points, device, **{"mode": "auto", "parallel": None, **options})
        return found.mode, found.parallel, found.threads

    assert chosen(CPU, 1) == ("serial", 1, None)
    assert chosen(CPU, 2) == ("processes", 2, 1)
    assert chosen(CPU, 16) == ("processes", 4, 4)
    assert chosen(CPU, 16, threads=2) == ("processes", 4, 2)
    assert chosen(CPU, 16, parallel=1) == ("serial", 1, None)
    assert chosen(cuda, 16) == ("streams", 4, None)
    assert chosen(cuda, 16, parallel=2) == ("streams", 2, None)
    assert chosen(cuda, 16, mode="processes") == ("processes", 4, 4)
    points = name_points([recipe.replace(train__graph="off") for recipe in recipes])
    assert chosen(cuda, 16) == ("processes", 4, 4)
    with pytest.raises(UnavailableError):
        chosen(CPU, 4, mode="streams")
    with pytest.raises(InputError):
        chosen(CPU, 4, mode="fast")
    with pytest.raises(InputError):
        chosen(CPU, 4, parallel=0)


def test_while_runs_fail_their_remedy_is_said_once(
    recipes: list[Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def short(recipe: Recipe, **_: Any) -> None:
        raise GearError("MEMORY", "out of memory", where=f"s{recipe.seed}", remedy="use less of it")

    monkeypatch.setattr("gear_offline.sweep.sweep.train", short)
    run_sweep(recipes[:2], tmp_path / "sweep", mode="serial", report=False)
    told = capsys.readouterr().err
    assert told.count("use less of it") == 1 and told.count("MEMORY: out of memory") == 2
    rows = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    assert all("use less of it" in row["error"] for row in rows)


def test_a_worker_that_is_stopped_before_it_has_begun_has_not_failed(
    data: Path, tmp_path: Path
) -> None:
    """It ends by the signal, as it listens only later; only then without an answer is it lost."""
    [point] = name_points([tiny_recipe(data)])
    endings = []
    for end in (Worker.interrupt, lambda worker: worker._process.kill()):
        worker = Worker({}, threads=1)
        worker.start(point, point.recipe, tmp_path / "run")
        end(worker)
        endings.append(worker.answer())
        worker.close()
    assert isinstance(endings[0], TrainingInterrupted)
    assert endings[1] is not None and endings[1].code == "SWEEP_WORKER"


@pytest.mark.long
def test_processes_are_killed_and_stopped_and_go_on(data: Path, tmp_path: Path) -> None:
    """One worker is killed, then the sweep is stopped; after that its runs end as alone."""
    out = tmp_path / "sweep"
    steps = ("train.steps=300", "train.checkpoint_every=20", "evaluate.episodes=0")
    recipes = grid(tiny_recipe(data, *steps), {}, seeds=[0, 1])
    before: set[int] = set()

    def trouble() -> None:
        wait_for(lambda: steps_done(out / "runs" / "s0") > 40)
        wait_for(lambda: steps_done(out / "runs" / "s1") > 40)
        first, *_ = sorted(children() - before)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: "SWEEP_WORKER" in (out / "sweep.json").read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    before = children()
    thread = threading.Thread(target=trouble)
    thread.start()
    with pytest.raises(TrainingInterrupted) as caught:
        run_sweep(recipes, out, mode="processes", parallel=2, quiet=True)
    thread.join()
    assert caught.value.code == "SWEEP_INTERRUPTED"
    assert children() == before, "no worker stays"
    rows = json.loads((out / "sweep.json").read_text())["points"]
    assert sorted("killed by SIGKILL" in (row["error"] or "") for row in rows) == [False, True]
    assert all(40 < steps_done(out / "runs" / name) < 300 for name in ("s0", "s1"))
    results = run_sweep(recipes, out, mode="processes", parallel=2, quiet=True, report=False)
    assert [(r.status, r.error, r.steps) for r in results] == [("complete", None, 300)] * 2
    for result in results:
        alone = train(result.recipe, out=tmp_path / result.name, quiet=True)
        assert learnt(result.path) == learnt(alone)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def children() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task")
    words = [word for task in tasks.iterdir() for word in (task / "children").read_text().split()]
    return {int(word) for word in words}


def test_the_command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(tiny_recipe(data, "evaluate.episodes=0", "train.steps=6").to_yaml())
    monkeypatch.chdir(tmp_path)
    words = ["sweep", str(recipe), "--seeds", "2", "--mode", "serial", "model.layers=1,2"]
    assert main([*words, "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["points"]] == [
        "layers=1,s0",
        "layers=1,s1",
        "layers=2,s0",
        "layers=2,s1",
    ]
    assert [row["complete"] for row in document["summary"]["rows"]] == [2, 2]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "runs/tiny-sweep"
    assert "layers=2" in captured.out
    assert main([*words, "model.layers=1,1"]) == 2
    assert "SWEEP_POINTS" in capsys.readouterr().err
    wider = [*words[:-1], "model.hidden_size=8,16"]
    assert main(wider) == 2
    assert "SWEEP_EXISTS" in capsys.readouterr().err
    # fewer: the table covers them alone
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/runs/*/*") if p.is_file()}
    assert main([*words[:3], "1,", *words[4:6], "model.layers=2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "layers=2" in printed and "layers=1" not in printed
    assert "not in the table: 3 more runs." in printed
    assert "not in the table: 3 more runs." in Path("runs/tiny-sweep/sweep.md").read_text()
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps and stamps
    # more seeds and values: what is there stays, what is new is run
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/runs/*/metrics.jsonl")}
    more = [*words[:3], "3", *words[4:6], "model.layers=1,2,3", "--json", "--quiet"]
    assert main(more) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["complete"] for row in document["summary"]["rows"]] == [3, 3, 3]
    assert {p: p.stat().st_mtime_ns for p in before} == before and len(before) == 4
