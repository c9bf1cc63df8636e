"""Opening, reading and verifying datasets: exact bytes, and no damaged byte gets through."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from gear_offline.convert import convert
from gear_offline.dataset import Dataset, open_dataset, verify_dataset
from gear_offline.errors import InputError
from gear_offline.manifest import MANIFEST_NAME, Manifest
from gear_offline.shards import EPISODE_COLUMNS, digest
from tests.support import ArraySource, hopper_columns, make_dataset

LENGTHS = [5, 1, 9, 3, 3, 20, 2]
STEPS = sum(LENGTHS)


def every_dtype() -> dict[str, npt.NDArray[Any]]:
    """Return columns of all dtypes and several shapes, random bytes where any byte is valid."""
    generator = np.random.default_rng(11)
    columns = hopper_columns(STEPS)
    for name in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"):
        info = np.iinfo(name)
        low, high = int(info.min), int(info.max)
        columns[name] = generator.integers(low, high, STEPS, dtype=name, endpoint=True)
    columns["f2"] = generator.normal(size=(STEPS, 2, 3)).astype("f2")
    columns["f8"] = generator.normal(size=(STEPS, 1))
    columns["c8"] = (generator.normal(size=(STEPS, 2)) * (1 + 2j)).astype("c8")
    columns["c16"] = generator.normal(size=STEPS) * (2 - 1j)
    columns["infos/flag"] = generator.integers(0, 2, size=(STEPS, 4)).astype(bool)
    columns["frames"] = generator.integers(0, 256, size=(STEPS, 6, 6, 2)).astype("u1")
    return columns


@pytest.fixture(scope="module")
def columns() -> dict[str, npt.NDArray[Any]]:
    return every_dtype()


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, npt.NDArray[Any]]
) -> Dataset:
    folder = tmp_path_factory.mktemp("dataset")
    source = ArraySource(columns, LENGTHS, environment_id="Hopper-v5")
    convert(source, folder / "d", shard_bytes=4_000, block_bytes=128, quiet=True)
    found = open_dataset(folder / "d")
    assert 3 < len(found.manifest.shards) < len(LENGTHS)
    return found


def test_columns_keep_bytes_dtype_and_shape(
    dataset: Dataset, columns: dict[str, npt.NDArray[Any]]
) -> None:
    assert [c.name for c in dataset.spec] == list(columns)
    for name, expected in columns.items():
        for found in (
            dataset.column(name),
            dataset.read(name, 0, STEPS),
            np.concatenate(dataset.column(name, mode="mmap")),
        ):
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert found.tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_row_range(
    dataset: Dataset, columns: dict[str, npt.NDArray[Any]], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(columns)))
    start = data.draw(st.integers(0, STEPS))
    stop = data.draw(st.integers(start, STEPS))
    found = dataset.read(name, start, stop, check=data.draw(st.booleans()))
    assert found.tobytes() == columns[name][start:stop].tobytes()
    assert found.shape == columns[name][start:stop].shape
    assert found.base is None or found.flags.writeable  # owned, not a view of a file


def test_ranges_outside_and_unknown_columns(dataset: Dataset) -> None:
    for start, stop in ((-1, 2), (3, 2), (0, STEPS + 1)):
        with pytest.raises(InputError) as caught:
            dataset.read("rewards", start, stop)
        assert caught.value.code == "STEP_RANGE"
    with pytest.raises(InputError) as caught:
        dataset.read("nothing", 0, 1)
    assert caught.value.code == "COLUMN_MISSING"


def test_episodes_returns_and_statistics(
    dataset: Dataset, columns: dict[str, npt.NDArray[Any]]
) -> None:
    assert dataset.episodes.lengths.tolist() == LENGTHS
    rewards = columns["rewards"].astype(np.float64)
    starts = np.cumsum([0, *LENGTHS])
    expected = [rewards[a:b].sum() for a, b in pairwise(starts)]
    np.testing.assert_allclose(dataset.returns, expected, rtol=1e-13)
    assert dataset.terminated.tolist() == [True] * 6 + [False]
    assert dataset.truncated.tolist() == [False] * 6 + [True]
    found = dataset.statistics["observations"]
    np.testing.assert_allclose(found.mean, columns["observations"].mean(axis=0, dtype="f8"))
    np.testing.assert_allclose(found.std, columns["observations"].std(axis=0, dtype="f8"))
    assert dataset.environment_id == "Hopper-v5"
    scores = dataset.reference_scores
    assert scores is not None and scores.indicative and scores.maximum == 3234.3
    assert dataset.verified


def test_any_safetensors_reader_opens_a_shard(
    dataset: Dataset, columns: dict[str, npt.NDArray[Any]]
) -> None:
    first = 0
    for shard in dataset.manifest.shards:
        found = load_file(dataset.path / shard.name)
        assert set(found) == {*columns, *(c.name for c in EPISODE_COLUMNS)}
        for name, expected in columns.items():
            rows = expected[first : first + shard.steps]
            assert found[name].tobytes() == rows.tobytes()
        assert found["episode_lengths"].sum() == shard.steps
        assert shard.header_bytes % 64 == 0
        first += shard.steps
    assert first == STEPS


def test_a_dataset_can_be_sent_to_another_process(dataset: Dataset) -> None:
    twin: Dataset = pickle.loads(pickle.dumps(dataset))
    assert twin.read("rewards", 3, 9).tobytes() == dataset.read("rewards", 3, 9).tobytes()


# --- damage ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of about a kilobyte: small enough to flip bit after bit."""
    folder = tmp_path_factory.mktemp("tiny")
    columns = hopper_columns(6, state_dim=2, action_dim=1)
    del columns["timeouts"]
    convert(ArraySource(columns, [4, 2]), folder / "d", shard_bytes=100, block_bytes=64, quiet=True)
    return folder / "d"


def damaged_code(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        verify_dataset(path, threads=1)
    assert "\n" not in str(caught.value)
    return caught.value.code


def test_a_flipped_bit_in_any_byte_is_found(tiny: Path) -> None:
    verify_dataset(tiny)
    manifest = Manifest.read(tiny)
    assert len(manifest.shards) == 2
    for shard in manifest.shards:
        # All bits around the borders: length field, padding, first data, last byte.
        borders = {*range(9), *range(shard.header_bytes - 2, shard.header_bytes + 2)}
        borders.add(shard.bytes - 1)
        handle = os.open(tiny / shard.name, os.O_RDWR)
        try:
            for position in range(shard.bytes):
                original = os.pread(handle, 1, position)[0]
                for bit in range(8) if position in borders else (position % 8,):
                    os.pwrite(handle, bytes([original ^ 1 << bit]), position)
                    assert damaged_code(tiny) == "SHARD_DIGEST", (shard.name, position, bit)
                os.pwrite(handle, bytes([original]), position)
        finally:
            os.close(handle)
    verify_dataset(tiny)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_random_flips_are_found(tiny: Path, data: st.DataObject) -> None:
    shard = data.draw(st.sampled_from(Manifest.read(tiny).shards))
    raw = (tiny / shard.name).read_bytes()
    flips = data.draw(st.lists(st.integers(0, 8 * len(raw) - 1), min_size=1, unique=True))
    damaged = bytearray(raw)
    for flip_at in flips:
        damaged[flip_at // 8] ^= 1 << flip_at % 8
    try:
        (tiny / shard.name).write_bytes(damaged)
        assert damaged_code(tiny) == "SHARD_DIGEST"
    finally:
        (tiny / shard.name).write_bytes(raw)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 4
    path.write_bytes(raw)


def test_the_message_names_file_tensor_and_block(copy: Path) -> None:
    manifest = Manifest.read(copy)
    shard = manifest.shards[1]
    observations = next(t for t in manifest.tensors(shard) if t.name == "observations")
    flip(copy / shard.name, shard.header_bytes + observations.start)
    for check in (lambda: verify_dataset(copy), lambda: open_dataset(copy)):
        with pytest.raises(InputError) as caught:
            check()
        assert "shard-00001.safetensors, tensor observations, block 0" in str(caught.value)


def test_without_verification_columns_are_not_read_but_the_rest_is(copy: Path) -> None:
    manifest = Manifest.read(copy)
    shard = manifest.shards[0]
    tensors = {t.name: t for t in manifest.tensors(shard)}
    flip(copy / shard.name, shard.header_bytes + tensors["actions"].start)
    dataset = open_dataset(copy, verify=False)
    assert not dataset.verified
    assert dataset.read("rewards", 0, 6, check=True).shape == (6,)
    with pytest.raises(InputError, match="tensor actions, block 0"):
        dataset.read("actions", 0, 1, check=True)
    flip(copy / shard.name, shard.header_bytes + tensors["episode_returns"].start)
    with pytest.raises(InputError, match="episode_returns"):
        open_dataset(copy, verify=False)


def test_bytes_that_change_after_opening_do_not_reach_a_column(copy: Path) -> None:
    dataset = open_dataset(copy)
    shard = dataset.manifest.shards[0]
    flip(copy / shard.name, shard.bytes - 10)
    seen = []
    for column in dataset.spec:
        try:
            dataset.column(column.name)
        except InputError as error:
            seen.append(error.code)
    flip(copy / shard.name, shard.bytes - 10)
    flip(copy / shard.name, shard.header_bytes + 40)
    for column in dataset.spec:
        try:
            dataset.column(column.name)
        except InputError as error:
            seen.append(error.code)
    assert "SHARD_DIGEST" in seen


@pytest.mark.parametrize("keep", [0, 1, 7, 100, -1])
def test_a_truncated_shard_is_an_error_not_a_signal(copy: Path, keep: int) -> None:
    dataset = open_dataset(copy)
    path = copy / dataset.manifest.shards[0].name
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    calls = (
        lambda: dataset.column("observations"),
        lambda: dataset.column("observations", mode="mmap"),
        lambda: open_dataset(copy),
        lambda: open_dataset(copy, verify=False),
    )
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.code == "FILE_SIZE"


def test_links_directories_and_missing_shards(copy: Path) -> None:
    path = copy / "shard-00000.safetensors"
    aside = copy.parent / "aside"
    path.rename(aside)
    assert damaged_code(copy) == "FILE_MISSING"
    path.symlink_to(aside)
    assert damaged_code(copy) == "FILE_KIND"
    path.unlink()
    path.mkdir()
    assert damaged_code(copy) == "FILE_KIND"
    path.rmdir()
    os.mkfifo(path)
    assert damaged_code(copy) == "FILE_KIND"


def test_shards_that_changed_places_are_refused(copy: Path) -> None:
    a, b = copy / "shard-00000.safetensors", copy / "shard-00001.safetensors"
    a.rename(copy / "x")
    b.rename(a)
    (copy / "x").rename(b)
    assert damaged_code(copy) in ("FILE_SIZE", "SHARD_DIGEST")


def test_a_replaced_dataset_is_noticed(copy: Path, tmp_path: Path) -> None:
    dataset = open_dataset(copy)
    copy.rename(tmp_path / "old")
    make_dataset(tmp_path, [4, 2], state_dim=2, action_dim=1).path.rename(copy)
    with pytest.raises(InputError) as caught:
        dataset.read("rewards", 0, 1)
    assert caught.value.code == "DATASET_CHANGED"


def reseal(path: Path, raw: bytes) -> None:
    body = raw[: raw.rindex(b',\n"digest"')]
    path.write_bytes(body + f',\n"digest": "xxh3-128:{digest(body)}"\n}}\n'.encode())


def forge(copy: Path, name: str, data: bytes) -> None:
    """Overwrite the start of a tensor of shard 0 and write digests that fit."""
    manifest = Manifest.read(copy)
    shard = manifest.shards[0]
    tensor = next(t for t in manifest.tensors(shard) if t.name == name)
    path = copy / shard.name
    raw = bytearray(path.read_bytes())
    start = shard.header_bytes + tensor.start
    old = f'"{name}": "{digest(bytes(raw[start : start + tensor.bytes]))}"'.encode()
    raw[start : start + len(data)] = data
    path.write_bytes(raw)
    text = (copy / MANIFEST_NAME).read_bytes()
    new = f'"{name}": "{digest(bytes(raw[start : start + tensor.bytes]))}"'.encode()
    assert old in text and old != new
    reseal(copy / MANIFEST_NAME, text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("episode_lengths", (5).to_bytes(8, "little")),
        ("episode_lengths", (0).to_bytes(8, "little")),
        ("episode_lengths", b"\xff" * 8),
        ("episode_terminated", b"\x00"),
        ("episode_terminated", b"\x02"),
        ("episode_truncated", b"\x01"),
    ],
)
def test_per_episode_tensors_that_contradict_are_refused(
    copy: Path, name: str, data: bytes
) -> None:
    forge(copy, name, data)
    verify_dataset(copy)
    with pytest.raises(InputError) as caught:
        open_dataset(copy)
    assert caught.value.code == "DATASET_CONTENT"


def test_a_header_that_is_not_the_manifests_is_refused(copy: Path) -> None:
    manifest = Manifest.read(copy)
    shard = manifest.shards[0]
    path = copy / shard.name
    raw = path.read_bytes()
    header = raw[: shard.header_bytes].replace(b'"actions"', b'"notions"')
    path.write_bytes(header + raw[shard.header_bytes :])
    text = (copy / MANIFEST_NAME).read_bytes()
    reseal(
        copy / MANIFEST_NAME,
        text.replace(shard.header_digest.encode(), digest(header).encode()),
    )
    assert damaged_code(copy) == "SHARD_HEADER"


def test_progress_and_report_count_every_byte(dataset: Dataset) -> None:
    done: list[int] = []
    report = verify_dataset(dataset.path, threads=2, on_progress=done.append)
    assert sum(done) == report.bytes == dataset.manifest.total_bytes
    assert report.shards == len(dataset.manifest.shards)
    digests = [d for s in dataset.manifest.shards for d in s.digests.values()]
    assert report.blocks == sum(len(d) for d in digests)


# --- compatibility --------------------------------------------------------------------------

FIXTURE = Path(__file__).parent / "fixtures" / "v1"


def test_version_1_fixture_stays_readable() -> None:
    from tests.fixtures.make_v1 import LENGTHS as lengths
    from tests.fixtures.make_v1 import fixture_columns

    dataset = open_dataset(FIXTURE)
    assert dataset.manifest.format_version == 1
    assert dataset.episodes.lengths.tolist() == lengths
    for name, expected in fixture_columns().items():
        assert dataset.column(name).tobytes() == expected.tobytes()
        assert dataset.column(name).dtype == expected.dtype
    assert json.loads((FIXTURE / MANIFEST_NAME).read_bytes())["format"] == "gear-offline"


def test_version_1_is_still_written_the_same(tmp_path: Path) -> None:
    from tests.fixtures.make_v1 import make

    make(tmp_path / "v1")
    names = sorted(os.listdir(FIXTURE))
    assert sorted(os.listdir(tmp_path / "v1")) == names
    for name in names:
        assert (tmp_path / "v1" / name).read_bytes() == (FIXTURE / name).read_bytes()
