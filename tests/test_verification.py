"""Verification: no damaged, foreign or missing byte gets through."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gear_offline.convert.conversion import convert
from gear_offline.dataset.dataset import open_dataset
from gear_offline.dataset.manifest import MANIFEST_NAME, Manifest
from gear_offline.dataset.shard import digest
from gear_offline.errors import InputError
from tests.support import ArraySource, failing_code, hopper_columns, make_dataset, one_error, sealed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of about a kilobyte: small enough to flip bit after bit."""
    folder = tmp_path_factory.mktemp("tiny")
    columns = hopper_columns(6, state_dim=2, action_dim=1)
    del columns["timeouts"]
    convert(ArraySource(columns, [4, 2]), folder / "d", shard_bytes=100, block_bytes=64, quiet=True)
    return folder / "d"


def damaged_code(path: Path) -> str:
    return failing_code(lambda: open_dataset(path))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 4
    path.write_bytes(raw)


def test_damage_is_found_by_what_reads_it(copy: Path) -> None:
    """Every other byte, and loading a table: tests/trust/flip_bits.py."""
    manifest = Manifest.read(copy)
    shard = manifest.shards[1]
    places = {t.name: shard.header_bytes + t.stop - 1 for t in manifest.tensors(shard)}
    for column in ("observations", "actions", "rewards"):
        flip(copy / shard.name, places[column])
        dataset = open_dataset(copy, verify=False)  # reads no column
        assert not dataset.verified
        with one_error("DATASET_DAMAGED", f"shard-00001.*tensor {column}, block"):
            dataset.column(column)
        flip(copy / shard.name, places[column])
    for part, place in {"episode_returns": places["episode_returns"], "header": 30}.items():
        flip(copy / shard.name, place)
        with pytest.raises(InputError, match=part):
            open_dataset(copy, verify=False)
        flip(copy / shard.name, place)
    verified = open_dataset(copy, verify=False).verify()
    assert verified.verified and verified.verify() is verified


@pytest.mark.parametrize("keep", [0, 1, 7, 100, -1])
def test_a_truncated_shard_is_an_error_not_a_signal(copy: Path, keep: int) -> None:
    dataset = open_dataset(copy)
    path = copy / dataset.manifest.shards[0].name
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    calls = (
        lambda: dataset.column("observations"),
        lambda: dataset.read("observations", 0, 1),
        lambda: open_dataset(copy),
        lambda: open_dataset(copy, verify=False),
    )
    assert all(failing_code(call) == "DATASET_DAMAGED" for call in calls)


def test_links_directories_and_missing_shards(copy: Path) -> None:
    path, aside = copy / "shard-00000.safetensors", copy.parent / "aside"
    path.rename(aside)
    path.symlink_to(aside)  # as the cache of the Hugging Face Hub has it
    open_dataset(copy)
    makes: list[Callable[[], object]] = [
        lambda: None,
        lambda: path.symlink_to(copy.parent / "nothing"),
        path.mkdir,
        lambda: os.mkfifo(path),
    ]
    for make in makes:
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        make()
        assert damaged_code(copy) == "DATASET_DAMAGED"


def test_a_replaced_dataset_is_noticed(copy: Path, tmp_path: Path) -> None:
    dataset = open_dataset(copy)
    copy.rename(tmp_path / "old")
    make_dataset(tmp_path, [4, 2], state_dim=2, action_dim=1).path.rename(copy)
    assert failing_code(lambda: dataset.read("rewards", 0, 1)) == "DATASET_DAMAGED"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("episode_lengths", (5).to_bytes(8, "little")),
        ("episode_lengths", (0).to_bytes(8, "little")),
        ("episode_lengths", b"\xff" * 8),
        ("episode_terminated", b"\x00"),
        ("episode_terminated", b"\x02"),
        ("episode_truncated", b"\x01"),  # terminated as well
        ("header", b"x"),  # a column of another name than the manifest's
    ],
)
def test_what_contradicts_is_refused_although_digests_fit(
    copy: Path, name: str, data: bytes
) -> None:
    manifest = Manifest.read(copy)
    shard, path = manifest.shards[0], copy / manifest.shards[0].name
    raw, spans = bytearray(path.read_bytes()), {t.name: t for t in manifest.tensors(shard)}
    if name == "header":
        span, place = slice(0, shard.header_bytes), raw.index(b"actions")
    else:
        tensor = spans[name]
        span = slice(shard.header_bytes + tensor.start, shard.header_bytes + tensor.stop)
        place = span.start
    key = "header_digest" if name == "header" else name
    old = f'"{key}": "{digest(bytes(raw[span]))}"'.encode()
    raw[place : place + len(data)] = data
    path.write_bytes(raw)
    text, new = (copy / MANIFEST_NAME).read_bytes(), f'"{key}": "{digest(bytes(raw[span]))}"'
    assert old in text
    text = text.replace(old, new.encode(), 1)
    (copy / MANIFEST_NAME).write_bytes(sealed(text[: text.rindex(b',\n"digest"')]))
    assert damaged_code(copy) == "DATASET_DAMAGED"
