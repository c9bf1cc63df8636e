"""A function of the user's reads a format that nobody else knows."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gear_offline as go
from gear_offline.errors import InputError

LOG = """
import json
import numpy as np

def read_log(path):
    for line in path.read_text().splitlines():
        columns = json.loads(line)
        yield {name: np.asarray(rows) for name, rows in columns.items()}

def read_by_chance(path):
    for episode in read_log(path):
        episode["actions"] = np.random.default_rng().normal(size=episode["actions"].shape)
        yield episode
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Write a file of episodes and its reader; return the episodes."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    episodes = []
    for steps in (3, 7, 1, 5):
        shapes = {"observations": (steps + 1, 2), "actions": (steps, 1), "rewards": (steps,)}
        columns = {name: rng.normal(size=shape).tolist() for name, shape in shapes.items()}
        episodes.append(columns | {"terminated": steps > 4})
    Path("mine.log").write_text("".join(f"{json.dumps(episode)}\n" for episode in episodes))
    Path("mylog.py").write_text(LOG)
    return episodes


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_reader_yields_is_what_is_stored(log: list[dict[str, Any]], workers: int) -> None:
    options: dict[str, Any] = {"reader": "mylog.py:read_log", "shard_bytes": 1 << 16}
    go.convert("mine.log", "data", quiet=True, workers=workers, **options)
    dataset = go.open_dataset("data")
    assert [len(e["rewards"]) for e in log] == dataset.episodes.lengths.tolist()
    assert [e["terminated"] for e in log] == dataset.terminated.tolist()
    for name, rows in {
        "observations": [row for e in log for row in e["observations"][:-1]],
        "next_observations": [row for e in log for row in e["observations"][1:]],
        "rewards": [row for e in log for row in e["rewards"]],
    }.items():
        np.testing.assert_array_equal(dataset.read(name, 0, 16), np.asarray(rows, np.float64))
    source = dataset.manifest.source
    assert [file.name for file in source.files] == ["mine.log"]
    assert str(source.attributes["reader"]).startswith("mylog.py:read_log, xxh3-128:")


def test_a_folder_is_read_by_a_function_of_this_process(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(3):
        np.save(folder / f"{number}.npy", np.full(4, number, np.float32))

    def read(path: Path) -> Iterator[dict[str, Any]]:
        for file in sorted(path.iterdir()):
            rows = np.load(file)
            yield {"observations": rows[:, None], "actions": rows[:, None], "rewards": rows}

    with go.open_source(folder, reader=read) as source:
        assert source.read("rewards", 3, 9).tolist() == [0, 1, 1, 1, 1, 2]
        assert [file.path.name for file in source.info.files] == ["0.npy", "1.npy", "2.npy"]


def _broken(path: Path) -> Iterator[dict[str, Any]]:
    yield {"observations": np.zeros((3, 2)), "actions": np.zeros((3, 1)), "rewards": np.zeros(3)}
    raise ValueError("line 7 is cut short")


def _leaving(path: Path) -> Iterator[dict[str, Any]]:
    yield {"observations": np.zeros((3, 2)), "actions": np.zeros((3, 1)), "rewards": np.zeros(3)}
    sys.exit()  # of status 0, which would look like success


def _ragged(path: Path) -> Iterator[dict[str, Any]]:
    for width in (2, 3):
        columns = {"observations": np.zeros((3, width)), "actions": np.zeros((3, 1))}
        yield columns | {"rewards": np.zeros(3)}


@pytest.mark.parametrize(
    ("reader", "options", "problem"),
    [
        (_broken, {}, r"raised ValueError: line 7 is cut short \(mine.log, after 1 episodes\)"),
        (_leaving, {}, "the reader raised SystemExit"),
        (_ragged, {}, r"column observations is float64 \(3,\) in episode 1"),
        (lambda path: [], {}, "no episode"),
        (lambda path: [np.zeros(3)], {}, "an episode is a ndarray"),
        (lambda path: None, {}, "raised TypeError"),
        ("mylog.py:read_nothing", {}, "has no 'read_nothing'"),
        ("mylog.py:read_log", {"rule": "terminals"}, "rule and ends are not for a reader"),
    ],
)
def test_a_reader_that_fails_leaves_nothing(
    log: list[dict[str, Any]],
    reader: str | Callable[[Path], Any],
    options: dict[str, Any],
    problem: str,
) -> None:
    with pytest.raises(InputError, match=problem):
        go.convert("mine.log", "data", reader=reader, quiet=True, **options)
    assert sorted(path.name for path in Path().iterdir()) == ["mine.log", "mylog.py"]


def test_workers_refuse_a_reader_that_yields_other_episodes_each_time(
    log: list[dict[str, Any]],
) -> None:
    options: dict[str, Any] = {"reader": "mylog.py:read_by_chance", "quiet": True}
    with pytest.raises(InputError, match="the reader yielded other episodes"):
        go.convert("mine.log", "data", workers=2, shard_bytes=64, **options)
    assert go.convert("mine.log", "data", **options).spec.steps == 16


def test_no_name_is_no_path_for_a_reader(log: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="'' names nothing"):
        go.open_source("", reader=_broken)


def _refilling(path: Path) -> Iterator[dict[str, Any]]:
    rows = np.empty((4, 1))
    for number in range(3):
        rows[...] = number
        yield {"observations": rows, "actions": np.zeros((4, 1)), "rewards": rows[:, 0]}


def test_an_array_that_is_filled_again_is_stored_as_it_was_yielded_or_refused(
    tmp_path: Path,
) -> None:
    with go.open_source(tmp_path, reader=_refilling) as source:
        assert source.read("rewards", 0, 12).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(InputError, match=r"changed after it was yielded \(episode 0, column obs"):
        go.from_episodes(_refilling(tmp_path))
    same = next(_refilling(tmp_path))
    assert go.from_episodes(same for _ in range(3)).spec.steps == 12
