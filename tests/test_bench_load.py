"""The loading benchmark: the peer reads the same bytes, and the document is complete."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gear_offline.bench import load as bench
from tests.support import make_dataset


def test_the_peer_reads_the_columns(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [30, 20])
    found = bench.read_raw(dataset, 2).tobytes()
    for column in bench.COLUMNS:
        assert dataset.column(column).tobytes() in found


def test_document_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK_STEPS", 20_000)
    monkeypatch.setattr(bench, "QUICK_SHARD_BYTES", 1 << 19)
    document = bench.run(quick=True)
    assert json.loads(json.dumps(document)) == document
    assert document["shards"] > 2
    header, *rows = bench.table(document)
    assert len(rows) == len(document["results"]) and {len(row) for row in rows} == {len(header)}
    for result in document["results"]:
        assert all(np.isfinite(result[name]) for name in bench.RATIOS)
