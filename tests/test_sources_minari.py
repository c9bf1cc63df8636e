"""Datasets made by the minari package itself come back exactly."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pyarrow as pa
import pytest
from gymnasium import spaces

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.export import export_hdf5
from gear_offline.data.sources import open_source
from gear_offline.errors import GearError
from gear_offline.evaluation.play import evaluate_tasks
from gear_offline.evaluation.tasks import tasks_of
from gear_offline.runs.resolve import resolve
from tests.evaluation_support import Constant
from tests.support import iter_episodes, one_error, refused
from tests.training_support import tiny_recipe

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
                infos={"qpos": rng.normal(size=(steps + 1, 2, 2))}
                | ({"odd": np.zeros((steps + 1, 1))} if number % 2 else {}),
            )
        )
    return found


def recorded(observations: Any, actions: Any, *, steps: int, number: int = 0) -> EpisodeBuffer:
    """An episode without rewards and without any flag: the recording stopped."""
    rewards, flags = [0.0] * steps, [False] * steps
    return EpisodeBuffer(number, None, None, observations, actions, rewards, flags, flags)


def create(name: str, episodes: list[EpisodeBuffer], **options: Any) -> None:
    minari.create_dataset_from_buffers(
        name,
        episodes,
        **{"observation_space": BOX, "action_space": PUSH, "jpeg_encoding": False} | options,
    )


@pytest.mark.parametrize("data_format", FORMATS)
def test_places_and_columns_that_not_all_have(root: Path, data_format: str) -> None:
    create("family/plain-v0", plain_episodes(12), data_format=data_format)
    folder = root / "family/plain-v0"
    for given in ("minari:family/plain-v0", folder, folder / "data"):
        with open_source(given) as source:
            assert source.info.uri == "minari:family/plain-v0"
            assert "infos/odd" in source.info.attributes["left_out"]
            names = [column.name for column in source.spec]
    assert names[:4] == ["observations", "actions", "rewards", "next_observations"]


@pytest.mark.parametrize("data_format", FORMATS)
def test_dict_and_tuple_spaces_become_columns(data_format: str) -> None:
    rng = np.random.default_rng(0)
    observation_space = spaces.Dict(
        {"state": BOX, "goal": spaces.Dict({"a pan": spaces.Discrete(5)}), "text": spaces.Text(8)}
    )
    action_space = spaces.Tuple((PUSH, spaces.MultiDiscrete([3, 4])))
    made = [
        recorded(
            {
                "state": rng.normal(size=(steps + 1, 3)),
                "goal": {"a pan": rng.integers(0, 5, size=steps + 1)},
                "text": ["word"] * (steps + 1),
            },
            (rng.normal(size=(steps, 2)).astype(np.float32), rng.integers(0, 3, size=(steps, 2))),
            steps=steps,
            number=number,
        )
        for number, steps in enumerate((3, 1, 5))
    ]
    options = {"observation_space": observation_space, "action_space": action_space}
    create("nested-v1", made, data_format=data_format, **options)
    with open_source("minari:nested-v1") as source:
        assert set(source.info.attributes["left_out"]) == {"observations/text"}
        said = " ".join(source.info.attributes["warnings"])
        assert "'observations/goal/a pan' is the column observations/goal/a_pan" in said
        for buffer, read in zip(made, iter_episodes(source), strict=True):
            observations, actions = buffer.observations, buffer.actions
            assert isinstance(observations, dict) and isinstance(actions, tuple)
            for name, values in (
                ("observations/state", observations["state"][:-1]),
                ("observations/goal/a_pan", observations["goal"]["a pan"][:-1]),
                ("next_observations/state", observations["state"][1:]),
                ("next_observations/goal/a_pan", observations["goal"]["a pan"][1:]),
                ("actions/0", actions[0]),
                ("actions/1", actions[1]),
            ):
                assert read[name].tobytes() == values.tobytes(), name
                assert read[name].dtype == values.dtype, name
    goal = "observations/goal/a pan + observations/goal/a_pan"
    with open_source("minari:nested-v1", names={"both": goal}) as source:
        wanted = np.concatenate([e.observations["goal"]["a pan"][:-1] for e in made])
        assert source.read("both", 0, 9).tolist() == [[one, one] for one in wanted.tolist()]
        assert "'observations/goal/a pan'" not in str(source.info.attributes["warnings"])


@pytest.mark.parametrize("data_format", FORMATS)
def test_images(data_format: str) -> None:
    space = spaces.Box(0, 255, (32, 40, 3), np.uint8)
    frames = np.random.default_rng(1).integers(0, 256, (4, 32, 40, 3)).astype(np.uint8)
    episode = recorded(frames, np.zeros((3, 2), np.float32), steps=3)
    create("raw-v0", [episode], observation_space=space, data_format=data_format)
    with open_source("minari:raw-v0") as source:
        assert source.spec["observations"].shape == (32, 40, 3)
        rows = source.read("observations", 0, 3)
        assert rows.tobytes() == episode.observations[:-1].tobytes()
        assert source.truncated.tolist() == [True]  # no flag at all: the recording stopped
    jpeg: dict[str, Any] = {"data_format": data_format, "jpeg_encoding": True}
    create("jpeg-v0", [episode], observation_space=space, **jpeg)
    decoded = next(iter(minari.load_dataset("jpeg-v0").iterate_episodes())).observations
    with open_source("minari:jpeg-v0") as source:
        assert source.read("observations", 0, 3).tobytes() == decoded[:-1].tobytes()


@pytest.mark.parametrize("data_format", FORMATS)
def test_nested_infos_and_names_alike(
    root: Path, data_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are what went in; infos without a shape, and those of minari 0.5.1, too."""
    rng, steps, made = np.random.default_rng(0), 4, list[Any]()
    for episode in plain_episodes(3):
        rows = len(episode.rewards) + 1
        deep = {"er": {"m": rng.normal(size=(rows, 2, 3))}, "n": rng.normal(size=(rows, 3))}
        made.append(replace(episode, infos={"deep": deep, "a_b": np.arange(rows)}))
    create("x-v0", made, data_format=data_format)
    if data_format == "arrow":  # as 0.5.1 wrote it: a shape's numbers as bytes
        for path in root.glob("x-v0/data/*/*.arrow"):
            with pa.ipc.open_file(path) as file:
                table = file.read_all()
            infos = table.schema.field("infos")
            deep = infos.type.field("deep").type
            er = pa.struct([deep.field("er").type.field("m").with_metadata({"shape": b"\2\3"})])
            kinds = [pa.field("er", er), deep.field("n").with_metadata({"shape": b"\3"})]
            kinds = [pa.field("deep", pa.struct(kinds)), infos.type.field("a_b")]
            schema = table.schema.set(
                table.schema.get_field_index("infos"), pa.field("infos", pa.struct(kinds))
            )
            with pa.ipc.new_file(path, schema) as file:
                file.write_table(table.cast(schema))
    with open_source("minari:x-v0") as source:
        for name, values in (
            ("infos/deep/er/m", [e.infos["deep"]["er"]["m"] for e in made]),
            ("infos/deep/n", [e.infos["deep"]["n"] for e in made]),
            ("infos/a_b", [e.infos["a_b"] for e in made]),
        ):
            wanted = np.concatenate([rows[:-1] for rows in values])
            np.testing.assert_array_equal(source.read(name, 0, source.spec.steps), wanted)
    space = spaces.Dict({"a/b": BOX, "a_b": BOX})
    parts = {name: rng.normal(size=(steps + 1, 3)) for name in ("a/b", "a_b")}
    if data_format != "hdf5":  # there a/b is a group
        episode = recorded(parts, np.zeros((steps, 2), np.float32), steps=steps)
        create("y-v0", [episode], observation_space=space, data_format=data_format)
        with open_source("minari:y-v0") as source:
            assert "observations/a_b_2" in str(source.info.attributes["warnings"])
            for name, of in (("a_b", "a_b"), ("a_b_2", "a/b")):
                found = source.read(f"observations/{name}", 0, steps)
                np.testing.assert_array_equal(found, parts[of][:-1])
    monkeypatch.setattr("gear_offline.data.sources.minari.MAX_EPISODE_BYTES", 100)
    refused("minari:x-v0", "SOURCE_UNSAFE", "an episode of")


def test_ids_and_environments() -> None:
    for invalid in ("../../etc-v0", "x", "a//b-v0", "a/../b-v0", "/a-v0"):
        refused(f"minari:{invalid}", "SOURCE_READ")
    error = refused("minari:mujoco/hopper/medium-v0", "SOURCE_READ")
    assert "minari download mujoco/hopper/medium-v0" in error.remedy
    create("x-v0", plain_episodes(2), env="Hopper-v5")
    with open_source("minari:x-v0") as source:
        assert source.info.environment_id == "Hopper-v5"


@pytest.mark.parametrize("with_eval", [False, True])
def test_data_are_played_as_minari_recovers_their_environment(
    with_eval: bool, tmp_path: Path
) -> None:
    def make(**options: Any) -> Any:
        plain = gymnasium.make("Pendulum-v1", render_mode="rgb_array", **options)
        return gymnasium.wrappers.ClipReward(plain, -8.0, -0.1)

    env, path = make(g=1.0, max_episode_steps=7), tmp_path / "x.hdf5"
    rows = [np.zeros((n, m), np.float32) for n, m in ((5, 3), (4, 1))]
    how = {"env": env, "ref_min_score": -60.0, "ref_max_score": -5.0}
    how |= {"eval_env": make(g=2.0, max_episode_steps=9)} if with_eval else {}
    spaces_of = {"observation_space": env.observation_space, "action_space": env.action_space}
    create("p-v0", [recorded(*rows, steps=4)], **how, **spaces_of)
    convert("minari:p-v0", tmp_path / "d", quiet=True)
    dataset = open_dataset(tmp_path / "d")
    convert(export_hdf5(dataset, path, quiet=True), tmp_path / "again", quiet=True)
    again = open_dataset(tmp_path / "again").manifest.environment
    assert (again.id, again.options) == (dataset.environment_id, dataset.environment_options)
    resolved, _ = resolve(tiny_recipe(dataset.path), dataset, quiet=True)
    assert resolve(resolved, dataset, quiet=True)[0] == resolved

    theirs, returns = minari.load_dataset("p-v0"), []
    recovered, action = theirs.recover_environment(eval_env=True), np.full(1, 0.4, np.float32)
    for episode in range(2):
        recovered.reset(seed=resolved.evaluate.seed + episode)
        steps = [recovered.step(action) for _ in range(9 if with_eval else 7)]
        assert [step[3] for step in steps].index(True) == len(steps) - 1
        returns.append(sum(float(step[1]) for step in steps))
    (task,) = tasks_of(resolved.replace({"evaluate.episodes": 2, "evaluate.targets": 0}))
    report = evaluate_tasks(lambda _: Constant(action), [task])
    assert report.targets[0].returns == pytest.approx(returns)
    score = minari.get_normalized_score(theirs, np.array(np.mean(returns)))
    assert report.normalized_score == pytest.approx(100 * float(score))


@pytest.mark.parametrize(
    ("entry_point", "kwargs"),
    [
        ("stranger:Wrapper", {}),
        ("subprocess:Popen", {"args": "true"}),
        ("gymnasium.wrappers.rendering:RecordVideo", {"video_folder": "v"}),
        ("gymnasium.wrappers:vector", {}),
        ("gymnasium.wrappers.transform_reward:TransformReward", None),
    ],
)
def test_nothing_that_data_alone_name_is_imported_or_run(
    entry_point: str, kwargs: Any, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stranger.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    env = gymnasium.make("Pendulum-v1")
    spaces_of = {"observation_space": env.observation_space, "action_space": env.action_space}
    rows = [np.zeros((n, m), np.float32) for n, m in ((5, 3), (4, 1))]
    create("p-v0", [recorded(*rows, steps=4)], env=env, **spaces_of)
    file = root / "p-v0" / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    wrapper = {"name": "Own", "entry_point": entry_point, "kwargs": kwargs}
    spec = json.loads(metadata["env_spec"]) | {"additional_wrappers": [wrapper]}
    file.write_text(json.dumps(metadata | {"env_spec": json.dumps(spec)}))
    convert("minari:p-v0", tmp_path / "d", quiet=True)
    dataset = open_dataset(tmp_path / "d")
    with one_error("ENVIRONMENT", "(Own .* cannot be made anew|none of the plain ones)"):
        resolve(tiny_recipe(dataset.path, "evaluate.environment=Pendulum-v1"), dataset)
    assert resolve(tiny_recipe(dataset.path), dataset)[0].evaluate.environment is None
    bare = tiny_recipe(dataset.path, "evaluate.environment_options={}")
    assert resolve(bare, dataset)[0].evaluate.environment == "Pendulum-v1"
    assert "stranger" not in sys.modules and not (tmp_path / "v").exists()


def test_episodes_are_decoded_again_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    create("x-v0", episodes := plain_episodes(40))
    monkeypatch.setattr("gear_offline.data.sources.minari.KEPT_BYTES", 1000)
    wanted = np.concatenate([np.asarray(e.observations)[1:] for e in episodes])
    with open_source("minari:x-v0") as source:
        for start, stop in [(0, len(wanted)), (7, 50), (3, 4)]:
            rows = source.read("next_observations", start, stop)
            assert rows.tobytes() == wanted[start:stop].tobytes()


@pytest.mark.parametrize("data_format", FORMATS)
def test_totals_must_agree(root: Path, data_format: str) -> None:
    create("x-v0", plain_episodes(3), data_format=data_format)
    path = root / "x-v0/data/metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_steps": 10_000}))
    refused("minari:x-v0", "SOURCE_LAYOUT")


def test_unusable_metadata(root: Path) -> None:
    create("x-v0", plain_episodes(2))
    file = root / "x-v0/data/metadata.json"
    good = json.loads(file.read_text())
    for fields in (
        {"data_format": "zarr"},
        {"total_steps": "many"},
        {"observation_space": '{"type": "Graph"}'},
        {"observation_space": None, "env_spec": '{"id": "stranger:Env-v0"}'},
        {"action_space": "{"},
    ):
        file.write_text(json.dumps(good | fields))
        with pytest.raises(GearError) as caught:
            open_source("minari:x-v0")
        assert caught.value.code in ("SOURCE_READ", "SOURCE_LAYOUT")
    for text in ("", "[]", "[" * 100_000):
        file.write_text(text)
        refused("minari:x-v0", "SOURCE_READ")
    file.unlink()
    refused(root / "x-v0", "SOURCE_READ")
    os.mkfifo(file)
    refused("minari:x-v0", "SOURCE_READ")


def test_damaged_hdf5(root: Path) -> None:
    create("x-v0", plain_episodes(3))
    path = root / "x-v0/data/main_data.hdf5"
    with h5py.File(path, "r+") as file:
        saved = file["episode_1/rewards"][:]
        del file["episode_1/rewards"]
    refused("minari:x-v0", "SOURCE_READ")
    for rewards in (np.zeros(saved.size + 1), saved.astype(np.float32)):
        with h5py.File(path, "r+") as file:
            file.pop("episode_1/rewards", None)
            file["episode_1/rewards"] = rewards
        refused("minari:x-v0", "SOURCE_LAYOUT")
    with h5py.File(path, "r+") as file:
        del file["episode_1/rewards"]
        made = file.create_dataset("episode_1/rewards", data=saved, chunks=(saved.size,))
        made.id.write_direct_chunk((0,), b"\0")
    refused("minari:x-v0", "SOURCE_READ")
    with h5py.File(path, "r+") as file:
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = h5py.ExternalLink("/etc/other.h5", "x")
    refused("minari:x-v0", "SOURCE_UNSAFE")


def test_observations_that_are_text_are_refused(tmp_path: Path) -> None:
    (episode,) = plain_episodes(1)
    texts = ["look"] * len(episode.observations)
    space = spaces.Text(10)
    create("family/text-v0", [replace(episode, observations=texts)], observation_space=space)
    with one_error("COLUMN", "there are no observations"):
        convert("minari:family/text-v0", tmp_path / "d", quiet=True)
    convert("minari:family/text-v0", tmp_path / "d", columns=["actions"], quiet=True)
