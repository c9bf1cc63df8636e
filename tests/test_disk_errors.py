"""Full, failing and read-only disks under training and conversion: one error, the old state."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gear_offline.errors import GearError
from gear_offline.runs.loop import train
from gear_offline.training.checkpoint_folder import list_checkpoints
from tests.support import write_hdf5
from tests.training_support import learnt, tiny_recipe

ROOT = Path(__file__).parents[1]
NOBODY = 65534


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gear_offline.runs.report.write_report", lambda run: run)
        run = train(tiny_recipe(data), out=tmp_path_factory.mktemp("runs") / "whole", quiet=True)
    return learnt(run)


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


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "OUTPUT_WRITE"), (errno.EIO, "OUTPUT_WRITE")]
)
def test_a_run_on_a_bad_disk_is_one_error_and_goes_on_later(
    data: Path,
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    code: str,
) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    run = tmp_path / "run"
    train(tiny_recipe(data, "train.steps=7"), out=run, quiet=True)
    before = [step for step, _ in list_checkpoints(run / "checkpoints")]
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(getattr(os, call), number, 2 if call == "fsync" else 1))
        with pytest.raises(GearError) as caught:
            train(tiny_recipe(data), out=run, resume=True, quiet=True)
    assert (caught.value.code, caught.value.exit_code) == (code, 1)
    assert str(run) in str(caught.value) and caught.value.remedy
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == before
    train(tiny_recipe(data), out=run, resume=True, quiet=True)
    found = learnt(run)
    assert (found["model"], found["training"]) == (whole["model"], whole["training"])
    assert not list((run / "checkpoints").glob(".*"))


def test_metrics_that_cannot_be_written_are_one_error(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write = os.write

    def full(file: int, content: bytes) -> int:
        if b'"loss"' in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(GearError, match="no space left") as caught:
        train(tiny_recipe(data), out=tmp_path / "run", quiet=True)
    assert caught.value.code == "OUTPUT_WRITE" and capfd.readouterr().err == ""


FULL = """
import sys
from pathlib import Path
import gear_offline.runs.report
from gear_offline.errors import GearError
from gear_offline.runs.loop import train
from tests.training_support import register_environment, tiny_recipe
gear_offline.runs.report.write_report = lambda run, **_: run
register_environment()
try:
    train(tiny_recipe(Path(sys.argv[1])), out=Path(sys.argv[2]), quiet=True)
except GearError as error:
    print(error.code)
"""


def test_a_real_limit_inside_a_checkpoint(data: Path, tmp_path: Path) -> None:
    """The kernel refuses to write more in the middle of the tensors."""
    found = subprocess.run(
        [sys.executable, "-c", FULL, str(data), str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000)),
    )
    assert found.stdout.split() == ["OUTPUT_WRITE"], found.stderr
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


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
        found = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, temporary, json.dumps(good), json.dumps(bad)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = found.stderr.splitlines()[-4:]
        codes = [line.partition("]")[0] for line in lines[::2]]
        assert codes == ["error[OUTPUT_WRITE", "error[OUTPUT_WRITE"], found.stderr
        assert lines[1::2] == ["2", "2"]
        assert os.listdir(folder / "there") == []
