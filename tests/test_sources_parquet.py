"""Parquet of one row an episode, as the Decision Transformer sets, compared with lists."""

import importlib
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.sources import from_arrays, join_sources, open_source, pick_episodes
from gear_offline.errors import at_the_command_line
from tests.support import hopper_columns, one_error, refused

LENGTHS = (5, 9, 4, 7)
Episodes = dict[str, list[Any]]  # a list an episode
VECTORS = pa.list_(pa.list_(pa.float32()))
SCHEMA = pa.schema(
    {
        "observations": VECTORS,
        "actions": VECTORS,
        "rewards": pa.list_(pa.float32()),
        "dones": pa.list_(pa.bool_()),
    }
)


def episodes() -> Episodes:
    made = [hopper_columns(steps, seed=steps) for steps in LENGTHS]
    names = ("observations", "actions", "rewards")
    rows: Episodes = {name: [episode[name].tolist() for episode in made] for name in names}
    return rows | {"dones": [[False] * (steps - 1) + [steps == 9] for steps in LENGTHS]}


def write(path: Path, rows: Episodes, schema: Any = SCHEMA, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows, schema=schema), path, **{"row_group_size": 3, **options})
    return path


def test_places_tell_the_reference(tmp_path: Path) -> None:
    path = write(tmp_path / "hopper-medium-v2" / "train" / "0000.parquet", episodes())
    for given in (path, path.parent, path.parent.parent):
        with open_source(given) as source:
            assert source.info.reference_name == "hopper-medium-v2"
            assert source.spec.episodes == 4


def test_other_names_types_and_columns(tmp_path: Path) -> None:
    rows = episodes()
    rows["rewards"] = [[[r] for r in rewards] for rewards in rows["rewards"]]
    rows["states"] = rows.pop("observations")
    rows["name"] = ["a"] * 4
    del rows["dones"]
    schema = pa.schema(
        {
            "states": pa.large_list(pa.list_(pa.float64(), 11)),
            "actions": VECTORS,
            "rewards": VECTORS,
            "name": pa.string(),
        }
    )
    path = write(tmp_path / "a.parquet", rows, schema)
    with open_source(path, names={"observations": "states"}) as source:
        assert source.spec["observations"].dtype == np.float64
        assert source.spec["rewards"].shape == () and source.truncated.all()
        assert list(source.info.attributes["left_out"]) == ["name"]
        assert source.read("observations", 0, 25).tolist() == list(chain(*rows["states"]))


BAD: dict[str, tuple[str, int, Any, str]] = {  # what is wrong, and what is said of it
    "ragged": ("actions", 0, [[1.0] * 3] * 4 + [[1.0]], "different widths"),
    "wider": ("actions", 3, [[1.0] * 4] * 7, "different widths"),
    "null": ("dones", 2, [None] * 4, "missing (null)"),
    "null step": ("actions", 0, [None] * 5, "missing"),
    "null episode": ("actions", 2, None, "without steps"),
    "null observations": ("observations", 2, None, "as long as"),
    "no steps": ("rewards", 3, [], "as long as"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_episodes_are_refused(tmp_path: Path, case: str) -> None:
    name, episode, values, words = BAD[case]
    rows = episodes()
    rows[name][episode] = values
    path = write(tmp_path / "bad.parquet", rows)
    assert str(path) in refused(path, "SOURCE_LAYOUT", words).where


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    refused(write(path, {name: [] for name in SCHEMA.names}), "SOURCE_LAYOUT", "no rows")
    names = ("obs_0", "obs_1", "act", "r")
    refused(write(path, {n: [1.0] for n in names}, None), "COLUMN", "found: act, obs_0, obs_1, r")


@pytest.mark.parametrize("flag", ["done", "", "frames"])
def test_rows_are_steps_where_a_reward_flag_or_mark_is_a_number(tmp_path: Path, flag: str) -> None:
    ids = [4, 4, 4, 1, 1, 7]
    wide: list[Any] = [[1.0 * n, 2.0 * n] for n in range(6)]  # as wide as the actions
    frames = [[[[n, 1, 2]] * 4] * 4 for n in range(6)]
    rows: Episodes = {"observations": wide, "actions": wide, "episode_id": ids}
    rows |= {"done": [n in (2, 4, 5) for n in range(6)]} if flag == "done" else {}
    rows |= {"observations": frames, "rewards": [0.5] * 6} if flag == "frames" else {}
    rule = None if flag == "done" else "ids:episode_id"
    with open_source(write(tmp_path / "x.parquet", rows, None), rule=rule) as source:
        assert source.episodes.lengths.tolist() == [3, 2, 1]
        assert source.terminated.tolist() == [flag == "done"] * 3
        for name, values in rows.items():
            assert source.read(name, 1, 5).tolist() == values[1:5]
    if flag == "":
        refused(tmp_path / "x.parquet", "COLUMN", "--ends ids:episode_id")


def test_a_flag_of_one_value_an_episode(tmp_path: Path) -> None:
    rows, schema = episodes(), SCHEMA.remove(3).append(pa.field("terminated", pa.bool_()))
    del rows["dones"]
    rows["terminated"] = [True, False, False, True]
    with open_source(write(tmp_path / "x.parquet", rows, schema)) as source:
        assert source.terminated.tolist() == rows["terminated"]
        flags = [
            n == steps - 1 and end
            for steps, end in zip(LENGTHS, rows["terminated"], strict=True)
            for n in range(steps)
        ]
        for start, stop in ((0, 25), (4, 5), (3, 17), (24, 25)):
            assert source.read("terminated", start, stop).tolist() == flags[start:stop]


@pytest.mark.parametrize("name", [int, str])
def test_an_episode_in_two_files_is_told(tmp_path: Path, name: type) -> None:
    for number, ids in enumerate(([3, 3, 5], [5, 5], [4, 5])):
        rows: Episodes = {"observations": [[1.0]] * len(ids), "actions": [[1.0]] * len(ids)}
        write(tmp_path / f"{number}.parquet", rows | {"episode_id": [*map(name, ids)]}, None)
    told = "1 episode cut where another part begins"
    with open_source(tmp_path, rule="ids:episode_id") as source:
        assert source.episodes.lengths.tolist() == [2, 1, 2, 1, 1]
        assert any(text.startswith(told) for text in source.info.attributes["warnings"])
    first, middle, last = (
        open_source(tmp_path / f"{n}.parquet", rule="ids:episode_id") for n in range(3)
    )
    for parts, is_cut in (
        ([first, middle], True),
        ([first, join_sources([middle, last])], True),  # what is joined has edges too
        ([middle, first], False),
        ([pick_episodes(first, [1]), pick_episodes(middle, [0])], False),  # nothing is known
    ):
        warnings = join_sources(parts).info.attributes["warnings"]
        assert any(text.startswith(told) for text in warnings) == is_cut


def test_observations_of_one_step_more(tmp_path: Path) -> None:
    rows = episodes()  # as imitation's sets on the Hub
    rows["obs"] = [[*e, [9.0] * 11] for e in rows.pop("observations")]
    rows["terminal"] = [bool(n % 2) for n in range(4)]
    del rows["dones"]
    schema = (
        SCHEMA.remove(3).set(0, pa.field("obs", VECTORS)).append(pa.field("terminal", pa.bool_()))
    )
    path = write(tmp_path / "x.parquet", rows, schema)
    wanted = np.array([step for e in rows["obs"] for step in e[:-1]], np.float32)
    with open_source(path, names={"observations": "obs"}) as source:
        assert source.episodes.lengths.tolist() == list(LENGTHS)
        assert source.terminated.tolist() == rows["terminal"]
        for start, stop in ((0, 25), (3, 7), (5, 14), (24, 25)):
            assert np.array_equal(source.read("observations", start, stop), wanted[start:stop])
    rows["obs"][2].append([1.0] * 11)
    write(path, rows, schema)
    refused(path, "SOURCE_LAYOUT", "as long as", names={"observations": "obs"})


def steps_table(ids: Any, **others: Any) -> Any:
    count = len(ids)
    columns: dict[str, Any] = {"observations": np.arange(count * 2.0).reshape(count, 2).tolist()}
    columns |= {"actions": [[0.5]] * count, "rewards": np.arange(float(count)), "episode_id": ids}
    return pa.table(columns | others)


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_ids_of_text(tmp_path: Path, kind: Any) -> None:
    ids = ["run-b"] * 4 + ["run-a"] * 3 + ["run-c"]
    path = tmp_path / "x.parquet"
    pq.write_table(steps_table(pa.array(ids, kind)), path, row_group_size=3)
    refused(path, "COLUMN", "give --ends ids:episode_id")
    with open_source(path, rule="ids:episode_id") as source:
        assert source.episodes.lengths.tolist() == [4, 3, 1]
    refused(path, "COLUMN", "episode_id is text", rule="first:episode_id")
    pq.write_table(steps_table(pa.array([*ids[:6], None, "b"], kind)), path)
    refused(path, "SOURCE_LAYOUT", "1 value missing", rule="ids:episode_id")
    pq.write_table(steps_table(pa.array([*ids[4:], *ids[:4], "run-a"][::-1], kind)), path)
    refused(path, "SOURCE_LAYOUT", "has an id again", rule="ids:episode_id")
    columns = {"observations": np.zeros((8, 2)), "actions": np.zeros((8, 1)), "who": ids}
    source = from_arrays(columns, rule="ids:who")
    assert source.episodes.lengths.tolist() == [4, 3, 1] and "who" not in source.spec
    with one_error("SOURCE_LAYOUT", "who has 7 rows, and ids:who asks for 8"):
        from_arrays(columns | {"who": ids[1:]}, rule="ids:who")


def test_missing_floats_are_nan_and_tensors_have_their_shape(tmp_path: Path) -> None:
    frames = np.arange(5 * 12, dtype=np.float32).reshape(5, 3, 4)
    values = pa.array([0.5, None, 2.0, 3.0, None])
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(frames)
    table = steps_table([0, 0, 1, 1, 1], rewards=values, observations=tensors)
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    with open_source(tmp_path / "x.parquet", rule="ids:episode_id") as source:
        np.testing.assert_array_equal(source.read("observations", 0, 5), frames)
        np.testing.assert_array_equal(source.read("rewards", 0, 5), [0.5, np.nan, 2, 3, np.nan])
        with one_error("COLUMN", "NaN"):
            convert(source, tmp_path / "d", quiet=True)
        convert(source, tmp_path / "d", allow_nonfinite=True, quiet=True)
    assert np.isnan(open_dataset(tmp_path / "d").read("rewards", 0, 5)).sum() == 2
    kind = pa.fixed_shape_tensor(pa.float32(), (3, 4), permutation=[1, 0])
    turned = pa.ExtensionArray.from_storage(kind, tensors.storage)
    pq.write_table(steps_table([0] * 5, observations=turned), tmp_path / "x.parquet")
    refused(tmp_path / "x.parquet", "SOURCE_LAYOUT", "another order", rule="none")


def test_folders_of_hugging_face_on_disk(tmp_path: Path) -> None:
    for folder, ids in (("train", [0, 0, 1]), ("train", [2, 3]), ("test", [9])):
        (tmp_path / folder).mkdir(exist_ok=True)
        count = len([*(tmp_path / folder).iterdir()])
        table = steps_table(ids)
        path = tmp_path / folder / f"data-0000{count}-of-00002.arrow"
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    (tmp_path / "dataset_dict.json").write_text("{}")
    with open_source(tmp_path, rule="ids:episode_id") as source:
        assert source.episodes.lengths.tolist() == [2, 1, 1, 1]
        assert (
            "test left out: convert apart, or go.join_sources" in source.info.attributes["warnings"]
        )


def test_counters_that_fall_inside_episodes_are_told(tmp_path: Path) -> None:
    order = [0, 2, 1, 3, 4, 6, 5]  # as of a table that another program has put in some order
    table = steps_table([0, 0, 0, 0, 1, 1, 1], step=[0, 1, 2, 3, 0, 1, 2])
    for rows, told in ((range(7), 0), (order, 2)):
        pq.write_table(table.take(pa.array(rows)), tmp_path / "x.parquet")
        with open_source(tmp_path / "x.parquet", rule="ids:episode_id") as source:
            warnings = " ".join(source.info.attributes["warnings"])
        assert (f"step falls at {told} steps inside episodes" in warnings) == bool(told)


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_columns_of_one_name_are_refused(tmp_path: Path, suffix: str) -> None:
    table = steps_table([0, 0, 1])
    table = table.append_column("observations", table["actions"])
    path = tmp_path / f"x{suffix}"
    with path.open("wb") as file:
        if suffix == ".parquet":
            pq.write_table(table, file)
        else:
            with pa.ipc.new_file(file, table.schema) as batches:
                batches.write_table(table)
    refused(path, "SOURCE_LAYOUT", "columns of one name", rule="ids:episode_id")


def test_one_number_an_episode_is_a_column(tmp_path: Path) -> None:
    rows = episodes() | {"task": [4, 3, 2, 1], "dones": [False, True, False, False]}
    fields = [("task", pa.int32()), ("dones", pa.bool_())]
    schema = pa.schema([field for field in SCHEMA if field.name != "dones"] + fields)
    with open_source(write(tmp_path / "x.parquet", rows, schema)) as source:
        assert source.read("task", 3, 16).tolist() == [4] * 2 + [3] * 9 + [2] * 2
        assert source.terminated.tolist() == [False, True, False, False]
        convert(source, tmp_path / "d", where="task < 3", quiet=True)
    assert open_dataset(tmp_path / "d").episodes.lengths.tolist() == [4, 7]


def arrow(path: Path, table: Any, **options: Any) -> Path:
    """Write batches of three rows as a file of Arrow, or as a stream."""
    new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
    settings = pa.ipc.IpcWriteOptions(**options)
    with new(str(path), table.schema, options=settings) as writer:
        writer.write_table(table, max_chunksize=3)
    return path.rename(path.with_suffix(".arrow"))


IDS = pa.array(["long" * 9] * 4 + ["b"] * 6).dictionary_encode()


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize("name", ["x.arrow", "x.stream"])
def test_arrow_batches_and_a_dictionary(tmp_path: Path, name: str, codec: str | None) -> None:
    path = arrow(tmp_path / name, steps_table(IDS), compression=codec)
    with open_source(path, rule="ids:episode_id") as source:
        assert source.episodes.lengths.tolist() == [4, 6]
        read = source.read("observations", 2, 10)
        np.testing.assert_array_equal(read, np.arange(4.0, 20.0).reshape(8, 2))


def test_a_stream_that_is_cut_between_batches_is_refused(tmp_path: Path) -> None:
    path = arrow(tmp_path / "x.stream", steps_table(IDS))
    content = path.read_bytes()
    with pa.ipc.open_stream(content) as reader:
        first = len(reader.schema.serialize())
    marks = [n for n in range(first, len(content)) if content[n : n + 4] == b"\xff" * 4]
    for end in (*marks, len(content) - 8, len(content) - 4):
        path.write_bytes(content[:end])
        refused(path, "SOURCE_READ", rule="ids:episode_id")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("new", ["new_file", "new_stream"])
def test_a_batch_that_unpacks_to_far_more_is_refused(tmp_path: Path, new: str, codec: str) -> None:
    zeros = pa.array(np.zeros(20_000_000, np.float32))
    table = pa.table({"observations": zeros, "actions": zeros, "rewards": zeros})
    path, options = tmp_path / "x.arrow", pa.ipc.IpcWriteOptions(compression=codec)
    with getattr(pa.ipc, new)(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    pa.default_memory_pool().release_unused()
    before = pa.total_allocated_bytes()
    error = refused(path, "SOURCE_UNSAFE", "unpack to 240,000,000 at once", rule="none")
    assert str(path) in error.where and pa.total_allocated_bytes() - before < 1 << 20


def test_a_group_of_rows_that_unpacks_to_far_more_is_refused(tmp_path: Path) -> None:
    zeros = pa.array(np.zeros(40_000_000, np.float32))
    options = {"compression": "zstd", "use_dictionary": ["actions"], "data_page_size": 1 << 30}
    rows: Any = {"observations": zeros, "actions": zeros}
    path = write(tmp_path / "x.parquet", rows, None, row_group_size=len(zeros), **options)
    refused(path, "SOURCE_UNSAFE", "unpack to", rule="none")


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_long_texts_that_repeat_are_kept_once(tmp_path: Path, form: str) -> None:
    count = 40_000
    ids = pa.DictionaryArray.from_arrays(np.arange(count) // (count // 2), ["x" * 90_000, "y"])
    zeros = pa.array(np.zeros(count, np.float32))
    table = pa.table({"observations": zeros, "actions": zeros, "episode_id": ids})
    path = tmp_path / f"x.{form}"
    if form == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path)
    before = pa.default_memory_pool().max_memory()
    with open_source(path, rule="ids:episode_id") as source:
        assert source.episodes.lengths.tolist() == [count // 2, count // 2]
    assert pa.default_memory_pool().max_memory() - before < 200 << 20


def stream(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(str(path), table.schema) as batches:
        batches.write_table(table)
    return path


def test_a_folder_is_the_files_that_it_lists(tmp_path: Path) -> None:
    shards = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for split in ("train", "old"):
        folder = tmp_path / split
        for name, ids in zip(shards, ([0, 0, 1], [2, 3, 3]), strict=True):
            stream(folder / name, steps_table(ids))
        stream(folder / "data-00002-of-00003.arrow", steps_table([7, 8]))  # of an older saving
        stream(folder / "cache-1f2e3d4c5b6a7988.arrow", steps_table([0, 0, 1, 2, 3, 3]))
        state = {"_data_files": [{"filename": name} for name in shards]}
        (folder / "state.json").write_text(json.dumps(state))
    for lists, given in (([], tmp_path / "train"), (["train"], tmp_path)):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": lists}))
        with open_source(given, rule="ids:episode_id") as source:
            assert source.episodes.lengths.tolist() == [2, 1, 1, 2]
            assert [file.path.name for file in source.info.files] == shards
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["new"]}))
    refused(tmp_path, "SOURCE_READ", "give one of those in it: old, train")
    (tmp_path / "train" / shards[1]).unlink()
    refused(tmp_path / "train", "SOURCE_READ", "cannot be read", rule="ids:episode_id")
    (tmp_path / "train" / "state.json").write_text('{"_data_files": [')
    refused(tmp_path / "train", "SOURCE_READ", "state.json")
    (tmp_path / "train" / "state.json").unlink()
    with open_source(tmp_path / "train", rule="ids:episode_id") as source:
        assert source.episodes.lengths.tolist() == [2, 1, 1, 1]
        warnings = " ".join(source.info.attributes["warnings"])
        assert "cache-1f2e3d4c5b6a7988.arrow left out" in warnings
    (tmp_path / "delta" / "_delta_log").mkdir(parents=True)
    pq.write_table(steps_table([0, 1]), tmp_path / "delta" / "part-0.parquet")
    refused(tmp_path / "delta", "SOURCE_READ", "a Delta table")


@pytest.mark.parametrize("form", ["arrow", "parquet", "state"])
@pytest.mark.parametrize("rule", [None, "ids:name"])
def test_an_episode_goes_on_in_the_next_shard(tmp_path: Path, form: str, rule: Any) -> None:
    names, folder = np.repeat(["run-c", "run-a", "run-b"], (7, 2, 5)), tmp_path / "set"
    columns = {"name": pa.array(names).dictionary_encode()}
    columns["terminals"] = pa.array(np.isin(np.arange(14), [6, 8, 13]))
    table, folder = steps_table(range(14), **columns).drop("episode_id"), tmp_path / "set"
    for number, (start, stop) in enumerate(((0, 3), (3, 5), (5, 8), (8, 14))):
        part = table.slice(start, stop - start)
        path = folder / f"train-0000{number}-of-00004.arrow"
        stream(path, part)
        if form == "parquet":
            pq.write_table(part, path.with_suffix(".parquet"))
            path.unlink()
    shards = sorted(file.name for file in folder.iterdir())
    if form == "state":
        listed = [{"filename": shard} for shard in shards]
        (folder / "state.json").write_text(json.dumps({"_data_files": listed}))
    if form != "state":  # where the Hub has them
        folder = folder.rename(tmp_path / "data")
    with open_source(folder if form == "state" else tmp_path, rule=rule) as source:
        assert source.episodes.lengths.tolist() == [7, 2, 5]
        assert source.terminated.tolist() == [True] * 3
        assert [file.path.name for file in source.info.files] == shards
        for start, stop in ((0, 14), (2, 9), (7, 8)):
            rows = source.read("rewards", start, stop)
            np.testing.assert_array_equal(rows, np.arange(14.0)[start:stop])
    (folder / shards[1]).unlink()
    if form == "state":
        refused(folder, "SOURCE_READ", shards[1])
    else:
        with open_source(folder, rule=rule) as source:
            assert "3 of the 4 files of train are here" in source.info.attributes["warnings"]


def test_partitions_and_structs_are_named(tmp_path: Path) -> None:
    table, folder = steps_table([0, 0, 1]), tmp_path / "parts"
    pq.write_to_dataset(table, folder, partition_cols=["episode_id"])
    error = refused(folder, "SOURCE_READ", "a folder of partitions, episode_id=0, episode_id=1")
    command = error.remedy.removeprefix("in Python: ").replace("mine", str(tmp_path / "mine"))
    exec(command, {"pyarrow": importlib.import_module("pyarrow.dataset") and pa})
    with open_source(tmp_path / "mine.parquet", rule="ids:episode_id") as source:
        assert source.episodes.lengths.tolist() == [2, 1]
    state = pa.array([{"x": 1.0, "y": 2.0}] * 3)
    pq.write_table(table.set_column(0, "observations", state), tmp_path / "x.parquet")
    rule = "ids:episode_id"
    refused(tmp_path / "x.parquet", "COLUMN", "columns are observations.FIELD", rule=rule)
    flat = table.set_column(0, "observations", state).flatten()
    pq.write_table(flat, tmp_path / "x.parquet")
    names = {"observations": "observations.x + observations.y"}
    with open_source(tmp_path / "x.parquet", rule=rule, names=names) as source:
        assert source.read("observations", 1, 2).tolist() == [[1.0, 2.0]]


def test_other_names_are_suggested(tmp_path: Path) -> None:
    rows: Any = {
        "obs": [[1.0]] * 3,
        "act": [[2.0]] * 3,
        "rew": [0.5] * 3,
        "done": [False, True, True],
    }
    path = write(tmp_path / "x.parquet", rows, None)
    with at_the_command_line():
        said = "--columns observations=obs,actions=act,rewards=rew,done"
        refused(path, "COLUMN", said)
    names = {"observations": "obs", "actions": "act", "rewards": "rew"}
    with open_source(path, names=names) as source:
        assert source.episodes.lengths.tolist() == [2, 1]
    refused(path, "COLUMN", "did you mean 'obs'?", names=names | {"observations": "obss"})
    refused(path, "COLUMN", "did you mean 'rew'?", names=names | {"rewards": "rews"})
