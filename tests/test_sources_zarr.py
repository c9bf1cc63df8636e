"""Zarr stores, written by the zarr package as Diffusion Policy's buffers; against NumPy's rows."""

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gear_offline.data.sources import open_source
from tests.support import refused

zarr = pytest.importorskip("zarr", reason="needs pip install 'gear-offline[zarr]'")
from numcodecs import Delta, FixedScaleOffset, get_codec  # noqa: E402

ENDS = np.array([4, 9, 10])
ROWS: dict[str, Any] = {
    "data/action": np.arange(20, dtype=np.float32).reshape(10, 2) + 1,
    "data/state": np.arange(30, dtype=np.float32).reshape(10, 3) + 1,
    "data/img": np.arange(10 * 48, dtype=np.uint8).reshape(10, 4, 4, 3) + 1,
    "meta/episode_ends": ENDS,
}


def store(path: Path, version: int = 2, **others: Any) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, rows in {**ROWS, **others}.items():
        if rows is not None:
            group.create_array(name, data=rows, chunks=(3, *rows.shape[1:]))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_names_ends_and_rules(tmp_path: Path, version: int) -> None:
    path = store(tmp_path / "pusht.zarr", version)
    with open_source(path) as source:
        assert source.episodes.lengths.tolist() == [4, 5, 1] and source.truncated.all()
        for name, stored in (("observations", "data/state"), ("actions", "data/action")):
            np.testing.assert_array_equal(source.read(name, 2, 10), ROWS[stored][2:])
    names = {"observations": "state + action"}
    with open_source(path, names=names, rule="ends:meta/episode_ends|steps=2") as source:
        both = np.concatenate([ROWS["data/state"], ROWS["data/action"]], axis=1)
        np.testing.assert_array_equal(source.read("observations", 0, 10), both)
        assert source.episodes.lengths.tolist() == [2, 2, 2, 2, 1, 1]
    store(path, version, **{"data/state": None})
    refused(path, "COLUMN", "found: action, img, meta/episode_ends")
    with open_source(path, names={"observations": "img"}) as source:
        np.testing.assert_array_equal(source.read("observations", 0, 10), ROWS["data/img"])


def test_chunks_that_are_missing_are_told(tmp_path: Path) -> None:
    path = store(
        tmp_path / "x.zarr",
        **{"data/reward": np.zeros(10), "data/done": ROWS["data/state"][:, 0] > 27},
    )
    with open_source(path) as source:
        assert not source.read("rewards", 0, 10).any() and source.terminated.tolist() == [0, 0, 1]
        told = "chunks that are not stored read as the fill value: 3 of done, 4 of reward"
        assert told in source.info.attributes["warnings"]
    (path / "meta" / "episode_ends" / "0").unlink()
    refused(path, "SOURCE_LAYOUT", "no ends of the episodes of 10 rows")
    refused(store(path, 2, **{"meta/episode_ends": ENDS - 1}), "SOURCE_LAYOUT", "no ends of")


@pytest.mark.parametrize("version", [2, 3])
def test_frames_of_a_codec_that_is_not_here_are_left_out(tmp_path: Path, version: int) -> None:
    path = store(tmp_path / "umi.zarr", version)
    if version == 2:
        zarr.consolidate_metadata(path)
    header = path / "data" / "img" / (".zarray" if version == 2 else "zarr.json")
    facts = json.loads(header.read_text())
    if version == 2:
        facts["compressor"] = {"id": "imagecodecs_jpegxl"}
    else:
        facts["codecs"][-1] = {"name": "imagecodecs_jpegxl", "configuration": {}}
    header.write_text(json.dumps(facts))
    with open_source(path) as source:
        np.testing.assert_array_equal(source.read("observations", 0, 10), ROWS["data/state"])
        assert "imagecodecs_jpegxl" in source.info.attributes["left_out"]["img"]
    refused(path, "COLUMN", "imagecodecs_jpegxl", names={"observations": "img"})


@pytest.mark.parametrize("version", [2, 3])
def test_damaged_and_hostile_stores(tmp_path: Path, version: int) -> None:
    path = store(tmp_path / "x.zarr", version)
    chunk = path / "data" / "action" / ("1.0" if version == 2 else "c/1/0")
    whole = chunk.read_bytes()
    for size in (0, 3, 17, len(whole) - 1):
        chunk.write_bytes(whole[:size])
        refused(path, "SOURCE_READ")
    chunk.write_bytes(whole)
    if version == 2:
        header = path / "data" / "action" / ".zarray"
        facts = json.loads(header.read_text())
        for changes in (
            {"filters": [{"id": "pickle"}]},
            {"compressor": {"id": "pickle"}},
            {"shape": [10**12, 2], "chunks": [10**11, 2]},
            {"shape": [10**12, 2]},
        ):
            header.write_text(json.dumps(facts | changes))
            refused(path, ("SOURCE_UNSAFE", "SOURCE_READ"))
    (tmp_path / "y.zip").write_bytes(b"PK\5\6" + bytes(18))
    refused(tmp_path / "y.zip", "SOURCE_READ", "unpack a zip of anything else")


CODECS = ("zlib", "gzip", "bz2", "lzma", "zstd", "lz4", "blosc")


def coded(path: Path, version: int, codec: str, shards: tuple[int, ...] | None = None) -> Path:
    """Write a store whose actions are in chunks of one codec."""
    store(path, version, **{"data/action": None})
    options: Any = {"compressors": get_codec({"id": codec})}
    if version == 3:
        name = codec if codec in ("gzip", "zstd", "blosc") else f"numcodecs.{codec}"
        options = {"compressors": [{"name": name, "configuration": {}}], "shards": shards}
    with warnings.catch_warnings(action="ignore"):  # no codec of numcodecs is in zarr's standard
        group = zarr.open_group(path)
        rows = ROWS["data/action"]
        group.create_array("data/action", data=rows, chunks=(3, 2), overwrite=True, **options)
    return path


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_takes_the_memory_that_it_declares(
    tmp_path: Path, version: int, codec: str
) -> None:
    path = coded(tmp_path / "x.zarr", version, codec)
    with open_source(path) as source:
        np.testing.assert_array_equal(source.read("actions", 0, 10), ROWS["data/action"])
    chunk = path / "data" / "action" / ("1.0" if version == 2 else "c/1/0")
    bomb = bytes(get_codec({"id": codec}).encode(np.zeros(48 << 20, np.uint8)))
    chunk.write_bytes(bomb)
    header = chunk.parent / ".zarray"
    twice = version == 2 and len(bomb) > 8192  # as zlib, of which a second layer is small
    if twice:
        facts = json.loads(header.read_text())
        header.write_text(json.dumps(facts | {"filters": [{"id": codec}]}))
        chunk.write_bytes(bytes(get_codec({"id": codec}).encode(bomb)))
    # tracemalloc crashes when it stops while a decoder of zarr's threads allocates
    Path("/proc/self/clear_refs").write_text("5")  # the greatest size begins anew
    before = _resident("VmRSS")
    refused(path, ("SOURCE_READ", "SOURCE_UNSAFE"))
    assert _resident("VmHWM") - before < 32 << 20


def _resident(name: str) -> int:
    """Return a size of this process in memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("codec", ["gzip", "blosc"])
def test_parts_of_shards_are_bounded_too(tmp_path: Path, codec: str) -> None:
    path = coded(tmp_path / "x.zarr", 3, codec, shards=(6, 2))
    with open_source(path) as source:
        np.testing.assert_array_equal(source.read("actions", 1, 10), ROWS["data/action"][1:])


def test_filters_of_numbers(tmp_path: Path) -> None:
    path = store(tmp_path / "x.zarr", 2, **{"data/action": None})
    filters = [Delta(dtype="<f4"), FixedScaleOffset(0, 1, "<f4", "i2")]
    rows = ROWS["data/action"]
    zarr.open_group(path).create_array("data/action", data=rows, chunks=(3, 2), filters=filters)
    with open_source(path) as source:
        np.testing.assert_array_equal(source.read("actions", 0, 10), ROWS["data/action"])
    header = path / "data" / "action" / ".zarray"
    facts = json.loads(header.read_text())
    wide = {"id": "delta", "dtype": "S9000000", "astype": "|u1"}
    header.write_text(json.dumps(facts | {"filters": [wide]}))
    refused(path, "SOURCE_READ", "unpacks to more than")


def test_chunks_that_are_missing_have_a_bound(tmp_path: Path) -> None:
    path, rows = tmp_path / "x.zarr", 200 << 20
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for name in ("action", "state"):  # of which nothing is stored
        group.create_array(f"data/{name}", shape=(rows, 1), chunks=(1 << 20, 1), dtype="f4")
    group.create_array("meta/episode_ends", data=np.array([rows]), chunks=(1,))
    refused(path, "SOURCE_UNSAFE", "200 missing")


def test_a_zip_with_a_large_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zarr.zip"
    folder = store(tmp_path / "x.zarr")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder))
    with open_source(path) as source:
        np.testing.assert_array_equal(source.read("actions", 0, 10), ROWS["data/action"])
    for name in ("data/action/2.0", "data/img/.zarray"):
        with zipfile.ZipFile(path, "r") as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
        with zipfile.ZipFile(tmp_path / "y.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for member, content in {**members, name: bytes(20 << 20)}.items():
                archive.writestr(member, content)
        refused(tmp_path / "y.zip", "SOURCE_UNSAFE")
