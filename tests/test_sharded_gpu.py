"""Rows spread over nodes whose GPUs exchange or map them: the batches of one process."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.distributed.world import open_world
from gear_offline.errors import GearError
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.training.graph import capture
from tests.gpu_support import ON_TWO_GPUS
from tests.image_support import image_columns
from tests.one_process import global_digest, row_digests
from tests.ranks_support import fork_ranks, launch
from tests.support import make_dataset

LENGTHS = [9, 3, 14, 1, 7, 5, 22, 2, 6, 11, 4, 8, 13, 10, 3, 6]
BATCH, STEPS = 24, 50
CASES: list[tuple[str, dict[str, Any]]] = [
    ("numbers", {"normalize_states": True, "extra_columns": ("terminals",)}),
    ("numbers", {"selection": "shuffled_epochs", "padding": "left"}),
    ("frames", {"selection": "return_weighted", "frame_stack": 3}),
    ("numbers", {"selection": "d3rlpy", "padding": "left"}),  # the host draws
]
# Each goes on from the last one.
PLACES = [("auto", "host"), ("peer", "hbm"), ("nccl", "hbm"), ("auto", "auto"), ("gloo", "host")]


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=ON_TWO_GPUS) for ranks in (2, 4)])
def test_batches_are_those_of_one_process(tmp_path: Path, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    frames = image_columns(sum(LENGTHS), (4, 5))
    paths = [
        make_dataset(tmp_path / "numbers", LENGTHS, shard_bytes=900).path,
        make_dataset(tmp_path / "frames", LENGTHS, columns=frames, shard_bytes=300).path,
    ]
    done = launch(ranks, "-m", "tests.test_sharded_gpu", *map(str, paths))
    assert done.stdout.count("the same") == len(CASES) * len(PLACES) * 2, done.stdout
    for road in ("NCCL", "collectives", "none, rows are read in the memory of their GPUs"):
        assert f"exchange: {road}" in done.stderr


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=ON_TWO_GPUS)])
def test_a_rank_that_dies_is_lost_and_its_rows_stay(tmp_path: Path, ranks: int) -> None:
    """Those who read in its memory go on until they need its answer, and read no wrong byte."""
    path = make_dataset(tmp_path / "numbers", LENGTHS, shard_bytes=900).path
    done = fork_ranks(ranks, "-m", "tests.test_sharded_gpu", "die", path)
    assert "read on: RANK_LOST" in done.stdout, done.stdout + done.stderr


def compare(paths: dict[str, str]) -> None:
    """On every rank, which poses as a node: batches and captured batches, in turn."""
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    with open_world(device, timeout=60) as world:
        for name, options in CASES:
            given: dict[str, Any] = {"batch_size": BATCH, "context_length": 6, "seed": 5} | options
            alone = GearLoader(paths[name], device="cpu", world=None, **given)
            state = alone.state_dict()
            for road, placement in PLACES:
                where: dict[str, Any] = {"exchange": road, "placement": placement}
                loader = GearLoader(
                    paths[name], device=device, world=world, sharding="shard", **where, **given
                )

                def check(batch: Batch, expected: Batch, step: int, loader: GearLoader) -> None:
                    mine = row_digests(batch.map(lambda tensor: tensor.cpu()))
                    answers = world.gather([loader.slots_at(step).tolist(), mine])
                    found = global_digest(*zip(*answers, strict=True))
                    assert found == global_digest([range(BATCH)], [row_digests(expected)])

                loader.load_state_dict(state)
                for _ in range(STEPS):
                    step = loader.step
                    check(next(loader), alone.batch_at(step), step, loader)
                state = loader.state_dict()
                static = loader.static_batch(ahead=True)
                static.prepare()
                static.enqueue()
                graph = capture(static.enqueue)
                static.set_step(loader.step)
                for step in range(loader.step, loader.step + STEPS):
                    static.prepare()
                    graph.replay()
                    check(static.batch, alone.batch_at(step), step, loader)
                if world.is_first:
                    print("batches: the same\ncaptured: the same", flush=True)
                graph.reset()
                loader.close()


def die(path: str) -> None:
    """On both ranks, which pose as nodes: one is gone, the other reads on and then asks it."""
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device("cuda", rank)
    options: dict[str, Any] = {"batch_size": BATCH, "context_length": 6, "seed": 5}
    alone = GearLoader(path, device="cpu", world=None, **options)
    with open_world(device, timeout=20) as world:
        where: dict[str, Any] = {"exchange": "peer", "placement": "hbm", "sharding": "shard"}
        loader = GearLoader(path, device=device, world=world, **where, **options)
        next(loader)
        torch.cuda.synchronize()
        world.gather(None)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for step in range(1, 2000):
                batch = next(loader)
                if step % 20 == 0:
                    mine = row_digests(batch.map(lambda tensor: tensor.cpu()))
                    assert mine == row_digests(alone.batch_at(step))[: BATCH // 2]
            world.gather(None)
        except GearError as error:
            print(f"read on: {error.code}", flush=True)
        os._exit(0)  # a group with a dead member does not end in order


if __name__ == "__main__":
    if sys.argv[1] == "die":
        die(sys.argv[2])
    else:
        compare(dict(zip(("numbers", "frames"), sys.argv[1:], strict=True)))
