"""The run directory: one writer, nothing overwritten by accident, nothing left when refused."""

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

import gear_offline
import gear_offline as go
from gear_offline.cli.main import main
from gear_offline.config.recipe import load_recipe
from gear_offline.core.files import _say_no_locks
from gear_offline.data.convert.conversion import convert
from gear_offline.errors import InputError
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.loop import train_run
from tests.support import Captured, Patch, failing_code, one_error, write_hdf5
from tests.training_support import learnt, tiny_recipe

pytestmark = pytest.mark.usefixtures("no_reports")


def code_of(path: Path, *, resume: bool) -> str:
    try:
        RunDirectory(path, resume=resume).close()
    except InputError as error:
        return error.code
    return ""


def test_a_run_is_not_begun_twice(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "x"
    assert code_of(tmp_path, resume=False) == "" and list(tmp_path.iterdir()) == []
    path.mkdir(parents=True)
    (path / ".lock").touch()  # killed before it wrote anything
    with RunDirectory(path) as run:
        run.begin(load_recipe("paper"), step=0)
        assert load_recipe(run.path) == load_recipe("paper") == load_recipe(path)
        assert code_of(path, resume=True) == "RUN_LOCKED"
    (path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert code_of(path, resume=False) == "OUTPUT_EXISTS"
    assert code_of(path, resume=True) == ""


def test_foreign_directories_and_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    (tmp_path / "mine" / "plots").mkdir(parents=True)
    (tmp_path / "mine" / "recipe.yaml").write_text("base: paper  # mine")
    for name, files in (("thesis", ["thesis.txt"]), ("mine", ["plots", "recipe.yaml"])):
        for resume in (False, True):
            assert code_of(tmp_path / name, resume=resume) == "OUTPUT_EXISTS"
        assert sorted(os.listdir(tmp_path / name)) == files
    for place in ("thesis/thesis.txt", "thesis/thesis.txt/run"):
        assert code_of(tmp_path / place, resume=False) == "OUTPUT_WRITE"
    (tmp_path / "mine" / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert code_of(tmp_path / "mine", resume=True) == "", "a copy without hidden files"


def test_what_was_made_for_nothing_goes(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "b"
    with RunDirectory(path):
        assert code_of(path, resume=False) == "RUN_LOCKED"
        assert (path / ".lock").exists(), "who was refused takes nothing away"
        (tmp_path / "runs" / "mine.txt").touch()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "runs", tmp_path / "runs" / "mine.txt"]
    with RunDirectory(path) as run:
        run.begin(load_recipe("paper"), step=0)
    assert sorted(os.listdir(path)) == [".lock", "recipe.yaml"]
    with pytest.raises(ValueError, match="step 1"), RunDirectory(tmp_path / "runs" / "c") as run:
        run.begin(load_recipe("paper"), step=0)
        raise ValueError("step 1")
    assert not run.path.exists()
    assert code_of(tmp_path / "other" / ("x" * 300), resume=False) == "OUTPUT_WRITE"
    assert not (tmp_path / "other").exists()


class Mover(go.Callback):
    def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
        run.path.rename(run.path.with_name("moved"))


def test_a_run_that_is_moved_ends_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    convert(write_hdf5(tmp_path / "x.hdf5"), tmp_path / "data", quiet=True)
    recipe, run = tiny_recipe(tmp_path / "data"), tmp_path / "run"
    whole = go.train(recipe, out=tmp_path / "whole", quiet=True)
    with pytest.raises(InputError, match="was moved or removed"):
        go.train(recipe, out=run, callbacks=[Mover()], quiet=True)
    assert not run.exists(), "nothing is written to where it was"
    (tmp_path / "moved").rename(run)
    go.train(recipe, out=run, resume=True, quiet=True)
    assert learnt(run)["model"] == learnt(whole.path)["model"]


def test_a_lock_whose_file_has_gone_is_not_held(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its holder removes it between another process's opening and locking it."""
    path, flock = tmp_path / "run", fcntl.flock

    def late(lock: int, how: int) -> None:
        (path / ".lock").unlink()
        flock(lock, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", late)
        assert code_of(path, resume=False) == "RUN_LOCKED"
    assert code_of(path, resume=False) == ""


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_once(
    number: int, data: Path, tmp_path: Path, monkeypatch: Patch, capfd: Captured
) -> None:
    def flock(lock: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    _say_no_locks.cache_clear()
    monkeypatch.setattr(fcntl, "flock", flock)
    left = tmp_path / ".d.gear-part-0123456789ab"
    left.mkdir()
    convert(write_hdf5(tmp_path / "x.hdf5"), tmp_path / "d", quiet=True)
    train_run(tiny_recipe(data, "train.steps=1", "evaluate.episodes=0"), tmp_path / "r", quiet=True)
    said = capfd.readouterr().err
    assert said.count("no file locks") == 1 and os.strerror(number) in said
    assert left.is_dir(), "without locks nobody knows that its writer is dead"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permissions"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENAMETOOLONG, "shorter name"),
    ],
)
def test_the_remedy_fits_what_the_system_said(
    number: int, remedy: str, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr(Path, "mkdir", refuse)
    for call in (
        lambda: RunDirectory(tmp_path / "run"),
        lambda: convert(write_hdf5(tmp_path / "x.hdf5"), tmp_path / "d" / "e", quiet=True),
    ):
        with one_error("OUTPUT_WRITE") as caught:
            call()
        assert remedy in caught.value.remedy
    monkeypatch.setattr(gear_offline, "list_runs", refuse, raising=False)
    assert main(["runs", "ls"]) == 1 and remedy in capsys.readouterr().err


def test_a_folder_may_be_a_link_and_no_file_is_written_through_one(
    whole: Path, tmp_path: Path
) -> None:
    run, disk, token = tmp_path / "run", tmp_path / "disk", tmp_path / "token"
    shutil.copytree(whole, run, symlinks=True)
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    shutil.move(run / "checkpoints", disk)
    (run / "checkpoints").symlink_to(disk)
    token.write_text("secret")
    for name in ("summary.json", "recipe.yaml"):
        (run / name).unlink()
        (run / name).symlink_to(token if name == "summary.json" else whole / name)
    train_run(load_recipe(whole), run, resume=True, quiet=True)
    assert learnt(run)["model"] == learnt(whole)["model"] and token.read_text() == "secret"
    assert not (run / "recipe.yaml").is_symlink() and (disk / "step-00000020").is_dir()


# found after the directory was made: with the data, with the model, and before the first step
REFUSED = [
    ("ENVIRONMENT", "evaluate.environment=CartPole-v1"),
    ("ENVIRONMENT", "evaluate.environment=NoSuch-v0"),
    ("MODEL", "model.max_timestep=4"),
    ("SELECTION", "selection.strategy=uniform_step"),
    ("DATASET_NOT_FOUND", "data.path=null"),
]


def content(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Return what is in a folder, and when it was last changed."""
    return {
        place: (place.lstat().st_mtime_ns, place.read_bytes() if place.is_file() else b"")
        for place in sorted(folder.rglob("*"))
    }


def refusal(data: Path, out: Path, *changes: str, resume: bool = False) -> str:
    recipe = tiny_recipe(data, *changes)
    return failing_code(lambda: train_run(recipe, out=out, resume=resume, quiet=True))


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_that_is_refused_leaves_nothing(resume: bool, data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for code, change in REFUSED:
        for out in (tmp_path / "runs" / "a", tmp_path / "mine"):
            assert refusal(data, out, change, resume=resume) == code
            assert list(tmp_path.rglob("*")) == [tmp_path / "mine"], "what was there stays"


def test_a_run_that_is_there_is_left_as_it_was(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_run(tiny_recipe(data, "train.steps=5"), out=run, quiet=True)
    source = write_hdf5(tmp_path / "x.h5")
    other = {"data.path": str(tmp_path / "other"), "data.source": str(source)}
    with one_error("RUN_MISMATCH", "data.path was"):  # before anything is converted
        go.train(run, other, resume=True, quiet=True)
    assert not (tmp_path / "other").exists()
    before = content(run)
    assert refusal(data, run) == "OUTPUT_EXISTS"
    for _, change in REFUSED:
        refusal(data, run, "train.steps=9", change, resume=True)
    assert refusal(data, run, "train.steps=4", resume=True) == "RUN_MISMATCH"
    assert refusal(data, run, "train.steps=9", "seed=7", resume=True) == "RUN_MISMATCH"
    assert content(run) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_run_whose_records_are_damaged_is_left_as_it_was(
    name: str, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_run(tiny_recipe(data, "train.steps=5", "train.log_every=1"), out=run, quiet=True)
    lines = (run / name).read_bytes().splitlines(keepends=True)
    (run / name).write_bytes(b"damaged\n" + b"".join(lines))
    (run / "checkpoints" / ".partial-step-00000009").mkdir()  # a killed run left it
    longer = ("train.steps=9", "train.log_every=1", "train.keep_checkpoints=7")
    before = content(run)
    assert refusal(data, run, *longer, resume=True) == "RUN_DAMAGED"
    assert content(run) == before
    later = b'{"step": 99}\ndamaged\n'  # after the checkpoint: cut, and never read
    (run / name).write_bytes(b"".join(lines) + later)
    train_run(tiny_recipe(data, *longer), out=run, resume=True, quiet=True)
    assert b"damaged" not in (run / name).read_bytes()
    assert not (run / "checkpoints" / ".partial-step-00000009").exists()


# a place that leads through a file is refused before any work, with its name -------------------


COMMANDS = (
    *("convert {source} {out}", "collect CartPole-v1 {out} --steps 20", "recipes cp paper {out}"),
    *("train {recipe} --out {out}", "train {recipe} data.path={out} data.source={source}"),
    "train {recipe} data.path={out} data.collect.environment=CartPole-v1",
    *("sweep {recipe} --seeds 2 --out {out}", "strategies {recipe} --out {out}"),
    "strategies {recipe} --train --out {out}",
)
CASES = [*product(COMMANDS, ("file", "link"), ("/x", "/x/y"))]
CASES += [(command, "link", "") for command in COMMANDS if " --out " in command]


@pytest.mark.parametrize(("command", "kind", "below"), CASES)
def test_a_file_or_a_link_that_leads_nowhere_is_named(
    command: str, kind: str, below: str, data: Path, tmp_path: Path, monkeypatch: Patch,
    capsys: Captured,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if kind == "file":
        Path("file").write_text("mine")
    else:
        Path("link").symlink_to("nothing")
    Path("tiny.yaml").write_text(tiny_recipe(data).to_yaml())
    words = command.format(source=data, recipe="tiny.yaml", out=f"{kind}{below}")
    assert main(words.split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error[OUTPUT_WRITE]: ")
    assert f"{kind} is not a folder (" in said and f"{kind}{below})" in said
    assert "another place" in said
    assert sorted(os.listdir()) == [kind, "tiny.yaml"]
    kept = Path("file").read_text() if kind == "file" else os.readlink("link")
    assert kept == ("mine" if kind == "file" else "nothing")


def test_an_export_says_so_too_and_asks_for_a_folder(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in (("file", "file is not a folder"), ("new", "folder does not exist")):
        with one_error("OUTPUT_WRITE", words):
            gear_offline.export_hdf5(data, tmp_path / place / "x.hdf5", quiet=True)
    assert os.listdir(tmp_path) == ["file"]


def test_a_name_that_is_no_text_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """As a name in Latin-1; TensorBoard would fail on it after everything is loaded."""
    place = tmp_path / "b\udce4r"
    assert failing_code(lambda: RunDirectory(place)) == "OUTPUT_WRITE"
    assert not place.exists()


@pytest.mark.parametrize("words", ["convert {data} {out}/d", "recipes cp paper {out}/mine.yaml"])
def test_a_folder_that_may_not_be_written_is_one_error(
    data: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured, words: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert main(words.format(data=data, out=tmp_path).split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error[OUTPUT_WRITE]: you may not write in") and said.count("\n") == 1
    assert os.listdir(tmp_path) == []
