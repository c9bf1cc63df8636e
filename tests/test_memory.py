"""Playing with memory: rewards in place of returns, windows over episodes, cached keys."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import gear_offline as go
from gear_offline.data.dataset.scores import RewardEdit
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.hugging_face import to_released
from tests.model_support import ACTIONS, STATES, inputs, make
from tests.support import one_error
from tests.test_policy import CONTEXT, make_policy

EDIT = RewardEdit(scale=0.5, shift=1.0)
LIMIT = 50  # timesteps that the model knows


def shift(rewards: Any) -> Any:
    """Return the reward before each of a window's steps, 0 before the first."""
    rows = [0.0, *np.asarray(rewards, np.float64).reshape(-1)[:-1]]
    return np.array(rows, np.float32)[:, None]


class Naive:
    """One environment whose window is lists; at each step all of it passes a plain model."""

    def __init__(self, model: DecisionTransformer, span: int = CONTEXT) -> None:
        self.model, self.span, self.rows = model, span, list[list[Any]]()

    def act(self, state: Any, timestep: int, asked: float = 0.0) -> Any:
        self.rows.append([state, np.zeros(ACTIONS), 0.0, asked, min(timestep, LIMIT - 1)])
        self.rows = self.rows[-self.span :]
        states, actions, rewards, returns, timesteps = (
            np.array(column, np.float32) for column in zip(*self.rows, strict=True)
        )
        is_asked = self.model.config.condition == "returns"
        window = {"states": states, "actions": actions, "timesteps": timesteps.astype(np.int64)}
        window["returns_to_go"] = returns[:, None] if is_asked else shift(rewards)
        plain = make(position=self.model.config.position).eval()
        plain.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            output = plain(**{n: torch.from_numpy(v)[None] for n, v in window.items()})
        return output.action_preds[0, -1].numpy()

    def observe(self, action: Any, reward: float) -> None:
        self.rows[-1][1:3] = action, reward


@pytest.mark.parametrize("padding", ["right", "left", "none"])
def test_the_reward_before_a_step_stands_for_its_return(padding: str) -> None:
    batch, order = inputs(), slice(None)
    if padding != "none":
        places = torch.arange(batch["timesteps"].shape[1])
        real = (places < 4) if padding == "right" else (places >= 3)
        batch = {name: values * real.view(1, -1, *[1] * (values.ndim - 2))
                 for name, values in batch.items()}  # fmt: skip
        order = slice(0, 4) if padding == "right" else slice(3, None)
    expected = dict(batch)
    rows = [shift(each[order]) for each in batch["rewards"].numpy()]
    expected["returns_to_go"] = torch.zeros_like(batch["rewards"])
    expected["returns_to_go"][:, order] = torch.from_numpy(np.array(rows))
    with torch.no_grad():
        found, plain = make(condition="rewards").eval(), make().eval()
        actions = [model(**each).action_preds[:, order]
                   for model, each in ((found, batch), (plain, expected))]  # fmt: skip
    torch.testing.assert_close(actions[0], actions[1], rtol=0, atol=0)
    with one_error("MODEL", "rewards and timesteps are all needed"):
        found(**{name: values for name, values in batch.items() if name != "rewards"})
    with one_error("MODEL", "reads no rewards"):
        to_released(found)


def test_a_policy_sees_what_its_actions_earned(tmp_path: Path) -> None:
    """As the data hold rewards, also of what was done in place of the model's action."""
    model, rng = make(condition="rewards").eval(), np.random.default_rng(0)
    raw: dict[str, Any] = {"state_mean": None, "state_std": None, "reward_edits": [EDIT]}
    folder = make_policy(model, **raw).save(tmp_path / "policy")
    policy, naive = go.load_policy(folder, device="cpu"), Naive(model)
    policy.reset()
    for step in range(3 * CONTEXT):
        seen, done, reward = rng.normal(size=STATES), rng.normal(size=ACTIONS), rng.normal()
        action = policy.act(seen[None])[0]
        np.testing.assert_allclose(action, naive.act(seen, step), atol=1e-5)
        policy.observe_reward([reward], actions=done[None])
        naive.observe(done, reward / 2 + 1)


@pytest.mark.long
def test_an_onnx_file_takes_rewards(tmp_path: Path) -> None:
    model, rng = make(condition="rewards").eval(), np.random.default_rng(0)
    policy = make_policy(model, state_mean=None, state_std=None)
    session = onnxruntime.InferenceSession(go.export_policy(policy, tmp_path / "policy.onnx"))
    window = {"observations": rng.normal(size=(1, 3, STATES)), "rewards": rng.normal(size=(1, 3)),
              "actions": rng.normal(size=(1, 3, ACTIONS))}  # fmt: skip
    window = {name: values.astype(np.float32) for name, values in window.items()}
    (found,) = session.run(["action"], window | {"timesteps": np.arange(3)[None]})
    naive = Naive(model)
    for step in range(3):
        expected = naive.act(window["observations"][0, step], step)
        naive.observe(window["actions"][0, step], window["rewards"][0, step])
    np.testing.assert_allclose(found[0], expected, atol=1e-5)


REFUSED = [
    ("model.kind=decoupled", "is for kind=decision_transformer"),
    ("loader.goals={future: 1.0}", "loader.goals exclude each other"),
    ("loader.condition=advantage", "model.condition=returns takes it"),
]


@pytest.mark.parametrize(("option", "reason"), REFUSED)
def test_options_that_rewards_exclude_are_named(option: str, reason: str) -> None:
    with one_error("RECIPE", reason):
        go.load_recipe("smoke", [option, "model.condition=rewards"])
