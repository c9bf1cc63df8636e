"""Runs in Python and on the command line: trained, opened, asked, listed, compared, watched."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import gear_offline as go
from gear_offline.artifacts.json_lines import read_records
from gear_offline.cli.main import main
from gear_offline.config.recipe import load_recipe
from gear_offline.errors import GearError
from gear_offline.runs.loop import TrainingInterrupted
from tests.support import Captured, Patch, one_error
from tests.training_support import learnt, tiny_recipe

pytestmark = pytest.mark.usefixtures("whole", "no_reports")


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


def test_a_run_tells_what_it_found(whole: Path, monkeypatch: Patch) -> None:
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


def test_a_damaged_run_is_shown_as_such(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nstepz: 3\n")
    assert "unknown option 'stepz'" in repr(go.open_run(tmp_path))
    assert "unknown option" in go.open_run(tmp_path)._repr_html_()


@pytest.fixture(scope="module")
def runs(whole: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two widths, one of them with two seeds, and of a sweep; a damaged one, no run."""
    folder = tmp_path_factory.mktemp("several") / "runs"
    short = ["train.steps=6", "evaluate.episodes=0"]
    go.train(tiny_recipe(data, *short), out=folder / "a-s0", quiet=True)
    go.train(tiny_recipe(data, *short, "seed=1"), out=folder / "a-s1", quiet=True)
    wide = "model.hidden_size=16"
    go.train(tiny_recipe(data, *short, wide), out=folder / "sweep" / "runs" / "b,s0", quiet=True)
    shutil.copytree(whole, folder / "whole", symlinks=True)
    (folder / "damaged" / "checkpoints").mkdir(parents=True)
    (folder / "damaged" / "recipe.yaml").write_text("stepz: 1\n")
    (folder / "lost" / "checkpoints" / "step-00000005").mkdir(parents=True)
    (folder / "no-run").mkdir()
    (folder / "no-run" / "recipe.yaml").write_text("name: mine\n")
    return folder


def test_runs_are_listed(runs: Path, whole: Path, data: Path, capsys: Captured) -> None:
    found = go.list_runs(runs)
    rows = {row.name: row for row in found.rows}
    assert set(rows) == {"a-s0", "a-s1", "sweep/runs/b,s0", "whole", "damaged", "lost"}
    assert "recipe.yaml" in (rows["lost"].error or "")
    one, best = rows["whole"], go.open_run(whole).best
    assert best is not None
    assert (one.steps, one.asked, one.best_return) == (20, 20, best.mean_return)
    assert (one.data, rows["a-s0"].best_return) == (str(data), None)
    assert "unknown option 'stepz'" in (rows["damaged"].error or "")
    ages = [row.age_seconds for row in found.rows]
    assert ages == sorted(ages) and ages[0] >= 0
    assert main(["runs", "ls", str(runs)]) == 0
    text = capsys.readouterr().out
    assert "20/20" in text and "damaged" in text
    assert {"a-s0", "sweep/runs/b,s0"} <= set(text.split()), "names are whole"
    assert main(["runs", "ls", str(runs / "whole"), "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["whole"]


def test_a_run_is_shown(runs: Path, capsys: Captured) -> None:
    assert main(["runs", "show", str(runs / "whole")]) == 0
    text = capsys.readouterr().out
    assert "20 of 20" in text and "checkpoints" in text
    assert main(["runs", "show", str(runs / "whole"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in document["evaluations"]] == [7, 14, 20]
    assert document["checkpoints"][-1] == 20


def test_runs_are_compared_by_what_they_differ_in(runs: Path, tmp_path: Path) -> None:
    a0, a1, b0 = runs / "a-s0", runs / "a-s1", runs / "sweep" / "runs" / "b,s0"
    comparison = go.compare_runs([a0, go.open_run(a1), str(b0)], out=tmp_path / "curves.png")
    labels = list(comparison.runs.values())
    assert labels == ["hidden_size=8", "hidden_size=8", "hidden_size=16"]
    assert {row.label: row.seeds for row in comparison.table.rows} == {
        "hidden_size=8": (0, 1),
        "hidden_size=16": (0,),
    }
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "hidden_size=16" in repr(comparison)
    assert list(go.compare_runs([a0, a1]).runs.values()) == ["s0", "s1"]
    go.sweep(load_recipe(a0), {"model.hidden_size": [8, 16]}, out=tmp_path / "sweep", parallel=1)
    of_sweep = go.compare_runs([tmp_path / "sweep"]).runs.values()
    assert set(of_sweep) == {"hidden_size=8", "hidden_size=16"}, "it stands for its trials"
    copy = Path(shutil.copytree(a0, tmp_path / "copy", symlinks=True))
    assert list(go.compare_runs([a0, copy]).runs.values()) == ["a-s0", "copy"]


def test_seeds_stay_one_setting_however_much_others_differ(runs: Path, tmp_path: Path) -> None:
    """Where labels would be long, names of runs stand for them; one file by two names is one."""

    def copied(name: str, source: str, changes: dict[str, Any]) -> Path:
        folder = Path(shutil.copytree(runs / source, tmp_path / name, symlinks=True))
        recipe = load_recipe(runs / source).replace(changes)
        (folder / "recipe.yaml").write_text(recipe.to_yaml())
        return folder

    far: dict[str, Any] = {
        "optimizer.weight_decay": 0.125,
        "loader.gamma": 0.25,
        "optimizer.clip_norm": 0.5,
    }
    far |= {"optimizer.betas": [0.5, 0.9], "loader.normalize_states": False, "model.dropout": 0}
    many = [runs / "a-s0", runs / "a-s1", copied("far-s0", "a-s0", far)]
    comparison = go.compare_runs(many, out=tmp_path / "far.png")
    seeds = {row.label: row.seeds for row in comparison.table.rows}
    assert seeds == {"a": (0, 1), "far-s0": (0,)}
    again = go.compare_runs([*many, copied("a-s1-again", "a-s1", {"train.threads": 1})])
    seeds = {row.label: row.seeds for row in again.table.rows}
    assert seeds == {"a": (0, 1), "a-s1-again": (1,), "far-s0": (0,)}
    parts = [("late:late", "0"), ("/x/late.py:late", "0"), ("/y/late.py:late", "1")]
    options: list[dict[str, Any]] = [
        {"selection": {"strategy": name}, "parts": {name: digest}, "seed": seed}
        for seed, (name, digest) in enumerate(parts)
    ]
    named = [copied(f"late{place}", "a-s0", each) for place, each in enumerate(options)]
    rows = go.compare_runs(named).table.rows
    assert {row.seeds: row.label for row in rows} == {
        (0, 1): "strategy=late:late",
        (2,): "strategy=late.py:late",
    }


def test_only_what_has_one_unit_is_compared(runs: Path, tmp_path: Path) -> None:
    for name, environment in (("a", "Here-v0"), ("b", "There-v0"), ("c", "There-v0")):
        shutil.copytree(runs / "whole", tmp_path / name, symlinks=True)
        lines = read_records(tmp_path / name / "evaluations.jsonl")
        scored = [{**line, "environment": environment, "normalized_score": 5.0} for line in lines]
        text = "".join(json.dumps(line) + "\n" for line in scored)
        (tmp_path / name / "evaluations.jsonl").write_text(text)
    there = go.compare_runs([tmp_path / "b", tmp_path / "c"], out=tmp_path / "one.svg")
    assert there.table.metric == "return" and list(there.environments) == ["There-v0"]
    mixed = go.compare_runs([tmp_path / name for name in "abc"], out=tmp_path / "mixed.svg")
    assert mixed.environments == {"Here-v0": ("a",), "There-v0": ("b", "c")}
    assert mixed.table.metric == "normalized_score"
    assert "return" not in {name for row in mixed.table.rows for name in row.estimates}
    assert "There-v0: b, c" in repr(mixed) and "There-v0" not in repr(there)
    unscored = go.compare_runs([tmp_path / "a", runs / "whole"])
    assert unscored.table.metric == "loss"


def test_compare_writes_one_picture(
    runs: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    picture = tmp_path / "curves.svg"
    words = ["runs", "compare", str(runs / "a-s0"), str(runs / "whole"), "--out", str(picture)]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(picture)
    assert "<svg" in picture.read_text()
    assert main(words) == 2
    assert "error[OUTPUT_EXISTS]" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plot"] == str(picture)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert main(words[:-2]) == 0
    assert set(tmp_path.iterdir()) == before, "a picture is drawn where it is asked for"


def test_a_relative_run_outlives_a_change_of_the_working_directory(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole.parent)
    here, run = go.open_run(whole), go.open_run(whole.name)
    monkeypatch.chdir("/")
    assert str(run.path) == whole.name
    assert (run.steps, len(run.metrics)) == (here.steps, len(here.metrics)) != (0, 0)
    assert (run.best, run.recipe) == (here.best, here.recipe)
    document, expected = run.to_json(), here.to_json()
    assert document == {**expected, "path": whole.name, "age_seconds": document["age_seconds"]}
    assert run.policy(device="cpu").model.facts == here.policy(device="cpu").model.facts
    assert os.fspath(run) == str(whole), "wherever a path is taken"


def test_a_page_of_runs_holds_all_it_shows(runs: Path, tmp_path: Path) -> None:
    wide = Path(shutil.copytree(runs / "whole", tmp_path / "wide", symlinks=True))
    recipe = load_recipe(wide).replace({"model.hidden_size": 48})
    (wide / "recipe.yaml").write_text(recipe.to_yaml())
    page = tmp_path / "runs.html"
    comparison = go.compare_runs([runs / "whole", wide], out=page)
    text = page.read_text()
    assert len(re.findall('<img src="data:image/png;base64,', text)) == 2, "curves; asked, achieved"
    assert not re.search(r"<script|<link|@import|(src|href)=\"(?!data:image/png)", text)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text)
    assert {"model.hidden_size", "48", str(wide)} < set(cells)
    for row in comparison.table.rows:
        assert {str(value) for value in row.asked.values()} < set(cells)


MISTAKES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda runs: go.list_runs(runs / "no-run"), "no run is there"),
    (lambda runs: go.list_runs(runs / "nothing"), "there is no such folder"),
    (lambda runs: go.open_run(runs / "lost"), "recipe.yaml is not there"),
    (lambda runs: go.train(runs / "lost", resume=True), "recipe.yaml is not there"),
    (lambda runs: go.compare_runs([runs / "a-s0"]), "nothing to compare"),
    (lambda runs: go.compare_runs([runs / "a-s0", runs / "sweep" / ".." / "a-s0"]), "two differ"),
    (lambda runs: go.compare_runs([runs / "nothing"]), "no such run"),
    (lambda runs: go.compare_runs([runs / "a-s0", runs / "no-run"]), "logged nothing yet"),
    (lambda runs: go.compare_runs([runs / "a-s0", runs / "damaged"]), "unknown option 'stepz'"),
    (lambda runs: go.compare_runs([runs / "a-s0", runs / "a-s1"], out="x.pdf"), "with .html"),
]


@pytest.mark.parametrize(("mistake", "what"), MISTAKES, ids=[what for _, what in MISTAKES])
def test_mistakes_are_told(mistake: Callable[[Path], Any], what: str, runs: Path) -> None:
    with pytest.raises(go.InputError, match=re.escape(what)):
        mistake(runs)


# callbacks: what they are told, how they end a run, what becomes of their errors ---------------


class Diary(go.Callback):
    """Writes down what it is told."""

    def __init__(self, stop_at: tuple[str, int] = ("", 0)) -> None:
        self.stop_at, self.told, self.errors = stop_at, list[tuple[str, int]](), list[Any]()

    def _note(self, what: str, step: int) -> bool:
        self.told.append((what, step))
        return self.stop_at == (what, step)

    def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> bool:
        assert values["loss"] == read_records(run.path / "metrics.jsonl")[-1]["loss"]
        assert run.steps == step  # before the first checkpoint, too
        return self._note("log", step)

    def on_evaluation(self, run: go.Run, step: int, record: Mapping[str, Any]) -> bool:
        assert run.last is not None and run.last.mean_return == record["return"]
        return self._note("evaluation", step)

    def on_checkpoint(self, run: go.Run, step: int, path: Path) -> bool:
        assert (path / "model.safetensors").is_file() and path.parent.parent == run.path
        return self._note("checkpoint", step)

    def on_end(self, run: go.Run, error: BaseException | None) -> None:
        assert error is not None or (run.path / "summary.json").is_file()
        self.errors.append(error)

    def steps(self, what: str) -> list[int]:
        return [step for name, step in self.told if name == what]


class Careless(go.Callback):
    """Changes torch for all who come after it."""

    def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
        torch.manual_seed(1)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        os.chdir("/")


@pytest.mark.parametrize("mode", ["on", "off"])
def test_callbacks_are_told_what_happens_and_disturb_nothing(
    mode: str, whole: Path, data: Path, tmp_path: Path
) -> None:
    diary, others = Diary(), [go.Callback(), Careless()]
    recipe = tiny_recipe(data, f"evaluate.background={mode}")
    run = go.train(recipe, out=tmp_path / "run", callbacks=[*others, diary], quiet=True)
    assert diary.steps("log") == [3, 6, 9, 12, 15, 18, 20]
    assert diary.steps("evaluation") == [7, 14, 20]
    assert diary.steps("checkpoint")[-1] == 20 and {5, 10} <= set(diary.steps("checkpoint"))
    assert diary.errors == [None]
    assert learnt(run.path)["model"] == learnt(whole)["model"]


@pytest.mark.parametrize("event", [("log", 6), ("evaluation", 7), ("checkpoint", 5)])
def test_a_callback_ends_the_run_which_can_go_on(
    event: tuple[str, int], whole: Path, data: Path, tmp_path: Path
) -> None:
    diary, recipe = Diary(stop_at=event), tiny_recipe(data, "evaluate.background=off")
    run = go.train(recipe, out=tmp_path / "run", callbacks=[diary], quiet=True)
    assert event[1] <= run.steps < 20 and diary.errors == [None]
    assert (run.path / "checkpoints" / f"step-{run.steps:08d}").is_dir()
    again = go.train(recipe, out=run, resume=True, quiet=True)
    assert again.steps == 20
    assert learnt(again.path)["model"] == learnt(whole)["model"]


def test_an_exception_of_a_callback_ends_the_run_with_one_error(data: Path, tmp_path: Path) -> None:
    class Broken(go.Callback):
        def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
            raise OSError(f"no network at step {step}\nno second line")

    class BrokenEnd(go.Callback):
        def on_end(self, run: go.Run, error: BaseException | None) -> None:
            raise SystemExit("end")

    diary, out = Diary(), tmp_path / "run"
    broken = [Broken(), BrokenEnd(), diary]
    with one_error("CALLBACK") as caught:
        go.train(tiny_recipe(data), out=out, callbacks=broken, quiet=True)
    assert caught.value.where == "Broken.on_log"
    assert "OSError: no network at step 3;" in caught.value.message.replace(" (Broken.on_log)", "")
    assert isinstance(caught.value.__cause__, OSError)
    assert diary.errors == [caught.value]
    with pytest.raises(GearError, match=r"BrokenEnd\.on_end"):
        go.train(tiny_recipe(data), out=out, resume=True, callbacks=[BrokenEnd()], quiet=True)
    assert go.open_run(out).steps == 20


def test_the_end_by_a_signal_is_told(data: Path, tmp_path: Path) -> None:
    class Killer(go.Callback):
        def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    diary = Diary()
    with pytest.raises(TrainingInterrupted) as caught:
        go.train(tiny_recipe(data), out=tmp_path / "run", callbacks=[Killer(), diary], quiet=True)
    assert diary.errors == [caught.value]


@pytest.mark.parametrize("given", [go.Callback, print, [object()], "on_log"])
def test_what_is_no_callback_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(go.InputError, match="is no callback"):
        go.train("smoke", out=tmp_path / "run", callbacks=given)
    assert not (tmp_path / "run").exists()
