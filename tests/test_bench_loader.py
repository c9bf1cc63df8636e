"""The loader benchmark compares like with like, and its document is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.bench import loader as bench
from gear_offline.bench import loader_peers as peers
from gear_offline.loaders.loader import GearLoader
from gear_offline.tables.returns import sum_returns
from tests.support import make_dataset

LENGTHS = [30, 1, 7, 55, 20, 3]


@pytest.fixture
def loader_and_data(tmp_path: Path) -> tuple[GearLoader, peers.Data]:
    dataset = make_dataset(tmp_path, LENGTHS)
    data = peers.Data(
        states=dataset.column("observations"),
        actions=dataset.column("actions"),
        rewards=dataset.column("rewards"),
        returns_to_go=sum_returns(
            dataset.column("rewards"), dataset.episodes.offsets, gamma=1.0, scale=1.0
        ),
        offsets=dataset.episodes.offsets,
    )
    return GearLoader(dataset, batch_size=32, context_length=9, device="cpu"), data


def test_the_plain_gather_makes_the_same_batch(
    loader_and_data: tuple[GearLoader, peers.Data],
) -> None:
    loader, data = loader_and_data
    batch = next(loader)
    episode, start = batch.segments.numpy().T
    found: Any = peers.PlainGather(data, 9)(
        data.offsets[episode] + start, start, data.offsets[episode + 1]
    )
    expected = batch.model_inputs().values()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", ["NumPy gather + selection", "original procedure"])
def test_peers_make_batches_of_the_same_law(
    loader_and_data: tuple[GearLoader, peers.Data], name: str
) -> None:
    """Real steps of every window are steps of the data, with their own returns-to-go."""
    _, data = loader_and_data
    call = peers.PEERS[name](data, 16, 9)
    for _ in range(5):
        batch: Any = call()
        states, actions, rewards, rest, timesteps, mask = batch
        assert [x.shape for x in (states, actions, rewards, rest)] == [
            (16, 9, 11),
            (16, 9, 3),
            (16, 9, 1),
            (16, 9, 1),
        ]
        for i in range(16):
            real = mask[i].bool()
            first = np.flatnonzero((data.states == states[i][real][0].numpy()).all(1))
            rows = int(first[0]) + np.arange(int(real.sum()))
            assert np.array_equal(states[i][real].numpy(), data.states[rows])
            np.testing.assert_allclose(rest[i][real, 0], data.returns_to_go[rows], rtol=1e-6)
            episode = np.searchsorted(data.offsets, rows, side="right") - 1
            assert (episode == episode[0]).all()
            assert np.array_equal(timesteps[i][real].numpy(), rows - data.offsets[episode])


def test_document_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(data: peers.Data, batch_size: int, span: int) -> peers.NextBatch:
        raise ImportError("No module named 'nothing'")

    monkeypatch.setattr(bench, "STEPS", 20_000)
    monkeypatch.setattr(bench, "EPISODES", 50)
    chosen = {name: peers.PEERS[name] for name in (bench.BASE, "NumPy gather + selection")}
    monkeypatch.setattr(peers, "PEERS", {**chosen, "absent": missing})
    document = bench.run(quick=True)
    assert json.loads(json.dumps(document)) == document
    names = ["GearLoader", *chosen]
    assert [row["name"] for row in document["results"]] == names * 2
    assert all(row["ratio"] > 0 for row in document["results"])
    assert {row["ratio"] for row in document["results"] if row["name"] == bench.BASE} == {1.0}
    assert "nothing" in document["skipped"]["absent"]
    header, *rows = bench.table(document)
    assert [row[0] for row in rows] == names
    assert {len(row) for row in (header, *rows)} == {5}
