"""Names of environments without a version: one line says which version is taken."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from gear_offline.collect import collect
from gear_offline.dataset import open_dataset
from gear_offline.environment_ids import say_version
from gear_offline.evaluate import evaluate
from gear_offline.preparation import resolve
from gear_offline.trainer import train
from tests.support import make_dataset
from tests.training_support import TinyEnvironment, tiny_recipe

SAID = "{} names no version: the newest one here is taken, {}"


def lines_about_versions(said: str) -> list[str]:
    """Return the lines that speak of a version, Gymnasium's included."""
    return [line for line in said.splitlines() if "version" in line]


@pytest.mark.parametrize("processes", [1, 2])
def test_collect_says_the_version_once(
    processes: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.hdf5"
    collect("CartPole", out, steps=300, environments=3, processes=processes)
    assert lines_about_versions(capfd.readouterr().err) == [SAID.format("CartPole", "CartPole-v1")]
    collect("CartPole-v1", out, steps=30, overwrite=True)
    assert lines_about_versions(capfd.readouterr().err) == []
    collect("CartPole", out, steps=30, overwrite=True, quiet=True)
    assert capfd.readouterr().err == ""


def test_training_and_evaluating_say_it_once_too(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_reports: None,
) -> None:
    for version in (2, 10):
        name = f"GearOfflineVersions-v{version}"
        spec = EnvSpec(name, entry_point=lambda **_: TinyEnvironment(), max_episode_steps=6)
        monkeypatch.setitem(gymnasium.registry, name, spec)
    said = [SAID.format("GearOfflineVersions", "GearOfflineVersions-v10")]
    data = make_dataset(tmp_path / "data", [4, 3], state_dim=3, action_dim=2).path
    recipe = tiny_recipe(data, "evaluate.environment=GearOfflineVersions", "train.steps=4")
    resolve(recipe, open_dataset(data), quiet=False)
    assert lines_about_versions(capfd.readouterr().err) == said
    train(recipe, out=tmp_path / "run", quiet=True)
    assert lines_about_versions(capfd.readouterr().err) == []
    evaluate(tmp_path / "run")
    assert lines_about_versions(capfd.readouterr().err) == said


def test_names_with_a_module_are_understood(capfd: pytest.CaptureFixture[str]) -> None:
    say_version("gymnasium:CartPole", quiet=False)
    assert capfd.readouterr().err == f"{SAID.format('gymnasium:CartPole', 'CartPole-v1')}\n"
