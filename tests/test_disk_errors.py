"""Full, failing and read-only disks under training and conversion: one error, the old state."""

import errno
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from gear_offline.errors import GearError
from gear_offline.runs.loop import train
from gear_offline.training.checkpoint import list_checkpoints
from tests.support import one_error, run_python, write_hdf5
from tests.training_support import learnt, tiny_recipe

NOBODY = 65534

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
    train(tiny_recipe(data, "train.steps=7"), out=run, quiet=True)
    before = [step for step, _ in list_checkpoints(run / "checkpoints")]
    with monkeypatch.context() as patched:
        place: Any = safetensors.torch if call == "save_file" else os
        refuse = failing(getattr(place, call), number, 2 if call == "fsync" else 1)
        patched.setattr(place, call, refuse)
        with pytest.raises(GearError) as caught:
            train(tiny_recipe(data), out=run, resume=True, quiet=True)
    assert (caught.value.code, caught.value.exit_code) == ("OUTPUT_WRITE", 1)
    assert str(run) in str(caught.value) and caught.value.remedy
    assert "gear-saver" not in [thread.name for thread in threading.enumerate()]
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == before
    train(tiny_recipe(data), out=run, resume=True, quiet=True)
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
        train(tiny_recipe(data), out=tmp_path / "run", quiet=True)
    assert capfd.readouterr().err == ""


AS_NOBODY = f"""
import json, os, sys
os.chdir(sys.argv[1])
from gear_offline.cli import main as cli
for arguments in json.loads(sys.argv[2]):
    assert cli.main(arguments) == 0  # what is imported late is imported now
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
for arguments in json.loads(sys.argv[3]):
    print(cli.main(arguments), file=sys.stderr)
"""


def test_places_that_may_not_be_written() -> None:
    """Read-only targets; root becomes another user for this."""
    with tempfile.TemporaryDirectory() as temporary:  # others cannot enter pytest's folders
        folder = Path(temporary)
        write_hdf5(folder / "x.hdf5")
        for name, mode in (("here", 0o755), ("there", 0o555)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
        folder.chmod(0o755)
        good, bad = (
            [
                ["convert", "x.hdf5", f"{place}/d", "--quiet"],
                ["recipes", "cp", "paper", f"{place}/mine.yaml"],
            ]
            for place in ("here", "there")
        )
        found = run_python("-c", AS_NOBODY, temporary, json.dumps(good), json.dumps(bad))
        lines = found.stderr.splitlines()[-4:]
        codes = [line.partition("]")[0] for line in lines[::2]]
        assert codes == ["error[OUTPUT_WRITE", "error[OUTPUT_WRITE"], found.stderr
        assert lines[1::2] == ["2", "2"]
        assert os.listdir(folder / "there") == []
