"""What other users, other jobs and other people's files can reach: nothing."""

import json
import os
import pickle
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import h5py
import pytest
import xxhash

import gear_offline as go
from gear_offline.batches.tables.shared import SharedMemory
from gear_offline.config.files import copy_recipe
from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import make_environment
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.resolve import resolve
from tests.checkpoint_support import write_run
from tests.support import (
    ROOT,
    Captured,
    failing_code,
    make_dataset,
    one_error,
    run_python,
    write_hdf5,
)
from tests.training_support import tiny_recipe

NOBODY = 65534
ATTACH_AS_NOBODY = f"""
import errno, json, os, sys
from gear_offline.errors import GearError
from gear_offline.batches.tables.shared import Handle, SharedMemory
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
    print(error.code, error.problem)
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


def wrapper(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"name": name, "entry_point": f"gymnasium.wrappers:{name}", "kwargs": kwargs}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"additional_wrappers": [wrapper("FrameStackObservation", stack_size=40)]}, "is 40"),
        ({"additional_wrappers": [wrapper("DelayObservation", delay=3e7)]}, "beyond 16"),
        ({"additional_wrappers": [wrapper("ResizeObservation", shape=[9, 10**6])]}, "1,000,000"),
        ({"additional_wrappers": [wrapper("RepeatAction", num_repeats=2)]}, "none of the plain"),
        ({"additional_wrappers": [wrapper("FlattenObservation")] * 2}, "there twice"),
        ({"additional_wrappers": [wrapper("ClipReward")] * 200}, "more than 16,384 characters"),
        ({"additional_wrappers": ["x"]}, "is no mapping"),
        ({"max_episode_steps": 10**12}, "max_episode_steps is 1,000,000,000,000"),
        ({"g": {"a": [0, [1e9]]}}, "g a is 1,000,000,000"),
        ({"g": 10**400}, "g is "),
        ({"render_mode": "human"}, "a path or a window"),
        ({"xml_file": "/dev/zero"}, "'/dev/zero', a path"),
    ],
)
@pytest.mark.parametrize("plays", [True, False])
def test_a_file_makes_no_large_environment(
    options: dict[str, Any], problem: str, plays: bool, tmp_path: Path, capfd: Captured
) -> None:
    """The environment of a file is made with a short list of options; the user types others."""
    with h5py.File(write_hdf5(tmp_path / "a.hdf5"), "a") as file:
        file.attrs["env_id"], file.attrs["env_options"] = "Pendulum-v1", json.dumps(options)
    go.convert(tmp_path / "a.hdf5", tmp_path / "d", quiet=True)
    dataset, how = go.open_dataset(tmp_path / "d"), f"evaluate.episodes={int(plays)}"
    made = Mock(side_effect=AssertionError("it is made"))
    with patch("gymnasium.make", made):
        resolved, _ = resolve(tiny_recipe(dataset.path, how), dataset)
        assert problem in capfd.readouterr().err
        with one_error("ENVIRONMENT", "a file alone names the options"):
            evaluate(write_run(tmp_path / "run", options=options), quiet=True)
    assert resolved.evaluate.environment == (None if plays else "Pendulum-v1")


def test_a_user_types_what_a_file_may_not_ask_for(tmp_path: Path) -> None:
    options = {"additional_wrappers": [wrapper("FrameStackObservation", stack_size=40)]}
    run = write_run(tmp_path / "run", options=options)
    with one_error("ENVIRONMENT", "stack_size is 40, beyond 16") as caught:
        evaluate(run, quiet=True)
    typed = re.search(r"environment_options='(.*?)' with", caught.value.remedy)
    assert typed
    for _ in range(2):  # it is made, and does not fit the model
        with one_error("ENVIRONMENT", "120 observation values"):
            evaluate(run, environment_options=json.loads(typed[1]), quiet=True)
        with one_error("ENVIRONMENT", "120 observation values"):
            evaluate(run, quiet=True)  # as he has typed them before
    go.load_recipe("smoke", {"evaluate.environment_options": {"g": 5000.0}})
    with make_environment("Pendulum-v1", {"g": 5000.0}) as environment:
        assert environment.raw.get_wrapper_attr("g") == 5000.0
    with one_error("ENVIRONMENT", "g is -Infinity") as caught:  # as Minari's specs may say
        make_environment("Pendulum-v1", {"g": "-Infinity"})
    typed = re.search(r"environment_options='(.*?)' with", caught.value.remedy)
    assert typed and go.load_recipe("smoke", [f"evaluate.environment_options={typed[1]}"])


STRANGE: dict[str, dict[str, object]] = {
    "model.kind": {"model": {"kind": "NAME"}},
    "selection.strategy": {"selection": {"strategy": "NAME"}},
    "selection": {
        "selection": {"strategy": "mixture", "parts": [{"strategy": "NAME"}, {"strategy": "top_k"}]}
    },
    "evaluate.environment": {"evaluate": {"environment": "NAME"}},
    "data.collect.environment": {"data": {"path": "new", "collect": {"environment": "NAME"}}},
    "train.trackers": {"train": {"trackers": ["NAME"]}},
    "train.callbacks": {"train": {"callbacks": ["NAME"]}},
}


@pytest.mark.parametrize(
    ("option", "parts"),
    [*((option, "") for option in STRANGE), ("train.callbacks", "parts: {NAME: DIGEST}\n")],
)
def test_a_strangers_recipe_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, parts: str
) -> None:
    """By no door, in no form; it does when the user types the name himself."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    make_dataset(tmp_path, [5, 5], state_dim=3, action_dim=1, environment_id=None)
    file, ran = tmp_path / "evil.py", tmp_path / "RAN"
    file.write_text(f"open({str(ran)!r}, 'w').close()\nraise SystemExit\n")
    name, digest = f"{file}:C", xxhash.xxh3_128_hexdigest(file.read_bytes())
    text = f"base: above.yaml\nname: run\n{parts}"
    Path("run").mkdir()
    Path("run/above.yaml").write_text(json.dumps({"base": "smoke", **STRANGE[option]}))
    for place in (Path("run/above.yaml"), Path("run/recipe.yaml")):
        content = place.read_text() if place.exists() else text
        place.write_text(content.replace("NAME", name).replace("DIGEST", f"xxh3-128:{digest}"))
    Path("mine.yaml").write_text("base: run\n")
    Path("linked.yaml").symlink_to("run/recipe.yaml")
    theirs = go.open_run("run").recipe
    Path("kept.yaml").write_text(theirs.to_yaml())
    options = {"train.steps": 2, "train.device": "cpu"}
    options |= {"data.path": "dataset"} if option[:4] != "data" else {}
    forms: list[Any] = ["run", "run/recipe.yaml", "mine.yaml", "linked.yaml", "kept.yaml", theirs]
    forms += [
        copy_recipe("run", "copied.yaml"),
        go.load_recipe("mine.yaml"),
        theirs.replace(options),
        theirs.model_copy(),
    ]
    forms += [Recipe.parse(theirs.to_dict()), pickle.loads(pickle.dumps(theirs))]
    for number, form in enumerate(forms):
        with suppress(GearError):
            go.train(form, options, out=f"out{number}", quiet=True)
        with suppress(GearError):
            go.sweep(form, options, parallel=1, out=f"sweep{number}", quiet=True)
        with suppress(GearError):
            go.GearLoader.from_recipe(form, options)
        assert not ran.exists() and not Path("state").exists(), form
    # an environment gives way to data that are named
    assert option[-11:] == "environment" or not Path("out0/checkpoints").exists()
    value = [name] if option.startswith("train.") else name
    words = {"selection": {"strategy": name}} if option == "selection" else {option: value}
    with pytest.raises(GearError, match="SystemExit"):
        go.train("run", {**options, **words}, out="typed", quiet=True)
    assert ran.exists() and name in Path("state/gear-offline/parts.jsonl").read_text()


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
