"""LeRobot's datasets, written by LeRobot itself (tests/fixtures/make_lerobot.py), step by step."""

import json
import sys
import zipfile
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
from tests.fixtures.make_lerobot import LENGTHS, recorded

FRONT, VIDEO = "observation.images.front", "observation.images.video"


@pytest.fixture(params=["v2.1", "v3.0"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    fixture = Path(__file__).parent / "fixtures" / "lerobot.zip"
    with zipfile.ZipFile(fixture) as archive:
        archive.extractall(tmp_path)
    return tmp_path / str(request.param)


def test_every_step_of_every_episode(folder: Path, tmp_path: Path) -> None:
    with open_source(folder) as source:
        facts = source.info.attributes
        assert source.info.format == "lerobot" and facts["codebase_version"] == folder.name
        assert sorted(facts["left_out"]) == [FRONT, VIDEO]
        assert f"observations={FRONT}" in facts["left_out"][FRONT] and not facts["warnings"]
        assert source.terminated.tolist() == [True, False, True]
        for number, episode in enumerate(iter_episodes(source)):
            wanted = recorded(number)
            pairs = {"actions": "action", "rewards": "next.reward", "next.success": "next.success"}
            for ours, theirs in pairs.items():
                assert episode[ours].dtype == wanted[theirs].dtype
                np.testing.assert_array_equal(episode[ours], wanted[theirs])
            vectors = [wanted["observation.state"], wanted["observation.velocity"]]
            np.testing.assert_array_equal(episode["observations"], np.concatenate(vectors, 1))
            assert (episode["task_index"] == number % 2).all()
            assert (episode["frame_index"] == np.arange(LENGTHS[number])).all()
    convert(folder, tmp_path / "shards", quiet=True)
    returns = [recorded(number)["next.reward"].sum() for number in range(3)]
    np.testing.assert_allclose(open_dataset(tmp_path / "shards").returns, returns, rtol=1e-6)


def test_frames_that_are_asked_for(folder: Path, tmp_path: Path) -> None:
    chosen = [f"observations={FRONT}", f"video={VIDEO}", "actions"]
    convert(folder, tmp_path / "shards", columns=chosen, shard_bytes=1 << 18, quiet=True)
    dataset = open_dataset(tmp_path / "shards")
    assert [c.name for c in dataset.spec] == ["observations", "video", "actions", "rewards"]
    wanted = [recorded(number) for number in range(3)]
    images = np.concatenate([episode[FRONT] for episode in wanted])
    np.testing.assert_array_equal(dataset.read("observations", 0, 23), images)
    video = np.concatenate([episode[VIDEO] for episode in wanted]).astype(int)
    near = np.abs(dataset.read("video", 0, 23) - video)  # frames differ by 20 and more
    assert near.max() <= 4
    names = {"observations": "observation.state + observation.velocity", "video": VIDEO}
    with open_source(folder, names=names) as source:
        assert source.spec["observations"].shape == (5,)
    with open_source(folder, names={"observations": VIDEO}) as source:
        for start, stop in ((22, 23), (5, 20), (0, 1), (18, 19)):  # in any order
            assert np.abs(source.read("observations", start, stop) - video[start:stop]).max() <= 4


def rewrite(path: Path, change: Any) -> None:
    """Write the parquet files of data again, `change` applied, in groups of 5 rows."""
    for file in path.glob("data/*/*.parquet"):
        pq.write_table(change(pq.read_table(file)), file, row_group_size=5)


def test_rewards_and_endings_that_are_not_recorded(folder: Path) -> None:
    rewrite(folder, lambda table: table.drop_columns(["next.reward", "next.done"]))
    with open_source(folder) as source:
        assert "rewards" not in source.spec and source.truncated.all()
        texts = " ".join(source.info.attributes["warnings"])
        assert "no rewards" in texts and "rewards=next.success" in texts and "next.done" in texts
    with open_source(folder, names={"rewards": "next.success"}) as source:
        assert source.spec["rewards"].dtype == np.float32
        assert source.read("rewards", 0, 23).tolist() == [0.0] * 22 + [1.0]


def test_truncated_episodes(folder: Path) -> None:
    def cut(table: Any) -> Any:
        return table.append_column("next.truncated", pa.array([True] * len(table)))

    rewrite(folder, cut)
    with open_source(folder) as source:
        assert source.truncated.all()


def test_damaged_and_foreign_folders_are_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, words: str = "", code: str = "SOURCE_") -> None:
        names = {"observations": VIDEO, "front": FRONT}
        with pytest.raises(InputError) as caught, open_source(path, names=names) as source:
            list(iter_episodes(source))
        assert caught.value.code.startswith(code) and words in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value)

    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        if path.name.startswith(("tasks", "stats", "episodes")):
            continue
        last = () if path.suffix == ".mp4" else (len(whole) - 9,)  # mp4 ends with remarks
        for cut in (0, 4, len(whole) // 3, len(whole) // 2, *last):
            path.write_bytes(whole[:cut])
            refused(folder)
        path.unlink()
        if path.name != "info.json":
            refused(folder)
        path.write_bytes(whole)
    text = (folder / "meta" / "info.json").read_text()
    info = json.loads(text)
    for change, words in (
        ({"codebase_version": "v1.6"}, "v1.6"),
        ({"total_frames": 24}, "24 of 3"),
        ({"features": 5}, "not a readable info.json"),
        ({"fps": 20}, "of the frames"),
    ):
        (folder / "meta" / "info.json").write_text(json.dumps({**info, **change}))
        refused(folder, words)
    (folder / "meta" / "info.json").write_text(text)
    with pytest.raises(InputError, match="rule"):
        open_source(folder, rule="dones")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnavailableError, match=r"gear-offline\[lerobot\]"):
        open_source(folder, names={"observations": FRONT})
    if folder.name == "v3.0":
        numbers = np.random.default_rng(0).permutation(23)
        rewrite(folder, lambda table: table.take(numbers))
        refused(folder, "do not follow each other")
