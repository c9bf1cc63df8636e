"""The run directory: whole files, one writer, and no run is overwritten by accident."""

import fcntl
import os
from pathlib import Path

import pytest

from gear_offline.config.recipe import load_recipe
from gear_offline.errors import InputError
from gear_offline.runs.directory import RunDirectory
from tests.support import run_python


def code_of(path: Path, *, resume: bool) -> str:
    try:
        RunDirectory(path, resume=resume).close()
    except InputError as error:
        return error.code
    return ""


def test_a_run_is_not_begun_twice(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "x"
    with RunDirectory(path) as run:
        run.begin(load_recipe("paper"), step=0)
        assert load_recipe(run.recipe_path) == load_recipe("paper") == load_recipe(path)
        assert code_of(path, resume=True) == "RUN_LOCKED"
    (path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert code_of(path, resume=False) == "OUTPUT_EXISTS"
    assert code_of(path, resume=True) == ""


def test_an_empty_or_just_begun_directory_may_be_used(tmp_path: Path) -> None:
    assert code_of(tmp_path, resume=False) == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".lock").touch()
    assert code_of(tmp_path, resume=False) == "", "killed before it wrote anything"


def test_foreign_directories_and_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert code_of(tmp_path, resume=False) == "OUTPUT_EXISTS"
    assert code_of(tmp_path, resume=True) == "OUTPUT_EXISTS"
    assert code_of(tmp_path / "thesis.txt", resume=False) == "OUTPUT_WRITE"
    assert code_of(tmp_path / "thesis.txt" / "run", resume=False) == "OUTPUT_WRITE"
    assert sorted(os.listdir(tmp_path)) == ["thesis.txt"]


def test_a_folder_with_a_recipe_of_the_users_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("base: paper  # mine")
    (tmp_path / "plots").mkdir()
    assert code_of(tmp_path, resume=False) == "OUTPUT_EXISTS"
    assert code_of(tmp_path, resume=True) == "OUTPUT_EXISTS"
    assert sorted(os.listdir(tmp_path)) == ["plots", "recipe.yaml"]
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert code_of(tmp_path, resume=True) == "", "a copy without hidden files"


def test_one_writer_also_across_processes(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "a"):
        assert code_of(tmp_path / "a", resume=True) == "RUN_LOCKED"
        program = (
            "import sys; from pathlib import Path\n"
            "from gear_offline.runs.directory import RunDirectory\n"
            "from gear_offline.errors import InputError\n"
            "try: RunDirectory(Path(sys.argv[1]), resume=True)\n"
            "except InputError as error: print(error.code)\n"
        )
        found = run_python("-c", program, tmp_path / "a", check=True)
        assert found.stdout == "RUN_LOCKED\n"
    assert code_of(tmp_path / "a", resume=True) == "", "the lock ends with its holder"


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
    assert code_of(tmp_path / "other" / ("x" * 300), resume=False) == "OUTPUT_WRITE"
    assert not (tmp_path / "other").exists()


def test_a_lock_whose_file_has_gone_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder removes it between another process's opening and locking it."""
    path, flock = tmp_path / "run", fcntl.flock

    def late(lock: int, how: int) -> None:
        (path / ".lock").unlink()
        flock(lock, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", late)
        assert code_of(path, resume=False) == "RUN_LOCKED"
    assert code_of(path, resume=False) == ""


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_nothing_is_written_through_a_link(tmp_path: Path, kind: str) -> None:
    """A link to a file without a newline was cut to nothing, as if that were a torn line."""
    token, folder = tmp_path / "token", tmp_path / "folder"
    token.write_text("secret")
    (folder / "step-00000010").mkdir(parents=True)
    files = ("metrics.jsonl", "summary.json", ".lock")
    for name in ("tensorboard", "checkpoints", "plots") if kind == "folder" else files:
        run = tmp_path / f"run-{name}"
        run.mkdir()
        (run / "recipe.yaml").write_text("name: x")
        if kind == "pipe":
            os.mkfifo(run / name)
        else:
            (run / name).symlink_to(token if kind == "link" else folder)
        (run / (".lock" if name == "metrics.jsonl" else "metrics.jsonl")).touch()
        assert code_of(run, resume=True) == "RUN_DAMAGED"
    assert token.read_text() == "secret" and os.listdir(folder) == ["step-00000010"]
