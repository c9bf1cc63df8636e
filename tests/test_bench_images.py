"""The images benchmark: its data, its training row and its table."""

from __future__ import annotations

import json

import pytest

from gear_offline.bench import images as bench
from gear_offline.bench import run_bench
from tests.support import failing_code


def test_training_on_the_benchmarks_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BATCH", 2)
    monkeypatch.setattr(bench, "CONTEXT", 3)
    monkeypatch.setattr(bench, "EPISODE", 20)
    with bench._frames_like(50) as dataset:
        assert dataset.episodes.lengths.tolist() == [20, 20, 10]
        assert dataset.spec["observations"].shape == (84, 84)
        options = ("model.layers=1", "train.threads=1")
        row = bench._train(dataset, options, seconds=1e-3, device="cpu")
    assert row["batch_size"] == 2 and row["milliseconds"] > 0
    assert 0 < row["data_wait_share"] < 1


def test_the_table_has_a_row_a_measurement() -> None:
    document = {
        "results": [
            {
                "tier": "host",
                "stored": "single frames",
                "gigabytes_per_second": 1.0,
                "million_windows_per_second": 0.5,
            }
        ],
        "bus_gigabytes_per_second": 2.0,
        "training": [{"name": "from GPU memory", "milliseconds": 3.0, "data_wait_share": 0.01}],
    }
    json.dumps(document)
    header, *rows = bench.table(document)
    assert len(rows) == 3 and all(len(row) == len(header) for row in rows)
    assert rows[-1][-1] == "1.00%"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert failing_code(lambda: run_bench("images")) == "DEVICE"
