"""Columns under other names, and columns put together of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gear_offline.convert import convert
from gear_offline.dataset.dataset import open_dataset
from gear_offline.errors import InputError
from gear_offline.loaders.loader import GearLoader
from gear_offline.sources import from_episodes, open_source
from tests.hdf5_files import write
from tests.support import hopper_columns


def code(call: Any, *values: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(InputError) as caught:
        call(*values, **options)
    assert caught.value.remedy
    return caught.value.code, f"{caught.value.what} ({caught.value.where})"


@pytest.mark.parametrize("workers", [1, 2])
def test_datasets_of_a_file_get_other_names(tmp_path: Path, workers: int) -> None:
    flags = np.arange(24) % 6 == 5
    names = {"obs/arm": "observations/arm", "obs/cam": "observations/cam", "act": "actions"}
    columns: dict[str, Any] = {
        "obs/arm": np.arange(48.0).reshape(24, 2),
        "obs/cam": np.arange(96, dtype=np.uint8).reshape(24, 2, 2),
        "act": np.ones((24, 1), np.float32),
        "r": np.arange(24.0),
        "end": flags,
        "actions": np.zeros(3),  # hidden by the one that takes its name
    }
    file = write(tmp_path / "mine.hdf5", columns)
    with pytest.raises(InputError, match="--columns observations=NAME"):
        open_source(file)
    wanted = ["observations=obs", "actions=act", "rewards = r", "dones=end"]
    options: dict[str, Any] = {"workers": workers, "shard_bytes": 300, "quiet": True}
    convert(file, tmp_path / "d", columns=wanted, **options)
    dataset = open_dataset(tmp_path / "d")
    assert dataset.episodes.lengths.tolist() == [6] * 4 and dataset.terminated.all()
    for stored, name in (names | {"r": "rewards", "end": "dones"}).items():
        assert np.array_equal(dataset.column(name), columns[stored])
    for bad, error in [
        (["observations=nothing"], "COLUMN_MISSING"),
        (["actions=act", "actions=r"], "CONVERT_OPTION"),
        (["actions="], "CONVERT_OPTION"),
        (["actions=act+"], "CONVERT_OPTION"),
        (["x=act+obs/cam", "actions=act", *wanted[::2], "dones=end"], "CONVERT_OPTION"),
        ("actions", "CONVERT_OPTION"),
    ]:
        assert code(convert, file, tmp_path / "e", columns=bad)[0] == error
    for both, said in [
        ("act+obs/cam", "obs/cam is uint8 (2, 2) a step, act float32 (1,): they do not make one"),
        ("act+obs", "obs is a group of 2 columns (column observations)"),
    ]:
        given = [f"observations={both}", "actions=act", "rewards=r", "dones=end"]
        assert said in code(convert, file, tmp_path / "e", columns=given)[1]
    assert code(convert, from_episodes([hopper_columns(3)]), tmp_path / "e", columns=["x=rewards"])[
        0
    ] == ("CONVERT_OPTION")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["file", "folder", "shards"])
def test_columns_are_put_together(tmp_path: Path, kind: str, workers: int) -> None:
    rows = np.arange(24.0)
    columns: dict[str, Any] = {
        "observations/goal": np.stack([rows, -rows], axis=1),
        "observations/time": rows + 100,
        "observations/place": np.stack([rows * 2] * 3, axis=1),
        "observations/unused": rows,
        "actions": np.ones((24, 1), np.float32),
        "rewards": rows,
        "terminated": rows % 6 == 5,
    }
    folder = tmp_path / "parts"
    folder.mkdir()
    source = write(folder / "mine.hdf5", columns) if kind == "file" else folder
    if kind == "folder":
        for half in (0, 1):
            part = {name: values[12 * half : 12 * half + 12] for name, values in columns.items()}
            write(folder / f"{half}.hdf5", part)
    elif kind == "shards":
        source = tmp_path / "before"
        convert(write(folder / "mine.hdf5", columns), source, quiet=True)
        with pytest.raises(InputError, match="observations=observations/goal\\+observations/pl"):
            GearLoader(source, batch_size=2, device="cpu")
    names = ["observations/place", "observations/goal", "observations/time"]
    wanted = [f"observations={' + '.join(names)}", "actions"]
    convert(source, tmp_path / "d", columns=wanted, workers=workers, shard_bytes=600, quiet=True)
    dataset = open_dataset(tmp_path / "d")
    assert sorted(c.name for c in dataset.spec) == ["actions", "observations", "rewards"]
    together = np.concatenate([columns[name].reshape(24, -1) for name in names], axis=1)
    assert np.array_equal(dataset.column("observations"), together)
    assert dataset.episodes.lengths.tolist() == [6] * 4
    assert dataset.terminated.all()
    batch = GearLoader(dataset, batch_size=2, context_length=3, device="cpu").batch_at(0)
    assert batch.states.shape == (2, 3, 6)
