"""Parquet of one row an episode, as the Decision Transformer sets, compared with lists."""

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gear_offline.convert.conversion import convert
from gear_offline.dataset.dataset import open_dataset
from gear_offline.errors import InputError, UnavailableError
from gear_offline.sources import iter_episodes, open_source

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
    rng = np.random.default_rng(0)
    return {
        "observations": [rng.normal(size=(t, 11)).astype("f4").tolist() for t in LENGTHS],
        "actions": [rng.uniform(-1, 1, (t, 3)).astype("f4").tolist() for t in LENGTHS],
        "rewards": [rng.normal(size=t).astype("f4").tolist() for t in LENGTHS],
        "dones": [[False] * (t - 1) + [t == 9] for t in LENGTHS],
    }


def write(path: Path, rows: Episodes, schema: Any = SCHEMA, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows, schema=schema), path, **{"row_group_size": 3, **options})
    return path


@pytest.mark.parametrize("options", [{}, {"row_group_size": 1000}, {"compression": "gzip"}])
def test_every_step_of_every_episode(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = episodes()
    path = write(tmp_path / "hopper-medium-v2" / "train" / "0000.parquet", rows, **options)
    for given in (path, path.parent, path.parent.parent):
        with open_source(given) as source:
            assert source.info.format == "parquet"
            assert source.info.reference_name == "hopper-medium-v2"
            assert source.terminated.tolist() == [False, True, False, False]
            assert source.truncated.tolist() == [True, False, True, True]
            assert source.read("rewards", 3, 22).tolist() == list(chain(*rows["rewards"]))[3:22]
            for number, episode in enumerate(iter_episodes(source)):
                assert episode["dones"].dtype == np.bool_
                assert episode["observations"].dtype == np.float32
                assert {n: v.tolist() for n, v in episode.items()} == {
                    name: lists[number] for name, lists in rows.items()
                }
    convert(path.parent.parent, tmp_path / "shards", quiet=True)
    stored = open_dataset(tmp_path / "shards").read("observations", 0, 25)
    assert stored.tolist() == list(chain(*rows["observations"]))


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
    "short": ("actions", 1, [[1.0] * 3], "as long as those of rewards"),
    "ragged": ("actions", 0, [[1.0] * 3] * 4 + [[1.0]], "different widths"),
    "wider": ("actions", 3, [[1.0] * 4] * 7, "before it was float32 (3,)"),
    "null": ("rewards", 2, [None] * 4, "missing (null)"),
    "null step": ("actions", 0, [None] * 5, "missing"),
    "null episode": ("observations", 2, None, "as long as"),
    "no steps": ("rewards", 3, [], "without steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_episodes_are_refused(tmp_path: Path, case: str) -> None:
    name, episode, values, words = BAD[case]
    rows = episodes()
    rows[name][episode] = values
    path = write(tmp_path / "bad.parquet", rows)
    with pytest.raises(InputError) as caught, open_source(path) as source:
        for column in source.spec:
            source.read(column.name, 0, 25)
    assert caught.value.code == "SOURCE_LAYOUT" and words in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_other_files_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(code: str, words: str, **options: Any) -> None:
        with pytest.raises(InputError) as caught:
            open_source(path, **options)
        assert caught.value.code == code and words in str(caught.value), str(caught.value)

    path = write(tmp_path / "a.parquet", episodes())
    refused("SOURCE_LAYOUT", "rule", rule="dones")
    refused("COLUMN", "found: actions", names={"observations": "obs"})
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[:-20]):
        path.write_bytes(content)
        refused("SOURCE_READ", "damaged")
    steps = {"observations": [[1.0]], "actions": [[1.0]], "rewards": [1.0]}
    pq.write_table(pa.table(steps), path)  # a row a step, as LeRobot has them
    refused("COLUMN", "'rewards' of one list an episode")
    write(path, {name: [] for name in SCHEMA.names})
    refused("SOURCE_LAYOUT", "no episodes")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UnavailableError) as missing:
        open_source(path)
    assert missing.value.code == "PACKAGE_MISSING" and "[parquet]" in missing.value.remedy
