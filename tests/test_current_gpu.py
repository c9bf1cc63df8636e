"""A run on a GPU that is not the first one: torch's current GPU is that one meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.config.recipe import load_recipe
from gear_offline.distributed.world import current
from gear_offline.errors import GearError
from gear_offline.runs.trainer import _torch_settings
from gear_offline.sweep.turns import Turns
from tests.sweep_support import name_points

SECOND = torch.device("cuda:1")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the stack of current GPUs."""
    stack = ["cuda:0"]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        stack.append(str(chosen))
        try:
            yield
        finally:
            stack.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch, "Generator", lambda _: None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    return stack


def test_a_cpu_has_none(gpus: list[str]) -> None:
    with current(torch.device("cpu")):
        assert gpus == ["cuda:0"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_train(gpus: list[str], deterministic: bool) -> None:
    recipe = load_recipe("paper").replace(train__deterministic=deterministic)
    with _torch_settings(recipe, SECOND):
        assert gpus[-1] == "cuda:1"
    assert gpus == ["cuda:0"]


def test_sweep(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def opened(self: Turns, lane: Any, point: Any) -> None:
        seen.append(gpus[-1])
        raise GearError("X", "a run that does not begin", remedy="none")

    monkeypatch.setattr(Turns, "_open", opened)
    nobody: Any = None
    turns = Turns(SECOND, parallel=2, prepare=nobody, place=lambda _: Path(), display=nobody)
    recipes = [load_recipe("paper").replace(seed=seed, train__compile="off") for seed in range(3)]
    ended = []
    turns.complete(name_points(recipes), lambda point, error: ended.append(error))
    assert seen == ["cuda:1"] * 3 and len(ended) == 3 and gpus == ["cuda:0"]
