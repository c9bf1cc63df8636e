"""The manifest: round trip, every changed bit found, everything odd refused."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.dataset.manifest import MANIFEST_NAME, Manifest
from gear_offline.errors import InputError
from tests.support import failing_code, hopper_columns, make_dataset, sealed

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


def refused(raw: bytes) -> str:
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
    newer = seal(json.loads(raw) | {"format_version": 2, "news": {"anything": 1}})
    # A later version may seal its manifest otherwise: the version is seen all the same.
    assert refused(newer) == refused(newer[:-20]) == "DATASET_DAMAGED"


Edit = Callable[[Document], Any]


def shard(index: int, **values: Any) -> Edit:
    return lambda d: d["shards"][index].update(values)


def key(path: str, value: Any) -> Edit:
    def edit(document: Document) -> None:
        *folders, last = path.split(".")
        for name in folders:
            document = document[int(name)] if isinstance(document, list) else document[name]
        document[last] = value

    return edit


EDITS: dict[str, Edit] = {
    "parent folder": shard(0, name="../shard-00000.safetensors"),
    "upper case": shard(0, name="SHARD-00000.safetensors"),
    "name twice": shard(1, name="shard-00000.safetensors"),
    "out of order": lambda d: d["shards"].reverse(),
    "shard missing": lambda d: d["shards"].pop(),
    "no shards": key("shards", []),
    "too many bytes": shard(0, bytes=1 << 70),
    "bytes do not fit": lambda d: d["shards"][0].update(bytes=d["shards"][0]["bytes"] + 1),
    "header too large": shard(0, header_bytes=1 << 40),
    "steps do not add up": shard(0, steps=5),
    "digest upper case": shard(0, header_digest="A" * 32),
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
    "other digest of the header": shard(0, header_digest="a" * 32),
}


@pytest.mark.parametrize("name", EDITS)
def test_sealed_nonsense_is_refused(raw: bytes, name: str) -> None:
    document = json.loads(raw)
    before = copy.deepcopy(document)
    EDITS[name](document)
    # NaN is unequal to itself: what counts is that the edit did something.
    assert json.dumps(document) != json.dumps(before)
    assert refused(seal(document)) == "DATASET_DAMAGED"


def test_deep_nesting_and_numbers_that_are_none_are_refused(raw: bytes) -> None:
    body = raw[: raw.rindex(b',\n"digest"')]
    for extra in (b',\n"x": ' + b"[" * 100_000, b',\n"x": 1e999', b',\n"x": NaN'):
        assert refused(sealed(body + extra)) == "DATASET_DAMAGED"


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
    monkeypatch.setattr("gear_offline.dataset.manifest.MAX_MANIFEST_BYTES", 1_000)
    assert failing_code(lambda: Manifest.read(path)) == "DATASET_DAMAGED"
    assert failing_code(lambda: make_dataset(tmp_path / "new", [3])) == "COLUMN"
    assert not list((tmp_path / "new").iterdir())
