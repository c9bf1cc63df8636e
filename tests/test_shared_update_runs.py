"""Whole runs whose ranks share the update: evaluated, saved, resumed on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gear_offline.runs.trainer import train
from gear_offline.training.checkpoint_folder import list_checkpoints
from tests.kernels_on_cpu import compile_threads
from tests.ranks_support import launch
from tests.training_support import learnt, tiny_recipe

OPTIONS = (
    "loader.batch_size=12",
    "model.dropout=0.0",
    "train.precision=fp32",
    "train.log_every=4",
    "train.evaluate_every=4",
    "train.checkpoint_every=4",
    "evaluate.beside=off",
)


def tensors(run: Path) -> dict[str, Tensor]:
    """Return the weights and moments of a run's last checkpoint."""
    _, last = list_checkpoints(run / "checkpoints")[-1]
    found = load_file(last / "model.safetensors") | load_file(last / "training.safetensors")
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def alike(found: Path, expected: Path, tolerance: float = 2e-5) -> None:
    """Check that one run learnt what another one did, of other ranks."""
    mine, theirs = tensors(found), tensors(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=tolerance, msg=name)
    one, other = learnt(found), learnt(expected)
    for record, before in zip(one["metrics"], other["metrics"], strict=True):
        assert record == pytest.approx(before, rel=1e-4)
    for (step, returns), (then, before) in zip(
        one["evaluations"], other["evaluations"], strict=True
    ):
        assert step == then
        for several, as_before in zip(returns, before, strict=True):
            assert several == pytest.approx(as_before, abs=1e-3)


def run_of(out: Path, steps: int, *options: str) -> str:
    """Return what the child takes."""
    return " ".join([str(out), *OPTIONS, f"train.steps={steps}", *options])


def test_runs_of_ranks_that_share_updates(data: Path, tmp_path: Path) -> None:
    """In one go and in two; begun by one rank, and continued by one, that does whole updates."""
    compile_threads(tmp_path, "adamw")
    alone, whole, parts, begun, handed = (
        tmp_path / name for name in ("alone", "whole", "parts", "begun", "handed")
    )
    half, half_parts = tmp_path / "half", tmp_path / "half-parts"
    bits = ("train.weights=bf16", "train.precision=bf16")
    recipe = tiny_recipe(data, *OPTIONS)
    train(recipe.replace(train__steps=8), out=alone, quiet=True)
    train(recipe.replace(train__steps=4), out=begun, quiet=True)
    runs = [run_of(whole, 8), run_of(parts, 4), run_of(parts, 8)]
    runs += [run_of(half, 8, *bits), run_of(half_parts, 4, *bits), run_of(half_parts, 8, *bits)]
    runs += [run_of(begun, 8), run_of(handed, 4)]
    words = ("-m", "tests.shared_update_child", str(tmp_path / "adamw_in_threads.so"), str(data))
    said = launch(2, *words, *runs).stderr
    assert said.count("resuming after step 4") == 3
    assert learnt(parts) == learnt(whole), "bit for bit"
    assert learnt(half_parts) == learnt(half)
    train(recipe.replace(train__steps=8), out=handed, resume=True, quiet=True)
    for run in (whole, begun, handed):
        alike(run, alone)
