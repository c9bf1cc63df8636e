"""A function of the user's reads a format that nobody else knows."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gear_offline as go
from gear_offline.config.recipe import Recipe
from gear_offline.core import parts
from gear_offline.errors import InputError
from gear_offline.runs.data import prepare_one
from tests.support import Patch, one_error

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
        ("mylog.py:read_log", {"rename": {"terminals": "done"}}, "before columns are renamed"),
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


RECIPE = {"data.path": "d", "data.source": "mine.log", "data.reader": "mylog.py:read_log"}


def test_a_recipe_makes_its_data_by_a_reader_and_tells_when_it_has_changed(
    log: list[dict[str, Any]], monkeypatch: Patch
) -> None:
    recipe = go.load_recipe("smoke", RECIPE)
    rewards = [reward for episode in log for reward in episode["rewards"]]
    for _ in range(2):  # made, and there already
        assert prepare_one(recipe, quiet=True).read("rewards", 0, 16).tolist() == rewards
    with one_error("DATA_MISMATCH", "made of mine.log by mylog.py:read_log, xxh3-128.* no reader"):
        prepare_one(recipe.replace("data.reader=null"), quiet=True)
    Path("mylog.py").write_text(f"import helper\n{LOG}")
    Path("helper.py").write_text("")
    with one_error("DATA_MISMATCH", "made of mine.log by mylog.py:read_log") as caught:
        prepare_one(go.load_recipe("smoke", RECIPE), quiet=True)
    assert "data.source=null" in caught.value.remedy
    taken = go.load_recipe("smoke", RECIPE | {"data.source": None, "data.reader": None})
    assert prepare_one(taken, quiet=True).episodes.episodes == 4
    go.convert("mine.log", "e", reader="mylog.py:read_log", quiet=True)
    recipe = go.load_recipe("smoke", RECIPE | {"data.path": "e"})
    assert prepare_one(recipe, quiet=True).episodes.episodes == 4
    Path("helper.py").write_text("# another one")  # which the reader imports
    with one_error("DATA_MISMATCH", "mylog.py:read_log"):
        prepare_one(recipe, quiet=True)


def test_a_reader_goes_with_its_source(log: list[dict[str, Any]]) -> None:
    base = Path("base.yaml")
    base.write_text("base: smoke\ndata: {source: mine.log, reader: 'mylog.py:read_log', path: d}\n")
    reader = str(Path("mylog.py:read_log").absolute())
    assert go.load_recipe(base).data.reader == reader
    assert go.load_recipe(base, "data.source=another.log").data.reader == reader
    assert go.load_recipe(base, "data.path=e").data.reader is None, "data that are named"
    assert prepare_one(go.load_recipe(base, "data.path=e"), quiet=True).episodes.episodes == 4
    task = {"path": "d", "source": "mine.log", "reader": "mylog.py:read_log"}
    assert {*go.load_recipe("paper", {"data.tasks": {"one": task}}).parts} == {reader}
    with one_error("RECIPE", "data: reader needs source"):
        go.load_recipe("smoke", {"data.reader": "mylog.py:read_log", "data.collect": None})


def test_a_reader_that_only_a_run_names_is_not_run(
    log: list[dict[str, Any]], monkeypatch: Patch
) -> None:
    """A recipe of nobody's word, as that of a stranger's run, opens and makes nothing."""
    Path("mylog.py").write_text(f"open('ran', 'w').close()\n{LOG}")
    stranger = go.load_recipe("smoke", RECIPE).to_dict()
    monkeypatch.setattr(parts, "_permission", parts.Permission())
    monkeypatch.setenv("XDG_STATE_HOME", str(Path("elsewhere").absolute()))
    recipe = go.load_recipe(Recipe.read(stranger))
    with one_error("RECIPE", "only a run, a dataset or a policy names.*data.reader=.*mylog.py"):
        prepare_one(recipe, quiet=True)
    with one_error("RECIPE", "only a run"):
        go.train(recipe, out="run", quiet=True)
    assert not Path("ran").exists()
    few = {"train.steps": 2, "evaluate.episodes": 0}
    go.train(recipe, RECIPE | few, out="run", quiet=True)
    assert Path("ran").exists()
    Path("mylog.py").write_text(LOG)
    with one_error("DATA_MISMATCH", "made of mine.log by mylog.py:read_log"):
        go.train("run", resume=True, quiet=True)
    taken = {"data.source": None, "data.collect": None}
    assert go.train("run", taken, resume=True, quiet=True).steps == 2


def _padded(told_by: str, extra: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return padded arrays and, cut from them by hand, the episodes."""
    lengths, steps, rng = [4, 1, 3], 5, np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "observations": rng.normal(size=(3, steps + extra, 2)).astype(np.float32),
        "actions": rng.integers(0, 4, (3, steps)),
        "rewards": rng.normal(size=(3, steps)),
        "terminated": np.array([True, False, True]),
        "masks": rng.integers(0, 2, (3, steps)),  # of JAX code: not of padding
        "level": np.array([7, 8, 9]),
    }
    names = ("observations", "actions", "rewards", "masks")
    episodes = []
    for number, length in enumerate(lengths):
        episode = {name: arrays[name][number][:length] for name in names}
        episodes.append(episode | {"level": [7 + number] * length})
    real = np.array([[step < length for step in range(steps)] for length in lengths])
    padding = {"mask": real, "lengths": lengths}
    return arrays | {n: v for n, v in padding.items() if told_by in (n, "both")}, episodes


@pytest.mark.parametrize("told_by", ["mask", "lengths", "both"])
@pytest.mark.parametrize("extra", [0, 1])
def test_padded_arrays_are_read_up_to_their_lengths(
    tmp_path: Path, told_by: str, extra: int
) -> None:
    arrays, episodes = _padded(told_by, extra)
    np.savez_compressed(tmp_path / "p.npz", **arrays)
    with go.open_source(tmp_path / "p.npz", reader="padded") as source:
        assert source.episodes.lengths.tolist() == [4, 1, 3]
        assert source.terminated.tolist() == [True, False, True]
        stored = {column.name for column in source.spec} - {"next_observations"}
        assert stored == {*episodes[0]}
        for name in episodes[0]:
            rows = np.concatenate([episode[name] for episode in episodes])
            np.testing.assert_array_equal(source.read(name, 0, 8), rows)
        if extra:
            rows = source.read("next_observations", 5, 8)
            np.testing.assert_array_equal(rows, arrays["observations"][2][1:4])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lengths": [4, 0, 3]}, "episode 1 is of 0 of 5 steps"),
        ({"lengths": [4, 1, 6]}, "episode 2 is of 6 of 5 steps"),
        ({"lengths": [4, 1.5, 3]}, "episode 1 is of 1.5"),
        ({"lengths": [4, np.nan, 3]}, "episode 1 is of nan"),
        ({"lengths": None, "masks": None}, r"no mask \(E, T\) or lengths"),
        ({"mask": np.ones((3, 5)) * [0, 0, 1, 1, 1]}, "episode 0 has a mask"),
        (
            {"mask": np.arange(5) < np.array([[4], [2], [2]])},
            "episode 1 has 2 .* mask, 1 by lengths",
        ),
        ({"mask": np.full((3, 5), 255)}, "mask is no mask: it holds 255"),
        ({"lengths": None, "masks": np.ones((3, 5))}, "masks may be .*call it mask .*lengths"),
        ({"actions": None}, "no actions among"),
        ({"level": np.zeros((3, 4))}, "level has shape"),
        ({"level": np.zeros(4)}, "level has shape"),
        ({"level": np.array(["a", "b", "c"])}, "neither numeric nor bool"),
        ({"dones": np.ones((3, 5), bool)}, "true at step 0 of 4"),
    ],
)
def test_padded_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    arrays = {n: v for n, v in (_padded("lengths", 0)[0] | changes).items() if v is not None}
    np.savez(tmp_path / "p.npz", **arrays)
    with one_error("SOURCE_LAYOUT", problem):
        go.open_source(tmp_path / "p.npz", reader="padded")


def test_padded_arrays_are_not_taken_for_steps(tmp_path: Path) -> None:
    arrays, _ = _padded("mask", 0)
    del arrays["rewards"]  # whose rows would be refused as they are
    np.savez(tmp_path / "p.npz", **arrays)
    with one_error("SOURCE_LAYOUT", "mask tells of .*; reader='?padded"):
        go.open_source(tmp_path / "p.npz")
    np.savez(tmp_path / "p.npz", **{n.replace("mask", "masks"): v for n, v in arrays.items()})
    with one_error("SOURCE_LAYOUT", "masks may be .*call it mask .*lengths"):  # one for both doors
        go.open_source(tmp_path / "p.npz")


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "day").symlink_to(tmp_path)
    with one_error("SOURCE_READ", "a link to a folder"):
        go.open_source(tmp_path / "logs", reader=_broken)


def test_doubts_about_a_reader_s_ends_name_no_rule(tmp_path: Path) -> None:
    episode = {"observations": np.zeros((3, 2)), "actions": np.zeros((3, 1)), "dones": True}
    with go.open_source(tmp_path, reader=lambda path: [episode]) as source:
        [note] = source.info.attributes["warnings"]
    assert note.endswith(
        "cannot be told from a termination; terminated and truncated tell them apart"
    )
