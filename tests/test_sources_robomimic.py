"""robomimic's files: written as dataset_states_to_obs.py does, compared with a naive reading."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.sources import join_sources, open_source, pick_episodes
from tests.hdf5_files import write
from tests.support import iter_episodes, one_error, refused

LENGTHS = {"demo_10": 7, "demo_2": 5, "demo_0": 9}
ORDER = ("demo_0", "demo_2", "demo_10")
ENV_ARGS = {"env_name": "Lift", "type": 1, "env_kwargs": {"robots": ["Panda"], "pad": "x" * 3000}}
VECTORS = ("object", "robot0_eef_pos", "robot0_gripper_qpos")  # by name, as robomimic


def write_demos(path: Path, *, next_obs: bool = True, **options: Any) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for name, steps in LENGTHS.items():
            demo = data.create_group(name)
            demo.create_dataset("actions", data=rng.uniform(-1, 1, (steps, 7)))
            demo.create_dataset("states", data=rng.normal(size=(steps, 32)))
            demo.create_dataset("rewards", data=rng.normal(size=steps))
            demo.create_dataset("dones", data=np.arange(steps) == steps - 1)
            obs = {
                "robot0_gripper_qpos": rng.normal(size=(steps, 2)),
                "robot0_eef_pos": rng.normal(size=(steps, 3)),
                "object": rng.normal(size=(steps, 10)),
                "agentview_image": rng.integers(0, 256, (steps, 8, 8, 3), np.uint8),
            }
            for key, values in obs.items():
                demo.create_dataset(f"obs/{key}", data=values, **options)
                if next_obs:
                    following = np.concatenate([values[1:], values[-1:]])
                    demo.create_dataset(f"next_obs/{key}", data=following, **options)
            demo.attrs["model_file"] = "<mujoco/>" * 2000
            demo.attrs["num_samples"] = steps
        data.attrs["total"] = sum(LENGTHS.values())
        data.attrs["env_args"] = json.dumps(ENV_ARGS, indent=4)
        file["mask/train"] = np.array(["demo_10", "demo_0"], dtype="S")
        file["mask/valid"] = np.array(["demo_2"], dtype="S")
    return path


def naive(path: Path, name: str) -> dict[str, Any]:
    with h5py.File(path) as file:
        demo = file[f"data/{name}"]
        rows = {key: demo[key][()] for key in ("actions", "states", "rewards", "dones")}
        for new, group in (("observations", "obs"), ("next_observations", "next_obs")):
            if group in demo:
                rows[new] = np.hstack([demo[f"{group}/{key}"][()] for key in VECTORS])
                rows[f"{group}/agentview_image"] = demo[f"{group}/agentview_image"][()]
        return rows


def test_facts_and_files_without_next_observations(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "low_dim.hdf5", next_obs=False)
    with open_source(path) as source:
        assert source.info.environment_id is None
        assert json.loads(source.info.attributes["env_args"]) == ENV_ARGS
        assert {column.name for column in source.spec} == set(naive(path, "demo_0"))


def test_filter_keys_and_chosen_columns(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "ph.hdf5")
    names = {"observations": "obs/robot0_eef_pos+obs/object", "pixels": "obs/agentview_image"}
    with open_source(f"robomimic:{path}#train", names=names) as source:
        assert source.info.uri == "ph.hdf5#train"
        assert source.info.attributes["filter_keys"] == ["train", "valid"]
        for name, rows in zip(("demo_0", "demo_10"), iter_episodes(source), strict=True):
            with h5py.File(path) as file:
                obs = file[f"data/{name}/obs"]
                both = np.hstack([obs["robot0_eef_pos"], obs["object"]])
                np.testing.assert_array_equal(rows["observations"], both)
                np.testing.assert_array_equal(rows["pixels"], obs["agentview_image"])
    with open_source(f"robomimic:{path}#valid") as valid, open_source(path) as whole:
        assert valid.episodes.lengths.tolist() == [5]
        picked = pick_episodes(whole, [1])
        wanted = picked.read("observations", 0, 5)
        np.testing.assert_array_equal(valid.read("observations", 0, 5), wanted)
        assert join_sources([valid, whole]).episodes.lengths.tolist() == [5, 9, 5, 7]
    write_demos(tmp_path / "ph_2.hdf5")
    with open_source(tmp_path) as folder:
        assert folder.episodes.lengths.tolist() == [9, 5, 7] * 2
    columns = ["obs/object", "actions"]  # a part of what would be observations
    convert(tmp_path, tmp_path / "parts", columns=columns, quiet=True)
    demos = [naive(path, name) for name in ("demo_0", "demo_2", "demo_10")] * 2
    with h5py.File(path) as file:
        objects = [file[f"data/{name}/obs/object"][()] for name in ("demo_0", "demo_2", "demo_10")]
    dataset = open_dataset(tmp_path / "parts")
    np.testing.assert_array_equal(dataset.column("obs/object"), np.concatenate(objects * 2))
    rewards = np.concatenate([demo["rewards"] for demo in demos])
    np.testing.assert_array_equal(dataset.column("rewards"), rewards)


def test_vectors_of_two_precisions_stand_side_by_side_in_the_wider(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    single, double = rng.normal(size=(4, 2)).astype("f4"), rng.normal(size=(4, 3))
    demo = {"actions": np.ones((4, 1)), "obs/a": single, "obs/b": double, "obs/n": np.arange(4)}
    write(tmp_path / "x.hdf5", {f"data/demo_0/{name}": rows for name, rows in demo.items()})
    with open_source(tmp_path / "x.hdf5") as source:
        rows = source.read("observations", 0, 4)
        assert rows.dtype == source.spec["observations"].dtype == np.float64
        np.testing.assert_array_equal(rows, np.concatenate([single, double], axis=1))
    names = {"observations": "obs/n+obs/a"}
    error = refused(tmp_path / "x.hdf5", "COLUMN", "of floats, or of integers", names=names)
    assert "--map" in error.remedy


def test_environments_of_gym_and_d4rl(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "a.hdf5")
    for name, told in (("Hopper-v5", ("Hopper-v5", None)), ("hopper-medium-v2", (None, 1))):
        with h5py.File(path, "a") as file:
            file["data"].attrs["env_args"] = json.dumps({"env_name": name, "type": 2})
        with open_source(path) as source:
            assert source.info.environment_id == told[0]
            assert source.info.reference_name == (name if told[1] else None)


def put(name: str, values: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[name]
        file[name] = values

    return change


def only_images(file: Any) -> None:
    for demo in file["data"].values():
        demo["obs/other"] = demo["obs/agentview_image"][()]
        for key in VECTORS:
            del demo[f"obs/{key}"]


OBJECT, TRAIN = "data/demo_2/obs/object", "mask/train"
BAD: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "a column too short": (
        put(OBJECT, np.zeros((4, 10))),
        "SOURCE_LAYOUT",
        "obs/object has 4 rows",
    ),
    "another width": (put(OBJECT, np.zeros((5, 11))), "SOURCE_LAYOUT", "(11,) in demo_2"),
    "a vector less": (lambda f: f.pop(OBJECT), "SOURCE_LAYOUT", "missing in demo_2"),
    "states only": (lambda f: f.pop("data/demo_2/obs"), "COLUMN", "found: actions, dones"),
    "no rewards": (lambda f: f.pop("data/demo_0/rewards"), "SOURCE_LAYOUT", "column rewards"),
    "cut": (lambda f: f["data/demo_10"].attrs.modify("num_samples", 8), "SOURCE_LAYOUT", "is 8"),
    "half a group": (lambda f: f.pop("data/demo_2/actions"), "COLUMN", "no dataset 'actions'"),
    "strangers in a key": (put(TRAIN, np.array([b"demo_0", b"demo_7"])), "SOURCE_LAYOUT", "demo_7"),
    "empty key": (put(TRAIN, np.array([], "S8")), "SOURCE_LAYOUT", "names nothing"),
    "no key": (lambda f: f.pop(TRAIN), "SOURCE_LAYOUT", "keys here: valid"),
    "a key of numbers": (put(TRAIN, [1.0]), "SOURCE_READ", "no short list of text"),
    "images": (only_images, "COLUMN", "--columns observations=obs/agentview_image"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    path = write_demos(tmp_path / "bad.hdf5")
    change, code, words = BAD[case]
    with h5py.File(path, "a") as file:
        change(file)
    error = refused(f"robomimic:{path}#train" if "key" in case else path, code, words)
    assert str(path) in error.where


def test_other_layouts(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["x"] = [1]
    refused(f"robomimic:{tmp_path}/other.hdf5", "SOURCE_LAYOUT", "no group data/demo_0")
    refused(f"robomimic:{tmp_path}/none.hdf5#train", "SOURCE_READ")


def steps(count: int, first: float = 0.0) -> Any:
    return np.arange(first, first + count)[:, None]


def test_groups_of_any_name_are_episodes(tmp_path: Path) -> None:
    names = {"actions": "act", "observations": "sensors", "rewards": "r"}
    columns: dict[str, Any] = {"about/version": 3, "about/1": np.zeros(4)}
    for head, count in (("day2/a", 4), ("day10/1", 2), ("day2/b", 0), ("day2/c", 3)):
        columns |= {f"{head}/act": steps(count), f"{head}/r": steps(count, 0.5)[:, 0]}
        columns |= {f"{head}/sensors/arm": steps(count + 1, 7.0), f"{head}/end": count == 4}
    path = write(tmp_path / "runs.h5", columns)
    with open_source(path, names={**names, "terminated": "end"}) as source:
        assert source.episodes.lengths.tolist() == [4, 3, 2]  # day2 before day10
        assert source.terminated.tolist() == [True, False, False]
        assert "1 episode without steps left out" in source.info.attributes["warnings"]
        assert {"about/version", "about/1"} <= {*source.info.attributes["left_out"]}
        for rows, count in zip(iter_episodes(source), (4, 3, 2), strict=True):
            np.testing.assert_array_equal(rows["observations/arm"], steps(count, 7.0))
            np.testing.assert_array_equal(rows["next_observations/arm"], steps(count, 8.0))
            np.testing.assert_array_equal(rows["rewards"], steps(count, 0.5)[:, 0])
    one = {name.removeprefix("day2/"): rows for name, rows in columns.items() if "day2" in name}
    refused(write(tmp_path / "train.h5", one), "COLUMN", "found: a/act", names=names)
    both = {f"actions_{k}": steps(3 + k) for k in (0, 1)}
    both |= {f"y_{k}_{part}": steps(3 + k, part) for k in (0, 1) for part in (0, 1)}
    with open_source(write(tmp_path / "d3rlpy.h5", both), names={"observations": "y"}) as source:
        assert source.episodes.lengths.tolist() == [3, 4]
        np.testing.assert_array_equal(source.read("observations/1", 3, 7), steps(4, 1))


def test_one_number_an_episode_is_a_column(tmp_path: Path) -> None:
    columns: dict[str, Any] = {}
    for n, count in enumerate((3, 1, 4)):
        head = f"data/demo_{n}"
        columns |= {f"{head}/{name}": steps(count) for name in ("obs/x", "actions")}
        columns |= {f"{head}/task": n, f"{head}/success": n != 1, f"{head}/rewards": 5.0}
    path = write(tmp_path / "x.hdf5", columns)
    with open_source(path) as source:
        assert source.read("task", 0, 8).tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
        assert "rewards" not in source.spec  # a row each, or none
        convert(source, tmp_path / "d", where="success and task > 0", quiet=True)
    assert open_dataset(tmp_path / "d").episodes.lengths.tolist() == [4]


def test_numbers_in_attributes_of_groups_are_columns(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "x.hdf5")
    success = {"demo_0": False, "demo_2": True, "demo_10": True}
    with h5py.File(path, "a") as file:
        for number, (name, demo) in enumerate(file["data"].items()):
            demo.attrs.update(success=[success[name]], seed=7 + number, gain=0.5, note="text")
            demo.attrs["score"] = (1, 0.5, True)[number]  # of three dtypes
            demo.attrs["terminated"] = success[name]
            demo.attrs["vector"] = [1, 2]
        seeds = {name: demo.attrs["seed"] for name, demo in file["data"].items()}
        scores = {name: float(demo.attrs["score"]) for name, demo in file["data"].items()}
        file["data/demo_0"].attrs["only_here"] = 1
    with open_source(path, rule="terminated-as-truncations") as source:
        assert not {"note", "vector", "num_samples", "only_here"} & {c.name for c in source.spec}
        why = "data/demo_10, data/demo_2 of 3 episodes have none"
        assert source.info.attributes["left_out"]["only_here"] == why
        counts = [LENGTHS[name] for name in ORDER]
        for column, dtype, values in (
            ("success", np.bool_, success),
            ("seed", np.int64, seeds),
            ("score", np.float64, scores),
            ("gain", np.float64, dict.fromkeys(ORDER, 0.5)),
        ):
            rows = source.read(column, 0, source.spec.steps)
            assert rows.dtype == source.spec[column].dtype == dtype
            np.testing.assert_array_equal(rows, np.repeat([values[n] for n in ORDER], counts))
        ends = [
            success[name] and row == LENGTHS[name] - 1
            for name in ORDER
            for row in range(LENGTHS[name])
        ]
        np.testing.assert_array_equal(source.read("terminated", 0, len(ends)), ends)
    for where in ("success", "success == 1 and seed > 0"):
        convert(path, tmp_path / "d", where=where, overwrite=True, quiet=True)
        assert open_dataset(tmp_path / "d").episodes.lengths.tolist() == [5, 7]
    with one_error("USAGE", f"only_here is no column: {why}"):
        convert(path, tmp_path / "d", where="only_here == 1", overwrite=True, quiet=True)


def test_claimed_rows_take_no_memory(tmp_path: Path) -> None:
    claimed = 20_000_000
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for name in ("traj_0", "traj_1"):
            group = file.create_group(name)
            for column in ("actions", "observations"):
                group.create_dataset(column, (claimed, 1), "f4", chunks=(4096, 1))
            group["success"], group["terminated"], group.attrs["seed"] = 1.0, True, 3
    tracemalloc.start()
    refused(tmp_path / "x.hdf5", "SOURCE_UNSAFE", "never written")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_groups_that_have_other_names_say_how_to_name_them(tmp_path: Path) -> None:
    columns = {f"ep{n}/{name}": steps(3) for n in range(3) for name in ("action", "state")}
    columns["meta/mean"] = steps(2)
    path = write(tmp_path / "x.h5", columns)
    refused(path, "COLUMN", "found: action, state; other names: rename={'NAME': 'observations'}")
    names = {"observations": "state"}
    refused(path, "COLUMN", "state; other names: --rename NAME=actions", names=names)
    names |= {"actions": "action"}
    with open_source(path, names=names) as source:
        assert source.episodes.lengths.tolist() == [3, 3, 3]
    flat = {f"{name}_{n}": steps(3 + n) for n in range(2) for name in ("action", "state")}
    refused(write(tmp_path / "y.h5", flat), "COLUMN", "found: action, state; other names:")
    with open_source(tmp_path / "y.h5", names=names) as source:
        assert source.episodes.lengths.tolist() == [3, 4]
    columns["ep1/done"] = "text, which is no flag"
    columns["ep1/state"] = steps(5)
    refused(write(tmp_path / "x.h5", columns), "SOURCE_LAYOUT", "ep1", names=names)


def test_groups_that_are_tables_of_several_episodes_are_refused(tmp_path: Path) -> None:
    ends = np.isin(np.arange(6), [2, 5])
    one = {"observations": steps(6), "actions": steps(6), "rewards": np.ones(6)}
    one |= {"terminals": np.zeros(6, bool), "timeouts": ends}
    path = write(
        tmp_path / "x.h5", {f"t{n}/{name}": rows for n in (1, 2) for name, rows in one.items()}
    )
    refused(path, "SOURCE_LAYOUT", "timeouts is true inside groups")
    with open_source(path, names={name: f"t2/{name}" for name in one}) as source:
        assert source.episodes.lengths.tolist() == [3, 3]
