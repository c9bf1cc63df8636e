"""The disk benchmark: its data, its peer, and a complete document."""

from __future__ import annotations

import json

import pytest

from gear_offline.bench import disk as bench


def test_document_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK_DATA_BYTES", 48 << 20)
    monkeypatch.setattr(bench, "QUICK_SECONDS", 0.2)
    monkeypatch.setattr(bench, "KINDS", dict(list(bench.KINDS.items())[:1]))
    document = bench.run(quick=True)
    assert json.loads(json.dumps(document)) == document
    (result,) = document["results"]
    assert result["data_bytes"] // result["budget_bytes"] == bench.OVER
    assert min(min(values) for values in result["bytes_per_second"].values()) > 0
    header, *rows = bench.table(document)
    assert len(rows) == 1 and len(header) == len(rows[0])
