"""The batched policy against a plain loop over single environments."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.policy import Policy
from tests.model_support import ACTIONS, STATES, make, released_model
from tests.support import one_error

MEAN = np.linspace(-1.0, 1.0, STATES)
STD = np.linspace(0.5, 2.0, STATES)
CONTEXT = 4


def make_policy(model: DecisionTransformer | None = None, **changes: Any) -> Policy:
    options: dict[str, Any] = {"state_mean": MEAN, "state_std": STD, "context_length": CONTEXT}
    return Policy(model or make(), **{**options, "returns_scale": 10.0, **changes})


class PlainActor:
    """One environment, the released class, history in lists, no padding: the paper's loop."""

    def __init__(self, model: DecisionTransformer, target: Any, *, scale: float = 10.0) -> None:
        self.model, self.scale, self.goals = released_model(model), scale, model.goals
        self.asked = [(target - MEAN) / (STD + 1e-6) if self.goals else [target / scale]]
        self.limit = int(model.config.max_ep_len)
        self.states: list[Any] = []
        self.actions: list[Any] = []

    def act(self, observation: Any) -> Any:
        self.states.append((np.asarray(observation) - MEAN) / (STD + 1e-6))
        first = max(0, len(self.states) - CONTEXT)
        steps = range(first, len(self.states))

        def window(rows: list[Any]) -> torch.Tensor:
            return torch.tensor(np.asarray(rows[first:]), dtype=torch.float32)[None]

        with torch.no_grad():
            output = self.model(
                states=window(self.states),
                actions=window([*self.actions, np.zeros(ACTIONS)]),
                returns_to_go=window(self.asked),
                timesteps=torch.tensor([[min(step, self.limit - 1) for step in steps]]),
            )
        self.actions.append(output.action_preds[0, -1].numpy())
        return self.actions[-1]

    def observe_reward(self, reward: float) -> None:
        left = self.asked[-1]
        self.asked.append(left if self.goals else [left[0] - reward / self.scale])


@given(
    seed=st.integers(0, 100),
    resets=st.lists(st.integers(0, 8), max_size=3),
    goals=st.booleans(),
    acting=st.sampled_from([[0, 1, 2], [2, 0], [1]]),
)
@settings(max_examples=12, deadline=None)
def test_lock_step_equals_single_environments(
    seed: int, resets: list[int], goals: bool, acting: list[int]
) -> None:
    """Environments with their own targets and resets at any step, all or some, act as if alone."""
    rng = np.random.default_rng(seed)
    model = make(goals=goals)
    targets: Any = rng.normal(size=(3, STATES)) if goals else np.array([30.0, 10.0, -5.0])
    policy = make_policy(model)
    policy.reset(np.arange(3), targets)
    asked = policy.targets.copy()
    alone = [PlainActor(model, target) for target in targets]
    for step in range(9):
        if step in resets:
            target, place = targets[0] + 7.0, acting[step % len(acting)]
            policy.reset([place], target)
            alone[place] = PlainActor(model, target)
        shape = (len(acting), STATES)
        observations, rewards = rng.normal(size=shape), rng.normal(size=len(acting))
        found = policy.act(observations, indices=acting)
        actors = [alone[place] for place in acting]
        expected = [actor.act(o) for actor, o in zip(actors, observations, strict=True)]
        np.testing.assert_allclose(found, np.asarray(expected), rtol=0, atol=1e-5)
        policy.observe_reward(rewards, indices=acting)
        for actor, reward in zip(actors, rewards, strict=True):
            actor.observe_reward(float(reward))
    others = [place for place in range(3) if place not in acting]
    np.testing.assert_array_equal(policy.targets[others], asked[others])


def test_impossible_settings_are_refused() -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"returns_scale": 0.0}, "not positive"),
        ({"returns_scale": float("nan")}, "not positive"),
        ({"context_length": 0}, "less than 1"),
        ({"state_mean": None}, "belong together"),
        ({"state_std": np.ones(STATES + 1)}, "state_std has 6 elements"),
        ({"state_mean": np.full(STATES, np.nan)}, "state_mean"),
    ]
    for changes, message in settings:
        with one_error("MODEL", message):
            make_policy(**changes)


def test_wrong_use_is_refused() -> None:
    policy = make_policy()
    with pytest.raises(InputError, match="reset an environment"):
        policy.act(np.zeros((1, STATES)))
    with pytest.raises(InputError, match="negative"):
        policy.reset([-1], 0.0)
    policy.reset([0], 1.0)
    with pytest.raises(InputError, match="the model expects 5"):
        policy.act(np.zeros((1, STATES + 1)))
    policy.act(np.zeros((1, STATES)))
    with pytest.raises(InputError, match="twice"):
        policy.act(np.zeros((1, STATES)))
    with pytest.raises(InputError, match="among 1"):
        policy.observe_reward([1.0], indices=[1])
    policy.reset([], [])
    assert policy.environments == 1


def test_a_policy_of_one_environment_takes_a_number() -> None:
    policy = make_policy()
    for number in (3600, 200.5):
        policy.reset(number)
        assert policy.targets.tolist() == [number]
    policy.reset([0, 1], 5)
    with pytest.raises(InputError, match=r"policy\.reset\(numbers of environments, targets\)"):
        policy.reset(3600)


def test_model_is_left_in_evaluation_mode_and_acts_alike_each_time() -> None:
    model, acted = make(dropout=0.5).train(), []
    for policy in (make_policy(model), make_policy(model)):
        policy.reset([0], 3.0)
        acted.append(policy.act(np.ones((1, STATES))))
    assert not model.training
    np.testing.assert_array_equal(acted[0], acted[1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    """What is asked next would be NaN: discrete actions would be drawn from it unseen."""
    policy = make_policy()
    policy.reset([0, 1], 5.0)
    seen = np.zeros((2, MEAN.size))
    seen[1, 2] = value
    with one_error("MODEL", "observation 1 is NaN"):
        policy.act(seen)
    assert np.isfinite(policy.act(np.zeros((2, MEAN.size)))).all(), "nothing of it is remembered"
    if not np.isfinite(value):
        with one_error("MODEL", "reward 1 is"):
            policy.observe_reward([1.0, value])
    assert policy.targets.tolist() == [5.0, 5.0], "nothing of it is remembered"
