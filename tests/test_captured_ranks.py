"""Gradients of several ranks inside one CUDA graph."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.loaders.batch import Batch
from gear_offline.training.data_parallel import GradientPass, micro_batches
from gear_offline.training.graph_watch import wait_for_steps
from gear_offline.training.parallel import Parallel
from gear_offline.training.rank_gradients import LINE, RankGradients, cut
from tests.ranks_support import launch
from tests.support import make_dataset
from tests.test_large_training import gradients, make_batch, trained
from tests.wire import Wire


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


@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(st.integers(0, 7), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    half=st.booleans(),
    limit=st.sampled_from([1, 300, 1000, 1 << 20]),
)
def test_gradients_are_those_of_the_global_batch(
    steps: list[int], seed: int, half: bool, limit: int
) -> None:
    """Each rank has other numbers of real steps; a batch without any has gradients of zero."""
    kind = torch.bfloat16 if half else torch.float32
    expected = weights_of(seed, torch.float32)
    inputs = torch.randn(len(steps), 8, 3, generator=torch.Generator().manual_seed(seed))
    masks = (torch.arange(8) < torch.tensor(steps)[:, None]).long()
    whole = (errors(expected, inputs) * masks).sum() / masks.sum().clamp(min=1)
    whole.backward()  # type: ignore[no-untyped-call]
    wire = Wire(len(steps))
    losses = torch.zeros(2, len(steps))

    def work(rank: int, world: World) -> None:
        mine = weights_of(seed, kind)
        hooked: list[Any] = mine
        for weight in hooked:
            weight.register_post_accumulate_grad_hook(lambda _: wire.count(rank))
        exchange = RankGradients(mine, world=world, divisor=5.0).exchange
        for turn in range(2):
            wire.ready[rank] = 0
            for weight in mine:
                weight.grad = None
            losses[turn, rank] = exchange(
                one_pass(mine, inputs[rank]), batch_of(masks[rank : rank + 1])
            )
            gradients = [weight.grad for weight in mine if weight.grad is not None]
            for found, theirs in zip(gradients, expected, strict=True):
                rtol, atol = (0.05, 0.02) if half else (1e-4, 1e-6)
                assert found.dtype == kind and theirs.grad is not None
                torch.testing.assert_close(found.float(), theirs.grad, rtol=rtol, atol=atol)
            start = gradients[0].untyped_storage().data_ptr()
            assert all(g.untyped_storage().data_ptr() == start for g in gradients)
            assert not any((g.data_ptr() - start) % (LINE * g.element_size()) for g in gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.training.rank_gradients.BUCKET_BYTES", limit)
        patch.setattr("gear_offline.training.rank_gradients.LAST_BYTES", min(limit, 200))
        wire.run(work)
    for mean in losses.mean(1):
        torch.testing.assert_close(mean, whole.detach(), rtol=0.02, atol=1e-3 * half)
    assert all(launched == wire.launched[0] for launched in wire.launched)
    launched = wire.launched[0]
    buckets = len(launched) // 2 - 1
    assert {1: buckets == len(WIDTHS), 1 << 20: buckets == 1}.get(limit, 1 < buckets < 6)
    assert [ready for _, ready in launched[: buckets + 1]] == [0, *[6] * buckets]
    second = [ready for _, ready in launched[buckets + 1 :]]
    assert second == sorted(set(second)) and second[-1] == 6, "a bucket is sent when it is full"


def one_pass(weights: list[Tensor], inputs: Tensor) -> Callable[..., Tensor]:
    """Return what stands for a `GradientPass`."""

    def gradients(batch: Batch, *, valid_steps: float, weight: Callable[[], Tensor]) -> Tensor:
        loss = (errors(weights, inputs) * batch.attention_mask).sum() / valid_steps
        factor = weight()
        loss.backward(factor)  # type: ignore[no-untyped-call]
        return loss.detach() * factor

    return gradients


def in_order(weights: list[Tensor], order: list[int]) -> Callable[..., Tensor]:
    """Return a pass that uses weights in some order; gradients are their numbers from 1."""

    def gradients(_: Batch, *, valid_steps: float, weight: Callable[[], Tensor]) -> Tensor:
        total = torch.zeros(())
        for number in order:
            total = total + (weights[number] * (number + 1)).sum() / valid_steps
        total.backward(weight())  # type: ignore[no-untyped-call]
        return total.detach()

    return gradients


@pytest.mark.parametrize(("nodes", "buckets"), [(1, 1), (2, 4)])
def test_ranks_send_alike_whatever_the_order_of_their_gradients(nodes: int, buckets: int) -> None:
    """What is used last is ready first; each pass of each rank uses weights in another order."""
    wire = Wire(3, nodes=nodes)
    found = [[torch.ones(size) for size in (3, 40, 7, 100)] for _ in range(3)]
    for weights in found:
        for weight in weights:
            weight.requires_grad_()

    def work(rank: int, world: World) -> None:
        ranks = RankGradients(found[rank], world=world, divisor=1.0)
        for turn in range(4):
            order = torch.randperm(4, generator=torch.Generator().manual_seed(5 * rank + turn))
            for tensor in found[rank]:
                tensor.grad = None
            ranks.exchange(in_order(found[rank], order.tolist()), batch_of(torch.ones(1, 2)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.training.rank_gradients.BUCKET_BYTES", 100)
        patch.setattr("gear_offline.training.rank_gradients.LAST_BYTES", 1)
        wire.run(work)
    lengths = [[length for length, _ in launched] for launched in wire.launched]
    assert lengths[0] == lengths[1] == lengths[2] and len(lengths[0]) == 4 * (1 + buckets)
    for weights in found:
        for number, weight in enumerate(weights, start=1):
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, torch.full_like(weight, number / 2))


def test_shares_of_a_batch_teach_what_all_of_it_does() -> None:
    """A Decision Transformer; the ranks' shares have other numbers of real steps."""
    batch, wire = make_batch(), Wire(2)
    models = [trained() for _ in range(2)]
    whole, *expected = gradients(trained(), batch)
    losses = torch.zeros(2)

    def work(rank: int, world: World) -> None:
        learning = [p for p in models[rank].parameters() if p.requires_grad]
        alone = GradientPass(models[rank], World(), parallel=Parallel("alone"))
        share = list(micro_batches(batch, 2))[rank]
        ranks = RankGradients(learning, world=world, divisor=float(share.attention_mask.numel()))
        for _ in range(2):
            models[rank].zero_grad(set_to_none=True)
            losses[rank] = ranks.exchange(alone, share)
        for found, theirs in zip([p.grad for p in learning], expected, strict=True):
            torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-7)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.training.rank_gradients.BUCKET_BYTES", 2048)
        patch.setattr("gear_offline.training.rank_gradients.LAST_BYTES", 512)
        wire.run(work)
    torch.testing.assert_close(losses.mean(), whole)
    assert len(wire.launched[0]) > 2 * (1 + 3), "several buckets a pass"


@pytest.mark.parametrize(("uses", "wrong"), [(0, "no gradient"), (2, "in two parts")])
def test_a_gradient_comes_once(uses: int, wrong: str) -> None:
    weights = [torch.ones(2).requires_grad_(), torch.ones(3, 4).requires_grad_()]

    def gradients(_: Batch, *, valid_steps: float, weight: Callable[[], Tensor]) -> Tensor:
        weights[0].sum().backward()  # type: ignore[no-untyped-call]
        for _use in range(uses):
            weights[1].sum().backward()  # type: ignore[no-untyped-call]
        return weight()

    def work(_: int, world: World) -> None:
        ranks = RankGradients(weights, world=world, divisor=1.0)
        with pytest.raises(GearError, match=f"1 of shape \\(3, 4\\) .*{wrong}") as caught:
            ranks.exchange(gradients, batch_of(torch.ones(1, 2)))
        assert caught.value.code == "GRADIENT_LAYOUT"

    Wire(1).run(work)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    limit=st.integers(1, 200),
    last=st.integers(1, 200),
)
def test_buckets_are_filled_from_the_end(sizes: list[int], limit: int, last: int) -> None:
    runs = cut(sizes, limit=limit, last=last)
    assert [number for run in runs for number in run] == list(range(len(sizes)))
    if sum(sizes) <= limit:
        assert len(runs) == 1
        return
    leasts = [0, *[limit] * (len(runs) - 2), last][-len(runs) :]
    for run, least in list(zip(runs, leasts, strict=True))[1:]:
        assert sum(sizes[n] for n in run) >= least > sum(sizes[n] for n in run[1:])


class FakeEvent:
    """An event of a GPU that needs some looks, or for ever."""

    looks = 3

    def record(self) -> None:
        self.left = type(self).looks

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


class EndedError(Exception):
    """In place of the end of the process."""


def test_a_gpu_that_waits_for_ever_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr("os._exit", end)
    world = World(rank=1, nodes=(0, 0, 0), timeout=0.05)
    wait_for_steps(world)
    monkeypatch.setattr(FakeEvent, "looks", 10**9)
    with pytest.raises(EndedError, match="1"):
        wait_for_steps(world)
    printed = capsys.readouterr().err
    assert printed.startswith("error[RANK_LOST]: another rank is gone or too slow, while the GPU")


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="run on a machine with two CUDA devices")
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
def test_graphs_learn_what_steps_learn(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, [30, 7, 44, 12]).path
    done = launch(2, "-m", "tests.captured_ranks_child", str(data), timeout=150)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["ranks"] == 2 and document["loss_relative"] < 2e-4
