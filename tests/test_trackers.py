"""Trackers hold each line of a run once: after a kill, a resume, a failure, and sent later.

What is in them is read without gear_offline: TensorBoard's own reader, trackio's SQLite file, the
records of a ``.wandb`` file with W&B's own messages.
"""

import json
import os
import shutil
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gear_offline as go
from gear_offline.artifacts.json_lines import read_records
from gear_offline.cli.main import main
from gear_offline.errors import GearError
from gear_offline.models.policy import Policy
from tests.forks import run_forked
from tests.support import Captured, Patch
from tests.training_support import tiny_recipe

NAMES = ["tensorboard", "csv", "trackio", "mlflow", "wandb"]
LEARNT = ("loss", "gradient_norm", "learning_rate")
Shown = dict[str, list[tuple[int, float]]]

pytestmark = pytest.mark.usefixtures("whole", "no_reports")
each_tracker = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: Patch) -> None:
    """Keep trackio's database and W&B's files here, and W&B from the network."""
    home = tmp_path / "trackio"
    variables = {"TRACKIO_DIR": str(home), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    variables |= {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "1"}
    for name, value in {**variables, "WANDB_ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(name, value)
    for module in ("trackio.utils", "trackio.sqlite_storage"):  # they read it when loaded
        if module in sys.modules:
            monkeypatch.setattr(f"{module}.TRACKIO_DIR", home)


def shown_by_tensorboard(run: Path) -> Shown:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = board.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in board.Scalars(tag)] for tag in tags}


def shown_by_trackio(run: Path, project: str) -> tuple[Shown, Any]:
    (file,) = (run.parent / "trackio").glob(f"{project}.db")
    shown: Shown = {}
    with sqlite3.connect(file) as database:
        rows = list(database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step"))
        ((config,),) = database.execute("SELECT config FROM configs")
    database.close()
    assert {name for name, _, _ in rows} == {f"{run.name}-{(run / 'id').read_text()}"}
    for _, step, text in rows:
        for tag, value in json.loads(text).items():
            shown.setdefault(tag, []).append((step, value))
    return shown, json.loads(config)


def shown_by_csv(run: Path) -> Shown:
    head, *lines = (run / "scalars.csv").read_text().splitlines()
    shown: Shown = {}
    assert head == "step,name,value"
    for step, name, value in (line.split(",") for line in lines):
        shown.setdefault(name, []).append((int(step), float(value)))
    return shown


def shown_by_mlflow(run: Path, project: str) -> tuple[Shown, Any]:
    """Read the files of MLflow: a line "time value step" of each metric."""
    shown: Shown = {}
    experiments = (run.parent / "mlflow").glob("*/meta.yaml")
    (place,) = (path.parent for path in experiments if f"name: {project}\n" in path.read_text())
    (folder,) = (path.parent for path in place.glob("*/metrics"))
    for path in (path for path in (folder / "metrics").rglob("*") if path.is_file()):
        rows = (line.split() for line in path.read_text().splitlines())
        points = [(int(step), float(value)) for _, value, step, *_ in rows]
        shown[str(path.relative_to(folder / "metrics"))] = points
    options = go.open_run(run).recipe.to_dict()
    assert (folder / "params" / "train.steps").read_text() == str(options["train"]["steps"])
    return shown, options


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield what W&B wrote: blocks of 32 KiB, chunks of checksum, length and kind in them."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, whole = file.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole = whole * (kind in (3, 4)) + content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)


def shown_by_wandb(run: Path, project: str) -> tuple[Shown, Any]:
    import wandb

    wandb.teardown()  # its process writes the end of the file after `finish`
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    shown: Shown = {}
    config: dict[str, Any] = {}
    for record in wandb_records(file):
        if record.HasField("run"):
            assert (record.run.project, record.run.display_name) == (project, run.name)
            assert record.run.run_id == (run / "id").read_text()
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        if record.HasField("history"):
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            (step,) = (value for key, value in row.items() if key.endswith("/step"))
            for tag, value in row.items():
                if not tag.startswith("_") and not tag.endswith("/step"):
                    shown.setdefault(tag, []).append((step, value))
    return shown, config


def shown_by(name: str, run: Path, project: str = "gear-offline") -> Shown:
    """Return what a tracker shows of a run, and check that its recipe went along."""
    if name == "tensorboard":
        return shown_by_tensorboard(run)
    if name == "csv":
        return shown_by_csv(run)
    readers = {"trackio": shown_by_trackio, "mlflow": shown_by_mlflow, "wandb": shown_by_wandb}
    shown, config = readers[name](run, project)
    options = go.open_run(run).recipe.to_dict()
    assert {key: config[key] for key in options} == json.loads(json.dumps(options))
    return shown


def expected(run: Path) -> Shown:
    """Return what the run's files say, by the names that trackers show."""
    numbers: Shown = {}
    for record in read_records(run / "metrics.jsonl"):
        for name, value in record.items():
            if name != "step" and value is not None:
                numbers.setdefault(f"train/{name}", []).append((record["step"], value))
    for record in read_records(run / "evaluations.jsonl"):
        for name, found in {"": record, **record.get("tasks", {})}.items():
            place = f"evaluate/{name}/".replace("//", "/")
            whole = {"return": found.get("return"), "score": found.get("normalized_score")}
            for target in found["targets"]:
                asked = f"{target['target']!r}".removesuffix(".0")
                asked = asked if len(asked) < 14 else f"{target['target']:.3g}"  # was computed
                whole[f"return_{asked}"] = target["return"]
                whole[f"score_{asked}"] = target.get("normalized_score")
            for tag, value in whole.items():
                if value is not None:
                    numbers.setdefault(f"{place}{tag}", []).append((record["step"], value))
    return numbers


def check(name: str, run: Path, project: str = "gear-offline") -> None:
    shown, found = shown_by(name, run, project), expected(run)
    assert found and set(shown) == set(found)
    for tag, points in found.items():
        there = sorted(shown[tag])
        assert [step for step, _ in there] == [step for step, _ in points], tag
        if tag.startswith("evaluate") or tag.removeprefix("train/") in LEARNT:  # else it is a time
            values = [value for _, value in points]
            assert [value for _, value in there] == pytest.approx(values, rel=1e-6), tag


class End(go.Callback):
    """Raises, or kills the process, at a step."""

    def __init__(self, step: int, *, kill: bool = False) -> None:
        self.step, self.kill = step, kill

    def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
        if step == self.step:
            if self.kill:
                os.kill(os.getpid(), 9)
            raise OSError("the end")


def test_a_run_that_was_killed_and_stopped_goes_on_without_a_gap_or_a_step_twice(
    data: Path, tmp_path: Path
) -> None:
    """What a tracker had not written yet comes from the run's files."""
    names, run = [name for name in NAMES if find_spec(name)], tmp_path / "run"
    recipe = tiny_recipe(data, f"train.trackers={names}", "evaluate.background=off")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    (script := tmp_path / "killed.py").write_text(f"""
import gear_offline as go, tests.test_trackers as this
from tests.training_support import register_environment as register; register()
go.train({str(tmp_path / "recipe.yaml")!r}, out={str(run)!r}, callbacks=[this.End(12, kill=True)])
""")
    killed = run_forked(script)
    assert killed.returncode == -9 and go.open_run(run).steps < 20
    with pytest.raises(GearError, match="the end"):
        go.train(recipe, out=run, resume=True, callbacks=[End(18)], quiet=True)
    go.train(recipe, out=run, resume=True, quiet=True)
    for name in names:
        check(name, run)


def test_curves_go_on_where_the_clock_has_gone_back(
    data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    pytest.importorskip("tensorboard")
    recipe, run = tiny_recipe(data, "train.trackers=[tensorboard]"), tmp_path / "run"
    with pytest.raises(GearError, match="the end"):
        go.train(recipe, out=run, callbacks=[End(12)], quiet=True)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 86_400)
    go.train(recipe, out=run, resume=True, quiet=True)
    check("tensorboard", run)


class Notes:
    """A tracker of one's own: its file has a line a call."""

    def __init__(self, run: go.Run, project: str) -> None:
        self.file = run.path / "notes"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.last_steps = dict(sorted((kind, int(step)) for kind, step in map(str.split, lines)))

    def send(self, step: int, values: dict[str, float]) -> None:
        with open(self.file, "a") as file:
            file.write(f"{next(iter(values)).partition('/')[0]} {step}\n")

    def close(self) -> None:
        pass


def test_an_evaluation_that_is_played_again_is_sent_behind_later_ones(
    data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    pytest.importorskip("tensorboard")
    own, run, asked = f"{__file__}:Notes", tmp_path / "run", list[int]()
    words = [f"train.trackers=[tensorboard, {own}]", "evaluate.background=off"]
    words += ["train.evaluate_every=10", "train.checkpoint_every=10", "train.keep_checkpoints=3"]
    recipe, ask = tiny_recipe(data, *words), Policy.ask

    def fails_first(self: Policy, *words: Any, **options: Any) -> Any:
        asked.append(1)
        return ask(self, *words, **options) if len(asked) > 1 else 1 / 0

    with monkeypatch.context() as patched:
        patched.setattr(Policy, "ask", fails_first)
        go.train(recipe, out=run, quiet=True)
    for _ in range(2):  # the first plays, the second has nothing to send
        go.train(recipe, out=run, resume=True, quiet=True)
        assert (run / "notes").read_text().split("evaluate ")[1:] == ["20\n", "10\n"]
        shown = shown_by_tensorboard(run)
        for tag, points in expected(run).items():
            assert sorted(step for step, _ in shown[tag]) == sorted(step for step, _ in points)


@each_tracker
def test_a_run_of_before_is_sent_once(
    name: str, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    pytest.importorskip(name)
    run = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    hopper = {"targets": [{"target": 9.0, "return": 3.0, "normalized_score": None}]}
    several = {"step": 20, "normalized_score": 1.5, "targets": [], "tasks": {"hopper": hopper}}
    with open(run / "evaluations.jsonl", "a") as lines:
        lines.write(json.dumps(several) + "\n")
    for _ in range(2):
        assert main(["sync", str(run), "--tracker", name, "--project", "mine"]) == 0
        check(name, run, "mine")
    assert capsys.readouterr().out == f"{run}\n" * 2
    other = go.open_run(shutil.copytree(whole, tmp_path / "other", symlinks=True))
    go.sync(other, name, project="other")  # in the same process
    check(name, other.path, "other")


@pytest.mark.parametrize("later", ["sync", "resume"])
def test_what_a_tracker_that_failed_lacks_is_sent_later(
    later: str, data: Path, tmp_path: Path, monkeypatch: Patch, capfd: Captured
) -> None:
    write, run = os.write, tmp_path / "run"

    def full(file: int, content: bytes) -> int:
        if b"train/loss" in content and (run / "metrics.jsonl").read_bytes().count(b"\n") > 2:
            raise OSError(5, os.strerror(5))
        return write(file, content)

    recipe = tiny_recipe(data, "train.trackers=tensorboard", "evaluate.background=off")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert go.train(recipe, out=run, quiet=True).steps == 20
    assert capfd.readouterr().err == (
        "warning: tensorboard failed and is told no more ([Errno 5] Input/output error); "
        f"training goes on; `gear-offline sync {run} --tracker tensorboard` sends the rest\n"
    )
    assert 0 < len(shown_by_tensorboard(run)["train/loss"]) < len(expected(run)["train/loss"])
    if later == "sync":
        go.sync(run)
    else:
        go.train(recipe, out=run, resume=True, quiet=True)
    check("tensorboard", run)


def test_what_a_tracker_needs_is_told_before_training(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("gear_offline.runs.checks.find_spec", lambda name: None)
    recipe = tiny_recipe(data, "train.trackers=[wandb]")
    for call in (
        lambda: go.train(recipe, out=tmp_path / "run", quiet=True),
        lambda: go.sync(whole, "trackio"),
    ):
        with pytest.raises(go.UnavailableError, match=r"gear-offline\[trackers\]"):
            call()
    assert not (tmp_path / "run").exists()
    with pytest.raises(go.InputError, match=r"no tracker 'trackoi'.*did you mean 'trackio'"):
        go.sync(whole, "trackoi")
    with pytest.raises(go.InputError, match="names no tracker"):
        go.sync(whole)
