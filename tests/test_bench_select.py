"""The benchmark of selecting: complete documents, peers only where they can take part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.bench import select as bench
from gear_offline.bench import select_gpu
from gear_offline.bench.select_peers import torchrl_calls
from tests.kernels_on_cpu import compile_kernels, on_cpu


def test_document_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK_SIZES", (50, 3000))
    monkeypatch.setattr(bench, "QUICK_DRAWS", 1000)
    monkeypatch.setattr(bench, "MULTINOMIAL_MOST", 100)
    document = bench.run(quick=True)
    assert json.loads(json.dumps(document)) == document
    small, large = document["results"]
    assert set(small["seconds"]) - set(large["seconds"]) == {"torch.multinomial"}
    assert set(bench.OWN) < set(large["seconds"])
    assert all(seconds > 0 for seconds in small["seconds"].values())
    assert 0 < small["updates"] <= 50 and large["priority_bytes_per_item"] < 10.2
    header, *rows = bench.table(document)
    assert {len(row) for row in rows} == {len(header)}
    assert [row[4] for row in rows if row[0] == "CPU: weighted"] == [
        *("torch.multinomial", "numpy choice")
    ]


class Tree:
    """What the benchmark asks of TorchRL's tree."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size)

    def __setitem__(self, items: Any, values: Any) -> None:
        self.values[items] = values

    def __getitem__(self, items: Any) -> Any:
        return self.values[items]

    def query(self, begin: int, end: int) -> float:
        return float(self.values[begin:end].sum())

    def scan_lower_bound(self, numbers: Any) -> Any:
        return np.searchsorted(self.values.cumsum(), numbers)


def test_the_peer_that_is_seldom_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchrl", "torchrl._torchrl"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(SumSegmentTreeFp64=Tree))
    weights, chosen = np.array([0.0, 2.0, 0.0, 6.0]), np.array([1, 3])
    calls = torchrl_calls(weights, chosen, 100)
    assert set(calls) == {"TorchRL: draw", "TorchRL: update"}
    assert set(np.asarray(calls["TorchRL: draw"]()).tolist()) == {2.0, 6.0}
    calls["TorchRL: update"]()
    monkeypatch.setitem(sys.modules, "torchrl._torchrl", None)
    assert torchrl_calls(weights, chosen, 100) == {}


def test_the_gpu_part_with_kernels_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it computes and that its own checks pass; no figure of it means anything."""

    def seconds(call: Any, *, turns: int, calls: int) -> float:
        call()
        return 1.0

    monkeypatch.setattr(select_gpu, "event_seconds", seconds)
    monkeypatch.setattr(select_gpu, "_graph_is_exact", lambda *_: True)
    for name in ("synchronize", "set_sync_debug_mode", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    with on_cpu(compile_kernels(tmp_path)) as device:
        results = [
            select_gpu.measure(items, 9000, turns=1, device=device) for items in (1000, 70_000)
        ]
    for result in results:
        assert result["draws_exact"] and result["sums_exact_after_updates"]
        assert result["bytes_per_item"] < 12
    gpu = {"results": results, "batches": [{"law": "fifo", "microseconds, B=64": 3.0}]}
    header, *rows = bench.table({"results": [], "gpu": gpu})
    assert {len(row) for row in rows} == {len(header)} and len(rows) == 2 * 7 + 1
    json.dumps(results)
