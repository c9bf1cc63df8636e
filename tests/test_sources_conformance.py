"""What every reader promises: one body of tests over all layouts.

Each layout is written by its own program, or as that does it, beside the arrays that went in.

Shape legend: T steps of an episode.
"""

import os
import re
import sys
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from gear_offline.cli.main import main
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.sources import Source, from_arrays, from_episodes, open_source
from gear_offline.errors import GearError
from tests import test_sources_dqn_replay as dqn
from tests import test_sources_robomimic as robomimic
from tests.fixtures import make_lerobot as lerobot
from tests.hdf5_files import NaiveEpisode, assert_same, write
from tests.support import contents, hopper_columns, one_error, refused

Episode = dict[str, Any]  # column name to T rows
LENGTHS = (5, 9, 4, 7)


class Made(NamedTuple):
    """A source, and what it must give."""

    source: Any  # what `open_source` takes, or an open source
    format: str
    episodes: list[Episode]
    terminated: list[bool]
    rule: str = ""  # of a format that stores episodes apart none


def played() -> list[Episode]:
    """Return episodes of which every second one terminates."""
    made = [dict(hopper_columns(steps, seed=steps)) for steps in LENGTHS]
    for number, episode in enumerate(made):
        episode[("timeouts", "terminals")[number % 2]][-1] = True
    return made


def flat(episodes: list[Episode]) -> Episode:
    return {name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]}


def hdf5(path: Path, episodes: list[Episode]) -> Any:
    return write(path / "hopper-x.hdf5", flat(episodes), compression="gzip")


def npz(path: Path, episodes: list[Episode]) -> Any:
    np.savez(path / "x.npz", **flat(episodes))
    return path / "x.npz"


def parquet(path: Path, episodes: list[Episode]) -> Any:
    columns = {name: [e[name].tolist() for e in episodes] for name in episodes[0]}
    kinds = {name: pa.from_numpy_dtype(rows.dtype) for name, rows in episodes[0].items()}
    for name, rows in episodes[0].items():
        for _ in rows.shape:
            kinds[name] = pa.list_(kinds[name])
    pq.write_table(pa.table(columns, schema=pa.schema(kinds)), path / "x.parquet", row_group_size=3)
    return path / "x.parquet"


def parquet_rows(path: Path, episodes: list[Episode]) -> Any:
    whole = flat(episodes)
    table = pa.table({n: rows.tolist() if rows.ndim > 1 else rows for n, rows in whole.items()})
    for number, (name, rows) in enumerate(whole.items()):
        if rows.ndim > 1:
            kind = pa.list_(pa.from_numpy_dtype(rows.dtype), rows.shape[1])
            table = table.set_column(number, name, pa.array(rows.tolist(), kind))
    pq.write_table(
        table.append_column("note", [["text"] * len(rows)]), path / "x.parquet", row_group_size=7
    )
    return path / "x.parquet"


def arrow(written: Path, suffix: str) -> Path:
    table = pq.read_table(written)
    path = written.with_suffix(suffix)
    if suffix == ".feather":
        feather.write_feather(table, path, chunksize=3)
    else:  # as Hugging Face's datasets
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    written.unlink()
    return path


EVERY_CHUNK = {"write_empty_chunks": True}  # of zeros too
EITHER, ENDS = "terminals|timeouts", [False, True, False, True]


def folder(path: Path) -> Made:
    for number, part in ((2, played()[:1]), (10, played()[1:])):
        write(path / f"part_{number}.hdf5", flat(part))
    for name in ("notes.txt", "metadata.json", "manifest.json"):
        (path / name).write_text('{"author": "not a file of data"}')
    return Made(path, "d4rl", played(), ENDS, EITHER)


def ogbench(path: Path) -> Made:
    episodes = [
        {name: e[name] for name in ("observations", "actions")}
        | {"terminals": e["terminals"] | e["timeouts"]}
        for e in played()
    ]
    np.savez_compressed(path / "antmaze-large-navigate-v0.npz", **flat(episodes))
    np.savez(path / "antmaze-large-navigate-v0-val.npz", **flat(episodes[:1]))
    file = path / "antmaze-large-navigate-v0.npz"
    return Made(file, "ogbench", episodes, [False] * 4, "terminals-as-truncations")


def demonstrations(path: Path) -> Made:
    file = robomimic.write_demos(path / "low_dim.hdf5", compression="gzip")
    episodes = [robomimic.naive(file, name) for name in robomimic.ORDER]
    return Made(file, "robomimic", episodes, [False] * 3)


def maniskill(path: Path) -> Made:
    episodes = list[Episode]()
    with h5py.File(path / "trajectory.h5", "w") as file:
        for number, e in enumerate(played() * 3):  # 12: traj_10 must not come before traj_2
            rows = np.arange(len(e["rewards"]) + 1.0)[:, None] * [1, -1, 0.5] + 100 * number
            stored = {"obs": rows, "env_states/actors/cube": rows, "actions": e["actions"]}
            stored |= {"rewards": e["rewards"], "success": e["terminals"]}
            stored |= {"terminated": e["terminals"], "truncated": e["timeouts"]}
            for name, values in stored.items():
                file.create_dataset(f"traj_{number}/{name}", data=values, chunks=True)
            made = {"observations": rows[:-1], "next_observations": rows[1:]}
            episodes.append({**stored, "env_states/actors/cube": rows[:-1], **made})
            del episodes[-1]["obs"]
    (path / "trajectory.json").write_text('{"env_info": {"env_id": "PushCube-v1"}}')
    return Made(path, "hdf5-groups", episodes, ENDS * 3)


def d3rlpy(path: Path) -> Made:
    episodes, names = list[Episode](), ("observations", "actions", "rewards", "terminated")
    with h5py.File(path / "dataset.h5", "w") as file:
        file["columns"], file["num_episodes"], file["version"] = [*names], 12, "2.1"
        for number, e in enumerate(played() * 3):
            for name in names[:2]:
                file[f"{name}_{number}"] = e[name]
            file[f"rewards_{number}"] = e["rewards"][:, None]
            file[f"terminated_{number}"] = e["terminals"].any()
            episodes.append({name: e[name] for name in names[:3]} | {names[3]: e["terminals"]})
    return Made(path / "dataset.h5", "hdf5-groups", episodes, ENDS * 3)


def replay(path: Path) -> Made:
    dqn.log(path / "Pong" / "1" / "replay_logs", dqn.EPISODES)
    episodes = [{f"{name}s": rows for name, rows in e.items()} for e in dqn.EPISODES]
    return Made(path / "Pong" / "1" / "replay_logs", "dqn-replay", episodes, [True] * 7)


def recorded(path: Path, version: str) -> Made:
    with zipfile.ZipFile(Path(__file__).parent / "fixtures" / "lerobot.zip") as archive:
        archive.extractall(path)
    names = {"actions": "action", "rewards": "next.reward"}
    names |= {name: name for name in ("next.done", "next.success")}
    episodes, numbers = list[Episode](), np.arange(sum(lerobot.LENGTHS))
    for number, stop in enumerate(np.cumsum(lerobot.LENGTHS)):
        made, index = lerobot.recorded(number), numbers[stop - lerobot.LENGTHS[number] : stop]
        rows = {name: made[stored] for name, stored in names.items()}
        vectors = [made["observation.state"], made["observation.velocity"]]
        rows |= {"observations": np.concatenate(vectors, axis=1), "index": index}
        rows |= {"episode_index": 0 * index + number, "task_index": 0 * index + number % 2}
        rows |= {"frame_index": index - index[0]}
        rows |= {"timestamp": (rows["frame_index"] / lerobot.FPS).astype(np.float32)}
        episodes.append(rows)
    return Made(path / version, "lerobot", episodes, [True, False, True])


def replay_buffer(path: Path, version: int) -> Made:
    zarr = pytest.importorskip("zarr", reason="needs pip install 'gear-offline[zarr]'")
    names = {"state": "observations", "action": "actions", "reward": "rewards"}
    whole = flat(played())
    group = zarr.open_group(path / "pusht.zarr", mode="w", zarr_format=version)
    for name, rows in {**whole, **{old: whole[new] for old, new in names.items()}}.items():
        if name not in names.values():
            chunks = (7, *rows.shape[1:])
            group.create_array(f"data/{name}", data=rows, chunks=chunks, config=EVERY_CHUNK)
    ends = np.cumsum(LENGTHS)
    group.create_array("meta/episode_ends", data=ends, chunks=(2,))
    return Made(path / "pusht.zarr", "zarr", played(), ENDS, "ends:meta/episode_ends")


def zipped(made: Made) -> Made:
    with zipfile.ZipFile(f"{made.source}.zip", "w") as archive:
        for place in made.source.rglob("*"):
            archive.write(place, place.relative_to(made.source))
    return made._replace(source=Path(f"{made.source}.zip"))


def minari(path: Path, data_format: str) -> Made:
    pytest.importorskip("minari", reason="needs pip install 'gear-offline[minari]'")
    from tests.test_sources_minari import create, plain_episodes

    buffers = plain_episodes(12)  # more than 10: episode_10 must not come before episode_2
    create("family/plain-v0", buffers, data_format=data_format)
    same, episodes = ("actions", "rewards", "terminations", "truncations"), list[Episode]()
    for buffer in buffers:
        rows, infos = np.asarray(buffer.observations), buffer.infos or {}
        made = {"observations": rows[:-1], "next_observations": rows[1:]}
        made |= {name: np.asarray(getattr(buffer, name)) for name in same}
        episodes.append(made | {"infos/qpos": infos["qpos"][:-1]})
    return Made(path / "family/plain-v0", "minari", episodes, [n % 3 == 0 for n in range(12)])


def shards(path: Path) -> Made:
    convert(from_episodes(played()), path / "d", shard_bytes=500, quiet=True)
    return Made(path / "d", "gear", played(), ENDS)


LAYOUTS: dict[str, Callable[[Path], Made]] = {
    "d4rl": lambda path: Made(hdf5(path, played()), "d4rl", played(), ENDS, EITHER),
    "folder": folder,
    "npz": lambda path: Made(npz(path, played()), "npz", played(), ENDS, EITHER),
    "ogbench": ogbench,
    "parquet": lambda path: Made(parquet(path, played()), "parquet", played(), ENDS),
    "parquet-rows": lambda path: Made(
        parquet_rows(path, played()), "parquet-rows", played(), ENDS, EITHER
    ),
    "arrow": lambda path: Made(arrow(parquet(path, played()), ".arrow"), "arrow", played(), ENDS),
    "arrow-rows": lambda path: Made(
        arrow(parquet_rows(path, played()), ".feather"), "arrow-rows", played(), ENDS, EITHER
    ),
    "robomimic": demonstrations,
    "maniskill": maniskill,
    "d3rlpy": d3rlpy,
    "dqn-replay": replay,
    "lerobot-v2.1": lambda path: recorded(path, "v2.1"),
    "lerobot-v3.0": lambda path: recorded(path, "v3.0"),
    "minari-hdf5": lambda path: minari(path, "hdf5"),
    "minari-arrow": lambda path: minari(path, "arrow"),
    "minari-parquet": lambda path: minari(path, "parquet"),
    "zarr-2": lambda path: replay_buffer(path, 2),
    "zarr-3": lambda path: replay_buffer(path, 3),
    "zarr-zip": lambda path: zipped(replay_buffer(path, 2)),
    "shards": shards,
    "arrays": lambda path: Made(from_arrays(flat(played())), "arrays", played(), ENDS, EITHER),
    "memory": lambda path: Made(from_episodes(played()), "arrays", played(), ENDS),
}
pytestmark = pytest.mark.filterwarnings(r"ignore::UserWarning:minari\..*")


@pytest.fixture(params=LAYOUTS)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    (tmp_path / "given").mkdir()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "given"))
    return LAYOUTS[request.param](tmp_path / "given")


@pytest.fixture
def stored(made: Made) -> Made:
    """A layout of files."""
    if isinstance(made.source, Source):
        pytest.skip("in memory")
    return made


def opened(made: Made) -> Source:
    return made.source if isinstance(made.source, Source) else open_source(made.source)


def data_files(made: Made) -> list[Path]:
    """Return the files that every reading of the layout needs."""
    aside = re.compile(r"tasks|stats|episodes|metadata|invalid|.*\.mp4|\.z")
    if made.format in ("d4rl", "hdf5-groups"):  # beside whose files others lie
        aside = re.compile(r".*\.(txt|json)")
    found = [made.source] if made.source.is_file() else sorted(made.source.rglob("*.*"))
    found = [path for path in found if path.is_file() and "meta/episodes" not in str(path)]
    return [path for path in found if not aside.match(path.name)]


def test_every_step_of_every_episode(made: Made) -> None:
    whole = flat(made.episodes)
    with opened(made) as source:
        assert source.info.format == made.format and "steps" in repr(source)
        bounds = pairwise(np.cumsum([0, *(len(e["actions"]) for e in made.episodes)]).tolist())
        ends = zip(bounds, made.terminated, strict=True)
        assert_same(source, whole, [NaiveEpisode(*rows, ended) for rows, ended in ends])
        steps = source.spec.steps
        for name, rows in whole.items():  # across episodes, backwards, and none
            for start, stop in [*reversed(list(pairwise(range(0, steps + 1, 6)))), (3, 3)]:
                assert np.array_equal(source.read(name, start, stop), rows[start:stop]), name
            for start, stop in ((-1, 3), (0, steps + 1), (3, 2)):
                with pytest.raises(IndexError):
                    source.read(name, start, stop)


RELABEL = "def halved(episode):\n    return {'half': episode['actions'] / 2}\n"


@pytest.mark.usefixtures("forked_workers")
def test_any_number_of_workers_writes_and_edits_it(stored: Made, tmp_path: Path) -> None:
    (tmp_path / "relabel.py").write_text(RELABEL)
    options = ["--map", f"{tmp_path / 'relabel.py'}:halved", "--where", "length > 4"]
    columns = {"observations", "terminals"} & stored.episodes[0].keys()
    names = {name: f"my_{name}" for name in sorted(columns)}
    options += ["--rename", ",".join(map("=".join, names.items())), "--shard-size", "900", "-q"]
    for workers in ("1", "2"):
        out = [str(stored.source), str(tmp_path / workers), "--workers", workers]
        assert main(["convert", *out, *options]) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    dataset = open_dataset(tmp_path / "1")
    assert len(dataset.manifest.shards) > 1
    kept = [e for e in stored.episodes if len(e["actions"]) > 4]
    for found, wanted in zip(dataset, kept, strict=True):
        half = found.pop("half")
        assert np.array_equal(half, wanted["actions"] / 2) and half.dtype.kind == "f"
        rows = {names.get(n, n): rows for n, rows in wanted.items()}
        assert not names.keys() & found.keys()
        assert all(found[name].tobytes() == rows[name].tobytes() for name in rows)
    if "rewards" in kept[0]:
        returns = [e["rewards"].sum(dtype=float) for e in kept]
        np.testing.assert_allclose(dataset.returns, returns, rtol=1e-6, atol=1e-9)


def test_columns_rules_and_what_is_not_there(made: Made, tmp_path: Path) -> None:
    source, chosen = made.source, {"observations", "actions"}
    manifest = convert(source, tmp_path / "d", columns=sorted(chosen), quiet=True)
    assert {c.name for c in manifest.spec} == {*chosen, "rewards"} & {*made.episodes[0]}
    with one_error("COLUMN", "found: |columns here: "):
        convert(source, tmp_path / "e", columns=["observations=nothing", "actions"], quiet=True)
    if isinstance(source, Source):
        return
    if not made.rule:
        refused(source, "SOURCE_LAYOUT", "rule", rule="none")
        return
    with open_source(source) as own, open_source(source, rule="steps=3") as given:
        assert (own.info.rule, given.info.rule) == (made.rule, "steps=3")
        assert given.episodes.lengths.max() == 3
    refused(source, "COLUMN", "needs the column 'dones'", rule="dones")


def test_files_that_are_cut_short_missing_or_no_files(stored: Made) -> None:
    codes = ("SOURCE_", "DATASET_")
    for path in data_files(stored):
        whole = path.read_bytes()
        for cut in (0, 4, len(whole) // 3, len(whole) // 2, len(whole) * 9 // 10):
            path.write_bytes(whole[:cut])
            refused(stored.source, codes)
        path.unlink()
        if stored.format not in ("d4rl", "gear"):
            os.mkfifo(path)  # would block a reader
            refused(stored.source, codes)
            path.unlink()
        path.write_bytes(whole)
    opened(stored)


def test_a_file_that_is_replaced_is_refused(stored: Made, tmp_path: Path) -> None:
    with open_source(stored.source) as source:
        for path in list(data_files(stored)):
            path.with_name("new").write_bytes(path.read_bytes())
            path.with_name("new").replace(path)
        with pytest.raises(GearError) as caught:
            convert(source, tmp_path / "d", quiet=True)
    assert caught.value.code in ("SOURCE_CHANGED", "DATASET_DAMAGED"), str(caught.value)
    assert not (tmp_path / "d").exists()


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    for name, module in (("minari-hdf5", "minari.dataset.minari_storage"), ("parquet", "pyarrow")):
        made = LAYOUTS[name](tmp_path)
        monkeypatch.setitem(sys.modules, module, None)
        remedy = f"pip install 'gear-offline[{name.partition('-')[0]}]'"
        refused(made.source, "PACKAGE_MISSING", remedy)


STEPS = LENGTHS[0]
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {  # columns that are others or none, and words
    "no actions": ({"actions": None}, "actions"),
    "a flag too few": ({"timeouts": np.zeros(STEPS - 1, bool)}, "timeouts"),
    "no observations": ({"observations": None}, "observations"),
    "a row too few": ({"actions": np.zeros((STEPS - 1, 3), np.float32)}, "actions"),
    "no steps": ({name: rows[:0] for name, rows in played()[0].items()}, ""),
    "two flags": ({"timeouts": np.zeros((STEPS, 2))}, "timeouts"),
    "no flag": ({"timeouts": np.full(STEPS, np.nan)}, "the flag timeouts is NaN at row"),
    "text": ({"actions": np.array([b"a"] * STEPS)}, "actions"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("writer", [hdf5, npz, parquet])
def test_mistakes_of_a_writer_are_one_error(tmp_path: Path, writer: Any, mistake: str) -> None:
    changes, words = MISTAKES[mistake]
    if writer is parquet and mistake == "text":
        pytest.skip("text is left out")
    episode = {n: rows for n, rows in {**played()[0], **changes}.items() if rows is not None}
    source = writer(tmp_path, [episode])
    assert str(source) in refused(source, ("SOURCE_LAYOUT", "COLUMN"), words).where
