"""A place that leads through a file is refused before any work, with the name of that file."""

import os
from pathlib import Path

import pytest

import gear_offline
from gear_offline.cli.main import main
from gear_offline.runs.directory import RunDirectory
from tests.support import Captured, Patch, failing_code, one_error
from tests.training_support import tiny_recipe

COMMANDS = {  # and their codes
    "convert {source} {out}": "OUTPUT_WRITE",
    "collect CartPole-v1 {out} --steps 20": "OUTPUT_WRITE",
    "train {recipe} --out {out}": "OUTPUT_WRITE",
    "train {recipe} data.path={out} data.source={source}": "OUTPUT_WRITE",
    "train {recipe} data.path={out} data.collect.environment=CartPole-v1": "OUTPUT_WRITE",
    "sweep {recipe} --seeds 2 --out {out}": "OUTPUT_WRITE",
    "strategies {recipe} --out {out}": "OUTPUT_WRITE",
    "strategies {recipe} --train --out {out}": "OUTPUT_WRITE",
    "recipes cp paper {out}": "OUTPUT_WRITE",
}


CASES = [
    (command, kind, below)
    for command in COMMANDS
    for kind in ("file", "link")
    for below in ("/x", "/x/y")
]
CASES += [(command, "link", "") for command in COMMANDS if " --out " in command]


def refused(command: str, out: str, data: Path, capsys: Captured) -> str:
    """Return the line that a command of `COMMANDS` ends with, which may not write to `out`."""
    Path("tiny.yaml").write_text(tiny_recipe(data).to_yaml())
    assert main(command.format(source=data, recipe="tiny.yaml", out=out).split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error[{COMMANDS[command]}]: ")
    return said


@pytest.mark.parametrize(("command", "kind", "below"), CASES)
def test_a_file_or_a_link_that_leads_nowhere_is_named(
    command: str,
    kind: str,
    below: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "file":
        Path("file").write_text("mine")
    else:
        Path("link").symlink_to("nothing")
    said = refused(command, f"{kind}{below}", data, capsys)
    assert f"{kind} is not a folder ({kind}{below}" in said and "move it away" in said
    assert sorted(os.listdir()) == [kind, "tiny.yaml"]
    kept = Path("file").read_text() if kind == "file" else os.readlink("link")
    assert kept == ("mine" if kind == "file" else "nothing")


def test_an_export_says_so_too_and_asks_for_a_folder(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in (("file", "file is not a folder"), ("new", "does not exist .*; make it")):
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
