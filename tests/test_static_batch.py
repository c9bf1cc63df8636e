"""Batches a step ahead: what each step sees, with the order of streams played by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gear_offline.kernels.columns import Field
from gear_offline.kernels.gather import Windows
from gear_offline.loaders import static_batch as module
from gear_offline.loaders.static_batch import StaticBatch

NAMES = ("states", "actions", "rewards", "returns_to_go")


class Stream:
    """Remembers who waits for whom."""

    log: list[str]

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append("back")


def make_windows(size: int) -> Windows:
    field: Any = {"dtype": torch.empty(0).numpy().dtype, "shape": (1,)}
    return Windows(
        buffers=tuple(torch.full((size, 3, 1), -1.0) for _ in NAMES),
        fields=tuple((Field(name=name, **field),) for name in NAMES),
        timesteps=torch.full((size, 3), -1),
        attention_mask=torch.full((size, 3), -1),
        segments=torch.full((size, 2), -1),
    )


class Fill:
    """Writes the step's number everywhere."""

    def __init__(self, log: list[str], windows: Windows) -> None:
        self.log, self.step, self.blocks, self.windows = log, 0, 1000, windows

    def limit_blocks(self, blocks: int) -> None:
        self.blocks = blocks

    def set_step(self, step: int) -> None:
        self.step = step

    def enqueue(self) -> None:
        self.log.append(f"fill {self.step}")
        for tensor in module._tensors(self.windows):
            tensor.fill_(self.step)
        self.step += 1


class Engine:
    """A GPU's gather of two segments; whatever it reads is worth fetching ahead."""

    rank_batch = 2

    def __init__(self, log: list[str], *, reads_host: bool = True) -> None:
        self.log, self.reads_host = log, reads_host
        self.fills: list[Fill] = []

    def allocate(self, shape: tuple[int, ...]) -> Windows:
        return make_windows(*shape)

    def fill(self, *, chances: bool = False, windows: Any = None, ring: int = 0) -> Fill:
        assert not chances
        self.fills.append(Fill(self.log, self.allocate((2,)) if windows is None else windows))
        return self.fills[-1]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    entries: list[str] = []
    monkeypatch.setattr(module, "AHEAD_BYTES", 0)
    monkeypatch.setattr(module, "StaticFill", lambda engine, **options: engine.fill(**options))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", entries))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", entries))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return entries


def seen(batches: StaticBatch) -> int:
    tensors = [*batches.batch.model_inputs().values(), batches.batch.segments]
    (value,) = {int(v) for tensor in tensors for v in tensor.flatten().tolist()}
    return value


@pytest.mark.parametrize("ahead", [True, False])
def test_each_step_sees_its_own_batch_to_its_end(log: list[str], ahead: bool) -> None:
    engine: Any = Engine(log)
    batches = StaticBatch(engine, padding="right", step=5, ahead=ahead)
    places = [tensor.data_ptr() for tensor in batches.batch.model_inputs().values()]
    for step in (5, 6, 7):
        batches.begin()
        assert seen(batches) == step
        batches.end()
        assert seen(batches) == step, "the next one travels into other memory"
    batches.enqueue()
    assert seen(batches) == 8
    batches.set_step(2)
    batches.begin()
    assert seen(batches) == 2
    assert places == [tensor.data_ptr() for tensor in batches.batch.model_inputs().values()]


@pytest.mark.parametrize("ahead", [True, False])
def test_batches_of_several_lie_one_after_another(log: list[str], ahead: bool) -> None:
    engine: Any = Engine(log, reads_host=ahead)
    places, whole = module.side_by_side(engine, 3, "right")
    parts = [
        StaticBatch(engine, padding="right", step=10 * n, ahead=True, windows=place)
        for n, place in enumerate(places)
    ]
    assert [part.ahead for part in parts] == [ahead] * 3
    for turn in range(2):
        for part in parts:
            part.begin()
        assert [seen(part) for part in parts] == [turn, 10 + turn, 20 + turn]
        for tensor in [*whole.model_inputs().values(), whole.segments]:
            assert [set(part.flatten().tolist()) for part in tensor.chunk(3)] == [
                {turn},
                {10 + turn},
                {20 + turn},
            ]
        for part in parts:
            part.end()
