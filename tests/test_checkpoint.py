"""Checkpoints: every changed bit is found, nothing is ever half there, the released class reads."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DecisionTransformerModel

from gear_offline.config.recipe import load_recipe
from gear_offline.errors import InputError
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.training.checkpoint import (
    TrainingState,
    load_policy_parts,
    newest_checkpoint,
    read_checkpoint,
    read_state,
    save_checkpoint,
)
from gear_offline.training.checkpoint_folder import (
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    prune,
    sweep,
)
from tests.damage import DAMAGE, damage
from tests.support import failing_code

RECIPE = load_recipe("smoke")
FILES = ("config.json", "model.safetensors", "state.json", "training.safetensors")


@pytest.fixture(scope="module")
def model() -> DecisionTransformer:
    torch.manual_seed(3)
    return build_model(state_dim=3, action_dim=2, hidden_size=8, layers=1, max_timestep=9)


def state(step: int) -> TrainingState:
    generator = torch.Generator().manual_seed(step)
    return TrainingState(
        step=step,
        recipe=RECIPE,
        tensors={
            "optimizer/exp_avg/w": torch.randn(4, generator=generator),
            "random/cpu": torch.arange(9, dtype=torch.uint8),
            "window": torch.zeros(0, 2),
        },
        loader={"step": step, "seed": 0},
        state_mean=np.array([0.1, 1 / 3, -1e300]),
        state_std=np.array([1.0, 0.0, 5e-324]),  # 0: an observation that never changes
        seconds=1.25,
    )


def code_of(path: Path) -> str:
    try:
        read_checkpoint(path)
    except InputError as error:
        return error.code
    return ""


def test_what_was_saved_is_read(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, state(30))
    assert path == tmp_path / "step-00000030"
    assert sorted(os.listdir(path)) == sorted(FILES)
    assert os.listdir(tmp_path) == ["step-00000030"]
    found, saved = read_checkpoint(path), state(30)
    assert (found.state.step, found.state.seconds) == (30, 1.25)
    assert found.state.recipe == RECIPE
    assert found.state.loader == saved.loader
    np.testing.assert_array_equal(found.state.state_mean, saved.state_mean)  # bit for bit
    np.testing.assert_array_equal(found.state.state_std, saved.state_std)
    assert found.state.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(found.state.tensors[name], tensor)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.model[name], tensor)
    assert read_state(path)["files"].keys() == set(FILES) - {"state.json"}


def test_states_that_were_not_normalised(tmp_path: Path, model: DecisionTransformer) -> None:
    raw = TrainingState(**{**vars(state(1)), "state_mean": None, "state_std": None})
    found = read_checkpoint(save_checkpoint(tmp_path, model, raw))
    assert found.state.state_mean is None
    assert found.state.state_std is None


def test_the_released_class_reads_it(
    tmp_path: Path, model: DecisionTransformer, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save_checkpoint(tmp_path, model, state(1))
    assert capfd.readouterr() == ("", ""), "saving is silent"
    loaded: Any = DecisionTransformerModel.from_pretrained(path, output_loading_info=True)
    released, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in released.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert json.loads((path / "config.json").read_text())["architectures"] == [
        "DecisionTransformerModel"
    ]
    ours = load_policy_parts(path).model
    assert ours.state_dict().keys() == released.state_dict().keys()


def test_every_flipped_bit_is_found(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, state(5))
    generator = random.Random(0)
    flips = 0
    for name in FILES:
        whole = (path / name).read_bytes()
        places = generator.sample(range(len(whole)), 700 if name == "state.json" else 100)
        for place in [*places, 0, len(whole) - 1]:
            changed = bytearray(whole)
            changed[place] ^= 1 << generator.randrange(8)
            (path / name).write_bytes(changed)
            if name == "state.json":
                with pytest.raises(InputError) as caught:
                    read_state(path)
                assert caught.value.code == "CHECKPOINT_DAMAGED"
            else:
                assert code_of(path) == "CHECKPOINT_DAMAGED", (name, place)
            flips += 1
        for cut in (0, 1, len(whole) // 2, len(whole) - 1):
            (path / name).write_bytes(whole[:cut])
            assert code_of(path) == "CHECKPOINT_DAMAGED", (name, cut)
        (path / name).write_bytes(whole + b"\n")
        assert code_of(path) == "CHECKPOINT_DAMAGED", "a byte too many"
        (path / name).write_bytes(whole)
    assert flips > 1000
    assert code_of(path) == ""


def test_missing_files_and_foreign_ones(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, state(5))
    for name in FILES:
        shutil.copytree(path, tmp_path / "copy")
        (tmp_path / "copy" / name).unlink()
        expected = "CHECKPOINT_MISSING" if name == "state.json" else "CHECKPOINT_DAMAGED"
        assert code_of(tmp_path / "copy") == expected
        shutil.rmtree(tmp_path / "copy")
    other = save_checkpoint(tmp_path / "other", model, state(6))
    shutil.copy(other / "training.safetensors", path)
    assert code_of(path) == "CHECKPOINT_DAMAGED", "files of two checkpoints do not mix"
    for text in ("", "[]", "null", "{}", "[" * 100_000, '{"format": "gear-offline checkpoint"}'):
        (path / "state.json").write_text(text)
        assert code_of(path) == "CHECKPOINT_DAMAGED"


def test_a_newer_format_is_named(
    tmp_path: Path, model: DecisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("gear_offline.training.checkpoint_saving.FORMAT_VERSION", 3)
        path = save_checkpoint(tmp_path, model, state(5))
    assert code_of(path) == "CHECKPOINT_VERSION"
    with pytest.raises(InputError, match="format version 3") as caught:
        newest_checkpoint(tmp_path, lambda message: None)
    assert caught.value.code == "CHECKPOINT_VERSION", "never passed over in favour of an old one"


def test_one_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, model: DecisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, model, state(5))
    path = save_checkpoint(tmp_path, model, state(10))

    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(InputError, match="Permission denied") as caught:
            newest_checkpoint(tmp_path, lambda message: None)
    assert caught.value.code == "CHECKPOINT_READ", "never passed over in favour of an old one"
    assert path.name in caught.value.where


@pytest.mark.parametrize("name", ["write_tensors", "sync_directory"])
def test_a_full_disk_is_one_error(
    tmp_path: Path, model: DecisionTransformer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_checkpoint(tmp_path, model, state(5))
    monkeypatch.setattr(f"gear_offline.training.checkpoint_saving.{name}", refuse)
    assert failing_code(lambda: save_checkpoint(tmp_path, model, state(10))) == "OUTPUT_WRITE"
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5]


def test_the_newest_whole_one_is_taken(tmp_path: Path, model: DecisionTransformer) -> None:
    said: list[str] = []
    assert newest_checkpoint(tmp_path / "none", said.append) is None
    assert newest_checkpoint(tmp_path, said.append) is None
    for step in (5, 10, 100_000_000):
        save_checkpoint(tmp_path, model, state(step))
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None
    assert (found.state.step, said) == (100_000_000, [])
    for step in (100_000_000, 10):
        (tmp_path / checkpoint_name(step) / "config.json").write_text("{}")
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None
    assert found.state.step == 5
    assert [line.split()[2] for line in said] == ["step-100000000:", "step-00000010:"]
    shutil.rmtree(tmp_path / checkpoint_name(5) / "config.json", ignore_errors=True)
    (tmp_path / checkpoint_name(5) / "config.json").unlink()
    with pytest.raises(InputError, match="none of the checkpoints is whole"):
        newest_checkpoint(tmp_path, said.append)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_leads_to_the_one_before(
    tmp_path: Path, model: DecisionTransformer, name: str, kind: str
) -> None:
    said: list[str] = []
    save_checkpoint(tmp_path, model, state(5))
    damage(save_checkpoint(tmp_path, model, state(10)) / name, kind)
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None and found.state.step == 5
    assert len(said) == 1 and said[0].startswith("passing over step-00000010: ")
    assert len(said[0]) > 40, "the message says why"


def test_an_empty_directory_is_passed_over(tmp_path: Path, model: DecisionTransformer) -> None:
    said: list[str] = []
    save_checkpoint(tmp_path, model, state(5))
    (tmp_path / checkpoint_name(10)).mkdir()
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None and found.state.step == 5 and len(said) == 1


def test_saving_again_replaces(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, state(5))
    (path / "model.safetensors").write_bytes(b"damage")
    assert save_checkpoint(tmp_path, model, state(5)) == path
    assert code_of(path) == ""
    assert os.listdir(tmp_path) == [path.name]


def test_the_newest_and_the_best_are_kept(tmp_path: Path, model: DecisionTransformer) -> None:
    for step in range(1, 7):
        save_checkpoint(tmp_path, model, state(step))
    prune(tmp_path, keep=2, best=3)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3, 5, 6]
    assert (tmp_path / "best").resolve().name == checkpoint_name(3)
    assert load_policy_parts(tmp_path / "best").recipe == RECIPE
    prune(tmp_path, keep=1, best=6)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [6]
    assert (tmp_path / "best").resolve().name == checkpoint_name(6)
    prune(tmp_path, keep=1, best=None)
    assert sorted(os.listdir(tmp_path)) == ["best", checkpoint_name(6)]


def test_best_is_a_file_where_there_are_no_links(
    tmp_path: Path, model: DecisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        save_checkpoint(folder, model, state(step))
    monkeypatch.setattr(Path, "symlink_to", refuse)
    prune(folder, keep=1, best=2)
    assert sorted(os.listdir(folder)) == ["best", checkpoint_name(2), checkpoint_name(3)]
    assert load_policy_parts(folder / "best").recipe == RECIPE
    for run in (folder.parent, folder / "best"):
        assert find_checkpoint(run, "best") == folder / checkpoint_name(2)
    prune(folder, keep=1, best=3)
    assert find_checkpoint(folder / "best") == folder / checkpoint_name(3)
    (folder / "best").write_text("../elsewhere")
    assert failing_code(lambda: find_checkpoint(folder / "best")) == "CHECKPOINT_MISSING"


def test_a_run_that_was_copied_with_its_links_followed(
    tmp_path: Path, model: DecisionTransformer
) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path / "run" / "checkpoints", model, state(step))
    prune(tmp_path / "run" / "checkpoints", keep=1, best=2)
    folder = shutil.copytree(tmp_path / "run", tmp_path / "copy") / "checkpoints"
    assert not (folder / "best").is_symlink()
    assert load_policy_parts(folder / "best").recipe == RECIPE
    prune(folder, keep=1, best=3)
    assert sorted(os.listdir(folder)) == ["best", checkpoint_name(3)]
    assert find_checkpoint(folder.parent, "best") == folder / checkpoint_name(3)


def test_acting_reads_no_moments(tmp_path: Path, model: DecisionTransformer) -> None:
    """They are two thirds of a checkpoint."""
    path = save_checkpoint(tmp_path / "checkpoints", model, state(5))
    (path / "training.safetensors").unlink()
    for place in (tmp_path, path):
        assert load_policy_parts(place).recipe == RECIPE
    assert code_of(path) == "CHECKPOINT_DAMAGED"


def test_leftovers_are_swept_and_never_taken(tmp_path: Path, model: DecisionTransformer) -> None:
    path = save_checkpoint(tmp_path, model, state(5))
    for name in (".partial-step-00000009", ".removed-step-00000004"):
        shutil.copytree(path, tmp_path / name)
    (tmp_path / ".partial-best").symlink_to(path)
    (tmp_path / "step-00000010.bak").mkdir()
    (tmp_path / "step-00000011").write_text("a file")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5]
    sweep(tmp_path)
    kept = [path.name, "step-00000010.bak", "step-00000011"]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    sweep(tmp_path / "none")
