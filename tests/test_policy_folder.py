"""A policy folder acts as its run does, without it; plain transformers reads its weights."""

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

FRAME = (36, 36)
FRAMES = {"state_dim": FRAME[0] * FRAME[1], "frame_shape": FRAME, "frame_stack": 2}


def act(policy: Policy) -> np.ndarray[Any, Any]:
    """Return the actions of an episode of random observations, longer than the context."""
    generator, actions = np.random.default_rng(0), []
    policy.reset(5.0)
    for _ in range(8):
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
    loaded = go.load_policy(str(folder), device="cpu")
    np.testing.assert_array_equal(act(loaded), act(policy))
    with one_error("USAGE", "knows no return"):
        loaded.reset()
    released = DecisionTransformerModel.from_pretrained(folder)
    for name, weight in released.state_dict().items():
        torch.testing.assert_close(weight, policy.model.state_dict()[name], rtol=0, atol=0)
    written = json.loads((folder / "policy.json").read_text())
    assert written["actions"] == ("continuous" if normalised else "discrete")
    assert written["action_bounds"] == ([-1, 1] if normalised else None)


def test_a_run_becomes_a_folder_that_plays_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = write_run(tmp_path / "pend-s0"), tmp_path / "pend"
    expected = go.evaluate(run, device="cpu", quiet=True).to_json()
    assert main(["export-policy", str(run), str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    shutil.rmtree(run)
    policy = go.load_policy(folder, device="cpu")
    facts = policy.facts
    assert (facts.name, facts.environment, facts.step) == ("pend-s0", "Pendulum-v1", 20)
    assert [one.mean_return for one in facts.achieved] == [t["return"] for t in expected["targets"]]
    policy.reset()
    assert policy.targets.tolist() == [-200]

    files = ["README.md", "config.json", "model.safetensors", "policy.json"]
    played = go.evaluate(folder, episodes=2, seed=3, device="cpu", quiet=True).to_json()
    assert played["targets"] == expected["targets"]
    assert sorted(path.name for path in folder.iterdir()) == files, "nothing is written there"
    assert failing_code(lambda: go.evaluate(folder, checkpoint="best")) == "USAGE"

    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    (result,) = yaml.safe_load(metadata)["model-index"][0]["results"]
    assert result["metrics"][0] == {"type": "mean_reward", "value": expected["return"]}
    assert result["dataset"]["name"] == "Pendulum-v1" and "| -200 |" in text


def test_only_another_policy_folder_is_replaced(tmp_path: Path) -> None:
    policy = go.load_policy(write_run(tmp_path / "run"), device="cpu")
    folder = policy.save(tmp_path / "policy")
    assert failing_code(lambda: policy.save(folder)) == "OUTPUT_EXISTS"
    assert go.export_policy(policy, folder, overwrite=True) == folder
    (folder / "mine").write_text("")
    assert failing_code(lambda: policy.save(folder, overwrite=True)) == "OUTPUT_EXISTS"
    assert failing_code(lambda: go.load_policy(folder, "hop")) == "RECIPE"


def test_damage_is_one_error(tmp_path: Path) -> None:
    policy = go.load_policy(write_run(tmp_path / "run"), device="cpu")
    changes: list[tuple[str, str, str]] = [
        ("policy.json", '"returns_scale": 50.0', '"returns_scale": -1.0'),
        ("policy.json", '"format_version": 1', '"format_version": 2'),
        ("policy.json", '"targets"', '"__import__"'),
        ("policy.json", '"context_length": 4', '"context_length": "4"'),
        ("config.json", "{", "{ "),
        ("model.safetensors", "format", "FORMAT"),
        ("model.safetensors", "", ""),
    ]
    for number, (file, old, new) in enumerate(changes):
        path = policy.save(tmp_path / str(number)) / file
        content = path.read_bytes()
        assert old.encode() in content
        path.write_bytes(content.replace(old.encode(), new.encode(), 1))
        if not old:
            path.unlink()
        with one_error("RUN_DAMAGED", "the policy is damaged"):
            go.load_policy(path.parent)


def test_what_others_wrote_steers_nothing(tmp_path: Path) -> None:
    """Neither a module that only a folder names is imported, nor is a terminal told what to do."""
    run = write_run(tmp_path / "run\x1b[2J", environment="this:Pendulum-v1")
    folder = go.load_policy(run, device="cpu").save(tmp_path / "policy")
    assert "\x1b" not in go.load_policy(folder, device="cpu").facts.name
    with one_error("ENVIRONMENT"):
        go.evaluate(folder, quiet=True)
