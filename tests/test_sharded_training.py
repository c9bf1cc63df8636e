"""Training whose checkpoints are shards: any number of ranks goes on from them."""

import errno
import faulthandler
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gear_offline.artifacts.checkpoint import (
    checkpoint_name,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
)
from gear_offline.artifacts.json_lines import read_records
from gear_offline.artifacts.sharded import read_whole
from gear_offline.artifacts.trained import load_policy
from gear_offline.config.recipe import load_recipe
from gear_offline.distributed.world import World, open_world
from gear_offline.errors import GearError
from gear_offline.runs.loop import train_run
from gear_offline.training.learner import Learner
from gear_offline.training.parallel import whole
from gear_offline.training.step import EagerStep
from tests.ranks_support import DEEPER, launch, ranks_recipe
from tests.support import make_dataset, one_error
from tests.training_support import measured


def launched(ranks: int, *arguments: str) -> str:
    """Run the child with so many ranks; return what they said."""
    done = launch(ranks, "-m", "tests.test_sharded_training", *arguments, timeout=240)
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
    found_newest = newest_checkpoint(run / "checkpoints")
    assert found_newest is not None and found_newest.state.step == 12


# the ranks, two of them first and then three --------------------------------------------------


# what FSDP2 collects weights with; older torch does not have the first
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
SECOND_SHARD = "sharded/shard-00002-model-00001-of-00001.safetensors"
FSDP = ("train.parallel=fsdp", "train.accumulate=2", "train.recompute=true")


def train(recipe: str, out: Path, *options: str) -> None:
    """Train sharded; compare the whole model with the last checkpoint.

    Weights are collected of two blocks and of what is around them: once a step, or for each of two
    micro-batches, the blocks' again for its backward pass.
    """

    made: list[Learner] = []
    weights: dict[str, torch.Tensor] = {}
    calls: Counter[str] = Counter()
    close = Learner.close

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return call(*arguments, **named)

        return count

    def remember(self: Learner) -> None:
        made.append(self)
        weights.update({n: whole(t).cpu() for n, t in self.model.state_dict().items()})
        close(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Learner, "close", remember)
        patched.setattr(EagerStep, "run", counted("step", EagerStep.run))
        patched.setattr(dist, GATHER, counted("gather", getattr(dist, GATHER)))
        train_run(load_recipe(recipe, [*FSDP, *options]), out=out, resume=True)
    (learner,) = made
    assert learner.parallel.sharded
    assert learner.parallel.reshard == ("train.reshard=off" not in options)
    a_step = 2 * (3 + 2) if learner.parallel.reshard else 3
    assert calls["step"] and calls["gather"] == calls["step"] * a_step, calls
    dist.barrier()  # the first rank returns when everything is on the disk
    if learner.world.is_first:
        saved = load_file(list_checkpoints(out / "checkpoints")[-1][1] / "model.safetensors")
        assert weights.keys() == saved.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
        print("saved is the whole model")


def two(world: World, recipe: str, out: Path) -> None:
    """Go on from whole tensors to step 8; damage its shards, and go on from step 6 to it again.

    The first time weights stay from pass to pass, the second time they do not: the same bits.
    """
    options = ("train.steps=8", "train.checkpoint_every=2")
    train(recipe, out, *options, "train.reshard=off")
    losses = [record["loss"] for record in read_records(out / "metrics.jsonl")]
    last, before = out / "checkpoints" / checkpoint_name(8), out.with_name("before")
    if world.is_first:
        shutil.copytree(last, before)
        shutil.copytree(last, last.with_name(f".partial-{checkpoint_name(10)}-dead"))
        shard = last / SECOND_SHARD
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    train(recipe, out, *options)
    for name in ("training.safetensors", "model.safetensors", SECOND_SHARD):
        same = [(folder / name).read_bytes() for folder in (last, before)]
        assert same[0] == same[1], f"{name} after a resume of as many ranks"
    found = [record["loss"] for record in read_records(out / "metrics.jsonl")]
    assert found == losses and len(losses) == 4, "losses of weights that stay, or do not"
    in_half(recipe, out.with_name("half"))


def in_half(recipe: str, out: Path) -> None:
    """Products in bfloat16, gradients added up in float32 or bfloat16: nearly the same losses."""
    added: list[torch.dtype] = []
    reduce = getattr(dist, REDUCE)

    def noted(*arguments: Any, **named: Any) -> Any:
        tensor: torch.Tensor = named["input"] if "input" in named else arguments[1]
        added.append(tensor.dtype)
        return reduce(*arguments, **named)

    losses = []
    for weights, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        added.clear()
        options = [f"train.weights={weights}", "train.precision=bf16", "train.steps=4"]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(dist, REDUCE, noted)
            train_run(load_recipe(recipe, ["train.parallel=fsdp", *options]), out=out / weights)
        assert set(added) == {dtype}, added
        losses.append([row["loss"] for row in read_records(out / weights / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and losses[0] != losses[1]


def three(world: World, recipe: str, out: Path) -> None:
    """Go on from two ranks' shards; refuse folders that one rank cannot write into, or is full."""
    train(recipe, out, "train.steps=10")
    train(recipe, out, "train.steps=12")
    few, place = load_recipe(recipe, [*FSDP, "train.steps=2"]), out.with_name("full")
    with pytest.MonkeyPatch.context() as patched:
        if world.rank == 2:
            patched.setattr("gear_offline.artifacts.sharded.os.access", lambda *_: False)
        with one_error("OUTPUT_WRITE", "rank 2 does not see it"):
            train_run(few, out=out.with_name("unseen"), quiet=True)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patched:
        if world.rank == 2:
            patched.setattr("gear_offline.artifacts.sharded.write_tensors", refuse)
        with pytest.raises(GearError) as caught:
            train_run(few, out=place, quiet=True)
    assert caught.value.code == ("OUTPUT_WRITE" if world.rank == 2 else "RANK_FAILED")
    assert world.rank == 2 or "rank 2 failed: no space left" in str(caught.value)
    dist.barrier()
    assert not list((place / "checkpoints").iterdir()), "nothing half written stays"


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def main(recipe: str, out: str) -> None:
    """Be a rank; each launch does all that needs its number, since starting them takes longest."""
    with open_world(torch.device("cpu")) as world, pytest.MonkeyPatch.context() as patched:
        patched.setattr("gear_offline.runs.loop.open_world", lambda *_, **__: nullcontext(world))
        (two if world.size == 2 else three)(world, recipe, Path(out))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # shows where a rank hangs
    main(*sys.argv[1:])
