"""Parquet of one row an episode, as the Decision Transformer sets, compared with lists."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gear_offline.sources import open_source
from tests.support import hopper_columns, refused

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
    "null": ("rewards", 2, [None] * 4, "missing (null)"),
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


def test_an_episode_in_two_files_is_told(tmp_path: Path) -> None:
    for number, ids in enumerate(([3, 3, 5], [5, 5], [4, 5])):
        rows: Episodes = {"observations": [[1.0]] * len(ids), "actions": [[1.0]] * len(ids)}
        write(tmp_path / f"{number}.parquet", rows | {"episode_id": ids}, None)
    with open_source(tmp_path, rule="ids:episode_id") as source:
        assert source.episodes.lengths.tolist() == [2, 1, 2, 1, 1]
        told = "1 episode cut where another file begins"
        assert told in source.info.attributes["warnings"]


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
