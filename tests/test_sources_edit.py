"""Edits at conversion, against the same done with NumPy on the source's arrays.

Shape legend: E episodes, T steps of an episode.
"""

import inspect
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gear_offline as go
from gear_offline.cli.main import main
from gear_offline.data.convert.append import Appender
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.sources import edit, from_arrays, from_episodes, open_source
from gear_offline.errors import InputError
from tests.hdf5_files import write
from tests.support import ArraySource, hopper_columns, one_error

Columns = dict[str, Any]


def relabelled(episode: Columns) -> Columns:
    past = np.cumsum(episode["rewards"], dtype=np.float32)
    return {"rewards": episode["rewards"] / 2, "past": past, "pair": np.stack([past, -past], 1)}


def episodes_of(lengths: list[int], seed: int = 0) -> list[Columns]:
    """Return episodes of float rewards, some of which terminate, each with a level of its own."""
    made = []
    for number, steps in enumerate(lengths):
        columns = hopper_columns(steps, seed=seed + number, state_dim=2, action_dim=1)
        rows = {name: columns[name] for name in ("observations", "actions", "rewards")}
        flags = np.zeros((2, steps), bool)
        flags[(seed + number) % 2, -1] = True
        level = np.full(steps, number % 3)
        made.append(rows | {"terminals": flags[0], "timeouts": flags[1], "level": level})
    return made


EXPRESSIONS: dict[str, Callable[[float, int, bool, int], Any]] = {
    "return > 0 and length > 2": lambda r, n, t, e: r > 0 and n > 2,
    "not (terminated or length == 3)": lambda r, n, t, e: not (t or n == 3),
    "-1 < return / length <= .25": lambda r, n, t, e: -1 < r / n <= 0.25,
    "truncated == (episode % 2)": lambda r, n, t, e: (not t) == (e % 2),
    "level != 1 or return - 1 >= -length": lambda r, n, t, e: e % 3 != 1 or r - 1 >= -n,
    "length // 2 * 2 == length": lambda r, n, t, e: n % 2 == 0,
}


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seed=st.integers(0, 99),
    where=st.sampled_from(sorted(EXPRESSIONS)),
    mapped=st.booleans(),
    window=st.sampled_from([1, 300, 1 << 20]),
    shard_bytes=st.sampled_from([200, 1 << 20]),
)
def test_what_is_written_is_what_numpy_makes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int, where: str,
    mapped: bool, window: int, **options: Any,
) -> None:  # fmt: skip
    episodes, out = episodes_of(lengths, seed), tmp_path_factory.mktemp("edit") / "d"
    wanted = [e | (relabelled(e) if mapped else {}) for e in episodes]
    kept, returns = EXPRESSIONS[where], [e["rewards"].sum(dtype=float) for e in wanted]
    keep = [
        bool(kept(total, len(e["rewards"]), e["terminals"][-1], i))
        for i, (e, total) in enumerate(zip(wanted, returns, strict=True))
    ]
    given_: Columns = {"map": relabelled if mapped else None, "rename": {"observations": "state"}}
    given_ |= {"where": where, "quiet": True, **options}
    if not any(keep):
        with pytest.raises(InputError, match="is kept"):
            convert(from_episodes(episodes), out, **given_)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edit, "WINDOW_BYTES", window)
        record = convert(from_episodes(episodes), out, **given_).source.attributes["edits"]
    wanted = [e for e, stays in zip(wanted, keep, strict=True) if stays]
    dataset = open_dataset(out)
    assert {c.name for c in dataset.spec} == {*wanted[0], "state"} - {"observations"}
    for found, made in zip(dataset, wanted, strict=True):
        for name, rows in found.items():
            again = made["observations" if name == "state" else name]
            assert rows.dtype == again.dtype and rows.tobytes() == again.tobytes(), name
    returns = [total for total, stays in zip(returns, keep, strict=True) if stays]
    np.testing.assert_allclose(dataset.returns, returns, rtol=1e-12, atol=1e-12)
    assert dataset.terminated.tolist() == [bool(e["terminals"][-1]) for e in wanted]
    mean = np.concatenate([e["rewards"] for e in wanted]).mean(dtype=float)
    assert dataset.statistics["rewards"].mean == pytest.approx(mean)
    assert record[0] == "rename observations to state" and where in record[-1]
    assert ("test_sources_edit:relabelled, xxh3-128:" in record[1]) is mapped


def test_edits_of_a_command_are_recorded(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nimport numpy as np\n"
    (tmp_path / "relabel.py").write_text(text + inspect.getsource(relabelled))
    episodes, source = episodes_of([3, 4, 5, 6, 7, 8, 9, 3, 4]), tmp_path / "x.hdf5"
    write(source, {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]})
    options = ["--where", "return > -9", "--where", "length > 3", "--rename", "level=stage", "-q"]
    options += ["--map", f"{tmp_path / 'relabel.py'}:relabelled"]
    assert main(["convert", str(source), str(tmp_path / "1"), *options]) == 0
    edits = open_dataset(tmp_path / "1").manifest.source.attributes["edits"]
    assert edits[1].startswith("map relabel.py:relabelled, xxh3-128:") and "7 of 9 epi" in edits[2]
    manifest = convert(tmp_path / "1", tmp_path / "again", where="length > 8", quiet=True)
    assert manifest.source.attributes["edits"] == [*edits, "where length > 8: 1 of 7 episodes"]


@pytest.mark.parametrize(
    ("columns", "new", "kept"),
    [
        (["observations"], "rewards", {"observations", "rewards"}),  # which are always kept
        (["observations", "rewards"], "rewards", {"observations", "rewards"}),
        (["observations", "stage"], "stage", {"observations", "rewards", "stage"}),
        (["observations", "level"], "stage", {"observations", "rewards", "stage"}),
    ],
)
def test_a_renamed_column_is_kept_by_either_name(
    tmp_path: Path, columns: list[str], new: str, kept: set[str]
) -> None:
    episodes, file = episodes_of([3, 4]), tmp_path / "x.hdf5"
    write(file, {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]})
    go.convert(file, tmp_path / "shards", quiet=True)
    for number, source in enumerate((file, tmp_path / "shards")):
        out = tmp_path / str(number)
        convert(source, out, columns=columns, rename={"level": new}, quiet=True)
        dataset = open_dataset(out)
        assert {column.name for column in dataset.spec} == kept
        levels = np.concatenate([episode["level"] for episode in episodes])
        np.testing.assert_array_equal(dataset.column(new), levels)


@pytest.mark.parametrize("function", [None, lambda episode: {"rewards": episode["rewards"] + 1}])
def test_returns_that_are_nan_are_told(tmp_path: Path, function: Any) -> None:
    """A comparison with NaN is false: the episode goes whichever way one asks."""
    episodes = episodes_of([3, 4, 5])
    episodes[1]["rewards"][0] = np.nan
    for number, where in enumerate(("return > -1e9", "return <= 1e9")):
        manifest = convert(
            from_episodes(episodes), tmp_path / str(number), where=where, map=function, quiet=True
        )
        assert manifest.spec.episodes == 2
        warnings = manifest.source.warnings
        assert "return is NaN in 1 episode: no > or < of where keeps it" in warnings


def test_warnings_from_before_a_choice_say_so(tmp_path: Path) -> None:
    """Of a source and of shards; where every episode is kept, they still hold."""
    rows, lengths = np.arange(52), [9, 9, 9, 9, 9, 3, 4]
    data: dict[str, Any] = dict.fromkeys(("observations", "actions", "rewards"), rows)
    data["terminals"] = np.isin(rows, np.cumsum(lengths) - 1)
    convert(from_arrays(data), tmp_path / "all", quiet=True)
    sources: tuple[Any, ...] = (from_arrays(data), tmp_path / "all")
    for number, source in enumerate(sources):
        for where, picked in (("length < 9", True), ("length > 0", False)):
            out = tmp_path / f"{number}{picked}"
            said = convert(source, out, where=where, quiet=True).source.warnings
            assert any(text.startswith("5 episodes of the greatest length (9)") for text in said)
            assert any("before some were picked" in text for text in said) == picked
        convert(tmp_path / f"{number}True", tmp_path / f"{number}", quiet=True)
        said = open_dataset(tmp_path / f"{number}").manifest.source.warnings
        assert any("before some were picked" in text for text in said)


def test_a_column_of_an_episode_may_be_nothing_but_nan(tmp_path: Path) -> None:
    episodes = episodes_of([4, 4, 4])
    for episode, score in zip(episodes, (np.nan, 1.0, 2.0), strict=True):
        episode["score"] = np.full(4, score)
    for where, kept in (("score > 0", [1, 2]), ("score != score", [0]), ("not score > 1", [0, 1])):
        out = tmp_path / where.replace(" ", "")
        convert(from_episodes(episodes), out, where=where, allow_nonfinite=True, quiet=True)
        found = open_dataset(out).column("score")[::4]
        np.testing.assert_array_equal(found, [episodes[n]["score"][0] for n in kept])
    episodes = episodes_of([4, 4, 4])
    for episode, score in zip(episodes, (0.1, 0.2, 0.3), strict=True):
        episode["score"] = np.full(4, score, np.float32)
    for where, holds in (("score == 0.1", np.equal), ("score <= 0.1", np.less_equal)):
        manifest = convert(from_episodes(episodes), tmp_path / where[6:8], where=where, quiet=True)
        assert manifest.episodes == holds([e["score"][0] for e in episodes], np.float32(0.1)).sum()
    episodes[1]["score"][2] = np.nan
    with one_error("USAGE", "the column score changes in episode 1"):
        convert(from_episodes(episodes), tmp_path / "d", where="score > 0", quiet=True)


def test_numbers_of_episodes_are_the_source_s_also_behind_shift(tmp_path: Path) -> None:
    episodes = episodes_of([3, 1, 4, 2])  # the second one has nothing to shift
    how: Any = {"shift": {"rewards": 1}, "where": "episode == 2", "quiet": True}
    convert(from_episodes(episodes), tmp_path / "d", **how)
    found = open_dataset(tmp_path / "d").column("rewards")[:]
    np.testing.assert_array_equal(found, episodes[2]["rewards"][1:])


def test_a_function_sees_each_episode_once_for_all_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit, "WINDOW_BYTES", 2000)
    calls = []

    def counted(episode: Columns) -> Columns:
        calls.append(len(episode["rewards"]))
        return relabelled(episode)

    lengths = [20, 30, 400, 10, 50]
    source = ArraySource(hopper_columns(sum(lengths)), lengths)
    convert(source, tmp_path / "d", map=counted, quiet=True)
    assert calls == [20, *lengths]  # the first one tells what columns there are


def broken(result: Any) -> Callable[[Columns], Any]:
    return lambda episode: result(episode) if len(episode["rewards"]) == 5 else relabelled(episode)


def written(episode: Columns) -> Columns:
    episode["rewards"] *= 2
    return episode


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"where": "retrun > 3"}, "USAGE", "unknown name 'retrun', did you mean 'return'?"),
        ({"where": "levle == 1"}, "USAGE", "did you mean 'level'?"),
        ({"where": "rewards > 1"}, "USAGE", "the column rewards changes in episode 0"),
        ({"where": "return >"}, "USAGE", "invalid syntax"),
        ({"where": "1 < 2"}, "USAGE", "it says nothing of episodes"),
        ({"where": "(length > 3) + (length > 5) == 3"}, "SELECTION", "none of 3 episodes"),
        ({"where": "length == 'a'"}, "USAGE", "'a' is not understood"),
        ({"where": "length < 10 ** 9"}, "USAGE", "Pow is not understood"),
        ({"where": "__import__('os').getpid() > length"}, "USAGE", "unknown name '__import__'"),
        ({"where": "(lambda: length)() > 1"}, "USAGE", "is not understood"),
        ({"where": "length.real > 1"}, "USAGE", "length.real is not understood"),
        ({"where": "length > 1" + " + 0" * 400}, "USAGE", "more than 1000 characters"),
        ({"where": "length > 9 and return > 0"}, "SELECTION", "none of 3 episodes is kept"),
        ({"shift": {"actions": 6}}, "USAGE", "no episode has more than 6 rows"),
        ({"map": "nothing_here:f"}, "USAGE", "No module named 'nothing_here'"),
        ({"map": "nothing.py:f"}, "USAGE", "No such file"),
        ({"map": "math:sqrrt"}, "USAGE", "did you mean 'sqrt'"),
        ({"map": 3}, "USAGE", "a int is no function"),
        ({"map": broken(lambda e: e["nothing"])}, "USAGE", "KeyError: 'nothing' (episode 1)"),
        ({"map": broken(written)}, "USAGE", "read-only (episode 1)"),
        ({"map": broken(lambda e: sys.exit())}, "USAGE", "raised SystemExit"),
        ({"map": broken(lambda e: [1])}, "USAGE", "returned a list (episode 1)"),
        (
            {"map": broken(lambda e: relabelled(e) | {"past": np.zeros(4)})},
            "SOURCE_LAYOUT",
            "returned shape (4,) of 5 steps (episode 1, column past)",
        ),
        (
            {"map": broken(lambda e: relabelled(e) | {"pair": np.zeros((5, 3), "f4")})},
            "SOURCE_LAYOUT",
            "column pair is float32 (3,) in episode 1, float32 (2,) in episode 0",
        ),
        (
            {"map": broken(lambda e: {"rewards": e["rewards"]})},
            "SOURCE_LAYOUT",
            "column past is missing in episode 1",
        ),
        (
            {"map": lambda e: {"terminals": ~e["terminals"]}},
            "USAGE",
            "makes the flag terminals, which was read before it (episode 0)",
        ),
        ({"map": relabelled, "workers": 2}, "USAGE", "workers=2 cannot be"),
        ({"rename": {"levle": "stage"}}, "COLUMN", "no 'levle' to take as 'stage'"),
        ({"rename": {"level": "a", "actions": "a"}}, "USAGE", "gives a name twice"),
        ({"columns": ["a=level"], "rename": {"actions": "a"}}, "USAGE", "gives a name twice"),
        ({"columns": ["a=level", "a"]}, "USAGE", "gives a name twice"),
        ({"columns": ["actions", "actions"]}, "USAGE", "gives a name twice"),
        ({"columns": ["level", "a"], "rename": {"level": "a"}}, "USAGE", "gives a name twice"),
        ({"columns": ["actions", ""]}, "USAGE", "gives a name twice, or none"),
        ({"shift": {"actoins": 1}}, "USAGE", "shift actoins=1 names no column"),
        ({"shift": {"actions": 10_000}}, "USAGE", "no whole number of rows from 0 to 1,000"),
        ({"shift": {"actions": 0.5}}, "USAGE", "no whole number of rows from 0 to 1,000"),
    ],
)
def test_edits_that_cannot_be_made_are_one_error(
    tmp_path: Path, options: Columns, code: str, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        convert(from_episodes(episodes_of([4, 5, 6])), tmp_path / "d", quiet=True, **options)
    error = caught.value
    assert error.code == code and said in f"{error.problem} ({error.where})" and error.remedy
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("option", "stored", "warnings"),
    [
        (
            "--rename=actions=rewards",
            {"rewards": "actions", "observations": "observations", "terminals": "terminals"},
            [
                "the stored column rewards is left out: another one gets its name",
                "no actions with these --columns or --rename: training needs them",
            ],
        ),
        (
            "--columns=o=observations,terminals",
            {"o": "observations", "rewards": "rewards", "terminals": "terminals"},
            [
                "no observations and no actions with these --columns or --rename: training needs "
                "them, or others by loader.observations"
            ],
        ),
        (
            "--rename=actions=rewards,rewards=actions",  # each is there under the other's name
            {"rewards": "actions", "actions": "rewards", "observations": "observations"},
            [],
        ),
    ],
)
def test_columns_that_names_take_away_are_told(
    tmp_path: Path, option: str, stored: dict[str, str], warnings: list[str]
) -> None:
    columns = hopper_columns(12, seed=3, action_dim=1) | {"terminals": np.arange(12) % 4 == 3}
    file = tmp_path / "x.npz"
    np.savez(file, **columns)
    assert main(["convert", str(file), str(tmp_path / "d"), option]) == 0
    made = open_dataset(tmp_path / "d")
    told = made.manifest.source.attributes["warnings"]
    assert [line for line in told if "left out:" in line or "--rename:" in line] == warnings
    with np.load(file) as arrays:
        for name, origin in stored.items():
            rows = arrays[origin].reshape(made.column(name).shape)
            np.testing.assert_array_equal(made.column(name), rows)


def test_a_function_makes_the_columns_that_a_file_lacks(tmp_path: Path) -> None:
    columns = hopper_columns(12, seed=3) | {"terminals": np.arange(12) % 4 == 3}
    state, torques = columns.pop("observations"), columns.pop("actions")
    stored = {**columns, "position": state[:, :5], "speed": state[:, 5:], "torques": torques}
    write(tmp_path / "x.hdf5", stored)
    np.savez(tmp_path / "x.npz", **stored)
    pyarrow = pytest.importorskip("pyarrow")
    lists = {n: [rows[i : i + 4].tolist() for i in (0, 4, 8)] for n, rows in stored.items()}
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(lists), tmp_path / "x.parquet")

    def whole(episode: Columns) -> Columns:
        both = np.concatenate([episode["position"], episode["speed"]], axis=1)
        return {"observations": both, "actions": episode["torques"]}

    for name in ("x.hdf5", "x.npz", "x.parquet"):
        source, out = tmp_path / name, tmp_path / f"of-{name}"
        with pytest.raises(InputError, match="observations"):
            convert(source, out, quiet=True)
        with pytest.raises(InputError, match="map made no actions"):
            convert(source, out, map=lambda e: {"observations": e["speed"]}, quiet=True)
        attributes = convert(source, out, map=whole, quiet=True).source.attributes
        assert attributes["mapped"] == ["actions", "observations"]
        read = list(open_dataset(out))
        np.testing.assert_array_equal(np.concatenate([e["observations"] for e in read]), state)
        np.testing.assert_array_equal(np.concatenate([e["actions"] for e in read]), torques)


def test_columns_that_are_named_stand_for_observations_with_a_function(tmp_path: Path) -> None:
    columns = hopper_columns(12, seed=3)
    columns["camera"] = columns.pop("observations")
    write(tmp_path / "x.hdf5", columns)
    turn: Any = lambda e: {"rewards": -e["rewards"]}  # noqa: E731
    names = ["camera", "actions"]
    convert(tmp_path / "x.hdf5", tmp_path / "a", columns=names, map=turn, quiet=True)
    convert(tmp_path / "a", tmp_path / "b", map=turn, quiet=True)  # names are there already
    for out, sign in (("a", -1), ("b", 1)):
        made = open_dataset(tmp_path / out)
        assert sorted(c.name for c in made.spec) == ["actions", "camera", "rewards"]
        np.testing.assert_array_equal(made.column("camera"), columns["camera"])
        np.testing.assert_array_equal(made.column("rewards"), sign * columns["rewards"])
    with pytest.raises(InputError, match="no column 'observations'"):
        names = ["observations", "actions"]
        convert(tmp_path / "x.hdf5", tmp_path / "c", columns=names, map=turn, quiet=True)


def test_rewards_that_a_function_makes_are_not_missed(tmp_path: Path) -> None:
    columns = {k: v for k, v in hopper_columns(12, seed=3).items() if k != "rewards"}
    write(tmp_path / "x.hdf5", columns)
    bare = convert(tmp_path / "x.hdf5", tmp_path / "bare", quiet=True)
    ones: Any = lambda e: {"rewards": np.ones(len(e["actions"]))}  # noqa: E731
    made = convert(tmp_path / "x.hdf5", tmp_path / "made", map=ones, quiet=True)
    told = [any("no rewards" in text for text in m.source.warnings) for m in (bare, made)]
    assert told == [True, False]


def test_groups_are_renamed_and_arrays_of_the_user_stay(tmp_path: Path) -> None:
    episode: Columns = {"obs": {"a": np.ones((3, 2)), "b": np.zeros(3)}, "actions": np.ones((3, 1))}
    with pytest.warns(UserWarning, match="training takes"):
        source = from_episodes([episode | {"rewards": [1.0, 2.0, 3.0], "terminated": True}])
    convert(source, tmp_path / "d", rename={"obs": "observations"}, quiet=True)
    names = [c.name for c in open_dataset(tmp_path / "d").spec]
    assert sorted(names) == ["actions", "observations/a", "observations/b", "rewards"]
    with open_source(tmp_path / "d") as opened:
        both = ["observations=observations/a+observations/b"]
        manifest = convert(opened, tmp_path / "e", columns=both, map=lambda e: {}, quiet=True)
    assert [str(c) for c in manifest.spec] == ["observations float64[3]", "rewards float64"]


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((3, 28, 28), (28, 28, 3)),
        ((4, 20, 30), (20, 30, 4)),
        ((1, 12, 16), (12, 16, 1)),
        ((9, 40, 40), (40, 40, 9)),
        ((28, 28, 3), None),
        ((3, 4, 5), None),
        ((28, 28), None),
    ],
)
def test_frames_with_channels_first(
    tmp_path: Path, shape: tuple[int, ...], turned: tuple[int, ...] | None
) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (12, *shape)).astype(np.uint8)
    columns: dict[str, Any] = {"observations": frames, "next_observations/camera": frames[::-1]}
    columns |= {"actions": np.zeros(12, np.int64), "rewards": np.ones(12, np.float32)}
    columns |= {"terminals": np.arange(12) % 4 == 3, "depth": frames}
    np.savez(tmp_path / "a.npz", **{n.replace("/", "_"): rows for n, rows in columns.items()})
    names = {"next_observations/camera": "next_observations_camera"}
    for source in (from_arrays(columns), open_source(tmp_path / "a.npz", names=names)):
        convert(source, tmp_path / "d", quiet=True, overwrite=True)
        dataset = open_dataset(tmp_path / "d")
        for name in ("observations", "next_observations/camera", "depth"):
            wanted = columns[name]
            if turned and name != "depth":
                wanted = np.moveaxis(wanted, 1, -1)
            np.testing.assert_array_equal(dataset.read(name, 0, 12), wanted)
        said = str(dataset.manifest.source.attributes["warnings"])
        assert said.count("channels first") == bool(turned)
    piece = {name: rows[:4] for name, rows in columns.items()}
    Appender(tmp_path / "d").append([piece])  # as an environment gives them


def test_names_in_the_wrong_order_are_said_the_other_way_round(tmp_path: Path) -> None:
    columns = {"state": np.ones((4, 3), "f4"), "cmd": np.ones((4, 1), "f4"), "rewards": np.ones(4)}
    with h5py.File(tmp_path / "lab.h5", "w") as file:
        for name, rows in (columns | {"terminals": np.arange(4) == 3}).items():
            file[name] = rows
    options: dict[str, Any] = {"quiet": True, "rule": "terminals"}
    renamed = {"observations": "state", "actions": "cmd"}
    with one_error("COLUMN", "rename={'state': 'observations'}"):
        go.convert(tmp_path / "lab.h5", tmp_path / "a", rename=renamed, **options)
    with one_error("COLUMN", "new name stands first: observations=state"):
        go.convert(tmp_path / "lab.h5", tmp_path / "a", columns=["state=observations"], **options)
    swapped = {old: new for new, old in renamed.items()}
    manifest = go.convert(tmp_path / "lab.h5", tmp_path / "a", rename=swapped, **options)
    assert {"observations", "actions"} <= {column.name for column in manifest.spec}


@pytest.mark.parametrize(("dtype", "base"), [("i8", 1 << 62), ("i8", -(1 << 62)), ("u8", 3 << 62)])
def test_long_integers_are_compared_as_integers(tmp_path: Path, dtype: str, base: int) -> None:
    numbers = [base + n for n in (0, 1, 3, 2)]
    ids = np.repeat(np.array(numbers, dtype), [4, 6, 3, 5])
    columns = {"observations": np.zeros((18, 2)), "actions": np.zeros((18, 1)), "eps_id": ids}
    flag = np.append(ids[1:] != ids[:-1], True)  # whose value is long too
    columns["terminals"] = np.where(flag, base + 1, base).astype(dtype)
    expressions: dict[str, Callable[[int], bool]] = {
        f"eps_id == {base + 1}": lambda n: n == base + 1,
        f"{base} < eps_id <= {base + 2}": lambda n: base < n <= base + 2,
        f"not eps_id - {base} == 3 and eps_id != {base}": lambda n: n - base not in (0, 3),
        "eps_id % 2 == 1": lambda n: n % 2 == 1,
        "eps_id > 1.5": lambda n: n > 1.5,
        f"eps_id == {base + 1}.0": lambda n: n == base + 1,
        f"eps_id >= {base + 1}.5": lambda n: n >= Fraction(f"{base + 1}.5"),
    }
    source = from_arrays(columns, rule=f"ids:eps_id|terminals={base + 1}")
    assert source.episodes.lengths.tolist() == [4, 6, 3, 5] and source.terminated.all()
    for expression, keeps in expressions.items():
        right = [n for n in numbers if keeps(n)]
        if not right:
            with one_error("SELECTION", f"eps_id is {min(numbers)} to {max(numbers)}"):
                edit.keep_episodes(expression, source, np.arange(4))
            continue
        kept = edit.keep_episodes(expression, source, np.arange(4))
        assert [n for n, stays in zip(numbers, kept, strict=True) if stays] == right
    with one_error("USAGE", "zero"):
        edit.keep_episodes("eps_id // 0 == 1", source, np.arange(4))
