"""``train.deterministic``: the same weights bit for bit after a resume, on one rank or more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gear_offline.config.recipe import load_recipe
from gear_offline.errors import InputError
from gear_offline.runs.loop import TrainingInterrupted, train
from gear_offline.training.checkpoint_folder import list_checkpoints
from gear_offline.training.seeding import deterministic
from tests.support import make_dataset, one_error
from tests.test_parallel_training import RECIPE, trained
from tests.test_resume import interrupted_in
from tests.training_support import learnt, tiny_data, tiny_recipe


def settings() -> list[object]:
    cudnn = torch.backends.cudnn
    return [
        torch.are_deterministic_algorithms_enabled(),
        *(cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
    ]


def test_torch_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.set_float32_matmul_precision("high")
    try:
        before = settings()
        with deterministic(False):
            assert settings() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        with deterministic(True):
            assert settings() == [True, False, True, False, "highest", False, False]
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_one_rank_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    recipe = tiny_recipe(tiny_data(tmp_path), "train.deterministic=true")
    whole = train(recipe, out=tmp_path / "whole", quiet=True)
    for stop in (4, 12):
        with interrupted_in(stop), pytest.raises(TrainingInterrupted):
            train(recipe, out=tmp_path / "run", resume=stop > 4, quiet=True)
    train(recipe, out=tmp_path / "run", resume=True, quiet=True)
    assert learnt(tmp_path / "run") == learnt(whole)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(InputError, match=r"train\.deterministic was True"):
        train(
            recipe.replace({"train.deterministic": False}),
            out=tmp_path / "run",
            resume=True,
            quiet=True,
        )


def test_compiled_kernels_are_refused() -> None:
    with one_error("RECIPE", "exclude each other"):
        load_recipe("paper", ["train.deterministic=true", "train.compile=on"])


@pytest.mark.long
def test_three_ranks_resume_to_the_bit(tmp_path: Path) -> None:
    """A rank killed at step 14 and restarted from 10 learns what undisturbed ranks learn.

    With three ranks the place of a gradient in its group decides the order of the sum.
    """
    data = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path
    found = []
    for kill_at in (0, 14):
        recipe, run = tmp_path / f"{kill_at}.yaml", tmp_path / f"run{kill_at}"
        text = RECIPE.format(data=data).replace("train: {", "train: {deterministic: true, ")
        recipe.write_text(text.replace("dropout: 0.0", "dropout: 0.1"))
        said = trained(3, str(recipe), str(run), "20", str(kill_at))
        assert ("resuming after step 10" in said) == (kill_at > 0)
        _, last = list_checkpoints(run / "checkpoints")[-1]
        names = ("model.safetensors", "training.safetensors")
        found.append([last.name, *((last / name).read_bytes() for name in names)])
    assert found[0] == found[1]
