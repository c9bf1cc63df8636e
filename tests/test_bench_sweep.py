"""The benchmark of sweeps without a GPU: its peer model, its table, its refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gear_offline.bench import sweep
from gear_offline.errors import UnavailableError


def test_the_table_has_ratios_to_one_run_after_another() -> None:
    found: dict[str, Any] = {
        "streams 4": {
            "1": {"steps_per_second": 1000.0},
            "2": {"steps_per_second": 1500.0},
            "memory_bytes": 7,
        },
        "stacked 8": {"steps_per_second": 2000.0, "memory_bytes": 1},
        "green 8": {"error": "no green contexts"},
    }
    rows = sweep.results(found)
    assert [(row["way"], row["runs"], row["ratio"]) for row in rows] == [
        ("serial", 1, 1.0),
        ("streams", 2, 1.5),
        ("stacked", 8, 2.0),
    ]
    equality = {"float32": {"together": 0.0, "alone_twice": 0.0}, "other": {"error": "lost"}}
    document = {"results": rows, "equality": equality, "skipped": {"green 8": "no green contexts"}}
    lines = sweep.table(document)
    assert lines[1] == ("one after another", 1, "1,000", "1.00")
    assert lines[-2][0] == "difference of weights, float32"
    assert lines[-1][2] == "not measured: no green contexts"


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError):
        sweep.run(quick=True)
