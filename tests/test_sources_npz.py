"""``.npz`` files: written as OGBench's scripts do, compared with what NumPy reads."""

import io
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy

from gear_offline.config.recipe import load_recipe
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.sources import open_source
from gear_offline.runs.resolve import resolve
from tests.support import one_error, refused

Columns = dict[str, Any]


def antmaze(episodes: int = 3, length: int = 11, seed: int = 0) -> Columns:
    rng, steps = np.random.default_rng(seed), episodes * length
    return {
        "observations": rng.normal(size=(steps, 29)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (steps, 8)).astype(np.float32),
        "terminals": np.arange(steps) % length == length - 1,
        "qpos": rng.normal(size=(steps, 15)).astype(np.float32),
        "qvel": rng.normal(size=(steps, 14)).astype(np.float32),
    }


def test_ogbench_has_no_rewards(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "antmaze-large-navigate-v0.npz", **antmaze())
    with open_source(tmp_path / "antmaze-large-navigate-v0.npz") as source:
        assert "rewards" not in source.spec
        warned = convert(source, tmp_path / "shards", quiet=True).source.warnings
        assert any("no rewards" in text for text in warned)
    with one_error("COLUMN", "the data have no rewards"):
        resolve(load_recipe("smoke"), open_dataset(tmp_path / "shards"), quiet=True)


def test_a_folder_and_the_file_for_validation(tmp_path: Path) -> None:
    parts = {number: antmaze(2, seed=number) for number in (10, 2)}
    for number, columns in parts.items():
        np.savez_compressed(tmp_path / f"cube-v0-{number}.npz", **columns)
        np.savez_compressed(tmp_path / f"cube-v0-{number}-val.npz", **antmaze(1, seed=99))
    with open_source(tmp_path) as source:
        whole = np.concatenate([parts[n]["observations"] for n in (2, 10)])
        np.testing.assert_array_equal(source.read("observations", 0, 44), whole)
        assert (
            "cube-v0-10-val.npz, cube-v0-2-val.npz left out"
            in source.info.attributes["warnings"][-1]
        )
    for name in ("train", "val", "test", "empty"):
        (tmp_path / "split" / name).mkdir(parents=True)
        if name != "empty":
            np.savez(tmp_path / "split" / name / "0.npz", **parts[2])
    with open_source(tmp_path / "split") as source:
        assert source.spec.steps == 22
        assert (
            "test, val left out: convert apart, or go.join_sources"
            in source.info.attributes["warnings"]
        )
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        np.savez(tmp_path / "split" / "val" / f"{name}.npz", **parts[2])
    (tmp_path / "split" / "val" / "0.npz").unlink()
    with open_source(tmp_path / "split" / "val") as source:
        assert source.spec.steps == 44
        told = "test-00000-of-00001.npz left out: convert apart, or go.join_sources"
        assert told in source.info.attributes["warnings"]
    (tmp_path / "split" / "train" / "0.npz").unlink()
    refused(tmp_path / "split", "SOURCE_READ", "give one of those in it: test, val")
    with open_source(tmp_path / "cube-v0-2-val.npz") as source:
        assert source.episodes.lengths.tolist() == [11]


def test_relabelled_and_other_arrays(tmp_path: Path) -> None:
    columns = antmaze() | {"rewards": np.full(33, -1, np.float32), "text": np.array(["a", "b"])}
    columns["terminals"][5], columns["timeouts"] = True, np.arange(33) % 11 == 10
    columns["obs"] = columns.pop("observations")
    np.savez(tmp_path / "a.npz", **columns)
    with open_source(tmp_path / "a.npz", names={"observations": "obs"}) as source:
        assert source.info.format == "npz" and source.info.rule == "terminals|timeouts"
        assert source.episodes.lengths.tolist() == [6, 5, 11, 11]
        assert source.read("rewards", 0, 2).tolist() == [-1, -1]
        assert list(source.info.attributes["left_out"]) == ["text"]
    with open_source(tmp_path / "a.npz", names={"observations": "obs"}, rule="steps=3") as source:
        assert source.spec.episodes == 11


def test_terminals_beside_masks_end_trajectories_only(tmp_path: Path) -> None:
    added: Columns = {"rewards": np.full(33, -1, np.float32), "masks": np.ones(33, np.float32)}
    np.savez(tmp_path / "a.npz", **antmaze(), **added)
    with open_source(tmp_path / "a.npz") as source:
        assert source.info.format == "ogbench" and not source.terminated.any()
        assert source.read("rewards", 0, 33).tolist() == [-1] * 33
        assert source.info.attributes["warnings"] == []


@pytest.mark.parametrize("save", [np.savez_compressed, np.savez])
def test_memory_is_that_of_a_read(tmp_path: Path, save: Callable[..., None]) -> None:
    columns = {
        "observations": np.zeros((1_000_000, 16), np.float32),
        "actions": np.zeros((1_000_000, 2), np.float32),
        "terminals": np.arange(1_000_000) % 1000 == 999,
    }
    save(tmp_path / "big.npz", **columns)
    del columns
    with open_source(tmp_path / "big.npz") as source:
        tracemalloc.start()
        for start in range(0, 1_000_000, 50_000):
            source.read("observations", start, start + 50_000)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 << 20  # of 64


BAD: dict[str, tuple[str, Any, str, str]] = {
    "no flags": ("terminals", None, "COLUMN", "no column tells where"),
    "compact": ("valids", np.ones(33), "SOURCE_LAYOUT", "compact_dataset=False"),
    "objects": ("actions", np.array([{}] * 33, object), "COLUMN", "'actions'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_refused(tmp_path: Path, case: str) -> None:
    name, values, code, words = BAD[case]
    columns, path = antmaze() | {name: values}, tmp_path / "bad.npz"
    if values is None:
        del columns[name]
    np.savez_compressed(path, **columns)
    assert str(path) in refused(path, code, words).where


@pytest.mark.parametrize("save", [np.savez_compressed, np.savez])
def test_arrays_stored_by_columns(tmp_path: Path, save: Callable[..., None]) -> None:
    columns, path = antmaze(), tmp_path / "a.npz"
    columns["actions"] = np.asfortranarray(columns["actions"].astype(">f2"))
    columns["frames"] = np.arange(33 * 24, dtype=np.uint8).reshape(4, 2, 3, 33).T
    save(path, **columns)
    with np.load(path) as wanted, open_source(path) as source:
        for start, stop in ((0, 10), (10, 33), (5, 6)):
            for name in ("actions", "frames"):
                found = source.read(name, start, stop)
                np.testing.assert_array_equal(found, wanted[name][start:stop])


def test_many_members_and_many_files(tmp_path: Path) -> None:
    """One reading of an archive's directory; no file open, and little kept, between reads."""
    arrays: Columns = {f"infos_{number}": np.zeros(33, np.uint8) for number in range(1500)}
    np.savez(tmp_path / "a.npz", **antmaze(), **arrays)
    with open_source(tmp_path / "a.npz") as source:
        assert len(source.spec.columns) == 1505
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(60):
        np.savez_compressed(folder / f"{number}.npz", **antmaze(1, seed=number))
    before = len(list(Path("/proc/self/fd").iterdir()))
    tracemalloc.start()
    with open_source(folder) as source:
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 60 * (64 << 10)
        for start in range(0, 660, 7):
            for name in ("observations", "actions", "qpos"):
                source.read(name, start, min(start + 7, 660))
            assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_flipped_bits_are_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", **antmaze(30))
    flipped = bytearray((tmp_path / "a.npz").read_bytes())
    flipped[3000] ^= 16
    (tmp_path / "a.npz").write_bytes(flipped)
    refused(tmp_path / "a.npz", "SOURCE_READ")


def test_claimed_rows_are_compared_with_what_is_stored(tmp_path: Path) -> None:
    claimed = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 2)}
    npy.write_array_header_1_0(claimed, header)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("observations", "actions"):
            archive.writestr(f"{name}.npy", claimed.getvalue() + bytes(1000))
    refused(tmp_path / "x.npz", "SOURCE_READ", "less than it claims", rule="steps=10")


def test_a_count_from_another_number_is_told(tmp_path: Path) -> None:
    columns: Any = {"observations": np.zeros((5, 2)), "actions": np.zeros((5, 1))}
    columns["t"] = [1, 2, 3, 1, 2]
    np.savez(tmp_path / "x.npz", **columns)
    refused(tmp_path / "x.npz", "SOURCE_LAYOUT", "its first row holds 1", rule="first:t=0")
    with open_source(tmp_path / "x.npz", rule="first:t=1") as source:
        assert source.episodes.lengths.tolist() == [3, 2]
