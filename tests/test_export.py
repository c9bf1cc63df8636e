"""Exported files: read back by h5py and by our own reader, they hold the same episodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import gear_offline.data.export
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.export import export_hdf5
from gear_offline.data.sources import from_arrays, from_episodes, open_source, pick_episodes
from tests.hdf5_files import write
from tests.support import ArraySource, Captured, Patch, hopper_columns, one_error

LENGTHS = [4, 1, 7, 3]
ENDS = [True, False, True, False]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    columns = hopper_columns(sum(LENGTHS)) | {
        "observations": np.arange(sum(LENGTHS) * 12, dtype=np.uint8).reshape(-1, 3, 4),
        "infos/qpos": np.arange(sum(LENGTHS), dtype=np.float64),
        "code": np.arange(sum(LENGTHS)).astype(np.complex64),
    }
    convert(ArraySource(columns, LENGTHS, terminated=ENDS), tmp_path / "d", quiet=True)
    return open_dataset(tmp_path / "d")


@pytest.mark.parametrize("piece_bytes", [1, 200, 1 << 20])
def test_a_round_trip_keeps_bytes_and_episodes(
    dataset: Dataset, tmp_path: Path, monkeypatch: Patch, piece_bytes: int
) -> None:
    monkeypatch.setattr(gear_offline.data.export, "PIECE_BYTES", piece_bytes)
    path = export_hdf5(dataset, tmp_path / "x.hdf5", quiet=True)
    last = np.cumsum(LENGTHS) - 1
    with h5py.File(path) as file:
        for column in dataset.spec:
            stored = file[column.name][()]
            assert stored.dtype == column.dtype
            if column.name not in ("terminals", "timeouts"):
                assert stored.tobytes() == dataset.column(column.name).tobytes()
        assert np.flatnonzero(file["timeouts"][()]).tolist() == last[~np.array(ENDS)].tolist()
        assert np.flatnonzero(file["terminals"][()]).tolist() == last[np.array(ENDS)].tolist()


def test_edits_of_rewards_and_columns_go_with_the_file(dataset: Dataset, tmp_path: Path) -> None:
    """What a policy hears of an environment's rewards depends on them."""

    def edit(episode: Mapping[str, Any]) -> dict[str, Any]:
        return {"rewards": episode["rewards"] * 2 + 1, "actions": -episode["actions"]}

    manifest = convert(dataset.path, tmp_path / "edited", map=edit, quiet=True)
    path = export_hdf5(tmp_path / "edited", tmp_path / "x.hdf5", quiet=True)
    again = convert(path, tmp_path / "again", quiet=True)
    for name in ("mapped", "reward_edits"):
        assert manifest.source.attributes[name]
        assert again.source.attributes[name] == manifest.source.attributes[name]


def test_episodes_in_memory_become_a_file(tmp_path: Path) -> None:
    columns = {k: hopper_columns(4)[k] for k in ("observations", "actions", "rewards")}
    facts: dict[str, Any] = {"name": "mine", "environment": "Hopper-v5", "attributes": {"a": 1}}
    source = from_episodes([columns | {"terminated": True}, columns], **facts)
    assert (source.info.uri, source.info.attributes["a"]) == ("mine", 1)
    path = export_hdf5(source, tmp_path / "x.hdf5", quiet=True)
    with open_source(path) as again:
        assert again.info.rule == "terminals|timeouts"
        assert again.info.environment_id == "Hopper-v5"
        assert again.episodes.lengths.tolist() == [4, 4]
        assert again.terminated.tolist() == [True, False]


def test_timeouts_inside_episodes_go_and_terminals_stay(tmp_path: Path, capsys: Captured) -> None:
    columns = hopper_columns(6)
    columns["timeouts"][:] = [False, True, True, False, False, True]
    columns["terminals"][:] = [True, False, True, False, False, False]
    source = ArraySource(columns, [3, 3], terminated=[True, False])
    path = export_hdf5(source, tmp_path / "x.hdf5", quiet=True)  # nothing else tells it
    assert "terminals marks 1 step inside episodes" in capsys.readouterr().err
    with h5py.File(path) as file:
        assert file["timeouts"][()].tolist() == [False, False, True, False, False, True]
        assert file["terminals"][()].tolist() == columns["terminals"].tolist()


@pytest.mark.parametrize("name", ["kitchen-mini", "maze2d-umaze-v1", "mine"])
@pytest.mark.parametrize("again", ["kitchen-again", "maze2d-large-v1", "mine"])
def test_truncated_episodes_stay_truncated(tmp_path: Path, name: str, again: str) -> None:
    """Of kitchen and maze2d D4RL's files mark with terminals what is cut."""
    columns = hopper_columns(20, state_dim=60 if "kitchen" in name else 4, action_dim=9)
    columns |= {"terminals": np.isin(np.arange(20), [9, 19]).astype(np.float32)}
    columns |= {"infos": np.repeat([0, 1], 10)}
    del columns["timeouts"]
    (tmp_path / "out").mkdir()
    with open_source(write(tmp_path / f"{name}.hdf5", columns)) as source:
        path = export_hdf5(source, tmp_path / "out" / f"{again}.hdf5", quiet=True)
        with h5py.File(path) as file, open_source(path) as found:
            assert not (file["terminals"][()].astype(bool) & file["timeouts"][()]).any()
            assert found.episodes.lengths.tolist() == source.episodes.lengths.tolist()
            assert found.terminated.tolist() == source.terminated.tolist()


@pytest.mark.parametrize("piece_bytes", [5000, 1 << 20])
def test_episodes_survive_terminals_inside_them(
    tmp_path: Path, monkeypatch: Patch, piece_bytes: int
) -> None:
    monkeypatch.setattr(gear_offline.data.export, "PIECE_BYTES", piece_bytes)
    columns = hopper_columns(3003, state_dim=29, action_dim=8)
    del columns["timeouts"]
    columns["terminals"][:] = np.isin(np.arange(3003), [990, 1000, 2500])
    first = write(tmp_path / "antmaze-umaze.hdf5", columns)  # its episodes end by its step limit
    path = export_hdf5(first, tmp_path / "antmaze-again.hdf5", quiet=True)
    with open_source(path) as again:
        assert again.info.rule == "timeouts"
        assert again.episodes.lengths.tolist() == [1001, 1001, 1001]
        assert again.terminated.tolist() == [True, False, False]


LAYOUTS: dict[str, Mapping[str, Any]] = {
    "flat": {"observations": np.zeros((60, 5), np.float32)},
    "goals": {f"observations/{n}": np.ones((60, 2)) for n in ("observation", "desired_goal")},
    "images": {"observations": np.zeros((60, 4, 4, 3), np.uint8)},
    "antmaze": {"observations": np.zeros((60, 29)), "actions": np.zeros((60, 8))},
    "kitchen": {
        "observations": np.zeros((60, 60)),
        "actions": np.zeros((60, 9)),
        "infos": 60 * [1],
    },
    "groups": {f"demo_{n}/observations": np.zeros((60, 2)) for n in (0, 1)}
    | {"demo_0/actions": np.ones((60, 2))},
}


@pytest.mark.parametrize(
    "name", ["mine", "antmaze-umaze-v2", "kitchen-mixed-v0", "maze2d-large-v1"]
)
@pytest.mark.parametrize("rewards", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_episodes_of_an_exported_file_are_not_guessed(
    tmp_path: Path, layout: str, rewards: bool, name: str
) -> None:
    goals, ends = np.isin(np.arange(60), [5, 6, 25, 50]), np.isin(np.arange(60), [19, 39, 59])
    columns = {"actions": np.zeros((60, 2), np.float32), **LAYOUTS[layout]}
    columns |= {"rewards": np.ones(60, np.float32)} if rewards else {}
    for terminals, timeouts, rule in ((goals, ends, "timeouts"), (ends, goals & ends, None)):
        flags = {"terminals": terminals, "timeouts": timeouts}
        with from_arrays({**columns, **flags}, rule=rule) as source:
            path = export_hdf5(source, tmp_path / f"{name}.hdf5", overwrite=True, quiet=True)
            with open_source(path, partial=layout == "groups") as again:
                assert again.episodes.lengths.tolist() == [20, 20, 20]
                np.testing.assert_array_equal(again.terminated, source.terminated)
                assert {c.name: c for c in again.spec} == {c.name: c for c in source.spec}


def test_choices_and_paths(dataset: Dataset, tmp_path: Path) -> None:
    with open_source(dataset.path) as source:
        best = pick_episodes(source, [2])
        export_hdf5(best, tmp_path / "best.hdf5", columns=["observations"], quiet=True)
    with h5py.File(tmp_path / "best.hdf5") as file:
        assert sorted(file) == ["observations", "rewards", "terminals", "timeouts"]
        assert np.array_equal(file["observations"], dataset.read("observations", 5, 12))
    export_hdf5(str(dataset.path), str(tmp_path / "all.hdf5"), quiet=True)
    for options, code in [({}, "OUTPUT_EXISTS"), ({"columns": ["x"]}, "COLUMN")]:
        more: dict[str, Any] = options
        with one_error(code):
            export_hdf5(dataset, tmp_path / "all.hdf5", **more)
    export_hdf5(dataset, tmp_path / "all.hdf5", overwrite=True, quiet=True)
    with one_error("USAGE", "HDF5"):  # convert would take it for another format
        export_hdf5(dataset, tmp_path / "all.npz")
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_a_column_beside_parts_of_its_name_is_refused(tmp_path: Path) -> None:
    columns = {k: hopper_columns(5)[k] for k in ("observations", "actions", "rewards")}
    source = from_episodes([columns | {"observations/goal": np.zeros((5, 2))}])
    with one_error("COLUMN", "both observations and observations/goal"):
        export_hdf5(source, tmp_path / "x.hdf5", quiet=True)
    assert list(tmp_path.iterdir()) == []
    export_hdf5(source, tmp_path / "x.hdf5", columns=["observations", "actions"], quiet=True)
