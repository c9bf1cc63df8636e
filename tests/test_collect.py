"""`collect` end to end: files in D4RL's layout, of the asked quality, the same every time."""

import errno
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import gear_offline as go
from gear_offline.config.recipe import load_recipe
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.export import _Output
from gear_offline.data.sources import open_source
from gear_offline.evaluation.collect.collection import collect
from gear_offline.runs.data import prepare_one
from gear_offline.runs.loop import train_run
from tests.collect_environments import CLOCK, COUNTER, LIMIT, PUSH, length_of
from tests.image_support import ENVIRONMENT, SIZE, BandEnvironment, register_environment
from tests.image_support import STEP_LIMIT as FRAMES
from tests.support import Captured, Patch, one_error, run_python

needs_mujoco = pytest.mark.skipif(
    importlib.util.find_spec("mujoco") is None, reason="needs pip install 'gear-offline[mujoco]'"
)
QUIET: dict[str, Any] = {"quiet": True, "processes": 1}


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all datasets, by path, and the attributes."""
    with h5py.File(path) as file:
        names: list[str] = []
        file.visit(names.append)
        datasets = {name: file[name][()] for name in names if isinstance(file[name], h5py.Dataset)}
        return datasets, dict(file.attrs)


@needs_mujoco
def test_hopper_has_d4rls_layout(tmp_path: Path) -> None:
    out = tmp_path / "hopper.hdf5"
    report = collect("Hopper-v5", out, steps=300, seed=4, **QUIET)
    columns, attributes = read(out)
    n = report.steps
    shapes = {
        "observations": ((n, 11), "float32"),
        "next_observations": ((n, 11), "float32"),
        "actions": ((n, 3), "float32"),
        "rewards": ((n,), "float32"),
        "terminals": ((n,), "bool"),
        "timeouts": ((n,), "bool"),
        "infos/qpos": ((n, 6), "float32"),
        "infos/qvel": ((n, 6), "float32"),
    }
    for name, (shape, dtype) in shapes.items():
        assert (columns[name].shape, columns[name].dtype.name) == (shape, dtype), name
    others = set(columns) - set(shapes)
    assert others and all(name.startswith("metadata/") for name in others)
    # A Hopper's observation is its position without x, and its clipped velocity.
    position, velocity = columns["infos/qpos"][:, 1:], columns["infos/qvel"].clip(-10, 10)
    np.testing.assert_array_equal(columns["observations"], np.hstack([position, velocity]))
    ends = columns["terminals"] | columns["timeouts"]
    assert ends[-1] and ends.sum() == report.episodes
    assert attributes["env_id"] == "Hopper-v5"
    assert attributes["note"] == "collected locally; not D4RL data"
    assert attributes["gymnasium"] and attributes["mujoco"]
    assert attributes["seed"] == 4 and attributes["episodes"] == report.episodes
    returns = [r.sum(dtype=np.float64) for r in np.split(columns["rewards"], ends.nonzero()[0] + 1)]
    assert attributes["mean_return"] == pytest.approx(np.mean(returns[:-1]), abs=1e-9)
    (maker,) = json.loads(attributes["makers"])
    assert maker["name"] == "random" and maker["steps"] == n
    assert maker["max_return"] == pytest.approx(max(returns), abs=1e-9)


def test_the_d4rl_source_reads_it(tmp_path: Path) -> None:
    out = tmp_path / "counter.hdf5"
    report = collect("Counter-v0", out, steps=400, **QUIET)
    seeds = read(out)[0]["metadata/episode_reset_seed"]
    with open_source(out) as source:
        assert source.info.environment_id == "Counter-v0"
        assert source.spec.steps == report.steps >= 400
        assert source.spec.episodes == report.episodes == len(seeds)
        np.testing.assert_array_equal(
            source.episodes.lengths, [min(length_of(int(s)), LIMIT) for s in seeds]
        )
        expected = [length_of(int(s)) <= LIMIT for s in seeds]
        np.testing.assert_array_equal(source.terminated, expected)
        assert any(expected) and not all(expected)


def test_numbers_that_float32_merges_are_stored_as_they_are(
    tmp_path: Path, capfd: Captured
) -> None:
    file = collect(CLOCK, tmp_path / "x.hdf5", steps=2 * LIMIT, quiet=True).path
    assert "observations: stored as float64, because float32" in capfd.readouterr().err
    seen = np.tile(1.75e9 + np.cumsum([0.0, *[0.1] * (LIMIT - 1)]), 2)
    with h5py.File(file) as stored:
        np.testing.assert_allclose(stored["observations"][:, 0], seen, rtol=1e-15)
        assert stored["next_observations"].dtype == np.float64
        assert stored["rewards"].dtype == np.float32


def test_exact_steps_cut_the_last_episode_without_a_flag(tmp_path: Path) -> None:
    whole = collect(COUNTER, tmp_path / "a.hdf5", steps=100, **QUIET)
    steps = whole.steps - 1
    assert 100 <= whole.steps < 100 + LIMIT
    cut = collect(COUNTER, tmp_path / "b.hdf5", steps=steps, exact_steps=True, **QUIET)
    assert cut.steps == steps and cut.episodes == whole.episodes
    long, short = read(tmp_path / "a.hdf5")[0], read(tmp_path / "b.hdf5")[0]
    for name in ("observations", "next_observations", "actions", "rewards"):
        np.testing.assert_array_equal(short[name], long[name][:-1])
    assert not short["terminals"][-1] and not short["timeouts"][-1]


@pytest.mark.long
def test_qualities_are_what_they_say(tmp_path: Path) -> None:
    means: dict[str, float] = {}
    common: dict[str, Any] = {"policy": "ars", "train_steps": 6_000, "seed": 3, **QUIET}
    for quality in ("expert", "medium", "replay", "mixed"):
        out = tmp_path / f"{quality}.hdf5"
        report = collect(PUSH, out, quality=quality, steps=400, **common)
        means[quality] = report.mean_return
        assert report.train_steps >= 6_000
        columns, attributes = read(tmp_path / f"{quality}.hdf5")
        makers = json.loads(attributes["makers"])
        numbers = columns["metadata/episode_maker"]
        assert sorted(set(numbers.tolist())) == list(range(len(makers)))
        for number, maker in enumerate(makers):
            assert maker["episodes"] == (numbers == number).sum()
    assert means["expert"] > max(means["medium"], means["replay"], means["mixed"])
    mixed = json.loads(read(tmp_path / "mixed.hdf5")[1]["makers"])
    assert [m["name"] for m in mixed] == ["replay", "level:0.25", "level:0.5", "expert"]
    shares = np.array([m["steps"] for m in mixed]) / 400
    np.testing.assert_allclose(shares, [0.4, 0.15, 0.15, 0.3], atol=0.05)
    expert = read(tmp_path / "expert.hdf5")[0]
    np.testing.assert_array_equal(
        expert["metadata/policy/weight"], expert["metadata/makers/expert/weight"]
    )


@pytest.mark.usefixtures("forked_workers")
def test_training_and_recording_are_the_same_in_processes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "ars", "quality": "mixed", "train_steps": 1_500}
    options |= {"steps": 600, "action_noise": 0.1, "quiet": True}
    for processes in (1, 2):
        collect(PUSH, tmp_path / f"{processes}.hdf5", processes=processes, **options)
    assert (tmp_path / "1.hdf5").read_bytes() == (tmp_path / "2.hdf5").read_bytes()


def test_a_training_of_fewer_steps_than_asked_for_is_told(tmp_path: Path, capsys: Captured) -> None:
    common: dict[str, Any] = {"policy": "ars", "quality": "replay", "processes": 1}
    for steps, told in ((100, 0), (5_000, 1)):
        report = collect(PUSH, tmp_path / f"{steps}.hdf5", steps=steps, train_steps=300, **common)
        assert capsys.readouterr().err.count("in place of 5,000: training had no more") == told
    assert report.steps == report.train_steps < 5_000


def test_histories_are_what_each_learner_did_in_order(tmp_path: Path, capsys: Captured) -> None:
    options: dict[str, Any] = {"policy": "ars", "train_steps": 3_000, "seed": 3}
    report = collect(PUSH, tmp_path / "a.hdf5", histories=3, steps=900, **options)
    assert "trains 3 learners for 3,000 steps each" in capsys.readouterr().err
    assert report.train_steps >= 9_000 and report.steps >= 900
    go.convert(tmp_path / "a.hdf5", tmp_path / "a", quiet=True)
    data = go.open_dataset(tmp_path / "a")
    assert data.history_column == "learner" and data.histories is not None
    assert np.unique(data.histories).tolist() == [0, 1, 2]
    firsts = {data[e]["actions"].tobytes() for e in np.flatnonzero(np.diff(data.histories)) + 1}
    assert len(firsts) == 2  # each has random numbers of its own
    for number in range(3):
        returns = data.returns[data.histories == number]
        assert data.episodes.lengths[data.histories == number].sum() >= 300
        third = len(returns) // 3
        assert returns[-third:].mean() > returns[:third].mean()


@pytest.mark.parametrize(
    ("environment", "options", "remedy"),
    [
        (PUSH, {"policy": "random"}, "take another policy"),
        (PUSH, {"policy": "ars", "train_steps": 500}, "more train_steps"),
        ("CartPole-v1", {"policy": "q_learning", "histories": 1}, "more steps"),
    ],
)
def test_a_missed_gate_leaves_no_file(
    tmp_path: Path, environment: str, options: dict[str, Any], remedy: str
) -> None:
    with one_error("USAGE", rf"below the gate of 999;.* {remedy}"):
        collect(environment, tmp_path / "a.hdf5", steps=200, gate=999, **options, **QUIET)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(_Output, "error", OSError(errno.ENOSPC, "full"))
    with one_error("OUTPUT_WRITE"):
        collect(COUNTER, tmp_path / "a.hdf5", steps=20, **QUIET)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_refused_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "a.hdf5"
    out.write_bytes(b"mine")
    with one_error("OUTPUT_EXISTS"):
        collect("NoSuchEnvironment-v0", out, **QUIET)
    collect(COUNTER, out, steps=20, overwrite=True, **QUIET)
    check = h5py.is_hdf5(out)
    assert check


USAGE: list[dict[str, Any]] = [
    *({"steps": 0}, {"processes": 0}, {"seed": -1}, {"gate": math.nan}, {"quality": "medium"}),
    *({"action_noise": noise} for noise in (-0.1, math.nan, math.inf)),
    *({"histories": 2}, {"histories": 0, "policy": "ars"}),
    *({"action_noise": 0.1}, {"train_steps": 100}, {"policy": "play", "train_steps": 100}),
    *({"policy": "ars", "quality": "best"}, {"policy": "no-such-policy"}, {"policy": "sb3:ppo"}),
]


@pytest.mark.parametrize("options", USAGE)
def test_impossible_options_are_one_error(tmp_path: Path, options: dict[str, Any]) -> None:
    with one_error("USAGE"):
        collect(COUNTER, tmp_path / "a.hdf5", **{**QUIET, **options})
    assert list(tmp_path.iterdir()) == []


def test_noise_of_discrete_actions_is_a_probability(tmp_path: Path) -> None:
    how: dict[str, Any] = {"policy": "q_learning", "histories": 1, "steps": 5, **QUIET}
    with one_error("USAGE", "got 1.5.* probability .*give 0 to 1"):
        collect("CartPole-v1", tmp_path / "a.hdf5", action_noise=1.5, **how)
    assert list(tmp_path.iterdir()) == []
    collect("FrozenLake-v1", tmp_path / "a.hdf5", action_noise=1.0, **how)


@needs_mujoco
def test_nothing_is_printed_when_quiet(tmp_path: Path, capfd: Captured) -> None:
    collect("HalfCheetah-v5", tmp_path / "a.hdf5", steps=5, exact_steps=True, **QUIET)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    collect(PUSH, tmp_path / "b.hdf5", steps=5, processes=1)
    captured = capfd.readouterr()
    assert captured.out == "" and "record b.hdf5" in captured.err


def test_frames_are_recorded_once_in_chunks_of_rows(tmp_path: Path, monkeypatch: Patch) -> None:
    register_environment()
    monkeypatch.setattr("gear_offline.data.export.CHUNK_BYTES", 5 * SIZE * SIZE)
    report = collect(ENVIRONMENT, tmp_path / "a.hdf5", steps=30, **QUIET)
    with h5py.File(tmp_path / "a.hdf5") as file:
        frames = file["observations"]
        assert frames.dtype == np.uint8 and frames.shape == (report.steps, SIZE, SIZE)
        assert frames.chunks == (5, SIZE, SIZE) and "next_observations" not in file
        seeds, actions = file["metadata/episode_reset_seed"][:], file["actions"][:]
        stored = frames[:]
    for number, seed in enumerate(seeds.tolist()):  # played again
        environment = BandEnvironment()
        frame, _ = environment.reset(seed=seed)
        for row in range(number * FRAMES, (number + 1) * FRAMES):
            assert np.array_equal(stored[row], frame)
            frame, *_ = environment.step(actions[row])
    convert(str(tmp_path / "a.hdf5"), tmp_path / "data", quiet=True)
    assert np.array_equal(open_dataset(tmp_path / "data").column("observations"), stored)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ale_py", "cv2")),
    reason="pip install 'gear-offline[atari]'",
)
def test_pong_from_the_game_to_a_score(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(
        "atari-pong",
        {
            "data.collect.steps": 300, "loader.batch_size": 4, "loader.context_length": 3,
            "model.layers": 1, "model.hidden_size": 16, "train.steps": 3, "train.device": "cpu",
            "train.threads": 1, "train.log_every": 1, "train.trackers": [],
            "evaluate.episodes": 1, "evaluate.environment_options.max_episode_steps": 400,
        },
    )  # fmt: skip
    dataset = prepare_one(recipe, quiet=True)
    assert dataset.spec["observations"].shape == (84, 84)
    run = train_run(recipe, out=tmp_path / "run", quiet=True)
    summary = json.loads((run / "summary.json").read_text())
    assert -21.0 <= summary["evaluation_last"]["return"] < 0


def test_a_library_trains_a_policy_on_the_spot(tmp_path: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "stable_baselines3", None)
        with one_error("PACKAGE_MISSING", r"pip install 'gear-offline\[rl\]'"):
            collect(PUSH, tmp_path / "a.hdf5", policy="sb3:PPO", quiet=True)
    assert list(tmp_path.iterdir()) == []
    pytest.importorskip("stable_baselines3", reason="needs pip install 'gear-offline[rl]'")
    report = collect(
        PUSH, tmp_path / "a.hdf5", policy="sb3:PPO", train_steps=4_096, steps=100, quiet=True
    )
    assert report.steps >= 100 and report.makers[0].algorithm.startswith("stable-baselines3")
    with one_error("USAGE", "no algorithm"):
        collect(PUSH, tmp_path / "b.hdf5", policy="sb3:NOTHING", quiet=True)


def test_a_script_needs_no_guard_for_processes(tmp_path: Path) -> None:
    script = (
        "import sys; from gear_offline.evaluation.collect.collection import collect\n"
        "print(collect('CartPole-v1', sys.argv[1], steps=50, processes=2, quiet=True).steps)"
    )
    (tmp_path / "script.py").write_text(script)
    done = run_python(tmp_path / "script.py", tmp_path / "a.hdf5")
    assert int(done.stdout) >= 50 and done.stderr == ""
