"""Verification: no damaged, foreign or missing byte gets through."""

import json
import math
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.dataset.manifest import MANIFEST_NAME, Manifest
from gear_offline.data.dataset.shard import digest
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


# the manifest: round trip, everything odd refused ----------------------------------------------


Document = dict[str, Any]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    columns = hopper_columns(9, state_dim=2, action_dim=1)
    columns["spin"] = np.arange(9).astype(np.complex64)
    folder = tmp_path_factory.mktemp("manifest")
    make_dataset(folder, [4, 3, 2], columns=columns, shard_bytes=150, environment_id="Hopper-v5")
    return (folder / "dataset" / MANIFEST_NAME).read_bytes()


def seal(document: Document) -> bytes:
    document = {k: v for k, v in document.items() if k != "digest"}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in document.items()]
    return sealed(("{\n" + ",\n".join(lines)).encode())


def refused_manifest(raw: bytes) -> str:
    return failing_code(lambda: Manifest.decode(raw))


def test_round_trip(raw: bytes) -> None:
    manifest = Manifest.decode(raw)
    assert manifest.encode() == raw
    assert manifest.spec.episodes == 3 and manifest.spec.steps == 9
    assert len(manifest.shards) == 3
    assert manifest.spec["spin"].dtype == np.complex64
    assert manifest.statistics["spin"].mean.shape == (2,)
    assert Manifest.decode(seal(json.loads(raw))).model_dump() == manifest.model_dump()


def test_newer_version_is_refused_in_one_line(raw: bytes) -> None:
    newer = seal(json.loads(raw) | {"format_version": 3, "news": {"anything": 1}})
    # A later version may seal its manifest otherwise: the version is seen all the same.
    assert refused_manifest(newer) == refused_manifest(newer[:-20]) == "DATASET_DAMAGED"


Edit = Callable[[Document], Any]


def shard_edit(index: int, **values: Any) -> Edit:
    return lambda d: d["shards"][index].update(values)


def key(path: str, value: Any) -> Edit:
    def edit(document: Document) -> None:
        *folders, last = path.split(".")
        for name in folders:
            document = document[int(name)] if isinstance(document, list) else document[name]
        document[last] = value

    return edit


EDITS: dict[str, Edit] = {
    "parent folder": shard_edit(0, name="../shard-00000.safetensors"),
    "upper case": shard_edit(0, name="SHARD-00000.safetensors"),
    "name twice": shard_edit(1, name="shard-00000.safetensors"),
    "out of order": lambda d: d["shards"].reverse(),
    "shard missing": lambda d: d["shards"].pop(),
    "no shards": key("shards", []),
    "too many bytes": shard_edit(0, bytes=1 << 70),
    "bytes do not fit": lambda d: d["shards"][0].update(bytes=d["shards"][0]["bytes"] + 1),
    "header too large": shard_edit(0, header_bytes=1 << 40),
    "steps do not add up": shard_edit(0, steps=5),
    "digest upper case": shard_edit(0, header_digest="A" * 32),
    "digest of another tensor": lambda d: d["shards"][0]["digests"].update(other="a" * 32),
    "digest missing": lambda d: d["shards"][0]["digests"].pop("actions"),
    "one digest too many": lambda d: d["shards"][0]["digests"].update(actions="a" * 64),
    "huge block": key("block_bytes", 1 << 60),
    "other format": key("format", "other"),
    "version 0": key("format_version", 0),
    "unknown key": key("extra", 1),
    "object column": lambda d: d["columns"][0].update(dtype="object"),
    "stored otherwise": lambda d: d["columns"][0]["stored"].update(dtype="F64"),
    "reserved column": lambda d: d["columns"][0].update(name="episode_returns"),
    "column with a bad name": lambda d: d["columns"][0].update(name="../x"),
    "column twice": lambda d: d["columns"].append(d["columns"][0]),
    "zero shape": lambda d: d["columns"][0].update(shape=[0]),
    "statistics missing": lambda d: d["statistics"].pop("actions"),
    "statistics of another shape": lambda d: d["statistics"]["actions"].update(mean=[1.0, 2.0]),
    "statistics deeper": lambda d: d["statistics"]["rewards"].update(mean=[1.0]),
    "more ends than episodes": key("endings", {"terminated": 3, "truncated": 3}),
    "source without rule": lambda d: d["source"].pop("rule"),
    "histogram edges": lambda d: d["returns"]["histogram"]["edges"].append(3.0),
    "episodes is NaN": key("episodes", math.nan),
    "negative deviation": lambda d: d["statistics"]["rewards"].update(std=-1.0),
    "negative spread of returns": lambda d: d["returns"].update(std=-1.0),
    "edges are null": lambda d: d["lengths"]["histogram"].update(edges=[None, None], counts=[3]),
    "counts without edges": lambda d: d["lengths"]["histogram"].update(edges=[]),
    "too many bins": lambda d: d["lengths"].update(
        histogram={"edges": list(range(1002)), "counts": [0] * 1001}
    ),
    "other digest of the header": shard_edit(0, header_digest="a" * 32),
}


@pytest.mark.parametrize("name", EDITS)
def test_sealed_nonsense_is_refused(raw: bytes, name: str) -> None:
    document = json.loads(raw)
    before = deepcopy(document)
    EDITS[name](document)
    # NaN is unequal to itself: what counts is that the edit did something.
    assert json.dumps(document) != json.dumps(before)
    assert refused_manifest(seal(document)) == "DATASET_DAMAGED"


def test_deep_nesting_and_numbers_that_are_none_are_refused(raw: bytes) -> None:
    body = raw[: raw.rindex(b',\n"digest"')]
    for extra in (b',\n"x": ' + b"[" * 100_000, b',\n"x": 1e999', b',\n"x": NaN'):
        assert refused_manifest(sealed(body + extra)) == "DATASET_DAMAGED"


PATHS = st.sampled_from(
    ["steps", "shards", "columns", "statistics", "source", "lengths", "endings"]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=200)
@given(path=PATHS, value=VALUES, data=st.data())
def test_random_values_are_refused_or_harmless(
    raw: bytes, path: str, value: Any, data: st.DataObject
) -> None:
    document = json.loads(raw)
    target = document[path]
    if isinstance(target, list) and data.draw(st.booleans()):
        target = target[0]
    if isinstance(target, dict) and data.draw(st.booleans()):
        target[data.draw(st.sampled_from(sorted(target)))] = value
    else:
        document[path] = value
    try:
        found = Manifest.decode(seal(document))
    except InputError as error:
        assert error.code == "DATASET_DAMAGED"
    else:
        assert Manifest.decode(found.encode()).model_dump() == found.model_dump()


def test_a_manifest_is_written_and_read_up_to_a_size(tmp_path: Path, monkeypatch: Any) -> None:
    path = make_dataset(tmp_path, [3]).path
    monkeypatch.setattr("gear_offline.data.dataset.manifest.MAX_MANIFEST_BYTES", 1_000)
    assert failing_code(lambda: Manifest.read(path)) == "DATASET_DAMAGED"
    assert failing_code(lambda: make_dataset(tmp_path / "new", [3])) == "COLUMN"
    assert not list((tmp_path / "new").iterdir())
