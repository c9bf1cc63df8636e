"""Gradients of several ranks inside one CUDA graph."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gear_offline.graph_watch import wait_for_steps
from gear_offline.loaders.batch import Batch
from gear_offline.rank_gradients import RankGradients
from gear_offline.roll_call import RollCall
from gear_offline.world import World
from tests.ranks_support import launch
from tests.support import make_dataset


def batch_of(mask: Tensor) -> Batch:
    nothing = torch.zeros(*mask.shape, 1)
    return Batch(nothing, nothing, nothing, nothing, mask, mask, mask, padding="right", extras={})


@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(st.integers(0, 7), min_size=2, max_size=4),
    seed=st.integers(0, 99),
    half=st.booleans(),
)
def test_gradients_are_those_of_the_global_batch(steps: list[int], seed: int, half: bool) -> None:
    """Each rank has other numbers of real steps; ranks take their turn in this process."""
    steps[0] += 1
    torch.manual_seed(seed)
    inputs = torch.randn(len(steps), 8, 3)
    masks = (torch.arange(8) < torch.tensor(steps)[:, None]).long()
    weight, bias = torch.randn(3, 2), torch.randn(2)

    def backward(ranks: slice, divisor: float) -> tuple[list[Tensor], Tensor]:
        parameters = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        error = (inputs[ranks] @ parameters[0] + parameters[1]).square().mean(-1)
        loss = (error * masks[ranks]).sum() / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        return parameters, loss

    expected, whole = backward(slice(None), float(masks.sum()))
    kind = torch.bfloat16 if half else torch.float32
    sent: dict[int, list[Tensor]] = {}  # by length
    for turn in ("collect", "add"):
        for rank in range(len(steps)):
            divisor = 5.0
            learning, loss = backward(slice(rank, rank + 1), divisor)
            parameters = [p.detach().to(kind).requires_grad_() for p in learning]
            for parameter, learnt in zip(parameters, learning, strict=True):
                assert learnt.grad is not None
                parameter.grad = learnt.grad.to(kind)

            def all_reduce(flat: Tensor, *, turn: str = turn) -> None:
                if turn == "collect":
                    sent.setdefault(len(flat), []).append(flat.clone())
                else:
                    flat.copy_(torch.stack(sent[len(flat)]).sum(0))

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("torch.distributed.all_reduce", all_reduce)
                average = RankGradients(parameters, divisor=divisor).average
                found = average(loss, batch_of(masks[rank : rank + 1]))
            if turn == "add":
                torch.testing.assert_close(found, whole.detach())
                for mine, theirs in zip(parameters, expected, strict=True):
                    assert mine.grad is not None and mine.grad.dtype == kind
                    rtol, atol = (0.03, 0.03) if half else (1e-4, 1e-5)
                    torch.testing.assert_close(mine.grad.float(), theirs.grad, rtol=rtol, atol=atol)


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
    calls = [RollCall("127.0.0.1", ranks=3) for _ in range(3)]
    cards = tuple(call.card for call in calls)
    world = World(rank=1, nodes=(0, 0, 0), cards=cards, timeout=0.05)
    calls[2].close()
    try:
        wait_for_steps(world)
        monkeypatch.setattr(FakeEvent, "looks", 10**9)
        with pytest.raises(EndedError, match="1"):
            wait_for_steps(world)
    finally:
        for call in calls:
            call.close()
    said = capsys.readouterr().err
    assert said.startswith("error[RANK_LOST]: rank 2 (127.0.0.1) is gone, while the GPU")
    assert "rank 0" not in said


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="run on a machine with two CUDA devices")
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
def test_graphs_learn_what_steps_learn(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, [30, 7, 44, 12]).path
    done = launch(2, "-m", "tests.captured_ranks_child", str(data), timeout=150)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["ranks"] == 2 and document["loss_relative"] < 2e-4
