"""Sources made of others, of arrays and of folders, against plain NumPy and the sources alone.

Shape legend: N rows, E episodes, T steps of an episode.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.sources import (
    from_arrays,
    from_episodes,
    join_sources,
    open_source,
    pick_episodes,
)
from gear_offline.errors import InputError
from gear_offline.loaders.loader import GearLoader
from tests.hdf5_files import table, write
from tests.support import ArraySource, hopper_columns, iter_episodes, refused


def episode(steps: int, *, seed: int = 0, **more: Any) -> dict[str, Any]:
    columns = hopper_columns(steps, seed=seed)
    return {k: columns[k] for k in ("observations", "actions", "rewards")} | more


def code(call: Any, *values: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(InputError) as caught:
        call(*values, **options)
    assert caught.value.remedy
    return caught.value.code, f"{caught.value.problem} ({caught.value.where})"


@pytest.mark.parametrize(
    ("flags", "ending"),
    [
        ({}, (False, True)),
        ({"terminated": True}, (True, False)),
        ({"terminated": np.bool_(False)}, (False, True)),
        ({"terminated": False, "truncated": True}, (False, True)),
        ({"terminated": True, "truncated": True}, (True, False)),
        ({"terminals": [0, 0, 1]}, (True, False)),
        ({"dones": np.array([[False], [False], [True]])}, (True, False)),
        ({"dones": True, "truncated": True}, (False, True)),
        ({"timeouts": [False, False, True]}, (False, True)),
        ({"terminations": [0.0, 0.0, 1.0], "truncations": [0, 0, 1]}, (True, False)),
    ],
)
def test_how_episodes_in_memory_end(flags: dict[str, Any], ending: tuple[bool, bool]) -> None:
    source = from_episodes([episode(3, **flags)])
    assert (bool(source.terminated[0]), bool(source.truncated[0])) == ending
    kept = {name for name, value in flags.items() if np.ndim(value)}
    assert {c.name for c in source.spec} == {"observations", "actions", "rewards"} | kept
    assert all(source.spec[name].shape == () for name in kept)


def test_an_additional_observation_becomes_the_next_ones() -> None:
    rows = np.arange(8.0).reshape(4, 2)
    camera = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    given_ = {"actions": np.zeros((3, 1)), "rewards": [1.0, 2.0, 3.0]}
    source = from_episodes([{"observations": {"state": rows, "camera": camera}, **given_}])
    found = next(iter_episodes(source))
    assert np.array_equal(found["observations/state"], rows[:-1])
    assert np.array_equal(found["next_observations/state"], rows[1:])
    assert np.array_equal(found["next_observations/camera"], camera[1:])
    assert found["rewards"].dtype == np.float64
    both = {"observations": rows, "next_observations": rows[1:], **given_}
    assert "beside next_observations" in code(from_episodes, [both])[1]


def test_episodes_that_do_not_fit_are_named() -> None:
    good = episode(3)
    for second, part in [
        (episode(3) | {"rewards": np.zeros(4)}, "3 rows where rewards has 4 (episode 1, column ob"),
        (
            episode(3) | {"rewards": [1.0, 2.0, 3.0]},
            "float64 () in episode 1, float32 () in episode 0",
        ),
        (
            episode(3, speed=np.zeros(3)),
            "column speed is float64 () in episode 1, missing in episode 0",
        ),
        ({k: v for k, v in good.items() if k != "actions"}, "column actions is missing"),
        (episode(3) | {"actions": np.zeros((3, 4), np.float32)}, "float32 (4,) in episode 1"),
        (episode(3) | {"actions": [[1.0], [1.0, 2.0], [1.0]]}, "no array"),
        (episode(3, text=["a", "b", "c"]), "neither numeric nor bool (episode 1, column text)"),
        (episode(3, weight=1.0), "one number instead of rows (episode 1, column weight)"),
        (episode(3, a={"b": [2.0] * 3}) | {"a/b": [1.0] * 3}, "given twice (episode 1, column a/b"),
        (episode(3, x=np.ma.masked_equal([1, 2, 3], 2)), "1 value masked (episode 1, column x)"),
        ({}, "there are no columns"),
        (episode(0), "rewards has no rows"),
        (episode(3, terminated=[0, 1, 0]), "true at step 1 of 3"),
        (episode(3, terminatd=[0, 0, 1]), "is no flag (episode 1, column terminatd"),
        (episode(3, done=[0, 0, 2]), "done is no flag: it holds 0, 2"),
        ([1, 2], "an episode is a list"),
    ]:
        found = code(from_episodes, [good, second])
        assert found[0] == "SOURCE_LAYOUT" and part in found[1], (part, found[1])
    with pytest.raises(InputError, match="rename obs to observations"):
        from_episodes([{"obs": [1.0] * 4, "rewards": [1.0] * 3}])
    assert code(from_episodes, [])[0] == "SOURCE_LAYOUT"
    assert code(from_episodes, [good], environment="my robot")[0] == "ENVIRONMENT"


def test_what_holds_no_episodes_or_is_not_open_is_named() -> None:
    for wrong in (None, 3):
        said = f"a {type(wrong).__name__} is given"
        for door, place in (from_arrays, "columns"), (from_episodes, "episodes"):
            assert code(door, wrong) == ("SOURCE_LAYOUT", f"{said} ({place})")
        assert code(join_sources, wrong) == ("SOURCE_LAYOUT", f"{said} (sources)")
    source = ArraySource(hopper_columns(3), [3])
    for other in ("data/a", Path("data/a"), None, [source]):
        said = f"a {type(other).__name__} is not an open source ()"
        assert code(pick_episodes, other, [0]) == ("SOURCE_READ", said)
        assert code(join_sources, [source, other]) == ("SOURCE_READ", said)
    assert code(from_arrays, [episode(3)])[0] == "SOURCE_LAYOUT"
    assert code(join_sources, "data/a")[0] == "SOURCE_READ"
    assert join_sources(iter([source, source])).episodes.lengths.tolist() == [3, 3]
    for names in (["observations=obs"], {"observations": 3}):
        assert code(open_source, "x.hdf5", names=names)[0] == "COLUMN"


def test_flat_arrays_need_something_that_ends_episodes() -> None:
    assert code(from_arrays, episode(4))[0] == code(from_arrays, episode(4), rule="dones")[0]
    assert from_arrays(episode(4), rule="steps=3").episodes.lengths.tolist() == [3, 1]
    twice = code(from_arrays, {"1": [1] * 4, 1: [2] * 4})
    assert twice == ("SOURCE_LAYOUT", "a column is given twice (column 1)")
    warned = from_arrays(episode(4, dones=np.array([0, 1, 0, 1])))
    assert warned.terminated.tolist() == [True, True] and warned.info.attributes["warnings"]


def test_what_d4rls_get_dataset_returns_is_a_source(tmp_path: Path) -> None:
    weights = np.zeros((256, 11), np.float32)
    arrays = hopper_columns(6) | {
        "terminals": np.arange(6) == 2,
        "metadata/algorithm": np.bytes_(b"SAC"),
        "metadata/iteration": np.int64(500),
        "metadata/policy/fc0/weight": weights,
    }
    source = from_arrays(arrays)
    assert source.episodes.lengths.tolist() == [3, 3]
    assert not any(column.name.startswith("metadata") for column in source.spec)
    file = write(tmp_path / "x.hdf5", arrays, attributes={"env_id": "Hopper-v5", "n": 3})
    for given_ in (source, file):
        facts = convert(given_, tmp_path / "d", overwrite=True, quiet=True).source.attributes
        assert facts["metadata"] == {
            "metadata/algorithm": "SAC",
            "metadata/iteration": 500,
            "metadata/policy/fc0/weight": "float32 [256, 11]",
        }
    assert facts["attributes"] == {"env_id": "Hopper-v5", "n": 3}
    only = {"metadata": {"a": [1]}}
    assert code(from_arrays, only) == ("SOURCE_LAYOUT", "there are no columns ()")


def test_flags_in_memory_are_true_or_false() -> None:
    for flag in (np.nan, np.array([0, np.nan, 1, 0]), np.zeros((4, 2), bool)):
        assert code(from_episodes, [episode(4, terminated=flag)])[0] == "SOURCE_LAYOUT"
        if np.ndim(flag):
            assert code(from_arrays, episode(4, terminated=flag))[0] == "SOURCE_LAYOUT"


@settings(max_examples=20)
@given(which=st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
def test_picked_episodes_are_those_of_the_source(which: list[int]) -> None:
    lengths = [3, 1, 4_000, 1, 5, 9]  # some close by, some far from each other
    source = ArraySource(hopper_columns(sum(lengths)), lengths)
    wanted = list(iter_episodes(source))
    picked = pick_episodes(source, which)
    assert picked.episodes.lengths.tolist() == [lengths[i] for i in which]
    assert picked.terminated.tolist() == source.terminated[which].tolist()
    for found, number in zip(iter_episodes(picked), which, strict=True):
        assert all(found[k].tobytes() == wanted[number][k].tobytes() for k in found)
    rewards = np.concatenate([wanted[number]["rewards"] for number in which])
    cuts = [*range(0, len(rewards), 7), len(rewards)]  # rows are read without a look at episodes
    read = [picked.read("rewards", *two) for two in pairwise(cuts)]
    assert np.concatenate(read).tobytes() == rewards.tobytes()
    mask: npt.NDArray[np.bool_] = np.isin(np.arange(6), which)
    assert pick_episodes(source, mask).episodes.lengths.tolist() == [
        lengths[i] for i in sorted(which)
    ]


def test_choices_of_episodes_that_are_none() -> None:
    source = ArraySource(hopper_columns(12), [2] * 6)
    for which in ([], [6], [-1], [1, 1], [0.5], [True, False], [[0, 1]], "all"):
        assert code(pick_episodes, source, which)[0] == "SELECTION"


def test_joined_sources_follow_each_other(tmp_path: Path) -> None:
    one = ArraySource(hopper_columns(7) | {"extra": np.zeros(7)}, [3, 4], environment_id="A-v0")
    two = ArraySource(hopper_columns(5, seed=1), [5], environment_id="B-v0")
    joined = join_sources([one, two])
    assert joined.episodes.lengths.tolist() == [3, 4, 5]
    assert joined.terminated.tolist() == [*one.terminated, *two.terminated]
    assert joined.info.environment_id is None
    assert "A-v0, B-v0" in joined.info.attributes["warnings"][0]
    assert joined.info.attributes["left_out"] == {
        "extra": "missing in memory, float64 () in memory"
    }
    both = np.concatenate([one.read("rewards", 0, 7), two.read("rewards", 0, 5)])
    assert np.array_equal(joined.read("rewards", 2, 11), both[2:11])
    assert code(join_sources, [])[0] == "SOURCE_LAYOUT"
    other = ArraySource(hopper_columns(5, action_dim=4), [5])
    assert code(join_sources, [one, other])[0] == "SOURCE_LAYOUT"
    convert(joined, tmp_path / "d", quiet=True)
    assert open_dataset(tmp_path / "d").spec.steps == 12


def flagged(steps: int, seed: int) -> dict[str, Any]:
    flags = np.zeros(steps, bool)
    flags[-1] = True
    return table(steps, seed=seed) | {"terminals": flags, "timeouts": np.zeros(steps, bool)}


def test_a_folder_with_a_file_that_does_not_fit(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", flagged(4, 0))
    write(tmp_path / "b.h5", flagged(4, 0) | {"actions": np.zeros((4, 9))})
    found = code(convert, tmp_path, tmp_path / "out" / "d")
    assert found[0] == "SOURCE_LAYOUT" and "a.h5" in found[1] and "b.h5" in found[1]
    (tmp_path / "b.h5").write_bytes(b"nothing")
    assert code(convert, tmp_path, tmp_path / "out" / "d")[0] == "SOURCE_READ"
    (tmp_path / "b.h5").unlink()
    (tmp_path / "b.h5").symlink_to("was_removed.h5")
    found = code(convert, tmp_path, tmp_path / "out" / "d")
    assert found[0] == "SOURCE_READ" and "b.h5" in found[1]
    np.savez(tmp_path / "c.npz", **flagged(4, 0))
    said = code(convert, tmp_path, tmp_path / "out" / "d")
    assert said[0] == "SOURCE_READ" and "2 like a.h5 and 1 like c.npz" in said[1]


def test_shards_are_a_source(tmp_path: Path) -> None:
    file = write(tmp_path / "hopper-medium-v2.hdf5", flagged(30, 0), attributes={"seed": 3})
    convert(file, tmp_path / "a", rule="steps=7", quiet=True)
    options: dict[str, Any] = {"shard_bytes": 1500, "quiet": True}
    convert(tmp_path / "a", tmp_path / "b", workers=2, columns=["actions"], **options)
    first, again = open_dataset(tmp_path / "a"), open_dataset(tmp_path / "b")
    assert [c.name for c in again.spec] == ["actions", "rewards"]
    assert again.episodes.lengths.tolist() == [7, 7, 7, 7, 2]
    assert first.reference_scores is not None
    assert again.reference_scores == first.reference_scores
    source = again.manifest.source
    assert (source.format, source.rule, source.uri) == ("gear", "steps=7", "a")
    assert "hopper-medium-v2.hdf5" in source.attributes["converted_from"]
    with open_source(tmp_path / "a") as opened:
        convert(pick_episodes(opened, first.returns == first.returns.max()), tmp_path / "best")
    assert open_dataset(tmp_path / "best").returns.tolist() == [first.returns.max()]


def test_datasets_of_a_file_get_other_names(tmp_path: Path) -> None:
    flags = np.arange(24) % 6 == 5
    names = {"obs/arm": "observations/arm", "obs/cam": "observations/cam", "act": "actions"}
    columns: dict[str, Any] = {
        "obs/arm": np.arange(48.0).reshape(24, 2),
        "obs/cam": np.arange(96, dtype=np.uint8).reshape(24, 2, 2),
        "act": np.ones((24, 1), np.float32),
        "r": np.arange(24.0),
        "end": flags,
        "actions": np.zeros(3),  # hidden by the one that takes its name
    }
    file = write(tmp_path / "mine.hdf5", columns)
    with pytest.raises(InputError, match=r"rename=\{'NAME': 'observations'\}"):
        open_source(file)
    wanted = ["observations=obs", "actions=act", "rewards = r", "dones=end"]
    options: dict[str, Any] = {"workers": 2, "shard_bytes": 300, "quiet": True}
    convert(file, tmp_path / "d", columns=wanted, **options)
    dataset = open_dataset(tmp_path / "d")
    assert dataset.episodes.lengths.tolist() == [6] * 4 and dataset.terminated.all()
    for stored, name in (names | {"r": "rewards", "end": "dones"}).items():
        assert np.array_equal(dataset.column(name), columns[stored])
    bad_ones: list[Any] = [["observations=nothing"], ["actions=act", "actions=r"], ["actions="]]
    bad_ones += [["actions=act+"], ["x=act+obs/cam", "actions=act", *wanted[::2], "dones=end"]]
    for bad in (*bad_ones, "actions"):
        assert code(convert, file, tmp_path / "e", columns=bad)[0] in ("COLUMN", "USAGE")
    for both, said in [
        ("act+obs/cam", "obs/cam is uint8 (2, 2) a step"),
        ("obs/cam+act", "obs/cam is uint8 (2, 2) a step"),
        ("r+end", "end is bool () a step"),
        ("act+obs", "obs is a group of 2 columns (column observations)"),
    ]:
        given = [f"observations={both}", "actions=act", "rewards=r", "dones=end"]
        assert said in code(convert, file, tmp_path / "e", columns=given)[1]
    source = from_episodes([hopper_columns(3)])
    manifest = convert(source, tmp_path / "e", columns=["pay=rewards", "actions"], quiet=True)
    assert {c.name for c in manifest.spec} == {"actions", "pay"}


@pytest.mark.parametrize("kind", ["file", "shards"])
def test_columns_are_put_together(tmp_path: Path, kind: str) -> None:
    rows = np.arange(24.0)
    columns: dict[str, Any] = {
        "observations/goal": np.stack([rows, -rows], axis=1),
        "observations/time": rows + 100,
        "observations/place": np.stack([rows * 2] * 3, axis=1),
        "observations/unused": rows,
        "actions": np.ones((24, 1), np.float32),
        "rewards": rows,
        "terminated": rows % 6 == 5,
    }
    source = write(tmp_path / "mine.hdf5", columns)
    if kind == "shards":
        convert(source, source := tmp_path / "before", quiet=True)
        with pytest.raises(InputError, match="observations=observations/goal\\+observations/pl"):
            GearLoader(source, batch_size=2, device="cpu")
    names = ["observations/place", "observations/goal", "observations/time"]
    wanted = [f"observations={' + '.join(names)}", "actions"]
    convert(source, tmp_path / "d", columns=wanted, shard_bytes=600, quiet=True)
    dataset = open_dataset(tmp_path / "d")
    assert sorted(c.name for c in dataset.spec) == ["actions", "observations", "rewards"]
    together = np.concatenate([columns[name].reshape(24, -1) for name in names], axis=1)
    assert np.array_equal(dataset.column("observations"), together)
    assert dataset.episodes.lengths.tolist() == [6] * 4
    assert dataset.terminated.all()
    batch = GearLoader(dataset, batch_size=2, context_length=3, device="cpu").batch_at(0)
    assert batch.states.shape == (2, 3, 6)


def test_names_that_no_column_may_have_are_mapped() -> None:
    rows = np.arange(10.0).reshape(5, 2)
    parts = {"a b": rows, "a_b": -rows, "c": rows + 1}
    given_ = {"actions": np.zeros((5, 1)), "rewards": np.zeros(5), "terminated": True}
    source = from_episodes([{"observations": parts, **given_}] * 2)
    assert np.array_equal(source.read("observations/a_b", 0, 5), -rows)
    assert np.array_equal(source.read("observations/a_b_2", 0, 5), rows)
    said = "'observations/a b' is the column observations/a_b_2"
    assert source.info.attributes["warnings"] == [said]


# how libraries name the row that is written next, and how full a buffer is
RINGS: dict[str, dict[str, Any]] = {
    "tianshou": {"_index": 25, "_size": 60, "maxsize": 60},
    "sb3": {"pos": 25, "full": True, "buffer_size": 60},
    "td3": {"ptr": 25, "size": 60, "max_size": 60},
    "rlpd": {"_insert_index": 25, "_size": 60, "_capacity": 60},
    "drq": {"idx": 25, "full": True},
    "own": {"write_pos": 25, "num_transitions": 60, "memory_capacity": 60},
    "rlkit": {"_top": 25, "_size": 60, "_max_replay_buffer_size": 60},
}
PARTS = {"tianshou": {"_index": 37, "_size": 37}, "sb3": {"pos": 37, "full": False}}
PARTS |= {"td3": {"ptr": 37, "size": 37}, "rlpd": {"_insert_index": 37, "_size": 37}}
PARTS |= {"own": {"write_pos": 37, "num_transitions": 37}, "drq": {"idx": 37, "full": False}}
PARTS |= {"rlkit": {"_top": 37, "_size": 37}}


def saved(path: Path, columns: dict[str, Any], numbers: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **columns, **numbers)
    elif path.suffix == ".zarr":
        zarr = pytest.importorskip("zarr")
        group = zarr.open_group(path, mode="w", zarr_format=2)
        for name, rows in columns.items():
            group.create_array(name, data=rows, chunks=(7, *rows.shape[1:]))
        for name, value in numbers.items():
            group.attrs[name] = value
    else:
        with h5py.File(path, "w") as file:
            as_attributes = "_size" in numbers
            for name, value in (columns | ({} if as_attributes else numbers)).items():
                file[name] = value
            file.attrs.update(numbers if as_attributes else {})
    return path


@pytest.mark.parametrize("form", ["npz", "h5", "zarr"])
@pytest.mark.parametrize("library", RINGS)
def test_a_saved_ring_is_read_from_its_oldest_row(tmp_path: Path, library: str, form: str) -> None:
    clock = np.concatenate([60 + np.arange(25), 25 + np.arange(35)]).astype(np.float32)
    for numbers, order in (
        (RINGS[library], np.arange(25, 85)),
        (RINGS[library] | PARTS[library], np.arange(37)),
    ):
        time = clock if order[0] else np.append(np.arange(37), np.zeros(23)).astype(np.float32)
        columns = {"observations": np.stack([time, -time], 1), "actions": time[:, None]}
        columns |= {"rewards": time, "terminals": (time % 13 == 11) & (time > 0)}
        path = saved(tmp_path / f"{order.size}.{form}", columns, numbers)
        with open_source(path) as source:
            ends = np.flatnonzero(order % 13 == 11)
            wanted = np.diff([-1, *ends, order.size - 1])
            assert source.episodes.lengths.tolist() == wanted[wanted > 0].tolist()
            for start, stop in ((0, order.size), (30, 37), (34, 36), (5, 6)):
                rows = source.read("observations", start, stop)
                assert rows[:, 0].tolist() == order[start:stop].tolist()
            warnings = " ".join(source.info.attributes["warnings"])
            assert ("row 25 is the oldest" if order[0] else "37 of 60 rows are filled") in warnings


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"ptr": 25, "size": 0, "max_size": 60}, "a ring of ptr 25, size 0"),
        ({"ptr": 25, "size": 37, "max_size": 60}, "a ring of ptr 25, size 37"),  # not as one grows
        ({"ptr": 25, "size": 99}, "a ring of ptr 25, size 99"),
        ({"ptr": 25, "size": 60, "max_size": 90}, "max_size 90"),
        ({"ptr": 25}, "a ring of ptr 25"),
        ({"pos": 25, "buffer_size": 60}, "a ring of pos 25, buffer_size 60"),
        ({"pos": 25, "buffer_size": 90}, ""),
        ({"ptr": 60, "size": 60, "max_size": 90}, ""),  # the filled rows alone
        ({"ptr": 0, "size": 60}, ""),
        ({"index": 3, "size": 60}, ""),  # of a shard
        ({"fps": 30.0, "size": 7}, ""),
    ],
)
def test_a_ring_that_is_not_clear_is_asked_for(
    tmp_path: Path, numbers: dict[str, Any], told: str
) -> None:
    rows = np.arange(60.0)
    columns = {"observations": rows[:, None], "actions": rows[:, None], "terminals": rows % 5 == 4}
    path = saved(tmp_path / "x.npz", columns, numbers)
    if told:
        assert told in refused(path, "SOURCE_LAYOUT").problem
        return
    with open_source(path) as source:
        assert source.read("observations", 0, 60)[:, 0].tolist() == rows.tolist()
        assert "ring" not in " ".join(source.info.attributes["warnings"])


def test_facts_in_which_parts_differ_are_told(tmp_path: Path) -> None:
    def part(name: str, codes: dict[str, str], **facts: Any) -> Any:
        columns = episode(3, seed=len(name)) | {"task": np.array([0, 1, 0])}
        facts |= {"codes": {"task": codes}} if codes else {}
        return from_episodes([columns], name=name, attributes=facts)

    args = '{"env_name": "Lift", "env_kwargs": {"control_freq": %d, "text": "same"}}'
    first = part("a", {"0": "pick", "1": "fold"}, fps=10, env_args=args % 20, author="x")
    second = part("b", {"0": "fold", "1": "push"}, fps=10, env_args=args % 40, author="y")
    convert(join_sources([first, second]), tmp_path / "ab", quiet=True)
    silent = part("c", {}, fps=50)
    for joined in (join_sources([first, second]), open_source(tmp_path / "ab")):
        assert joined.read("task", 0, 6).tolist() == [0, 1, 0, 1, 2, 1]
        attributes = joined.info.attributes
        assert attributes["fps"] == 10 and attributes["codes"]["task"]["2"] == "push"
        assert (
            "the parts differ in env_args.env_kwargs.control_freq: 20, 40"
            in (attributes["warnings"])
        )
        assert not any("author" in text or "text" in text for text in attributes["warnings"])
        warnings = join_sources([joined, silent]).info.attributes["warnings"]
        assert "the parts differ in fps: 10, 50" in warnings
        assert any(text.startswith("task has other numbers, maybe, in c") for text in warnings)
    same = join_sources([first, first])
    assert same.read("task", 0, 6).tolist() == [0, 1, 0] * 2
    assert not any("differ" in text for text in same.info.attributes["warnings"])
    wrong = join_sources([part("d", {"0": "pick"}), second])
    assert "task holds 1, which has no name" in code(wrong.read, "task", 0, 3)[1]
