"""The benchmarks run, their documents are JSON, and their peers hand out the same windows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import benchmarks.__main__ as command
from benchmarks import common, loader_peers
from gear_offline.loaders.loader import GearLoader

ON_A_CPU = ("loader", "load", "select")  # of a few seconds


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "STEPS", 20_000)
    monkeypatch.setattr(common, "EPISODES", 60)
    monkeypatch.setattr("benchmarks.load.QUICK_STEPS", 20_000)
    monkeypatch.setattr("benchmarks.select.QUICK_SIZES", (10_000,))
    monkeypatch.setattr("benchmarks.select.QUICK_DRAWS", 1_000)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_benchmark_prints_one_json_document(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", name, "--quick", "--json"])
    assert command.main() == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["benchmark"] == name and document["machine"]["cores"] >= 1
    assert document["results"] and all(isinstance(row, dict) for row in document["results"])
    common.print_document(document)


def test_the_list_names_every_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    assert command.main() == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert set(ON_A_CPU) < set(listed) and "parity" not in listed


def test_the_numpy_peer_gathers_what_the_loader_does() -> None:
    with common.hopper_like(quick=True) as data:
        loader = GearLoader(data.dataset, batch_size=32, context_length=20, device="cpu")
        batch = next(loader)
        episode, start = batch.segments.numpy().T
        gather = loader_peers.PlainGather(data, 20)
        first = data.offsets[episode] + start
        fields: Any = gather(first, start, data.offsets[episode + 1])
        names = ("states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask")
        for name, field in zip(names, fields, strict=True):
            mine = getattr(batch, name).numpy()
            np.testing.assert_allclose(field.numpy().reshape(mine.shape), mine, rtol=1e-6)
