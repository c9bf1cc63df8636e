"""Datasets made by the minari package itself, read back without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gymnasium import spaces

from gear_offline.errors import GearError, InputError, UnavailableError
from gear_offline.sources import confined, iter_episodes, open_source
from gear_offline.sources.minari_arrow import ArrowStorage

pytest.importorskip("minari", reason="needs pip install 'gear-offline[minari]'")
import minari
from minari.data_collector.episode_buffer import EpisodeBuffer

FORMATS = ("hdf5", "arrow", "parquet")
pytestmark = pytest.mark.filterwarnings(r"ignore::UserWarning:minari\..*")

BOX = spaces.Box(-10, 10, (3,), np.float64)
PUSH = spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def plain_episodes(count: int) -> list[EpisodeBuffer]:
    rng = np.random.default_rng(count)
    found = []
    for number in range(count):
        steps = int(rng.integers(1, 9))
        ends = [False] * (steps - 1)
        found.append(
            EpisodeBuffer(
                id=number,
                seed=number,
                observations=rng.normal(size=(steps + 1, 3)),
                actions=rng.uniform(-1, 1, size=(steps, 2)).astype(np.float32),
                rewards=rng.normal(size=steps).tolist(),
                terminations=[*ends, number % 3 == 0],
                truncations=[*ends, number % 3 == 1],
                infos={
                    "qpos": rng.normal(size=(steps + 1, 2, 2)),
                    "deep": {"speed": rng.normal(size=steps + 1)},
                },
            )
        )
    return found


def create(name: str, episodes: list[EpisodeBuffer], **options: Any) -> None:
    minari.create_dataset_from_buffers(
        name,
        episodes,
        **{"observation_space": BOX, "action_space": PUSH, "jpeg_encoding": False} | options,
    )


@pytest.mark.parametrize("data_format", FORMATS)
def test_infos_whose_names_are_no_columns_are_left_out(data_format: str) -> None:
    episodes = plain_episodes(3)
    for episode in episodes:
        assert isinstance(episode.infos, dict)
        episode.infos["a..b"] = episode.infos["qpos"]
    create("odd-v0", episodes, data_format=data_format)
    with open_source("minari:odd-v0") as source:
        assert "name" in source.info.attributes["left_out"]["infos/a..b"]
        assert "infos/qpos" in source.spec


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_many_short_episodes_are_not_taken_for_an_attack(
    data_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create("short-v0", plain_episodes(24), data_format=data_format)
    opened: list[Path] = []
    given: list[int] = []
    whole = ArrowStorage._open

    def counted(storage: ArrowStorage, part: Path, column: str | None) -> Any:
        opened.append(part)
        return whole(storage, part, column)

    def asked(_: Any, seconds: int) -> tuple[int, bytes]:
        given.append(seconds)
        return 0, b""

    monkeypatch.setattr(ArrowStorage, "_open", counted)
    with open_source("minari:short-v0") as source:
        assert len(opened) < 3 * source.spec.episodes  # for its end, and for what its infos are
    monkeypatch.setattr(confined, "_forked", asked)
    monkeypatch.setattr(confined, "_spawned", asked)
    confined.check_source("minari:short-v0")
    assert given == [confined.SECONDS + 24 * 2 // confined.FILES_PER_SECOND]


def refused(uri: str | Path, code: str) -> GearError:
    with pytest.raises(GearError) as caught:
        open_source(uri)
    assert caught.value.code == code, str(caught.value)
    return caught.value


@pytest.mark.parametrize("data_format", FORMATS)
def test_episodes_come_back_exactly(root: Path, data_format: str) -> None:
    episodes = plain_episodes(12)  # more than 10: episode_10 must not come before episode_2
    create("family/plain-v0", episodes, data_format=data_format)
    with open_source("minari:family/plain-v0") as source:
        assert source.info.format == "minari" and source.info.rule == "episodes"
        assert source.info.uri == "minari:family/plain-v0"
        assert [c.name for c in source.spec][:4] == [
            "observations",
            "actions",
            "rewards",
            "next_observations",
        ]
        assert source.episodes.lengths.tolist() == [len(e.rewards) for e in episodes]
        assert source.terminated.tolist() == [number % 3 == 0 for number in range(12)]
        assert (source.truncated == ~source.terminated).all()
        for made, read in zip(episodes, iter_episodes(source), strict=True):
            steps = len(made.rewards)
            observations, infos = np.asarray(made.observations), made.infos or {}
            wanted = {
                "observations": observations[:-1],
                "next_observations": observations[1:],
                "actions": np.asarray(made.actions),
                "rewards": np.asarray(made.rewards),
                "terminations": np.asarray(made.terminations),
                "truncations": np.asarray(made.truncations),
                "infos/qpos": infos["qpos"][:steps],
                "infos/deep/speed": infos["deep"]["speed"][:steps],
            }
            assert set(read) == set(wanted)
            for name, values in wanted.items():
                assert read[name].dtype == values.dtype, name
                assert read[name].tobytes() == values.tobytes(), name
        steps = source.spec.steps
        for column in source.spec:  # reads that begin and end inside episodes
            whole = source.read(column.name, 0, steps)
            parts = [source.read(column.name, i, min(i + 3, steps)) for i in range(0, steps, 3)]
            assert np.concatenate(parts).tobytes() == whole.tobytes()
        again = open_source(source.info.locator, rule=source.info.rule)
        assert (
            again.read("rewards", 0, steps).tobytes() == source.read("rewards", 0, steps).tobytes()
        )
        again.close()
    for directory in (root / "family/plain-v0", root / "family/plain-v0" / "data"):
        with open_source(directory) as source:
            assert source.spec.steps == steps
    with pytest.raises(ValueError, match="closed"):
        source.read("rewards", 0, 1)


@pytest.mark.parametrize("data_format", FORMATS)
def test_dict_and_tuple_spaces_become_columns(data_format: str) -> None:
    rng = np.random.default_rng(0)
    observation_space = spaces.Dict(
        {"state": BOX, "goal": spaces.Dict({"id": spaces.Discrete(5)}), "text": spaces.Text(8)}
    )
    action_space = spaces.Tuple((PUSH, spaces.MultiDiscrete([3, 4])))
    made = [
        EpisodeBuffer(
            id=number,
            observations={
                "state": rng.normal(size=(steps + 1, 3)),
                "goal": {"id": rng.integers(0, 5, size=steps + 1)},
                "text": ["word"] * (steps + 1),
            },
            actions=(
                rng.normal(size=(steps, 2)).astype(np.float32),
                rng.integers(0, 3, size=(steps, 2)),
            ),
            rewards=[0.0] * steps,
            terminations=[False] * steps,
            truncations=[False] * (steps - 1) + [True],
        )
        for number, steps in enumerate((3, 1, 5))
    ]
    create(
        "nested-v1",
        made,
        observation_space=observation_space,
        action_space=action_space,
        data_format=data_format,
    )
    with open_source("minari:nested-v1") as source:
        assert set(source.info.attributes["left_out"]) == {"observations/text"}
        for buffer, read in zip(made, iter_episodes(source), strict=True):
            observations, actions = buffer.observations, buffer.actions
            assert isinstance(observations, dict) and isinstance(actions, tuple)
            for name, values in (
                ("observations/state", observations["state"][:-1]),
                ("observations/goal/id", observations["goal"]["id"][:-1]),
                ("next_observations/state", observations["state"][1:]),
                ("next_observations/goal/id", observations["goal"]["id"][1:]),
                ("actions/0", actions[0]),
                ("actions/1", actions[1]),
            ):
                assert read[name].tobytes() == values.tobytes(), name
                assert read[name].dtype == values.dtype, name


def image_episode() -> EpisodeBuffer:
    rng = np.random.default_rng(1)
    return EpisodeBuffer(
        id=0,
        observations=rng.integers(0, 256, size=(4, 32, 40, 3)).astype(np.uint8),
        actions=np.zeros((3, 2), np.float32),
        rewards=[0.0] * 3,
        terminations=[False] * 3,
        truncations=[False] * 3,
    )


@pytest.mark.parametrize("data_format", FORMATS)
def test_images(root: Path, data_format: str) -> None:
    space = spaces.Box(0, 255, (32, 40, 3), np.uint8)
    episode = image_episode()
    create("raw-v0", [episode], observation_space=space, data_format=data_format)
    for file in (None, root / "raw-v0" / "data" / "metadata.json"):
        if file is not None:  # older versions of Minari wrote arrays, and did not say so
            facts = json.loads(file.read_text())
            del facts["jpeg_encoding"]
            file.write_text(json.dumps(facts))
        with open_source("minari:raw-v0") as source:
            assert source.spec["observations"].shape == (32, 40, 3)
            rows = source.read("observations", 0, 3)
            assert rows.tobytes() == episode.observations[:-1].tobytes()
            assert source.truncated.tolist() == [True]  # no flag at all: the recording stopped
    create(
        "jpeg-v0",
        [episode],
        observation_space=space,
        data_format=data_format,
        jpeg_encoding=True,
    )
    assert "jpeg_encoding=False" in refused("minari:jpeg-v0", "MINARI_JPEG").remedy


def test_environment_id_gives_indicative_scores() -> None:
    create("hopper-v0", plain_episodes(1), env="Hopper-v5")
    with open_source("minari:hopper-v0") as source:
        assert source.info.environment_id == source.info.reference_name == "Hopper-v5"


def test_files_of_minari_before_its_metadata_file(root: Path) -> None:
    create("hopper-v0", plain_episodes(2), env="Hopper-v5")
    file = root / "hopper-v0" / "data" / "metadata.json"
    facts = json.loads(file.read_text())
    file.unlink()
    with h5py.File(file.with_name("main_data.hdf5"), "a") as data:
        data.attrs.update({k: v for k, v in facts.items() if k in ("env_spec", "minari_version")})
        data.attrs["dataset_id"] = b"hopper-v0"
    with open_source(root / "hopper-v0") as source:
        assert source.spec.episodes == 2
        assert source.info.environment_id == "Hopper-v5"
        assert source.info.uri == "minari:hopper-v0"
        assert source.info.attributes["metadata"]["minari_version"] == facts["minari_version"]
    file.with_name("main_data.hdf5").write_bytes(b"nothing")
    refused(root / "hopper-v0", "HDF5_UNREADABLE")


def test_ids_and_places(root: Path, tmp_path: Path) -> None:
    for bad in ("../../etc-v0", "x", "a//b-v0", "a/../b-v0", "/a-v0"):
        refused(f"minari:{bad}", "MINARI_ID")
    error = refused("minari:mujoco/hopper/medium-v0", "MINARI_MISSING")
    assert "minari download mujoco/hopper/medium-v0" in error.remedy
    create("x-v0", plain_episodes(2))
    with pytest.raises(InputError) as caught:
        open_source("minari:x-v0", rule="terminals")
    assert caught.value.code == "RULE_UNKNOWN"


def test_arrow_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    create("x-v0", plain_episodes(2), data_format="arrow")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnavailableError) as caught:
        open_source("minari:x-v0")
    assert caught.value.code == "PYARROW_MISSING" and "[minari]" in caught.value.remedy


def test_hdf5_is_read_without_minari_and_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    create("x-v0", plain_episodes(2))
    for name in ("minari", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    open_source("minari:x-v0").close()


def change(root: Path, **fields: Any) -> None:
    path = root / "x-v0/data/metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("data_format", FORMATS)
def test_totals_must_agree(root: Path, data_format: str) -> None:
    create("x-v0", plain_episodes(3), data_format=data_format)
    change(root, total_steps=10_000)
    refused("minari:x-v0", "MINARI_LAYOUT")


@pytest.mark.parametrize(
    "fields",
    [
        {"data_format": "zarr"},
        {"total_steps": "many"},
        {"observation_space": '{"type": "Graph"}'},
        {"action_space": "{"},
        {"env_spec": "[1]"},
    ],
)
def test_odd_metadata(root: Path, fields: dict[str, Any]) -> None:
    create("x-v0", plain_episodes(2))
    change(root, **fields)
    refused("minari:x-v0", "MINARI_METADATA")


def test_metadata_that_is_no_object(root: Path) -> None:
    create("x-v0", plain_episodes(2))
    for text in ("", "[]", "[" * 100_000):
        (root / "x-v0/data/metadata.json").write_text(text)
        refused("minari:x-v0", "MINARI_METADATA")


def test_damaged_hdf5(root: Path) -> None:
    create("x-v0", plain_episodes(3))
    path = root / "x-v0/data/main_data.hdf5"
    with h5py.File(path, "r+") as file:
        saved = file["episode_1/rewards"][:]
        del file["episode_1/rewards"]
    refused("minari:x-v0", "MINARI_LAYOUT")
    with h5py.File(path, "r+") as file:
        file["episode_1/rewards"] = np.zeros(saved.size + 1)
    refused("minari:x-v0", "MINARI_LAYOUT")
    with h5py.File(path, "r+") as file:
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = saved.astype(np.float32)
    refused("minari:x-v0", "MINARI_LAYOUT")
    with h5py.File(path, "r+") as file:
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = h5py.ExternalLink("/etc/other.h5", "x")
    refused("minari:x-v0", "HDF5_LINK")
    path.write_bytes(path.read_bytes()[:300])
    refused("minari:x-v0", "HDF5_UNREADABLE")


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_damaged_arrow(root: Path, data_format: str) -> None:
    create("x-v0", plain_episodes(3), data_format=data_format)
    part = root / f"x-v0/data/1/part-0.{data_format}"
    part.write_bytes(part.read_bytes()[:-40])
    refused("minari:x-v0", "MINARI_LAYOUT")
    part.unlink()
    refused("minari:x-v0", "MINARI_LAYOUT")
