"""The benchmark of selecting: complete documents, peers only where they can take part."""

from __future__ import annotations

import json

import pytest

from gear_offline.bench import select as bench


def test_document_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK_SIZES", (50, 3000))
    monkeypatch.setattr(bench, "QUICK_DRAWS", 1000)
    monkeypatch.setattr(bench, "MULTINOMIAL_MOST", 100)
    document = bench.run(quick=True)
    assert json.loads(json.dumps(document)) == document
    small, large = document["results"]
    assert set(small["seconds"]) - set(large["seconds"]) == {"torch.multinomial"}
    assert all(seconds > 0 for seconds in small["seconds"].values())
    assert 0 < small["updates"] <= 50 and large["priority_bytes_per_item"] < 10.2
    header, *rows = bench.table(document)
    assert {len(row) for row in rows} == {len(header)} and len(rows) == 2
    assert rows[1][-1] == "-"
