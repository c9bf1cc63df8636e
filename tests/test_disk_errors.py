"""Full and failing disks under training: one error, the old state."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from gear_offline.cli.main import main
from gear_offline.errors import GearError
from gear_offline.runs.loop import train_run
from gear_offline.training.checkpoint import list_checkpoints
from tests.support import one_error
from tests.training_support import learnt, tiny_recipe

pytestmark = pytest.mark.usefixtures("no_reports")


def failing(original: Callable[..., Any], number: int, after: int) -> Callable[..., Any]:
    """Return `original`, which fails from its call `after` on."""
    calls = 0

    def call(*values: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= after:
            raise OSError(number, os.strerror(number))
        return original(*values, **options)

    return call


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "save_file"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_run_on_a_bad_disk_is_one_error_and_goes_on_later(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    run = tmp_path / "run"
    train_run(tiny_recipe(data, "train.steps=7"), out=run, quiet=True)
    before = [step for step, _ in list_checkpoints(run / "checkpoints")]
    with monkeypatch.context() as patched:
        place: Any = safetensors.torch if call == "save_file" else os
        refuse = failing(getattr(place, call), number, 2 if call == "fsync" else 1)
        patched.setattr(place, call, refuse)
        with pytest.raises(GearError) as caught:
            train_run(tiny_recipe(data), out=run, resume=True, quiet=True)
    assert (caught.value.code, caught.value.exit_code) == ("OUTPUT_WRITE", 1)
    assert str(run) in str(caught.value) and caught.value.remedy
    assert "gear-saver" not in [thread.name for thread in threading.enumerate()]
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == before
    train_run(tiny_recipe(data), out=run, resume=True, quiet=True)
    found, expected = learnt(run), learnt(whole)
    assert (found["model"], found["training"]) == (expected["model"], expected["training"])
    assert not list((run / "checkpoints").glob(".*"))


def test_metrics_that_cannot_be_written_are_one_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write = os.write

    def full(file: int, content: bytes) -> int:
        if b'"loss"' in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content)

    monkeypatch.setattr(os, "write", full)
    with one_error("OUTPUT_WRITE", "no space left"):
        train_run(tiny_recipe(data), out=tmp_path / "run", quiet=True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("words", ["convert {data} {out}/d", "recipes cp paper {out}/mine.yaml"])
def test_a_folder_that_may_not_be_written_is_one_error(
    data: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert main(words.format(data=data, out=tmp_path).split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error[OUTPUT_WRITE]: you may not write in") and said.count("\n") == 1
    assert os.listdir(tmp_path) == []
