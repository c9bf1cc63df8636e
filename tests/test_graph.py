"""What is around a captured step, on the CPU with CUDA's calls left out: one run, several ranks."""

# mypy: disable-error-code="no-untyped-call"
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gear_offline.config.recipe import load_recipe
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.distributed.world import World, open_world, rank_device
from gear_offline.loaders.batch import Batch
from gear_offline.models.base import ModelSizes
from gear_offline.training.graph import LINE, RankGradients, why_not_captured
from gear_offline.training.learner import Learner
from tests.gpu_support import ON_TWO_GPUS
from tests.ranks_support import launch
from tests.support import Captured, Patch, last_words, make_dataset, one_error
from tests.task_support import advance


@pytest.mark.parametrize(
    ("nodes", "graph", "facts", "reason"),
    [
        ((0,), "auto", {}, ""),
        ((0, 0), "auto", {}, ""),
        ((0, 0), "off", {}, "train.graph=off"),
        ((0, 0), "auto", {"sharded": True}, "graphs of several ranks need replicas"),
        ((0, 0), "auto", {"learner": 1}, "the ranks tell each other the losses of segments"),
        ((0,), "auto", {"learner": 1}, ""),
        ((0,), "auto", {"learner": 1, "draws": False}, "the host draws when it has heard of"),
        ((0, 0), "auto", {"engine": None}, "batches are not made by the GPU (loader.engine)"),
        ((0, 0, 1, 1), "auto", {}, ""),
    ],
)
def test_replicas_are_captured(
    nodes: tuple[int, ...], graph: str, facts: dict[str, Any], reason: str
) -> None:
    recipe, world = load_recipe("paper", [f"train.graph={graph}"]), World(nodes=nodes)
    engine = facts.get("engine", SimpleNamespace(draws=facts.get("draws", True)))
    loader: Any = SimpleNamespace(loss_sampler=facts.get("learner"), engine=engine)
    options: dict[str, Any] = {"sharded": facts.get("sharded", False)}
    found = why_not_captured(recipe, torch.device("cuda"), world, loader, **options)
    assert (found or "").startswith(reason) and (found is None) == (not reason)
    if reason and graph == "auto":
        insisting = recipe.replace({"train.graph": "on"})
        with one_error("UNAVAILABLE", "graph=on is not possible"):
            why_not_captured(insisting, torch.device("cuda"), world, loader, **options)


def batch_of(mask: Tensor) -> Batch:
    nothing = torch.zeros(*mask.shape, 1)
    return Batch(nothing, nothing, nothing, nothing, mask, mask, mask, padding="right", extras={})


WIDTHS = ((3, 5), (5,), (5, 64), (64,), (64, 2), (2,))


def weights_of(seed: int, kind: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)  # threads share torch's own one
    drawn = [torch.randn(*shape, generator=source) / 4 for shape in WIDTHS]
    return [weight.to(kind).requires_grad_() for weight in drawn]


def errors(weights: list[Tensor], inputs: Tensor) -> Tensor:
    """(B, K, 3) -> (B, K), float32."""
    hidden = inputs.to(weights[0].dtype)
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        hidden = torch.tanh(hidden @ weight + bias)
    return hidden.float().square().mean(-1)


def one_pass(weights: list[Tensor], inputs: Tensor) -> Callable[..., Tensor]:
    """Return what stands for a `GradientPass`."""

    def run(batch: Batch, *, valid_steps: float, weight: Callable[[], Tensor]) -> Tensor:
        loss = (errors(weights, inputs) * batch.attention_mask).sum() / valid_steps
        factor = weight()
        loss.backward(factor)
        return loss.detach() * factor

    return run


@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(st.integers(0, 7), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    half=st.booleans(),
)
def test_gradients_are_those_of_the_global_batch(steps: list[int], seed: int, half: bool) -> None:
    """Each rank has other numbers of real steps; a batch without any has gradients of zero."""
    kind = torch.bfloat16 if half else torch.float32
    expected = weights_of(seed, torch.float32)
    inputs = torch.randn(len(steps), 8, 3, generator=torch.Generator().manual_seed(seed))
    masks = (torch.arange(8) < torch.tensor(steps)[:, None]).long()
    whole = (errors(expected, inputs) * masks).sum() / masks.sum().clamp(min=1)
    whole.backward()
    wire, losses = Wire(len(steps)), torch.zeros(2, len(steps))

    def work(rank: int, world: World) -> None:
        mine = weights_of(seed, kind)
        exchange = RankGradients(mine, world=world, divisor=5.0).exchange
        for turn in range(2):
            for weight in mine:
                weight.grad = None
            own = batch_of(masks[rank : rank + 1])
            losses[turn, rank] = exchange(one_pass(mine, inputs[rank]), own)
            found = [weight.grad for weight in mine if weight.grad is not None]
            for gradient, theirs in zip(found, expected, strict=True):
                rtol, atol = (0.05, 0.02) if half else (1e-4, 1e-6)
                assert gradient.dtype == kind and theirs.grad is not None
                torch.testing.assert_close(gradient.float(), theirs.grad, rtol=rtol, atol=atol)
            start = found[0].untyped_storage().data_ptr()
            assert all(g.untyped_storage().data_ptr() == start for g in found)
            assert not any((g.data_ptr() - start) % (LINE * g.element_size()) for g in found)

    wire.run(work)
    for mean in losses.mean(1):
        torch.testing.assert_close(mean, whole.detach(), rtol=0.02, atol=1e-3 * half)
    lengths = [[tensor.numel() for tensor in sent] for sent in wire.sent]
    assert all(each == lengths[0] for each in lengths)
    assert len(lengths[0]) == 4, "of each pass the steps and all gradients"


def test_a_gpu_that_waits_for_ever_ends_the_process(monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr("os._exit", sys.exit)
    world = World(rank=1, nodes=(0, 0, 0), timeout=0.05)
    comes, never = Mock(query=Mock(side_effect=[False] * 3 + [True])), Mock(query=lambda: False)
    world.wait_for_gpu(comes)
    with pytest.raises(SystemExit, match="1"):
        world.wait_for_gpu(never)
    assert "RANK_LOST" in capsys.readouterr().err


@pytest.mark.parametrize(
    "rows", [pytest.param(n, marks=ON_TWO_GPUS) for n in ("replicate", "shard")]
)
def test_graphs_learn_what_steps_learn(tmp_path: Path, rows: str) -> None:
    data = make_dataset(tmp_path, [30, 7, 44, 12], shard_bytes=3000).path
    done = launch(2, "-m", "tests.test_graph", str(data), rows, timeout=150)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["ranks"] == 2 and document["loss_relative"] < 2e-4


class Wire:
    """Adds up what the threads of one process give, each a rank; `sent` is what each rank gave."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.place, self.met = threading.local(), threading.Barrier(ranks, timeout=20)

    def all_reduce(self, tensor: Tensor, *, async_op: bool) -> SimpleNamespace:
        assert async_op, "the host does not wait"
        sent = self.sent[self.place.rank]
        number = len(sent)
        sent.append(tensor.clone())

        def wait() -> None:
            self.met.wait()
            tensor.copy_(torch.stack([each[number] for each in self.sent]).sum(0))

        return SimpleNamespace(wait=wait)

    def run(self, work: Callable[[int, World], None]) -> None:
        """Do something on each rank, in a thread of its own."""

        def begin(rank: int) -> None:
            self.place.rank = rank
            work(rank, cast(World, SimpleNamespace(rank=rank, size=len(self.sent))))

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(self.sent)) as pool:
            patch.setattr("torch.distributed.all_reduce", self.all_reduce)
            for done in [pool.submit(begin, rank) for rank in range(len(self.sent))]:
                done.result(timeout=30)


# the ranks ------------------------------------------------------------------------------------


SMALL = ("model.hidden_size=32", "model.layers=2", "loader.context_length=8")
EXACT = ("model.dropout=0.0", "train.precision=fp32", "train.compile=off")


def make(data: Path, world: World, device: torch.device, *options: str) -> Learner:
    settings = [f"data.path={data}", "train.device=cuda", "train.log_every=1000000"]
    settings += ["loader.placement=hbm", "optimizer.warmup_steps=5", "train.steps=1000", *options]
    settings += [f"loader.sharding={'replicate' if world.node_count == 1 else 'shard'}"]
    recipe = load_recipe("paper", last_words(*settings))
    dataset = open_dataset(data)
    states, actions = (dataset.spec[c].shape[0] for c in ("observations", "actions"))
    torch.manual_seed(0)
    sizes = ModelSizes(state_dim=states, action_dim=actions, discrete=False)
    return Learner(recipe, sizes, dataset, device, world=world)


def trained(some: Learner, steps: int, world: World) -> Any:
    advance(some, steps)
    window = some.window.rows[: some.window.filled].clone()
    world.sum_into(window)
    return window.cpu().numpy() / world.size


def compare(data: Path, world: World, device: torch.device) -> dict[str, float]:
    """Return the largest relative difference between ways, of losses and of weights."""
    options = (*SMALL, *EXACT, f"loader.batch_size={8 * world.size}", "optimizer.schedule=cosine")
    single = make(data, world, device, *options, "train.graph=off")
    expected = trained(single, 60, world)
    graph = make(data, world, device, *options, "train.graph=on")
    try:
        found = trained(graph, 60, world)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)
        pairs = list(zip(graph.model.parameters(), single.model.parameters(), strict=True))
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5)
        weights = [float((a - b).detach().abs().max()) for a, b in pairs]
        again = trained(graph, 5, world)
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
        trained(first, 20, world)
        for one, shadow in zip(first.model.parameters(), first.working.parameters(), strict=True):
            assert torch.equal(one.bfloat16(), shadow), "what is saved is up to date"
        # every rank goes on from what the first one would save
        tensors = first.tensors()
        kept = world.send_tensors(tensors if world.is_first else None)
        model = world.send_tensors(first.model.state_dict() if world.is_first else None)
        loader = first.loader.state_dict()
        losses = trained(first, 20, world)
        later = first.tensors() | first.model.state_dict()
        later = {name: tensor.detach().clone() for name, tensor in later.items()}
        second.load(step=20, model=model, tensors=kept, loader=loader)  # random numbers too
        np.testing.assert_array_equal(trained(second, 20, world), losses)
        for name, tensor in (second.tensors() | second.model.state_dict()).items():
            assert torch.equal(tensor, later[name]), name
        for one, shadow in zip(first.model.parameters(), first.working.parameters(), strict=True):
            assert torch.equal(one.bfloat16(), shadow)
    finally:
        for some in (first, second):
            some.release()
            some.close()


def main(data: str, rows: str) -> None:
    """One of several ranks with GPUs; with "shard" each poses as a node that holds some rows."""
    if rows == "shard":
        os.environ["GROUP_RANK"] = os.environ["RANK"]
    device = rank_device("cuda")
    with open_world(device, timeout=50) as world:
        document: dict[str, Any] = {"ranks": world.size, **compare(Path(data), world, device)}
        resume(Path(data), world, device)
        if world.is_first:
            print(json.dumps(document), flush=True)


if __name__ == "__main__":
    # Shows where a rank hangs, and ends it.
    faulthandler.dump_traceback_later(100, exit=True)
    main(*sys.argv[1:])
