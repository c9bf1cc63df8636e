"""Batches a step ahead: what each step sees, with the order of streams played by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gear_offline.kernels.columns import Field
from gear_offline.kernels.gather import Windows
from gear_offline.loaders import static_batch as module
from gear_offline.loaders.static_batch import StaticBatch, make_static_batch

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


class Fill:
    """Writes the step's number everywhere."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.step, self.blocks = log, 0, 1000
        field = {"dtype": torch.empty(0).numpy().dtype, "shape": (1,)}
        self.windows = Windows(
            buffers=tuple(torch.full((2, 3, 1), -1.0) for _ in NAMES),
            fields=tuple((Field(name=name, **field),) for name in NAMES),  # type: ignore[arg-type]
            timesteps=torch.full((2, 3), -1),
            attention_mask=torch.full((2, 3), -1),
            segments=torch.full((2, 2), -1),
        )

    def limit_blocks(self, blocks: int) -> None:
        self.blocks = blocks

    def set_step(self, step: int) -> None:
        self.step = step

    def enqueue(self) -> None:
        self.log.append(f"fill {self.step}")
        for tensor in module._tensors(self.windows):
            tensor.fill_(self.step)
        self.step += 1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    entries: list[str] = []
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
    fill: Any = Fill(log)
    batches = StaticBatch(fill, padding="right", step=5, ahead=ahead)
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


def test_the_next_rows_travel_between_begin_and_end(log: list[str]) -> None:
    fill: Any = Fill(log)
    batches = StaticBatch(fill, padding="right", step=0, ahead=True)
    log.clear()
    batches.begin()
    assert log == ["side waits for main", "on side", "fill 1", "back"]
    log.clear()
    batches.end()
    assert log == ["main waits for side"]


@pytest.mark.parametrize(
    ("host_bytes", "least", "asked", "ahead"),
    [(9, 0, True, True), (9, 0, False, False), (0, 0, True, False), (9, 99999, True, False)],
)
def test_only_large_batches_from_host_memory_are_fetched_ahead(
    log: list[str],
    host_bytes: int,
    least: int,
    asked: bool,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Engine:
        reads_host, selection = bool(host_bytes), object()
        fill = Fill(log)

        def static(self, *, chances: bool, windows: Any = None, ring: int = 0) -> Fill:
            assert not chances
            return self.fill

    monkeypatch.setattr(module, "AHEAD_BYTES", least)
    engine: Any = Engine()
    assert make_static_batch(engine, padding="right", step=0, ahead=asked).ahead is ahead
    assert engine.fill.blocks == (module.AHEAD_BLOCKS if ahead else 1000)


@pytest.mark.parametrize("ahead", [True, False])
def test_batches_of_several_lie_one_after_another(
    log: list[str], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES", 0)
    field = {"dtype": torch.empty(0).numpy().dtype, "shape": (1,)}

    class Engine:
        batch_size, selection = 2, object()
        reads_host = ahead

        def allocate(self, shape: tuple[int, ...]) -> Windows:
            (size,) = shape
            return Windows(
                buffers=tuple(torch.full((size, 3, 1), -1.0) for _ in NAMES),
                fields=tuple((Field(name=name, **field),) for name in NAMES),  # type: ignore[arg-type]
                timesteps=torch.full((size, 3), -1),
                attention_mask=torch.full((size, 3), -1),
                segments=torch.full((size, 2), -1),
            )

        def static(
            self, *, chances: bool = False, windows: Windows | None = None, ring: int = 0
        ) -> Fill:
            fill = Fill(log)
            fill.windows = self.allocate((2,)) if windows is None else windows
            return fill

    engine: Any = Engine()
    places, whole = module.side_by_side(engine, 3, "right")
    parts = [
        make_static_batch(engine, padding="right", step=10 * n, ahead=True, windows=place)
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
