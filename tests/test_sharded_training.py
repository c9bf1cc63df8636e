"""Training whose checkpoints are shards: any number of ranks goes on from them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gear_offline.config.recipe import load_recipe
from gear_offline.runs.trainer import train
from gear_offline.training.checkpoint import (
    load_policy_parts,
    newest_checkpoint,
    read_checkpoint,
    read_state,
)
from gear_offline.training.checkpoint_folder import checkpoint_name, list_checkpoints
from gear_offline.training.metrics import read_records
from gear_offline.training.shard_index import INDEX, read_index
from gear_offline.training.sharded_checkpoint import load_shards
from tests.ranks_support import launch
from tests.sharded_child import whole_tensors
from tests.support import make_dataset

RECIPE = """
name: sharded
data: {{path: {data}}}
model: {{hidden_size: 16, layers: 2, heads: 2, dropout: 0.0, action_tanh: false}}
loader: {{batch_size: 12, context_length: 6}}
optimizer: {{warmup_steps: 3}}
train: {{steps: 14, log_every: 2, checkpoint_every: 4, device: cpu, threads: 1}}
evaluate: {{episodes: 0}}
"""


def launched(ranks: int, *arguments: str) -> str:
    """Run the child with so many ranks; return what they said."""
    done = launch(ranks, "-m", "tests.sharded_child", *arguments, timeout=240)
    assert "acts like the whole model" in done.stdout
    return done.stderr


def measured(run: Path) -> list[list[float]]:
    names = ("step", "loss", "gradient_norm", "learning_rate")
    return [[record[name] for name in names] for record in read_records(run / "metrics.jsonl")]


def check_pieces(folder: Path) -> None:
    """One process reads what two ranks saved, and what three read and saved, bit for bit."""
    trained = load_file(folder / "whole.safetensors")
    for ranks in (2, 3):
        expected = whole_tensors() | trained
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        load_shards(folder / str(ranks), found)
        assert len(trained) == 8 and any(tensor.any() for tensor in trained.values())
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (ranks, name)
        assert read_index(folder / str(ranks))["ranks"] == ranks


def check_shards(run: Path) -> None:
    """Checkpoints of two ranks: shards of everything, whole weights at the end."""
    folder = run / "checkpoints"
    assert [step for step, _ in list_checkpoints(folder)] == [4, 6, 8], "keep_checkpoints is 3"
    assert not list(folder.glob(".*")), "what a killed run left is swept"
    files = {f"shard-0000{rank}-of-00002.safetensors" for rank in (0, 1)}
    files |= {INDEX, "config.json", "state.json", "training.safetensors"}
    steps = [folder / checkpoint_name(step) for step in (6, 8)]
    assert set(os.listdir(steps[0])) == files
    assert set(os.listdir(steps[1])) == files | {"model.safetensors"}
    assert all(read_state(path)["format_version"] == 2 for path in steps)
    found, plain = read_checkpoint(steps[1]), load_file(steps[1] / "model.safetensors")
    assert found.model.keys() == plain.keys()
    assert all(torch.equal(found.model[name], plain[name]) for name in plain)
    assert load_policy_parts(steps[0]).model.config.hidden_size == 16
    acting = read_checkpoint(steps[0], training=False)
    whole = read_checkpoint(steps[0])
    assert acting.model.keys() == whole.model.keys() and not acting.state.tensors.keys() & {"x"}
    assert all(torch.equal(acting.model[name], whole.model[name]) for name in whole.model)


def check_names(sharded: Path, alone: Path) -> None:
    """The same tensors, whoever wrote them."""
    one, other = read_checkpoint(sharded), read_checkpoint(alone)
    mine: Any
    for mine, theirs in ((one.model, other.model), (one.state.tensors, other.state.tensors)):
        shapes = {n: t.shape for n, t in mine.items() if not n.startswith("random/cpu/")}
        assert shapes == {n: t.shape for n, t in theirs.items()}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """Four steps alone, four on two ranks and on three, two alone: the losses of one process."""
    recipe, run, pieces = tmp_path / "sharded.yaml", tmp_path / "run", tmp_path / "pieces"
    pieces.mkdir()
    data = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path
    recipe.write_text(RECIPE.format(data=data))
    alone = train(load_recipe(recipe), out=tmp_path / "alone", quiet=True)
    train(load_recipe(recipe, ["train.steps=4"]), out=run, quiet=True)
    arguments = (str(recipe), str(run), str(pieces))
    said = launched(2, *arguments)
    for line in (
        "2 ranks (FSDP, as the recipe says; weights collected once a step, as the recipe says)",
        "2 ranks (FSDP, as the recipe says; weights collected for each pass: ranks in host memory)",
        "checkpoints: a shard of each rank",
        "resuming after step 4",
        "passing over step-00000008: the checkpoint is damaged: shard-00001-of-00002.safetensors",
        "resuming after step 6",
    ):
        assert line in said
    check_shards(run)
    check_names(
        run / "checkpoints" / checkpoint_name(8), alone / "checkpoints" / checkpoint_name(8)
    )
    said = launched(3, *arguments)
    for line in (
        "checkpoints: collected by the first rank",
        "resuming after step 8",
        "checkpoints: a shard of each rank",
        "resuming after step 10",
    ):
        assert line in said
    check_pieces(pieces)
    train(load_recipe(recipe), out=run, resume=True, quiet=True)
    for mine, theirs in zip(measured(run), measured(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    last, same = (list_checkpoints(some / "checkpoints")[-1][1] for some in (run, alone))
    for name, tensor in load_file(same / "model.safetensors").items():
        found = load_file(last / "model.safetensors")[name]
        torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-6)
    shutil.rmtree(last)
    said_here: list[str] = []
    found_newest = newest_checkpoint(run / "checkpoints", said_here.append)
    assert found_newest is not None and found_newest.state.step == 12 and not said_here
