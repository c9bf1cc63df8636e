"""Training whose checkpoints are shards: any number of ranks goes on from them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gear_offline.config.recipe import load_recipe
from gear_offline.runs.loop import train_run
from gear_offline.training.checkpoint import (
    checkpoint_name,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
)
from gear_offline.training.policies import load_policy
from gear_offline.training.sharded import read_whole
from tests.ranks_support import DEEPER, launch, ranks_recipe
from tests.support import make_dataset, one_error
from tests.training_support import measured


def launched(ranks: int, *arguments: str) -> str:
    """Run the child with so many ranks; return what they said."""
    done = launch(ranks, "-m", "tests.sharded_child", *arguments, timeout=240)
    assert "saved is the whole model" in done.stdout
    return done.stderr


def check_shards(run: Path) -> None:
    """Checkpoints of two ranks: shards of everything, and the weights whole."""
    folder = run / "checkpoints"
    assert [step for step, _ in list_checkpoints(folder)] == [4, 6, 8], "keep_checkpoints is 3"
    assert not list(folder.glob(".*")), "what a killed run left is swept"
    for step in (6, 8):
        checkpoint = read_checkpoint(folder / checkpoint_name(step))
        assert len(checkpoint.state.shards) == 2
        weights = read_whole(checkpoint.path / "sharded", "model/")
        assert {f"model/{name}" for name in checkpoint.weights()} == weights.keys()
        for name, tensor in checkpoint.weights().items():
            assert torch.equal(tensor, weights[f"model/{name}"])
    load_policy(folder / checkpoint_name(6))
    other = folder / checkpoint_name(8) / "sharded" / "shard-00003.safetensors"
    other.write_bytes(b"")  # all files there are read
    with one_error("RUN_DAMAGED", "other files"):
        read_checkpoint(folder / checkpoint_name(8))
    other.unlink()


def check_names(sharded: Path, alone: Path) -> None:
    """The same tensors, whoever wrote them."""
    one, other = read_checkpoint(sharded), read_checkpoint(alone)
    for some, same in ((one.weights(), other.weights()), (one.tensors(), other.tensors())):
        shapes = {n: t.shape for n, t in some.items() if not n.startswith("random/cpu/")}
        assert shapes == {n: t.shape for n, t in same.items()}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """Four steps alone, four on two ranks and on three, two alone: the losses of one process."""
    run = tmp_path / "run"
    data = make_dataset(tmp_path, [9, 30, 4, 17, 25]).path
    recipe = ranks_recipe(tmp_path / "sharded.yaml", data, *DEEPER, "train.steps=14")
    alone = train_run(load_recipe(recipe), out=tmp_path / "alone", quiet=True)
    train_run(load_recipe(recipe, ["train.steps=4"]), out=run, quiet=True)
    arguments = (str(recipe), str(run))
    said = launched(2, *arguments)
    for line in (
        "2 ranks (FSDP, as the recipe says; weights collected once a step, as the recipe says)",
        "2 ranks (FSDP, as the recipe says; weights collected for each pass: ranks in host memory)",
        "resuming after step 4",
        "passing over step-00000008: the checkpoint is damaged: sharded/shard-00002",
        "resuming after step 6",
    ):
        assert line in said
    check_shards(run)
    check_names(
        run / "checkpoints" / checkpoint_name(8), alone / "checkpoints" / checkpoint_name(8)
    )
    said = launched(3, *arguments)
    for line in ("resuming after step 8", "resuming after step 10"):
        assert line in said
    train_run(load_recipe(recipe), out=run, resume=True, quiet=True)
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
