"""The benchmark of several tasks: a complete document, in seconds on a CPU."""

from __future__ import annotations

import pytest

from gear_offline.bench import run_bench
from gear_offline.bench import tasks as bench


def test_one_row_a_batch_size_and_a_choice_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK", 2)
    monkeypatch.setattr(bench, "EPISODE", 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    document = run_bench("tasks", quick=True, sizes=["batches=4", "episodes=2"])
    assert [row["tasks"] for row in document["results"]] == ["one", "three"]
    assert all(row["steps_per_second"] > 0 for row in document["results"])
    header, *rows = bench.table(document)
    assert len(rows) == 2 and len(header) == len(rows[0])
