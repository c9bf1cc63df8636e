"""Blocks gathered one ahead: the order of calls, jumps, errors, interruptions, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gear_offline.tables.gather_ahead import GatherAhead


class Recorder:
    """Answers with what it was asked for, and remembers it."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def fill(self, first_step: int, steps: int) -> Any:
        assert self.gate.wait(30)
        self.calls.append((first_step, steps))
        if self.broken:
            raise OSError("the disk is gone")
        return first_step, steps


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def ahead(recorder: Recorder) -> Iterator[GatherAhead]:
    found = GatherAhead(recorder.fill)
    yield found
    recorder.gate.set()
    found.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("gear-gather")]


def test_blocks_in_order_are_gathered_once(recorder: Recorder, ahead: GatherAhead) -> None:
    found: list[Any] = [ahead.take(step, 4) for step in (0, 4, 8, 12)]
    assert found == [(0, 4), (4, 4), (8, 4), (12, 4)]
    ahead.close()
    assert recorder.calls == [*found, (16, 4)][: len(recorder.calls)]
    assert len(recorder.calls) >= 4


def test_a_jump_or_another_size_is_what_was_asked_for(ahead: GatherAhead) -> None:
    asked = [(0, 4), (4, 4), (100, 4), (104, 4), (2, 4), (6, 3), (9, 3)]
    found: list[Any] = [ahead.take(*each) for each in asked]
    assert found == asked


def test_an_error_comes_where_its_block_is_taken(recorder: Recorder, ahead: GatherAhead) -> None:
    ahead.take(0, 1)
    recorder.broken = True
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            ahead.take(7, 1)
    recorder.broken = False
    found: Any = ahead.take(7, 1)
    assert found == (7, 1)


def test_an_interrupted_wait_goes_on(
    recorder: Recorder, ahead: GatherAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.gate.clear()

    class Impatient:
        def __init__(self, future: Any) -> None:
            self.done = future.done

        def result(self) -> Any:
            raise KeyboardInterrupt

    begin = ahead._begin

    def impatient(first_step: int, steps: int) -> None:
        begin(first_step, steps)
        assert ahead._next is not None
        waiting: Any = Impatient(ahead._next[2])
        kept.append(ahead._next)
        ahead._next = (first_step, steps, waiting)

    kept: list[Any] = []
    monkeypatch.setattr(ahead, "_begin", impatient)
    with pytest.raises(KeyboardInterrupt):
        ahead.take(3, 2)
    monkeypatch.undo()
    assert ahead._next is not None, "it is still being gathered"
    ahead._next = kept[0]
    recorder.gate.set()
    found: Any = ahead.take(3, 2)
    assert found == (3, 2) and recorder.calls.count((3, 2)) == 1


def test_two_threads_of_the_pool_do_not_gather_at_once() -> None:
    """Ctrl-C while the pool starts its thread leaves it with another one besides."""
    under_way: list[int] = []
    most: list[int] = []

    def fill(first_step: int, steps: int) -> Any:
        under_way.append(first_step)
        most.append(len(under_way))
        time.sleep(0.05)
        under_way.pop()
        return first_step, steps

    ahead = GatherAhead(fill)
    ahead._pool._max_workers = 2
    for step in (0, 10, 20):
        ahead.take(step, 1)
    ahead.close()
    assert set(most) == {1}
