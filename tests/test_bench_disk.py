"""The disk benchmark: its data, its peer, and a complete document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gear_offline.bench import disk as bench
from gear_offline.convert import convert
from gear_offline.dataset.dataset import open_dataset


@pytest.mark.parametrize("kind", bench.KINDS)
def test_the_data_do_not_depend_on_how_they_are_read(kind: str, tmp_path: Path) -> None:
    source = bench.MadeSource(kind, 8 << 20)
    convert(source, tmp_path / "dataset", shard_bytes=1 << 20, quiet=True)
    dataset = open_dataset(tmp_path / "dataset")
    assert len(dataset.manifest.shards) >= 2
    found = dataset.column("observations")
    assert len(np.unique(found[::97].reshape(len(found[::97]), -1), axis=0)) > 10
    for seconds, buffers in ((0.05, 2), (0.0, 1)):  # something is read however short the time is
        rate = bench.read_in_order(dataset, threads=2, seconds=seconds)
        assert np.isfinite(rate) and rate > 0
        for nbytes in (5000, 4 << 20):  # more than a shard has, too
            options = {"nbytes": nbytes, "threads": 2, "buffers": buffers}
            rate = bench.read_at_random(dataset, **options, seconds=seconds)
            assert np.isfinite(rate) and rate > 0


def test_document_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QUICK_DATA_BYTES", 48 << 20)
    monkeypatch.setattr(bench, "QUICK_SECONDS", 0.2)
    monkeypatch.setattr(bench, "KINDS", dict(list(bench.KINDS.items())[:1]))
    document = bench.run(quick=True)
    assert json.loads(json.dumps(document)) == document
    (result,) = document["results"]
    assert result["data_bytes"] // result["budget_bytes"] == bench.OVER
    rates = result["bytes_per_second"]
    assert min(min(values) for values in rates.values()) > 0
    assert result["peak_bytes"] > result["imports_bytes"] > 0
    header, *rows = bench.table(document)
    assert len(rows) == 1 and len(header) == len(rows[0])
