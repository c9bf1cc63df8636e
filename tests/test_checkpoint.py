"""Checkpoints: every changed bit is found, nothing is ever half there, the released class reads."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DecisionTransformerModel

from gear_offline.artifacts.checkpoint import (
    Keep,
    checkpoint_name,
    chosen_checkpoint,
    find_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_checkpoint,
    remove_partial,
    seal,
)
from gear_offline.artifacts.trained import load_policy
from gear_offline.config.recipe import load_recipe
from gear_offline.errors import InputError
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from tests.checkpoint_support import RECIPE, save_checkpoint, saved_state, training_tensors
from tests.model_support import assert_same_state, load_completely
from tests.support import failing_code, one_error

FILES = ("config.json", "model.safetensors", "state.json", "training.safetensors")
CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "first bit": lambda whole: bytes([whole[0] ^ 1]) + whole[1:],
    "last bit": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "truncated": lambda whole: whole[:-7],
    "empty": lambda whole: b"",
    "longer": lambda whole: whole + b"\0",
    "zeros": lambda whole: bytes(len(whole)),
}
IN_ITS_PLACE: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.fixture(scope="module")
def model() -> DecisionTransformer:
    torch.manual_seed(3)
    return build_model(state_dim=3, action_dim=2, hidden_size=8, layers=1, max_timestep=9)


def code_of(path: Path) -> str:
    return failing_code(lambda: read_checkpoint(path))


def test_what_was_saved_is_read(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, 30)
    assert path == tmp_path / "step-00000030"
    assert sorted(os.listdir(path)) == sorted(FILES)
    assert os.listdir(tmp_path) == ["step-00000030"]
    checkpoint, saved = read_checkpoint(path), saved_state(30)
    assert checkpoint.recipe == RECIPE
    assert checkpoint.state.model_copy(update={"files": {}}) == saved  # bit for bit
    shown = checkpoint.state.window
    assert (shown.state_mean, shown.state_std) == ((0.1, 1 / 3, -1e300), (1.0, 0.0, 5e-324))
    tensors, expected = checkpoint.tensors(), training_tensors(30)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.weights()[name], tensor)


def test_plain_transformers_reads_it(
    tmp_path: Path, model: DecisionTransformer, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save_checkpoint(tmp_path, model, 1)
    assert capfd.readouterr() == ("", ""), "saving is silent"
    assert_same_state(load_completely(DecisionTransformerModel, path), model)
    text = json.loads((path / "config.json").read_text())
    assert text["architectures"] == ["DecisionTransformerModel"]
    assert load_policy(path, device="cpu").model.state_dict().keys() == model.state_dict().keys()


def test_lies_with_a_digest_that_fits(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, 5)
    honest = json.loads((path / "state.json").read_text())
    del honest["digest"]
    wrong_file = {**honest["files"], "config.json": {"bytes": -1, "xxh3_128": ""}}
    lies: dict[str, list[Any]] = {
        "format": ["another"],
        "format_version": ["1"],
        "step": [-1, 1.5, 1 << 63],
        "seconds": [-1.0],
        "recipe": [[], {"model": {"layers": "many"}}],
        "loader": [None],
        "files": [{}, wrong_file],
        "window": [None, {**honest["window"], "state_std": [1.0, -1.0, 1.0]}],
        "more": [1],
    }
    texts = [seal({**honest, key: lie}) for key in lies for lie in lies[key]]
    texts += [seal({**honest, "seconds": 8.125}).replace(b"8.125", b"1e999")]
    for text in (*texts, b"", b"[]", b"null", b"{}", b"[" * 100_000):
        (path / "state.json").write_bytes(text)
        assert code_of(path) == "RUN_DAMAGED", text[:300]
    (path / "state.json").write_bytes(seal(honest))
    assert read_checkpoint(path).state.step == 5


def damage(path: Path, kind: str) -> None:
    whole = path.read_bytes()
    path.unlink()
    if kind in CONTENTS:
        path.write_bytes(CONTENTS[kind](whole))
    else:
        IN_ITS_PLACE[kind](path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", [*CONTENTS, *IN_ITS_PLACE])
def test_every_kind_of_damage_leads_to_the_one_before(
    tmp_path: Path,
    model: DecisionTransformer,
    name: str,
    kind: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    save_checkpoint(tmp_path, model, 5)
    damage(save_checkpoint(tmp_path, model, 10) / name, kind)
    (tmp_path / checkpoint_name(11)).mkdir()
    newest = newest_checkpoint(tmp_path)
    said = capfd.readouterr().err.splitlines()
    assert newest is not None and newest.state.step == 5
    assert [line[:27] for line in said] == [f"passing over step-000000{n}:" for n in (11, 10)]
    assert all(len(line) > 40 for line in said), "the message says why"
    shutil.rmtree(tmp_path / checkpoint_name(5))
    with pytest.raises(InputError, match="none of the checkpoints is whole"):
        newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path / "none") is None


def test_one_that_may_be_whole_is_never_passed_over(
    tmp_path: Path, model: DecisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, model, 5)
    path = save_checkpoint(tmp_path, model, 10)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(InputError, match=r"Permission denied.*step-00000010") as caught:
            newest_checkpoint(tmp_path)
    assert caught.value.code == "RUN_DAMAGED"
    document = json.loads((path / "state.json").read_text())
    del document["digest"]
    (path / "state.json").write_bytes(seal({**document, "format_version": 3, "news": 1}))
    with pytest.raises(InputError, match="format version 3"):
        newest_checkpoint(tmp_path)


def test_runs_of_a_time_with_an_option_of_attention(
    tmp_path: Path, model: DecisionTransformer
) -> None:
    path = save_checkpoint(tmp_path, model, 5)
    document = json.loads((path / "state.json").read_text())
    del document["digest"]
    for named in ("auto", "sdpa"):  # as it is done now
        document["recipe"]["model"]["attention"] = named
        (path / "state.json").write_bytes(seal(document))
        assert read_checkpoint(path).recipe == RECIPE
        assert_same_state(load_policy(tmp_path / path.name, device="cpu").model, model)
    for option, value in (("attention", "eager"), ("of_later", 1)):  # another version's
        document["recipe"]["model"] = {option: value}
        (path / "state.json").write_bytes(seal(document))
        with one_error("RUN_DAMAGED", f"none for this gear-offline: .*{option}") as caught:
            newest_checkpoint(tmp_path)
        assert caught.value.remedy.startswith("use the version that wrote it")
    with one_error("RECIPE", "attention is no option any more"):
        load_recipe("smoke", ["model.attention=eager"])


def test_saving_again_replaces(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, 5)
    (path / "model.safetensors").write_bytes(b"damage")
    assert save_checkpoint(tmp_path, model, 5) == path
    read_checkpoint(path)
    assert os.listdir(tmp_path) == [path.name]


def test_the_newest_and_the_best_are_kept(tmp_path: Path, model: DecisionTransformer) -> None:
    for step in range(1, 8):
        save_checkpoint(tmp_path, model, step)
    prune(tmp_path, Keep(newest=2, best=3, pinned=(4,)))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3, 4, 6, 7]
    assert (tmp_path / "best").resolve().name == checkpoint_name(3)
    load_policy(tmp_path / "best")
    prune(tmp_path, Keep(newest=1, best=7))
    assert (tmp_path / "best").resolve().name == checkpoint_name(7)
    prune(tmp_path, Keep(newest=1))
    assert sorted(os.listdir(tmp_path)) == ["best", checkpoint_name(7)]


def test_a_run_that_was_copied_with_its_links_followed(
    tmp_path: Path, model: DecisionTransformer
) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "run" / "checkpoints", model, step)
    prune(tmp_path / "run" / "checkpoints", Keep(newest=1, best=2))
    folder = shutil.copytree(tmp_path / "run", tmp_path / "copy") / "checkpoints"
    assert not (folder / "best").is_symlink()
    load_policy(folder / "best")
    prune(folder, Keep(newest=1, best=3))
    assert sorted(os.listdir(folder)) == ["best", checkpoint_name(3)]
    assert find_checkpoint(folder.parent, "best") == folder / checkpoint_name(3)


def test_acting_reads_no_moments(tmp_path: Path, model: DecisionTransformer) -> None:
    """They are two thirds of a checkpoint."""
    path = save_checkpoint(tmp_path / "checkpoints", model, 5)
    (path / "training.safetensors").unlink()
    for place in (tmp_path, path):
        assert chosen_checkpoint(place).recipe == RECIPE
    assert code_of(path) == "RUN_DAMAGED"


@pytest.mark.parametrize("name", FILES[:3])
def test_a_checkpoint_that_is_pruned_while_it_is_read_gives_way_to_a_newer_one(
    name: str, tmp_path: Path, model: DecisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run saves another one and removes the first just before one of its files is opened."""
    folder, opened = tmp_path / "checkpoints", os.open
    first = save_checkpoint(folder, model, 5)

    def prune_first(path: Any, *rest: Any, **options: Any) -> int:
        if str(path) == str(first / name):
            monkeypatch.undo()
            save_checkpoint(folder, model, 10)
            prune(folder, Keep(newest=1))
        return opened(path, *rest, **options)

    monkeypatch.setattr(os, "open", prune_first)
    assert load_policy(tmp_path, device="cpu").facts.step == 10
    with one_error("RUN_NOT_FOUND", "no checkpoint '5'"):
        load_policy(tmp_path, device="cpu", checkpoint=5)


def test_what_is_no_run_is_said(tmp_path: Path, model: DecisionTransformer) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").touch()
    for place, what in (("none", "no such run"), ("data", "a dataset"), (".", "no run in")):
        with one_error("RUN_NOT_FOUND", what):
            find_checkpoint(tmp_path / place)
    assert failing_code(lambda: load_policy(tmp_path / "none")) == "RUN_NOT_FOUND"
    (tmp_path / "checkpoints").mkdir()
    assert failing_code(lambda: load_policy(tmp_path)) == "RUN_NOT_FOUND"


def test_leftovers_are_swept_and_never_taken(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, 5)
    for name in (".partial-step-00000009", ".removed-step-00000004"):
        shutil.copytree(path, tmp_path / name)
    (tmp_path / ".partial-best").symlink_to(path)
    (tmp_path / "step-00000010.bak").mkdir()
    (tmp_path / "step-00000011").write_text("a file")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5]
    remove_partial(tmp_path)
    kept = [path.name, "step-00000010.bak", "step-00000011"]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
