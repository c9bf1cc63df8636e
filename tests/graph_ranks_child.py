"""One of several ranks with GPUs: trains step by step and as a CUDA graph, and compares.

With "shard" as its second argument each rank poses as a node that holds a part of the rows.
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gear_offline.config.recipe import load_recipe
from gear_offline.dataset.dataset import open_dataset
from gear_offline.distributed.world import World, open_world, rank_device
from gear_offline.training.learner import Learner
from gear_offline.training.model import ModelSizes

SMALL = ("model.hidden_size=32", "model.layers=2", "loader.context_length=8")
EXACT = ("model.dropout=0.0", "train.precision=fp32", "train.compile=off")


def note(world: World, text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] rank {world.rank}: {text}", file=sys.stderr)


def make(data: Path, world: World, device: torch.device, *options: str) -> Learner:
    settings = [f"data.path={data}", "train.device=cuda", "train.log_every=1000000"]
    settings += ["loader.placement=hbm", "optimizer.warmup_steps=5", "train.steps=1000", *options]
    settings += [f"loader.sharding={'replicate' if world.node_count == 1 else 'shard'}"]
    recipe = load_recipe("paper", settings)
    dataset = open_dataset(data)
    states, actions = (dataset.spec[c].shape[0] for c in ("observations", "actions"))
    torch.manual_seed(0)
    sizes = ModelSizes(state_dim=states, action_dim=actions, discrete=False)
    return Learner(recipe, sizes, dataset, device, world=world)


def run(some: Learner, steps: int, world: World) -> Any:
    for _ in range(steps):
        some.advance()
    window = some.window.rows[: some.window.filled].clone()
    world.sum_into(window)
    return window.cpu().numpy() / world.size


def compare(data: Path, world: World, device: torch.device) -> dict[str, float]:
    """Return the largest relative difference between ways, of losses and of weights."""
    options = (*SMALL, *EXACT, f"loader.batch_size={8 * world.size}", "optimizer.schedule=cosine")
    single = make(data, world, device, *options, "train.graph=off")
    expected = run(single, 60, world)
    note(world, "step by step is done")
    graph = make(data, world, device, *options, "train.graph=on")
    try:
        found = run(graph, 60, world)
        note(world, "the graph is done")
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)
        pairs = list(zip(graph.model.parameters(), single.model.parameters(), strict=True))
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5)
        weights = [float((a - b).detach().abs().max()) for a, b in pairs]
        again = run(graph, 5, world)
        assert len(again) == 65 and np.isfinite(again).all()
        alike = world.gather(float(sum(p.double().sum() for p in graph.model.parameters())))
        assert len(set(alike)) == 1, "every rank has the same weights"
    finally:
        graph.release()
        for some in (single, graph):
            some.close()
    loss = float(np.abs(found / expected - 1).max())
    return {"loss_relative": loss, "weight_absolute": max(weights)}


def resume(data: Path, world: World, device: torch.device) -> None:
    """Go on from another learner's tensors: the same bits, of weights in 16 bits too."""
    half = ("train.precision=bf16", "train.weights=bf16", "train.compile=off", "train.graph=on")
    options = (*SMALL, *half, f"loader.batch_size={8 * world.size}")
    first = make(data, world, device, *options)
    second = make(data, world, device, *options)
    try:
        run(first, 20, world)
        for one, shadow in zip(first.model.parameters(), first.working.parameters(), strict=True):
            assert torch.equal(one.bfloat16(), shadow), "what is saved is up to date"
        # every rank goes on from what the first one would save
        tensors = first.tensors()
        kept = world.send_tensors(tensors if world.is_first else None)
        model = world.send_tensors(first.model.state_dict() if world.is_first else None)
        loader = first.loader.state_dict()
        losses = run(first, 20, world)
        later = first.tensors() | first.model.state_dict()
        later = {name: tensor.detach().clone() for name, tensor in later.items()}
        second.load(step=20, model=model, tensors=kept, loader=loader)  # random numbers too
        np.testing.assert_array_equal(run(second, 20, world), losses)
        for name, tensor in (second.tensors() | second.model.state_dict()).items():
            assert torch.equal(tensor, later[name]), name
        for one, shadow in zip(first.model.parameters(), first.working.parameters(), strict=True):
            assert torch.equal(one.bfloat16(), shadow)
    finally:
        for some in (first, second):
            some.release()
            some.close()


def main(data: str, rows: str) -> None:
    if rows == "shard":
        os.environ["GROUP_RANK"] = os.environ["RANK"]
    device = rank_device("cuda")
    with open_world(device, timeout=50) as world:
        document: dict[str, Any] = {"ranks": world.size, **compare(Path(data), world, device)}
        note(world, "equal")
        resume(Path(data), world, device)
        note(world, "resumed")
        if world.is_first:
            print(json.dumps(document), flush=True)


BEGAN = time.monotonic()

if __name__ == "__main__":
    # Shows where a rank hangs, and ends it.
    faulthandler.dump_traceback_later(float(os.environ.get("CHILD_SECONDS", "100")), exit=True)
    main(*sys.argv[1:])
