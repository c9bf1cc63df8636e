"""Hostile and damaged HDF5 files are refused with their code; honest ones give exact bytes."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from h5py import h5pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gear_offline.errors import GearError, InputError
from gear_offline.sources import open_source
from gear_offline.sources.flat import FlatSource
from gear_offline.sources.hdf5 import Hdf5Rows
from gear_offline.sources.hdf5_guard import ColumnCheck, Limits, open_file
from tests.hdf5_files import Columns, table, write
from tests.hostile_hdf5 import HOSTILE, STEPS, plugin_filter


def good_columns() -> Columns:
    columns = table(STEPS)
    columns["terminals"] = np.arange(STEPS) % 7 == 6
    columns["timeouts"] = np.zeros(STEPS, bool)
    return columns


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path / "hopper.hdf5", good_columns())


def refused(path: Path, code: str) -> InputError:
    with pytest.raises(InputError) as caught:
        open_source(path)
    assert caught.value.code == code, str(caught.value)
    assert str(path) in caught.value.where
    assert "\n" not in str(caught.value)
    return caught.value


def replace(path: Path, name: str, make: Callable[[h5py.File], Any]) -> None:
    with h5py.File(path, "r+") as file:
        if name in file:
            del file[name]
        make(file)


@pytest.mark.parametrize(("make", "code"), HOSTILE, ids=lambda v: getattr(v, "__name__", v))
def test_hostile_file_is_refused(
    tmp_path: Path, good: Path, make: Callable[[h5py.File, Path], None], code: str
) -> None:
    open_source(good).close()
    replace(good, "observations", lambda file: make(file, tmp_path))
    error = refused(good, code)
    assert "TOPSECRET" not in str(error)


def test_large_chunks_are_not_called_damage(good: Path) -> None:
    options = {"chunks": (1 << 24, 11), "maxshape": (None, 11)}
    replace(good, "actions", lambda f: f.create_dataset("actions", (STEPS, 11), "f4", **options))
    assert refused(good, "HDF5_SHAPE").remedy.startswith("store the column in chunks of")


def bomb(path: Path, steps: int, **options: Any) -> Path:
    """A file all of whose columns claim `steps` rows that it does not hold."""
    with h5py.File(path, "w") as file:
        for name, shape, dtype in (
            ("observations", (steps, 11), "f4"),
            ("actions", (steps, 3), "f4"),
            ("rewards", (steps,), "f4"),
            ("terminals", (steps,), "?"),
        ):
            chunks = (4096, *shape[1:]) if options.get("chunked") else None
            file.create_dataset(name, shape, dtype, chunks=chunks)
    return path


@pytest.mark.parametrize("chunked", [False, True])
def test_shape_bomb_with_equal_lengths(tmp_path: Path, chunked: bool) -> None:
    path = bomb(tmp_path / "hopper.hdf5", 1 << 47, chunked=chunked)
    assert path.stat().st_size < 100_000
    refused(path, "HDF5_SHAPE")


def place(path: Path, name: str, address: int) -> int:
    """Make the contiguous dataset `name` lie at `address`; returns where it lay before."""
    with h5py.File(path) as file:
        offset, size = int(file[name].id.get_offset()), int(file[name].id.get_storage_size())
    raw = path.read_bytes()
    old, new = (at.to_bytes(8, "little") + size.to_bytes(8, "little") for at in (offset, address))
    assert raw.count(old) == 1, "address and size stand together in the dataset's header only"
    path.write_bytes(raw.replace(old, new))
    return offset


def test_data_behind_the_end_of_the_file(good: Path) -> None:
    rows = Hdf5Rows(good)
    fact = dataclasses.replace(rows.facts["rewards"], end=good.stat().st_size + 1)
    rows.close()
    with pytest.raises(InputError) as caught:
        ColumnCheck(good).add(fact)
    assert caught.value.code == "HDF5_SHAPE"
    place(good, "observations", good.stat().st_size - 100)
    refused(good, "HDF5_UNREADABLE")  # recent HDF5 libraries see it before we do


def test_columns_that_share_their_bytes(tmp_path: Path) -> None:
    columns = good_columns() | {"zz": np.zeros((STEPS, 5000))}  # the file's last bytes
    columns["infos/zz"] = columns["zz"]
    del columns["zz"]
    path = write(tmp_path / "hopper.hdf5", columns)
    with h5py.File(path, "r+") as file:
        file["zz2"] = columns["infos/zz"]
        shared = int(file["infos/zz"].id.get_offset())
    end = place(path, "zz2", shared)
    raw = bytearray(path.read_bytes()[:end])
    assert int.from_bytes(raw[40:48], "little") > end, "the superblock's end of file"
    raw[40:48] = end.to_bytes(8, "little")
    path.write_bytes(raw)
    refused(path, "HDF5_SHAPE")


def test_compression_bomb(tmp_path: Path) -> None:
    path = write(
        tmp_path / "hopper.hdf5",
        {
            "observations": np.zeros((400_000, 20), "f4"),
            "actions": np.zeros((400_000, 1), "f4"),
            "rewards": np.zeros(400_000, "f4"),
            "terminals": np.zeros(400_000, bool),
        },
        compression="gzip",
    )
    open_source(path).close()  # a small file of zeros is honest
    rows = Hdf5Rows(path, limits=Limits(allowance_bytes=1 << 20, expansion=50))
    with pytest.raises(InputError) as caught:
        rows.admit(["observations", "actions", "rewards", "terminals"])
    rows.close()
    assert caught.value.code == "HDF5_SHAPE"


def test_parts_never_written_are_a_warning(tmp_path: Path) -> None:
    path = bomb(tmp_path / "hopper.hdf5", 5000, chunked=True)
    with open_source(path) as source:
        assert any("never written" in w for w in source.info.attributes["warnings"])


def test_deep_and_many_objects(tmp_path: Path, good: Path) -> None:
    with h5py.File(good, "r+") as file:
        file.create_group("metadata/" + "/".join("g" * 40))
    refused(good, "HDF5_OBJECTS")
    many = write(tmp_path / "many.hdf5", good_columns())
    with h5py.File(many, "r+") as file:
        group = file.create_group("metadata/many")
        for number in range(60):
            group.create_group(str(number))
    with pytest.raises(InputError) as caught:
        Hdf5Rows(many, limits=Limits(objects=50))
    assert caught.value.code == "HDF5_OBJECTS"
    open_source(many).close()


@pytest.mark.parametrize("content", [b"", b"text\n" * 100, b"\x89HDF\r\n\x1a\n" + b"\0" * 500])
def test_not_hdf5(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.hdf5"
    path.write_bytes(content)
    refused(path, "HDF5_UNREADABLE")


def test_truncated(tmp_path: Path, good: Path) -> None:
    whole = good.read_bytes()
    cut = tmp_path / "cut.hdf5"
    for size in np.linspace(1, len(whole) - 1, 25).astype(int):
        cut.write_bytes(whole[:size])
        refused(cut, "HDF5_UNREADABLE")


def test_missing_file_directory_and_pipe(tmp_path: Path) -> None:
    refused(tmp_path / "absent.hdf5", "FILE_MISSING")
    pipe = tmp_path / "pipe.hdf5"
    os.mkfifo(pipe)
    refused(pipe, "HDF5_UNREADABLE")


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,  # a crash of the HDF5 library must not come and go between runs
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damage_gives_an_error_or_rows_never_a_crash(
    tmp_path: Path, good: Path, data: st.DataObject
) -> None:
    raw = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw), 6000) - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.hdf5"
    damaged.write_bytes(raw)
    try:
        with open_source(damaged) as source:
            for column in source.spec:
                assert source.read(column.name, 0, source.spec.steps).shape[1:] == column.shape
    except GearError as error:
        assert error.code.isupper()


def test_nan_flag_and_impossible_bool(tmp_path: Path, good: Path) -> None:
    flags = np.zeros(STEPS, "f4")
    flags[11] = np.nan
    replace(good, "timeouts", lambda file: file.create_dataset("timeouts", data=flags))
    assert "row 11" in refused(good, "HDF5_VALUE").what
    where = 0
    replace(good, "timeouts", lambda file: file.create_dataset("timeouts", data=flags > 5))
    with h5py.File(good) as file:
        where = file["timeouts"].id.get_offset()
    raw = bytearray(good.read_bytes())
    raw[where + 3] = 7
    good.write_bytes(raw)
    refused(good, "HDF5_VALUE")


def test_plugins_are_never_looked_for(good: Path, tmp_path: Path) -> None:
    """HDF5 would open the files of its plug-in folder to find filter 32015."""
    replace(good, "observations", lambda file: plugin_filter(file, tmp_path))
    (tmp_path / "plugins").mkdir()
    code = (
        "import sys\n"
        "from h5py import h5pl\n"
        "from gear_offline.sources import open_source\n"
        "seen = []\n"
        "before = [h5pl.get(i) for i in range(h5pl.size())]\n"
        "assert before == [sys.argv[2].encode()], before\n"
        "from gear_offline.sources import hdf5_guard\n"
        "real = hdf5_guard._scan\n"
        "def spy(*args):\n"
        "    seen.append(h5pl.size())\n"
        "    return real(*args)\n"
        "hdf5_guard._scan = spy\n"
        "try:\n"
        "    open_source(sys.argv[1])\n"
        "except Exception as error:\n"
        "    print(error.code, seen, [h5pl.get(i) for i in range(h5pl.size())] == before)\n"
    )
    plugins = str(tmp_path / "plugins")
    done = subprocess.run(
        [sys.executable, "-c", code, str(good), plugins],
        env={**os.environ, "HDF5_PLUGIN_PATH": plugins},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "HDF5_FILTER [0] True", done.stderr
    assert h5pl.size() > 0


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"chunks": True},
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
    {"compression": "lzf"},
]
DTYPES = ["?", "i1", "u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f4", "<f8", ">f8", "<c8", "<c16"]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 5), max_size=3),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_any_dtype_and_width_has_exact_bytes(
    tmp_path: Path, dtype: str, shape: list[int], layout: dict[str, Any], data: st.DataObject
) -> None:
    rng = np.random.default_rng(len(shape))
    raw: npt.NDArray[Any] = rng.integers(0, 2 if dtype == "?" else 200, size=(STEPS, *shape))
    columns = good_columns() | {"observations": raw.astype(dtype)}
    path = write(tmp_path / "x.hdf5", columns, **layout)
    start = data.draw(st.integers(0, STEPS))
    stop = data.draw(st.integers(start, STEPS))
    with open_source(path) as source:
        rows = source.read("observations", start, stop)
        assert rows.dtype == source.spec["observations"].dtype == np.dtype(dtype).newbyteorder("=")
        assert rows.dtype.metadata is None
        wanted = columns["observations"][start:stop].astype(rows.dtype)
        assert rows.shape == wanted.shape and rows.tobytes() == wanted.tobytes()


def test_reads_follow_the_chunks(tmp_path: Path) -> None:
    steps = 100_000
    columns = {
        "observations": np.arange(steps * 11, dtype="f4").reshape(steps, 11),
        "actions": np.zeros((steps, 3), "f4"),
        "rewards": np.zeros(steps, "f4"),
        "terminals": np.zeros(steps, bool),
    }
    path = write(tmp_path / "hopper.hdf5", columns, compression="gzip", chunks=None)
    with h5py.File(path) as file:
        chunk_rows = file["observations"].chunks[0]
        assert file["observations"].chunks[1] < 11, "the test wants chunks by column"
    with open_source(path) as source:
        block = source.preferred_rows("observations")
        assert block % chunk_rows == 0 and block * 44 <= 8 << 20
        parts = [
            source.read("observations", at, min(at + 7777, steps)) for at in range(0, steps, 7777)
        ]
        assert np.concatenate(parts).tobytes() == columns["observations"].tobytes()


def test_one_chunk_has_room_however_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.sources.hdf5.CACHE_BYTES", 1000)
    path = write(tmp_path / "x.hdf5", good_columns(), compression="gzip")
    with open_source(path) as source:
        assert isinstance(source, FlatSource)
        source.read("observations", 0, 1)
        dataset = source._rows._open["observations"][0]
        room = dataset.id.get_access_plist().get_chunk_cache()[1]
        assert room >= dataset.chunks[0] * dataset.chunks[1] * dataset.dtype.itemsize > 1000


def test_bad_range_and_closed(good: Path) -> None:
    source = open_source(good)
    for start, stop in ((-1, 3), (0, STEPS + 1), (5, 4)):
        with pytest.raises(IndexError):
            source.read("rewards", start, stop)
    source.read("rewards", 0, 1)
    source.close()
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.read("rewards", 0, 1)


def test_a_file_that_may_not_be_read_is_not_called_damaged(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        error = refused(good, "SOURCE_READ")
    assert "Permission denied" in error.what and "permissions" in error.remedy
    refused(good / "below.h5", "FILE_MISSING")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        with pytest.raises(InputError) as caught:
            open_file(good)
    assert caught.value.code == "SOURCE_READ"


def test_a_file_that_is_being_written_is_not_called_damaged(good: Path) -> None:
    with good.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as HDF5 does in a program that writes
        assert "another program" in refused(good, "SOURCE_READ").what
    open_source(good).close()
