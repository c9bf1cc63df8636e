"""Names of environments without a version: one line says which version is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from gear_offline.collect import collect
from gear_offline.dataset.dataset import open_dataset
from gear_offline.evaluation.environment_ids import say_version, versioned_id
from gear_offline.evaluation.evaluate import evaluate
from gear_offline.runs.preparation import resolve
from gear_offline.runs.trainer import train
from gear_offline.sources import open_source
from tests.support import failing_code, make_dataset
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


def test_what_is_recorded_is_the_environment_that_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, policy = tmp_path / "x.hdf5", tmp_path / "policy.safetensors"
    report = collect("CartPole", out, steps=30, quiet=True)
    with open_source(out) as source:
        assert source.info.environment_id == report.environment_id == "CartPole-v1"
    named, plain = out.read_bytes(), tmp_path / "plain.hdf5"
    collect("CartPole-v1", plain, steps=30, quiet=True)
    assert plain.read_bytes() == named
    report = collect("gymnasium:CartPole", out, steps=30, overwrite=True, quiet=True)
    assert report.environment_id == "gymnasium:CartPole-v1"

    options: dict[str, Any] = {
        "policy": "ars",
        "train_steps": 50,
        "save_policy": policy,
        "overwrite": True,
    }
    collect("CartPole", out, steps=30, quiet=True, **options)
    for name in ("CartPole", "CartPole-v1"):
        collect(name, out, policy=policy, steps=30, overwrite=True, quiet=True)
    code = failing_code(lambda: collect("CartPole-v0", tmp_path / "0", policy=policy, quiet=True))
    assert code == "POLICY_ENVIRONMENT"
    monkeypatch.setattr("gear_offline.collect.environment.versioned_id", lambda name: name)
    collect("CartPole", out, steps=30, quiet=True, **options)  # as files were before
    monkeypatch.undo()
    collect("CartPole", out, policy=policy, steps=30, overwrite=True, quiet=True)


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


@pytest.mark.parametrize("name", ["Hopper-v4", "", "no id!", "a:b:c", "Nothing", "a/b"])
def test_any_other_text_stays(name: str) -> None:
    assert versioned_id(name) == name


def test_names_with_a_module_are_understood(capfd: pytest.CaptureFixture[str]) -> None:
    say_version("gymnasium:CartPole", quiet=False)
    assert capfd.readouterr().err == f"{SAID.format('gymnasium:CartPole', 'CartPole-v1')}\n"
