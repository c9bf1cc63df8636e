"""What a captured step does around its capture, on the CPU with CUDA's calls left out."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gear_offline.config.recipe import load_recipe
from gear_offline.distributed.world import World
from gear_offline.errors import UnavailableError
from gear_offline.training.captured_part import WARM_UPS, _own_stream, warm_up
from gear_offline.training.captured_step import CapturedStep, why_not_captured


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


class Weights:
    """An optimiser's face, over one parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.moment = parameter, torch.zeros(3)

    @property
    def weights(self) -> list[Tensor]:
        return [self.parameter]

    def state(self) -> dict[str, Tensor]:
        return {"moment": self.moment}

    def zero_gradients(self) -> None:
        self.parameter.grad = None


def holders(parameter: nn.Parameter) -> int:
    """Return how many tensors there are whose graph ends at a parameter."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    nexts = [node for t in tensors if t.grad_fn is not None for node, _ in t.grad_fn.next_functions]
    return sum(getattr(node, "variable", None) is parameter for node in nexts)


def test_a_warm_up_leaves_nothing_and_finds_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is kept has nodes of gradients that belong to the stream they were made on."""
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    parameter = nn.Parameter(torch.arange(3.0))
    some: Any = object.__new__(CapturedStep)
    some._start = 5, 2
    some._optimizer, some._window = Weights(parameter), torch.ones(4, 2)
    some._row, some._index = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
    steps: list[int] = []
    some._batches = type("Batches", (), {"set_step": lambda _, step: steps.append(step)})()
    found = []

    def step() -> None:
        found.append(holders(parameter))
        assert (int(some._row), int(some._index)) == (0, 5)
        torch.rand(1)
        (parameter.square().sum()).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            parameter.add_(1)
        some._optimizer.moment.add_(1)
        some._window.zero_()

    some._run = step
    random = torch.get_rng_state()
    warm_up(some._rehearse, some.written(), parameter.device)
    some.put_back()
    assert found == [0] * WARM_UPS
    assert parameter.tolist() == [0, 1, 2] and some._optimizer.moment.tolist() == [0, 0, 0]
    assert bool((some._window == 1).all()) and torch.equal(torch.get_rng_state(), random)
    assert (int(some._row), int(some._index), steps) == (2, 5, [5])


@pytest.mark.parametrize(
    ("current", "kept", "expected"),
    [
        ("cuda:0 own", None, "cuda:0 own"),
        ("cuda:0 default", None, None),
        ("cuda:0 default", "cuda:0 kept", None),
        ("cuda:1 default", "cuda:0 kept", "cuda:1 new"),
        ("cuda:1 own", "cuda:0 kept", "cuda:1 own"),
    ],
)
def test_a_step_is_captured_on_a_stream_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch, current: str, kept: str | None, expected: str | None
) -> None:
    class Named(str):
        @property
        def device(self) -> str:
            return self.split()[0]

    here = Named(current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: Named(f"{here.device} default"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Named(f"{here.device} new"))
    stream = None if kept is None else Named(kept)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", stream)
    assert _own_stream() == expected


@pytest.mark.parametrize(
    ("nodes", "graph", "shared", "reason"),
    [
        ((0,), "auto", {}, ""),
        ((0, 0), "auto", {}, ""),
        ((0, 0), "off", {}, "train.graph=off"),
        ((0, 0), "auto", {"sharded": True}, "graphs of several ranks need replicas"),
        ((0, 0), "auto", {"learner": 1}, "the ranks tell each other the losses of segments"),
        ((0,), "auto", {"learner": 1}, ""),
        (
            (0,),
            "auto",
            {"learner": 1, "draws": False},
            "the host draws when it has heard of the losses",
        ),
        ((0, 0), "auto", {"engine": None}, "batches are not made by the GPU (loader.engine)"),
        ((0, 0, 1, 1), "auto", {}, "several nodes exchange gradients"),
        ((0, 0, 1, 1), "on", {}, ""),
    ],
)
def test_replicas_of_one_node_are_captured(
    nodes: tuple[int, ...], graph: str, shared: dict[str, Any], reason: str
) -> None:
    shared = dict(shared)
    recipe = load_recipe("paper", [f"train.graph={graph}"])
    engine = SimpleNamespace(draws=shared.pop("draws", True))
    facts = {"sharded": False, "learner": None, "engine": engine, **shared}
    sharded = facts.pop("sharded")
    loader: Any = SimpleNamespace(**facts)
    world = World(nodes=nodes)
    found = why_not_captured(recipe, torch.device("cuda"), world, loader, sharded=sharded)
    assert found == reason
    if reason and graph == "auto" and len(nodes) == 2:
        insisting = recipe.replace(train__graph="on")
        with pytest.raises(UnavailableError, match="graph=on is not possible") as caught:
            why_not_captured(insisting, torch.device("cuda"), world, loader, sharded=sharded)
        assert caught.value.code == "GRAPH_UNAVAILABLE"
