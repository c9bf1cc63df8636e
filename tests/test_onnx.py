"""Exported policies act as `Policy` does, over whole episodes."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from gear_offline import export_policy
from gear_offline.cli.main import main
from gear_offline.errors import InputError, UnavailableError
from gear_offline.models.policy import Policy
from tests.model_support import ACTIONS, STATES, make

STEPS, COUNT, FRAME, STACK = 60, 3, (36, 36), 2  # the model knows timesteps up to 49

MODELS: dict[str, dict[str, Any]] = {
    "normalised": {},
    "one step": {"discrete": True},
    "goals": {"goals": True},
    "frames": {
        "discrete": True,
        "state_dim": FRAME[0] * FRAME[1],
        "frame_shape": FRAME,
        "frame_stack": STACK,
    },
}


def policy_of(name: str) -> Policy:
    normalised = name in ("normalised", "goals")
    return Policy(
        make(**MODELS[name]),
        state_mean=np.linspace(-1.0, 1.0, STATES) if normalised else None,
        state_std=np.linspace(0.5, 2.0, STATES) if normalised else None,
        returns_scale=10.0,
        context_length=1 if name == "one step" else 4,
    )


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


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
