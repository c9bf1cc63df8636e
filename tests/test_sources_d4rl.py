"""Each family's boundaries and bytes against a naive reader; what the user is told."""

import http.server
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.data.convert.conversion import convert
from gear_offline.data.sources import Source, d4rl, from_arrays, open_source
from gear_offline.errors import InputError, UnavailableError
from tests.hdf5_files import Columns, assert_same, naive_episodes, table, write
from tests.support import Patch, one_error

Flags = npt.NDArray[np.bool_]


@st.composite
def flag_pairs(draw: st.DrawFn) -> tuple[Flags, Flags]:
    """Rows of terminals and timeouts: sparse, dense, both on one row, runs, none at all."""
    steps = draw(st.integers(1, 60))
    density = draw(st.sampled_from([0.0, 0.05, 0.3, 0.9]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.random(steps) < density, rng.random(steps) < density


def warnings_of(source: Source) -> str:
    return "\n".join(source.info.attributes["warnings"])


def flagged(terminals: Any, timeouts: Any | None, **shapes: int) -> Columns:
    columns = table(len(terminals), **shapes)
    columns["terminals"] = np.asarray(terminals)
    if timeouts is not None:
        columns["timeouts"] = np.asarray(timeouts)
    return columns


EITHER, CUTS = "terminals|timeouts", "terminals-as-truncations"
# by file: family, widths of observations and actions, rule, whether it has timeouts and whether
# its terminals terminate, and what is said of it
FAMILIES: dict[str, tuple[str, tuple[int, int], str, bool, bool, str]] = {
    "hopper_medium-v2": ("mujoco", (11, 3), EITHER, True, True, ""),
    "walker2d-medium-replay-v1": ("mujoco", (17, 6), EITHER, True, True, ""),
    "ant_expert-v2": ("mujoco", (27, 8), EITHER, True, True, ""),
    "pen-human-v1": ("adroit-pen", (45, 24), EITHER, True, True, ""),
    "door-cloned-v1": ("adroit", (39, 28), EITHER, True, True, ""),
    "Ant_maze_u-maze_noisy_multistart_False": ("antmaze", (29, 8), "timeouts", True, True, ""),
    "unnamed-1": ("antmaze", (29, 8), "timeouts", True, True, "by its 29 observations"),
    "mini_kitchen_microwave_kettle_light_slider-v0": (
        *("kitchen", (60, 9), CUTS, False, False, "not success"),
    ),
    "unnamed-2": ("kitchen", (60, 9), CUTS, False, False, "infos column"),
    "maze2d-umaze-sparse-v1": ("maze2d", (4, 2), "timeouts", True, True, ""),
    "halfcheetah_medium": ("mujoco", (17, 6), "terminals|steps=1000", False, True, "no timeouts"),
    "pen-v0_demos_clipped": (
        *("adroit-pen", (45, 24), "terminals|steps=100", False, True, "human demonstrations"),
    ),
    "relocate-x": ("adroit", (39, 30), "terminals|steps=200", False, True, "D4RL's step limit"),
    "maze2d-umaze-sparse": ("maze2d", (4, 2), CUTS, False, False, "one conti"),
}


@settings(max_examples=6)
@given(flags=flag_pairs(), repeats=st.sampled_from([1, 40]), dtype=st.sampled_from(["?", "f4"]))
@pytest.mark.parametrize("name", FAMILIES)
def test_episodes_of_every_family(
    tmp_path: Path, name: str, flags: tuple[Flags, Flags], repeats: int, dtype: str
) -> None:
    family, (observations, actions), rule, has_timeouts, terminal_counts, said = FAMILIES[name]
    terminals, timeouts = (np.tile(f, repeats).astype(dtype) for f in flags)
    widths = {"observations": observations, "actions": actions}
    columns = flagged(terminals, timeouts if has_timeouts else None, **widths)
    if family == "kitchen":
        columns = {n: v for n, v in columns.items() if not n.startswith("infos")}
        columns["infos"] = np.arange(terminals.size)
    limit = int(rule.partition("steps=")[2] or 0)

    def ends(row: int, step: int) -> bool:
        at_limit = step + 1 == limit
        return (
            bool(timeouts[row] and has_timeouts)
            or at_limit
            or bool(terminals[row] and rule != "timeouts")
        )

    naive = naive_episodes(columns, ends, terminal_counts=terminal_counts)
    path = write(tmp_path / f"{name}.hdf5", columns, compression="gzip" if repeats == 1 else None)
    with open_source(path) as source:
        assert (source.info.rule, source.info.attributes["family"]) == (rule, family)
        assert said in warnings_of(source)
        assert_same(source, columns, naive)
        tail = naive[-1].stop - naive[-1].start
        finished = ends(naive[-1].stop - 1, tail - 1)
        assert source.info.attributes["unfinished_tail_steps"] == (0 if finished else tail)


def parquet_rows(path: Path, columns: dict[str, Any]) -> None:
    rows = {name: values.tolist() for name, values in columns.items()}
    pq.write_table(pa.table(rows), path)


@pytest.mark.parametrize(
    ("name", "widths", "limit", "ends", "terminated", "reference"),
    [
        ("antmaze-umaze-v2", (29, 8), [4, 9], [5, 10, 12], [False] * 3, "antmaze-umaze-v2"),
        ("kitchen-complete-v0", (60, 9), None, [3, 8, 12], [False] * 3, "kitchen-complete-v0"),
        ("hopper-medium-v2", (11, 3), None, [3, 8, 12], [True, True, False], "hopper-medium-v2"),
        ("unnamed", (11, 3), None, [3, 8, 12], [True, True, False], None),
    ],
)
def test_a_family_s_rule_holds_in_every_format(  # terminals after steps 3 and 8 of 12
    tmp_path: Path, name: str, widths: tuple[int, int], limit: list[int] | None,
    ends: list[int], terminated: list[bool], reference: str | None,
) -> None:  # fmt: skip
    terminals, timeouts = np.isin(np.arange(12), (2, 7)), np.isin(np.arange(12), limit or [])
    made = flagged(
        terminals, timeouts if limit else None, observations=widths[0], actions=widths[1]
    )
    columns: dict[str, Any] = {n: rows for n, rows in made.items() if not n.startswith("infos")}
    paths = [tmp_path / f"{name}{suffix}" for suffix in (".hdf5", ".npz", ".parquet")]
    write(paths[0], columns)
    np.savez(paths[1], **columns)
    parquet_rows(paths[2], columns)
    sources = [*map(open_source, paths), from_arrays(columns, name=name)]
    for source in sources:
        with source:
            assert source.episodes.offsets[1:].tolist() == ends
            assert source.terminated.tolist() == terminated
            assert source.info.reference_name == reference
    with open_source(paths[1], rule="terminals", names={"observations": "observations"}) as source:
        assert source.episodes.offsets[1:].tolist() == [3, 8, 12]  # what the user says wins


PASSED_OVER = "terminals is true at 290 steps where no episode ends"


@pytest.mark.parametrize(
    ("name", "ends", "said"),
    [
        ("antmaze-medium-play-v2", [1000, 2001, 3002], [PASSED_OVER]),
        ("antmaze-umaze-v0", [997, 2500], [PASSED_OVER, "D4RL#77"]),
    ],
)
def test_what_is_said_of_antmaze(
    tmp_path: Path, name: str, ends: list[int], said: list[str]
) -> None:
    terminals, timeouts = np.zeros(3003, np.float32), np.zeros(3003, bool)
    terminals[700:990] = 1  # at the goal, and the play goes on
    timeouts[ends] = True
    columns = flagged(terminals, timeouts, observations=29, actions=8)
    with open_source(write(tmp_path / f"{name}.hdf5", columns)) as source:
        assert source.episodes.offsets[1 : len(ends) + 1].tolist() == [end + 1 for end in ends]
        assert len(source.info.attributes["warnings"]) == len(said)
        assert all(text in warnings_of(source) for text in said)


@pytest.mark.parametrize("name", ["hopper-mine.hdf5", "kitchen.hdf5", "antmaze.hdf5", "x.hdf5"])
def test_time_flags_of_other_names_are_taken_at_their_word(tmp_path: Path, name: str) -> None:
    rows = np.arange(12)
    columns = flagged(rows == 3, None) | {"truncations": rows % 6 == 5}
    with open_source(write(tmp_path / name, columns)) as source:
        assert source.info.rule == "terminals|truncations"
        assert source.episodes.lengths.tolist() == [4, 2, 6]
        assert source.terminated.tolist() == [True, False, False]
        assert "no timeouts column" not in warnings_of(source)


def test_cut_episodes_and_missing_flags_are_reported(tmp_path: Path) -> None:
    timeouts = np.zeros(4000, bool)
    timeouts[[39, 1039]] = True
    columns = flagged(np.zeros(4000, bool), timeouts)
    with open_source(write(tmp_path / "walker2d_full_replay-v2.hdf5", columns)) as source:
        assert source.episodes.lengths.tolist() == [40, 1000, 2960]
        assert "1 episode cut by a timeout before step 1000" in warnings_of(source)
        said = "\n".join(convert(source, tmp_path / "d", quiet=True).source.warnings)
        assert "1 episode longer than the 1000 steps of mujoco" in said
        assert "--rule 'terminals|steps=1000'" in said


def test_columns_of_width_one_are_one_number_a_step(tmp_path: Path) -> None:
    columns = flagged(np.zeros((9, 1), bool), np.eye(9, 1, -4, dtype=bool))
    columns["rewards"] = columns["rewards"][:, None]
    with open_source(write(tmp_path / "replay.hdf5", columns)) as source:
        assert source.spec["rewards"].shape == source.spec["timeouts"].shape == ()
        assert source.episodes.lengths.tolist() == [5, 4]
        assert source.read("rewards", 2, 5).tobytes() == columns["rewards"][2:5].tobytes()


@pytest.mark.parametrize("environment", ["AntMaze_UMaze-v4", "my_mazes:Ant_maze-v0", "x.y:maze-v0"])
def test_gymnasium_id_means_plain_flags(tmp_path: Path, environment: str) -> None:
    terminals, timeouts = np.zeros(20, bool), np.zeros(20, bool)
    terminals[4] = timeouts[9] = True
    columns = flagged(terminals, timeouts, observations=29, actions=8)
    for name in ("antmaze-umaze.hdf5", "collected.hdf5"):
        path = write(tmp_path / name, columns, attributes={"env_id": environment})
        with open_source(path) as source:
            assert source.info.environment_id == environment
            assert source.info.rule == "terminals|timeouts"
            assert source.episodes.lengths.tolist() == [5, 5, 10]
            assert source.info.reference_name is None
    path = write(tmp_path / "x.hdf5", columns, attributes={"env_id": "antmaze-umaze-v2"})
    with open_source(path) as source:
        assert source.info.rule == "timeouts"
        assert source.info.environment_id is None
        assert source.info.reference_name == "antmaze-umaze-v2"


@settings(max_examples=15)
@given(flags=flag_pairs(), limit=st.integers(1, 20))
def test_rule_can_be_given(tmp_path: Path, flags: tuple[Flags, Flags], limit: int) -> None:
    terminals, timeouts = flags
    columns = flagged(terminals, timeouts)
    path = write(tmp_path / "kitchen.hdf5", columns)
    rules: dict[str, Callable[[int, int], bool]] = {
        "none": lambda row, step: False,
        "terminals": lambda row, step: bool(terminals[row]),
        "timeouts": lambda row, step: bool(timeouts[row]),
        f"timeouts|steps={limit}": lambda row, step: bool(timeouts[row]) or step == limit - 1,
        f"steps={limit}": lambda row, step: step == limit - 1,
    }
    for rule, ends in rules.items():
        with open_source(path, rule=rule) as source:
            assert source.info.rule == rule
            assert_same(source, columns, naive_episodes(columns, ends))


def test_name_finds_the_file_in_d4rls_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    write(tmp_path / "hopper_mixed.hdf5", flagged(np.zeros(5, bool), None))
    with open_source("d4rl:hopper-medium-replay-v0") as source:
        assert source.info.uri == "d4rl:hopper-medium-replay-v0"
        assert source.info.reference_name == "hopper-medium-replay-v0"
        assert source.info.rule == "terminals|steps=1000"
    with one_error("SOURCE_READ") as caught:
        open_source("d4rl:hoper-medium-v2")
    assert "hopper-medium-v2" in caught.value.remedy


def test_download_and_its_failure(tmp_path: Path, monkeypatch: Patch) -> None:
    served, cache = tmp_path / "served", tmp_path / "cache"
    (served / "gym_mujoco_v2").mkdir(parents=True)
    columns = flagged(np.zeros(5, bool), np.zeros(5, bool))
    write(served / "gym_mujoco_v2" / "hopper_medium-v2.hdf5", columns)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(served))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("D4RL_DATASET_DIR", str(cache))
    monkeypatch.setattr(d4rl, "SERVER", f"http://127.0.0.1:{server.server_port}/")
    try:
        with open_source("d4rl:hopper-medium-v2") as source:
            assert_same(source, columns, naive_episodes(columns, lambda *_: False))
        monkeypatch.setenv("D4RL_DATASET_DIR", str(served))
        (served / "hopper_medium-v2.hdf5").mkdir()  # no place for a file
        with pytest.raises(UnavailableError, match="output exists"):
            open_source("d4rl:hopper-medium-v2")
        monkeypatch.setenv("D4RL_DATASET_DIR", str(cache))
        with pytest.raises(UnavailableError) as caught:
            open_source("d4rl:hopper-expert-v2")
    finally:
        server.shutdown()
        server.server_close()
    assert caught.value.code == "SOURCE_READ"
    assert str(cache / "hopper_expert-v2.hdf5") == caught.value.where
    assert [p.name for p in cache.iterdir()] == ["hopper_medium-v2.hdf5"]


GYM = """
entries = {}
def make(name):
    module, colon, name = name.rpartition(":")
    if colon:
        __import__(module)  # as gym does
    return entries[name]()
"""
PACKAGE = """
import h5py, gym
print("a warning of the package")
class Environment:
    def get_dataset(self):
        arrays = {}
        with h5py.File(PATH, "r") as file:
            file.visititems(lambda n, d: arrays.update({n: d[()]}) if hasattr(d, "shape") else None)
        return arrays
    def close(self):
        pass
gym.entries["hopper-medium-v2"] = gym.entries["made-up-v0"] = Environment
"""


@pytest.mark.parametrize("name", ["hopper-medium-v2", "made-up-v0"])
def test_the_package_of_d4rl_gives_what_its_file_has(
    tmp_path: Path, monkeypatch: Patch, name: str
) -> None:
    cut, ended = np.zeros(9, bool), np.zeros(9, bool)
    ended[3] = cut[6] = True
    columns = flagged(ended, cut)
    extra = {"metadata/algorithm": np.bytes_(b"SAC"), "metadata/weights": np.zeros((2, 3))}
    file = write(tmp_path / "hopper_medium-v2.hdf5", columns | extra)
    (tmp_path / "gym.py").write_text(GYM)
    (tmp_path / "d4rl.py").write_text(f"PATH = {str(file)!r}\n{PACKAGE}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("gym", "d4rl"):  # what is imported goes with the test
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(d4rl, "SERVER", "nowhere:")
    manifests = [
        convert(f"d4rl:{name}", tmp_path / "packaged", quiet=True),
        convert(file, tmp_path / "read", quiet=True),
    ]
    with open_source(tmp_path / "packaged") as dataset:
        assert_same(dataset, columns, naive_episodes(columns, lambda row, _: row in (3, 6)))
    assert {manifest.source.format for manifest in manifests} == {"d4rl"}
    assert len({manifest.source.rule for manifest in manifests}) == 1
    assert str(manifests[0].source.attributes["yielded"]).startswith("xxh3-128:")
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with one_error("SOURCE_READ"):
        open_source(f"d4rl:stranger:{name}")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "d4rl.py").write_text("raise SystemExit('no MuJoCo')")
    del sys.modules["d4rl"]
    with one_error("SOURCE_READ"):  # as without the package
        open_source(f"d4rl:{name}")


def test_a_missing_file_of_d4rl_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give d4rl:hopper-medium-v2, which downloads it"):
        open_source(tmp_path / "hopper_medium-v2.hdf5")
