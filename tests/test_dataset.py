"""Opening and reading datasets: exact bytes, dtypes and shapes; the format stays readable."""

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import gear_offline.data.dataset.dataset
from gear_offline.artifacts.trained import load_policy
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.dataset.inspect import inspect
from gear_offline.data.dataset.shard import EPISODE_COLUMNS
from gear_offline.data.sources import open_source
from gear_offline.errors import InputError
from gear_offline.runs.evaluate import evaluate
from tests.fixtures.make_v1 import fixture_columns, make
from tests.support import ArraySource, failing_code, hopper_columns, make_dataset

LENGTHS = [5, 1, 9, 3, 3, 20, 2]
STEPS = sum(LENGTHS)
Columns = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def columns() -> Columns:
    """Return columns of all dtypes and several shapes, random bytes where any byte is valid."""
    generator = np.random.default_rng(11)
    columns: Columns = hopper_columns(STEPS)
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
def dataset(tmp_path_factory: pytest.TempPathFactory, columns: Columns) -> Dataset:
    folder = tmp_path_factory.mktemp("dataset")
    source = ArraySource(columns, LENGTHS, environment_id="Hopper-v5")
    convert(source, folder / "d", shard_bytes=4_000, block_bytes=128, quiet=True)
    found = open_dataset(folder / "d")
    assert 3 < len(found.manifest.shards) < len(LENGTHS)
    return found


@settings(max_examples=150)
@given(data=st.data())
def test_any_row_range(dataset: Dataset, columns: Columns, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(columns)))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, STEPS)] * 2)))
    found, wanted = dataset.read(name, start, stop), columns[name][start:stop]
    assert found.tobytes() == wanted.tobytes() and found.shape == wanted.shape
    assert found.base is None or found.flags.writeable  # owned, not a view of a file
    whole = dataset.column(name)
    assert whole.dtype == found.dtype == wanted.dtype and whole.shape == columns[name].shape
    assert whole.tobytes() == columns[name].tobytes()


@pytest.mark.parametrize("reader", [open_dataset, inspect, open_source, load_policy, evaluate])
def test_what_is_no_path_is_refused_as_a_wrong_one_is(reader: Callable[[Any], object]) -> None:
    with pytest.raises(InputError, match="a NoneType is not a path") as caught:
        reader(None)
    assert "pathlib.Path" in caught.value.remedy
    with pytest.raises(InputError, match=r"a dict is not a path; .*go.from_arrays\(columns\)"):
        open_source({})  # type: ignore[arg-type]


def test_ranges_outside_and_unknown_columns(dataset: Dataset) -> None:
    with pytest.raises(AttributeError, match=r"'rewards': the column is column\('rewards'\)"):
        getattr(dataset, "rewards")  # noqa: B009
    assert not hasattr(dataset, "no_column")
    for start, stop in ((-1, 2), (3, 2), (0, STEPS + 1)):
        refused = failing_code(lambda a=start, b=stop: dataset.read("rewards", a, b))  # type: ignore[misc]
        assert refused == "SELECTION"
    assert failing_code(lambda: dataset.read("nothing", 0, 1)) == "COLUMN"


def test_episodes_returns_and_statistics(dataset: Dataset, columns: Columns) -> None:
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


def test_any_safetensors_reader_opens_a_shard(dataset: Dataset, columns: Columns) -> None:
    assert [c.name for c in dataset.spec] == list(columns)
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
    sent: Dataset = pickle.loads(pickle.dumps(dataset))
    assert sent.read("rewards", 3, 9).tobytes() == dataset.read("rewards", 3, 9).tobytes()


# --- compatibility --------------------------------------------------------------------------

FIXTURE = Path(__file__).parent / "fixtures" / "v1"


def test_opening_takes_memory_for_what_is_there(dataset: Dataset) -> None:
    """It made room for the largest manifest that there can be."""
    tracemalloc.start()
    open_dataset(dataset.path, verify=False)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10 << 20


def test_docs_format_is_enough_to_read_the_fixture() -> None:
    """A reader written from docs/reference/format.md alone, with json, xxhash and NumPy.

    What it finds is what the fixture was made of, and what the product reads.
    """
    raw = (FIXTURE / "manifest.json").read_bytes()
    body, _, seal = raw.rpartition(b',\n"digest": "xxh3-128:')
    assert seal == xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'
    document = json.loads(raw)
    lines = raw.split(b"\n")
    assert lines[:3] == [b"{", b'"format": "gear-offline",', b'"format_version": 1,']
    codes = {"BOOL": "?", "U8": "u1", "F16": "<f2", "F32": "<f4", "I64": "<i8", "F64": "<f8"}
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    for shard in document["shards"]:
        data = (FIXTURE / shard["name"]).read_bytes()
        assert len(data) == shard["bytes"]
        begin = 8 + int.from_bytes(data[:8], "little")
        assert begin == shard["header_bytes"] and begin % 64 == 0
        assert xxhash.xxh3_128_hexdigest(data[:begin]) == shard["header_digest"]
        header = json.loads(data[8:begin])
        assert next(iter(header)) == "__metadata__"
        assert header.pop("__metadata__") == {"format": "gear-offline", "format_version": "1"}
        text = json.dumps(
            {"__metadata__": {"format": "gear-offline", "format_version": "1"}} | header
        )
        assert data[8:begin].rstrip(b" ") == text.replace(", ", ",").replace(": ", ":").encode()
        end = 0
        for name, tensor in header.items():
            start, stop = tensor["data_offsets"]
            assert start == end and (begin + start) % np.dtype(codes[tensor["dtype"]]).itemsize == 0
            end = stop
            payload = data[begin + start : begin + stop]
            size = document["block_bytes"]
            blocks = [payload[i : i + size] for i in range(0, len(payload), size)]
            assert shard["digests"][name] == "".join(map(xxhash.xxh3_128_hexdigest, blocks))
            values = np.frombuffer(payload, codes[tensor["dtype"]]).reshape(tensor["shape"])
            columns.setdefault(name, []).append(values)
        assert begin + end == len(data)
    found = {name: np.concatenate(parts) for name, parts in columns.items()}
    dataset = open_dataset(FIXTURE)
    assert found["episode_lengths"].tolist() == dataset.episodes.lengths.tolist() == [3, 1, 4]
    for name, expected in fixture_columns().items():
        assert dataset.column(name).dtype == expected.dtype
        assert found[name].tobytes() == dataset.column(name).tobytes() == expected.tobytes()
    rewards = found["rewards"].astype(float)
    assert found["episode_returns"].tolist() == [rewards[:3].sum(), rewards[3], rewards[4:].sum()]
    assert found["infos/spin"].shape == (8, 2)
    for column in document["columns"]:
        values = found[column["name"]].astype(float)
        spread = document["statistics"][column["name"]]
        assert list(values.shape[1:]) == column["stored"]["shape"]
        np.testing.assert_allclose(spread["mean"], values.mean(axis=0))
        np.testing.assert_allclose(spread["std"], values.std(axis=0))
        np.testing.assert_array_equal(spread["max"], values.max(axis=0))


def test_version_1_is_still_written_the_same(tmp_path: Path) -> None:
    # The first fixture is read by other tests; since then histograms of lengths have whole bins.
    written = FIXTURE.with_name("v1_written")
    make(tmp_path / "v1")
    names = sorted(os.listdir(written))
    assert sorted(os.listdir(tmp_path / "v1")) == names == sorted(os.listdir(FIXTURE))
    for name in names:
        assert (tmp_path / "v1" / name).read_bytes() == (written / name).read_bytes()


def test_episodes_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 1, 4, 1, 5]
    dataset = make_dataset(tmp_path, lengths, shard_bytes=600)
    whole = {c.name: dataset.column(c.name) for c in dataset.spec}
    offsets = np.cumsum([0, *lengths])

    def same(found: dict[str, Any], number: int, names: list[str]) -> bool:
        part = slice(offsets[number], offsets[number + 1])
        return list(found) == names and all(
            np.array_equal(found[name], whole[name][part]) for name in names
        )

    for run_bytes in (1, 200, 1 << 20):
        monkeypatch.setattr(gear_offline.data.dataset.dataset, "RUN_BYTES", run_bytes)
        assert len(dataset) == 5 and len(list(dataset)) == 5
        assert all(same(found, n, list(whole)) for n, found in enumerate(dataset))
        assert same(dataset[-1], 4, list(whole)) and same(dataset[np.int64(2)], 2, list(whole))
        assert same(dataset.episode(0, columns=["rewards"]), 0, ["rewards"])
        order = [4, 0, 1, 3]
        for number, found in zip(order, dataset.iter_episodes(order), strict=True):
            assert same(found, number, list(whole))
        best = dataset.iter_episodes(dataset.returns > -np.inf, columns=["actions", "rewards"])
        assert all(same(found, n, ["actions", "rewards"]) for n, found in enumerate(best))
    assert dataset[0]["rewards"].base is None  # not a view that keeps a longer read alive
    with pytest.raises(IndexError, match="episode 5 of 5"):
        dataset[5]
    with pytest.raises(TypeError, match="column"):
        dataset["rewards"]  # type: ignore[call-overload]
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: dataset.episode(5), "SELECTION"),
        (lambda: dataset.episode(0, columns="rewards"), "COLUMN"),
        (lambda: dataset.episode(0, columns=["reward"]), "COLUMN"),
    ]
    for call, code in calls:
        assert failing_code(call) == code


def test_what_is_no_dataset_says_what_it_may_be(tmp_path: Path) -> None:
    for name in ("d4rl:hopper-medium-v2", "minari:a/b-v0", "hopper-medium-v2"):
        with pytest.raises(InputError, match=f"gear-offline convert (d4rl:)?{name} OUT"):
            open_dataset(name)
    (tmp_path / "f").write_bytes(b"")
    for name in ("f", "g", 300 * "h"):
        assert failing_code(lambda n=name: open_dataset(tmp_path / n)) == "DATASET_NOT_FOUND"  # type: ignore[misc]
