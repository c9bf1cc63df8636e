"""What other users, other jobs and other people's files can reach: nothing."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

import gear_offline as go
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.prepare import resolve
from gear_offline.tables.shared import SharedMemory
from tests.checkpoint_support import write_run
from tests.support import ROOT, failing_code, make_dataset, one_error, run_python
from tests.training_support import tiny_recipe

NOBODY = 65534
ATTACH_AS_NOBODY = f"""
import errno, json, os, sys
from gear_offline.errors import GearError
from gear_offline.tables.shared import Handle, SharedMemory
handle = Handle(**json.loads(sys.argv[1]))
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
path = f"/proc/{{handle.process}}/fd/{{handle.descriptor}}"
for flags in (os.O_RDONLY, os.O_RDWR):
    try:
        os.open(path, flags)
    except OSError as error:
        print(errno.errorcode[error.errno])
try:
    SharedMemory.attach(handle)
except GearError as error:
    print(error.code, error.what)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user: run as root")
def test_another_user_cannot_reach_a_shared_table() -> None:
    block = SharedMemory.create(1 << 16)
    found = run_python("-c", ATTACH_AS_NOBODY, json.dumps(asdict(block.handle())))
    lines = found.stdout.splitlines()
    assert lines[:2] == ["EACCES", "EACCES"], found.stderr
    assert lines[2].startswith("MEMORY") and "Permission denied" in lines[2]


def test_a_file_cut_short_under_a_reader(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [500, 500])
    rows = dataset.stream(0, "observations", chunk_bytes=64)
    next(rows)
    os.truncate(dataset.path / dataset.manifest.shards[0].name, 100)
    assert failing_code(lambda: list(rows)) == "DATASET_DAMAGED"


def test_a_file_names_no_module_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A module that only a dataset or a run names is not run; one that the user names is."""
    (tmp_path / "strange_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "strange_module:Own-v0"
    dataset = make_dataset(tmp_path, [3, 3], environment_id=name)
    resolved, _ = resolve(tiny_recipe(dataset.path), dataset)
    assert resolved.evaluate.environment is None
    assert f"'{name}' would import a module" in capfd.readouterr().err
    run = write_run(tmp_path / "run", environment=name)
    with one_error("ENVIRONMENT", f"'{name}' would import") as caught:
        evaluate(run, quiet=True)
    assert name in caught.value.remedy
    away = write_run(tmp_path / "away", environment="/home/her/own.py:Own")  # where nobody is here
    with one_error("ENVIRONMENT", "/home/her/own.py, .* is not here") as caught:
        evaluate(away, quiet=True)
    assert caught.value.remedy.endswith("--environment own.py:Own")
    with one_error("ENVIRONMENT", "SystemExit: imported"):
        evaluate(run, environment=name, quiet=True)
    own = {"evaluate.environment": name, "data.path": str(dataset.path)}
    with one_error("ENVIRONMENT", "SystemExit: imported"):
        go.train("paper", own, out=tmp_path / "new", quiet=True)
    run = write_run(tmp_path / "other", environment=name)  # of which nobody has typed it yet
    (run / "recipe.yaml").write_text(f"{{base: paper, evaluate: {{environment: '{name}'}}}}")
    with one_error("RUN_MISMATCH"):
        go.train(run, {"data.path": str(dataset.path)}, resume=True, quiet=True)
    with one_error("ENVIRONMENT", "SystemExit: imported"):
        named = {"data.path": str(dataset.path), "evaluate": {"environment": name}}
        go.train(run, named, resume=True, quiet=True)


def test_the_source_has_no_way_to_run_what_it_reads() -> None:
    banned = re.compile(
        r"import (?:pickle|marshal|shelve|dill|joblib|cloudpickle)|from (?:pickle|marshal) "
        r"|torch\.load|(?<!safetensors\.)torch\.save|allow_pickle=True|weights_only=False"
        r"|trust_remote_code=True|shell=True|(?<![\w.])(?:eval|exec)\("
        r"|yaml\.(?:unsafe_|full_)?load\((?!text, Loader=_L)"
    )
    rooms = ("gear_offline", "loaders", "models", "kernels", "recipes")
    files = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 80
    assert banned.search("x = yaml.load(text)") and banned.search("torch.load(path)")
    found = [
        f"{path}: {match.group()}"
        for path in files
        for match in banned.finditer(path.read_text("utf-8"))
        if path.name != "workers.py"  # reads what its own caller sends
    ]
    assert found == []
