"""Atari through Gymnasium's wrappers: collect, convert, train, evaluate; a tiny stand-in first."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import pytest

import gear_offline.export as writer_module
from gear_offline.collect import collect
from gear_offline.config.recipe import load_recipe
from gear_offline.convert import convert
from gear_offline.dataset.dataset import open_dataset
from gear_offline.errors import UnavailableError
from gear_offline.evaluation.atari import is_atari
from gear_offline.evaluation.environment_ids import unregistered
from gear_offline.evaluation.episode_runner import make_environment, space_sizes
from gear_offline.runs.preparation import prepare_one
from gear_offline.runs.trainer import train
from tests.image_support import ENVIRONMENT, SIZE, STEP_LIMIT, BandEnvironment, register_environment

needs_atari = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ale_py", "cv2")),
    reason="pip install 'gear-offline[atari]'",
)


def test_frames_are_recorded_once_in_chunks_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_environment()
    monkeypatch.setattr(writer_module, "CHUNK_BYTES", 5 * SIZE * SIZE)
    report = collect(ENVIRONMENT, tmp_path / "a.hdf5", steps=30, environments=2, quiet=True)
    with h5py.File(tmp_path / "a.hdf5") as file:
        frames = file["observations"]
        assert frames.dtype == np.uint8 and frames.shape == (report.steps, SIZE, SIZE)
        assert frames.chunks == (5, SIZE, SIZE) and frames.compression == "gzip"
        assert "next_observations" not in file
        seeds, actions = file["metadata/episode_reset_seed"][:], file["actions"][:]
        stored = frames[:]
    for number, seed in enumerate(seeds.tolist()):  # played again
        environment = BandEnvironment()
        frame, _ = environment.reset(seed=seed)
        for step in range(STEP_LIMIT):
            row = number * STEP_LIMIT + step
            assert np.array_equal(stored[row], frame)
            frame, *_ = environment.step(actions[row])
    convert(str(tmp_path / "a.hdf5"), tmp_path / "data", quiet=True)
    dataset = open_dataset(tmp_path / "data")
    assert np.array_equal(dataset.column("observations"), stored)
    assert dataset.environment_id == ENVIRONMENT


def test_without_ale_py_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_atari("ALE/Pong-v5") and not is_atari("Hopper-v5")
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(UnavailableError, match="Atari games need ale-py") as caught:
        make_environment("ALE/Pong-v5")
    assert caught.value.code == "ENVIRONMENT_PACKAGE"
    assert "gear-offline[atari]" in caught.value.remedy
    assert unregistered("ALE/NoGame-v5") == "", "nobody can say"


@needs_atari
def test_games_that_do_not_exist_are_named_before_any_work() -> None:
    assert unregistered("ALE/Pong-v5") == ""
    assert "ALE/NoGame-v5" in unregistered("ALE/NoGame-v5")


def test_without_opencv_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py")

    def refuse(*_: object, **__: object) -> None:
        raise gymnasium.error.DependencyNotInstalled("opencv is not installed")

    monkeypatch.setattr(gymnasium.wrappers, "AtariPreprocessing", refuse)
    with pytest.raises(UnavailableError, match="opencv") as caught:
        make_environment("ALE/Pong-v5")
    assert "gear-offline[atari]" in caught.value.remedy


@needs_atari
def test_games_are_preprocessed_as_usual() -> None:
    environment = make_environment("ALE/Pong-v5")
    assert space_sizes(environment) == (84 * 84, 6, True)
    assert environment.spec is not None and environment.spec.max_episode_steps == 27_000
    frame, _ = environment.reset(seed=3)
    assert frame.shape == (84, 84) and frame.dtype == np.uint8 and frame.max() > 100
    following, _, _, _, facts = environment.step(0)
    assert facts["episode_frame_number"] % 4 == facts["frame_number"] % 4
    again, _ = environment.reset(seed=3)
    assert np.array_equal(frame, again) and following.shape == frame.shape
    environment.close()


@needs_atari
def test_pong_from_the_game_to_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    # what the recipe would collect in eight games at once
    file = tmp_path / "data" / "atari-pong-random.hdf5"
    collect("ALE/Pong-v5", file, steps=300, environments=1, quiet=True)
    recipe = load_recipe(
        "atari-pong",
        [
            "data.collect.steps=300",
            "loader.batch_size=4",
            "loader.context_length=3",
            "model.layers=1",
            "model.hidden_size=16",
            "optimizer.warmup_steps=1",
            "train.steps=3",
            "train.device=cpu",
            "train.threads=1",
            "train.log_every=1",
            "train.tensorboard=false",
            "evaluate.episodes=1",
        ],
    )
    dataset = prepare_one(recipe, quiet=True)
    assert dataset.spec["observations"].shape == (84, 84)
    assert dataset.environment_id == "ALE/Pong-v5"
    run = train(recipe, out=tmp_path / "run", quiet=True)
    assert run is not None
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert '"evaluation_last"' in summary and "-21" in summary
