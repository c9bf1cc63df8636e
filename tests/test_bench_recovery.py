"""The times of a recovery are told apart; the benchmark itself is run by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gear_offline.bench import recovery
from gear_offline.errors import GearError


def mark(what: str, rank: int, time: float, step: int = 0) -> dict[str, Any]:
    return {"what": what, "rank": rank, "step": step, "time": time}


MARKS = [
    *(mark("begin", rank, 1.0) for rank in (0, 1)),
    *(mark("ready", rank, 2.0) for rank in (0, 1)),
    *(mark("step", rank, 3.0 + step, step) for rank in (0, 1) for step in (1, 2, 3)),
    mark("killed", 1, 7.0, 3),
    mark("error", 0, 7.5),
    mark("begin", 0, 8.0), mark("begin", 1, 9.0),
    mark("ready", 1, 12.0, 2), mark("ready", 0, 13.0, 2),
    mark("step", 0, 14.0, 2), mark("step", 1, 14.5, 2),
    mark("step", 0, 16.0, 3), mark("step", 1, 16.25, 3), mark("step", 1, 20.0, 4),
]  # fmt: skip


def test_the_parts_make_up_the_whole() -> None:
    found = recovery.split_times(MARKS)
    assert found == {
        "detection": 0.5,
        "restart": 1.5,
        "start_up": 4.0,
        "first_step": 1.5,
        "replay": 1.75,
        "until_first_step": 7.5,
        "until_caught_up": 9.25,
    }
    row = {"name": "one node", **found}
    assert recovery.table({"results": [row]})[1] == (
        *("one node", "0.50", "1.50", "4.00", "1.50", "1.75", "7.50", "9.25"),
    )


@pytest.mark.parametrize("what", ["killed", "error", "begin", "ready"])
def test_a_missing_mark_is_told(what: str) -> None:
    some = [m for m in MARKS if m["what"] != what or m["time"] < 3]
    with pytest.raises(GearError) as caught:
        recovery.split_times(some)
    assert caught.value.code == "BENCH_RUN"
