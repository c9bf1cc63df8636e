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
from gear_offline.sources import open_source
from tests.fixtures.make_lerobot import recorded
from tests.support import refused

FRONT, VIDEO = "observation.images.front", "observation.images.video"


@pytest.fixture(params=["v2.1", "v3.0"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    fixture = Path(__file__).parent / "fixtures" / "lerobot.zip"
    with zipfile.ZipFile(fixture) as archive:
        archive.extractall(tmp_path)
    return tmp_path / str(request.param)


def test_facts_of_the_dataset(folder: Path) -> None:
    with open_source(folder) as source:
        facts = source.info.attributes
        assert facts["codebase_version"] == folder.name
        assert ["a time limit cannot be told" in text for text in facts["warnings"]] == [True]
        assert sorted(facts["left_out"]) == [FRONT, VIDEO]
        assert f"observations={FRONT}" in facts["left_out"][FRONT]


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
        assert "no rewards" in texts and "next.success=rewards" in texts and "no flag" in texts
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
    names = {"observations": VIDEO, "front": FRONT}
    for path in sorted(folder.rglob("*.*")):
        if path.suffix != ".mp4" and path.parent.parent.name != "episodes":
            continue  # tests/test_sources_conformance.py damages all others
        whole = path.read_bytes()
        for cut in (0, 4, len(whole) // 3, len(whole) // 2):
            path.write_bytes(whole[:cut])
            refused(folder, "SOURCE_", names=names)
        path.unlink()
        refused(folder, "SOURCE_", names=names)
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
        refused(folder, "SOURCE_", words, names=names)
    (folder / "meta" / "info.json").write_text(text)
    monkeypatch.setitem(sys.modules, "av", None)
    refused(folder, "PACKAGE_MISSING", "gear-offline[lerobot]", names={"observations": FRONT})
    if folder.name == "v3.0":
        numbers = np.random.default_rng(0).permutation(23)
        rewrite(folder, lambda table: table.take(numbers))
        refused(folder, "SOURCE_LAYOUT", "do not follow each other")
