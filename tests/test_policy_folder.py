"""A policy folder acts as its run does, without it; plain transformers reads its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import DecisionTransformerModel

import gear_offline as go
from gear_offline.cli.main import main
from gear_offline.models.policy import Policy
from tests.checkpoint_support import write_run
from tests.model_support import STATES, make
from tests.support import failing_code, one_error

FILES = ["README.md", "config.json", "model.safetensors", "policy.json"]
FRAME = (36, 36)
FRAMES = {"state_dim": FRAME[0] * FRAME[1], "frame_shape": FRAME, "frame_stack": 2}


def act(policy: Policy, steps: int = 8) -> np.ndarray[Any, Any]:
    """Return the actions of an episode of random observations, longer than the context."""
    generator, actions = np.random.default_rng(0), []
    policy.reset(5.0)
    for _ in range(steps):
        seen: Any = generator.normal(size=(1, policy.state_dim))
        if policy.frame_shape:
            seen = generator.integers(0, 256, (1, *FRAME), np.uint8)
        actions.append(policy.act(seen)[0])
        policy.observe_reward([0.5])
    return np.array(actions)


@pytest.mark.parametrize("kind", ["normalised", "discrete", "frames"])
def test_a_folder_acts_as_the_policy_that_was_saved(kind: str, tmp_path: Path) -> None:
    generator, normalised = np.random.default_rng(1), kind == "normalised"
    policy = Policy(
        make(discrete=not normalised, **(FRAMES if kind == "frames" else {})),
        state_mean=generator.normal(size=STATES) if normalised else None,
        state_std=generator.random(STATES) if normalised else None,
        returns_scale=1 / 3,
        context_length=4,
    )
    folder = policy.save_pretrained(tmp_path / "policy")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    loaded = go.load_policy(str(folder), device="cpu")
    np.testing.assert_array_equal(act(loaded), act(policy))
    released = DecisionTransformerModel.from_pretrained(folder)
    for name, weight in released.state_dict().items():
        torch.testing.assert_close(weight, policy.model.state_dict()[name], rtol=0, atol=0)
    written = json.loads((folder / "policy.json").read_text())
    assert written["actions"] == ("continuous" if normalised else "discrete")
    assert written["action_bounds"] == ([-1, 1] if normalised else None)


def test_a_run_becomes_a_folder_that_plays_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = write_run(tmp_path / "pend-s0"), tmp_path / "pend"
    expected = go.evaluate(run, device="cpu", quiet=True).to_json()
    assert main(["export-policy", str(run), str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    shutil.rmtree(run)
    policy = go.load_policy(folder, device="cpu")
    facts = policy.facts
    assert (facts.name, facts.environment, facts.step) == ("pend-s0", "Pendulum-v1", 20)
    assert facts.targets == (-200, -900)
    assert [one.mean_return for one in facts.achieved] == [t["return"] for t in expected["targets"]]
    policy.reset()
    assert policy.targets.tolist() == [-200]
    with one_error("USAGE", "knows no return"):
        Policy(
            policy.model, state_mean=None, state_std=None, returns_scale=1, context_length=1
        ).reset()

    before = sorted(folder.iterdir())
    played = go.evaluate(folder, episodes=2, seed=3, device="cpu", quiet=True).to_json()
    timing = {"seconds": 0, "versions": {}}
    assert {**played, **timing, "environments": 2} == {**expected, **timing, "environments": 2}
    assert sorted(folder.iterdir()) == before, "the folder stays as it is"
    assert failing_code(lambda: go.evaluate(folder, checkpoint="best")) == "USAGE"

    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    card = yaml.safe_load(metadata)
    (result,) = card["model-index"][0]["results"]
    best = max(target["return"] for target in expected["targets"])
    assert result["metrics"][0]["value"] == pytest.approx(best, abs=1e-4)
    assert result["dataset"]["name"] == "Pendulum-v1" and "Pendulum-v1" in card["tags"]
    assert "| -200 |" in text and 'go.load_policy("' in text


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    policy = go.load_policy(write_run(tmp_path / "run"), device="cpu")
    folder = policy.save(tmp_path / "policy")
    assert failing_code(lambda: policy.save(folder)) == "OUTPUT_EXISTS"
    assert go.export_policy(policy, folder, overwrite=True) == folder
    (folder / "mine").write_text("")
    assert failing_code(lambda: policy.save(folder, overwrite=True)) == "OUTPUT_EXISTS"
    assert failing_code(lambda: go.load_policy(folder, "hop")) == "RECIPE"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("policy.json", '"returns_scale":50.0', '"returns_scale":-1.0'),
        ("policy.json", '"format_version":1', '"format_version":2'),
        ("policy.json", '"targets"', '"__import__"'),
        ("policy.json", '"context_length":4', '"context_length":"4"'),
        ("config.json", "{", "{ "),
        ("model.safetensors", "format", "FORMAT"),
        ("model.safetensors", None, None),
    ],
)
def test_damage_is_one_error(file: str, old: str | None, new: str, tmp_path: Path) -> None:
    policy = go.load_policy(write_run(tmp_path / "run"), device="cpu")
    path = policy.save(tmp_path / "policy") / file
    if old is None:
        path.unlink()
    else:
        content = (
            path.read_bytes().replace(b": ", b":") if file == "policy.json" else path.read_bytes()
        )
        assert old.encode() in content
        path.write_bytes(content.replace(old.encode(), new.encode(), 1))
    with one_error("RUN_DAMAGED", "the policy is damaged"):
        go.load_policy(path.parent)


def test_a_module_that_only_a_folder_names_is_not_imported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", environment="this:Pendulum-v1")
    folder = go.load_policy(run, device="cpu").save(tmp_path / "policy")
    with one_error("ENVIRONMENT"):
        go.evaluate(folder, quiet=True)
