"""A policy folder and an ONNX file act as the run does, without it; transformers reads weights."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from transformers import DecisionTransformerModel

import gear_offline as go
from gear_offline import export_policy
from gear_offline.cli.main import main
from gear_offline.errors import InputError, UnavailableError
from gear_offline.models.policy import Policy
from tests.checkpoint_support import write_run
from tests.model_support import ACTIONS, STATES, make
from tests.support import Captured, Patch, failing_code, one_error

STEPS, COUNT, FRAME, STACK = 60, 3, (36, 36), 2  # the model knows timesteps up to 49
FRAMES = {"state_dim": FRAME[0] * FRAME[1], "frame_shape": FRAME, "frame_stack": STACK}
MODELS: dict[str, dict[str, Any]] = {
    "normalised": {},
    "one step": {"discrete": True},
    "goals": {"goals": True},
    "frames": {"discrete": True, **FRAMES},
}


def policy_of(name: str) -> Policy:
    normalised = name in ("normalised", "goals")
    return Policy(
        make(**MODELS[name]),
        state_mean=np.linspace(-1.0, 1.0, STATES) if normalised else None,
        state_std=np.linspace(0.5, 2.0, STATES) if normalised else None,
        returns_scale=10 / 3,
        context_length=1 if name == "one step" else 4,
    )


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


@pytest.mark.parametrize("kind", ["normalised", "one step", "frames"])
def test_a_folder_acts_as_the_policy_that_was_saved(kind: str, tmp_path: Path) -> None:
    policy, normalised = policy_of(kind), kind == "normalised"
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


def test_a_run_becomes_a_folder_that_plays_the_same(tmp_path: Path, capsys: Captured) -> None:
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


@pytest.mark.parametrize("name", MODELS)
def test_actions_equal_those_of_the_policy(name: str, tmp_path: Path) -> None:
    policy, generator = policy_of(name), np.random.default_rng(0)
    file = export_policy(policy, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(file)
    length = int(session.get_modelmeta().custom_metadata_map["context_length"])
    assert length == policy.context_length
    asked: Any = np.linspace(5.0, 50.0, COUNT)
    if name == "goals":
        asked = generator.normal(size=(COUNT, STATES)).astype(np.float32)
    policy.reset(np.arange(COUNT), asked)
    inputs = [each.name for each in session.get_inputs()]
    columns: dict[str, list[Any]] = {name: [] for name in inputs}
    stack = np.zeros((COUNT, STACK, *FRAME), np.uint8)
    for step in range(STEPS):
        seen: Any = generator.normal(size=(COUNT, STATES)).astype(np.float32)
        if name == "frames":
            frames = generator.integers(0, 256, (COUNT, *FRAME), np.uint8)
            stack = np.concatenate([stack[:, 1:], frames[:, None]], axis=1)
            expected, seen = policy.act(frames), stack
        else:
            expected = policy.act(seen)
        columns["observations"].append(seen)
        columns["actions"].append(generator.integers(0, 2, expected.shape).astype(expected.dtype))
        columns["goals" if name == "goals" else "returns_to_go"].append(asked.astype(np.float32))
        columns["timesteps"].append(np.full(COUNT, step))
        window = {key: np.stack(rows[-length:], axis=1) for key, rows in columns.items()}
        (action,) = session.run(["action"], window)
        assert action.dtype == expected.dtype
        np.testing.assert_allclose(action, expected, atol=1e-5, rtol=0)
        columns["actions"][-1] = expected
        rewards = generator.normal(size=COUNT)
        policy.observe_reward(rewards)
        asked = asked if name == "goals" else asked - rewards
    assert expected.shape == ((COUNT,) if policy.discrete else (COUNT, ACTIONS))


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "policy.onnx"
    file.write_text("mine")
    with pytest.raises(InputError, match="OUTPUT_EXISTS"):
        export_policy(policy_of("normalised"), file)
    assert main(["export-policy", str(tmp_path / "nothing"), str(tmp_path / "new.onnx")]) == 2
    assert file.read_text() == "mine"
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UnavailableError, match=r"gear-offline\[onnx\]"):
        export_policy(policy_of("normalised"), tmp_path / "other.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["policy.onnx"]
