"""Environments and policies that tests of playing and of evaluation share."""

import random
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from gear_offline.evaluation.rollout import (
    ActingPolicy,
    Environments,
    Episodes,
    play_together,
    turns,
)

Array = npt.NDArray[Any]


def play_episodes(policy: ActingPolicy, environments: Environments, **options: Any) -> Episodes:
    """The episodes of one policy, played to their ends; `options` as of `turns`."""
    played = play_together(environments, [turns(policy, environments, **options)])[0]
    if isinstance(played, Exception):
        raise played
    return played


class Counted(gymnasium.Env[Array, Array]):
    """An episode lasts `seed % 7 + 1` steps and pays the step's number; refuses what is wrong."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert seed is not None and seed >= 0, "every episode has its own seed"
        self.left, self.at = seed % 7 + 1, 0
        return np.array([seed, 0.0]), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        assert self.left > 0, "stepped after the end of an episode"
        assert self.action_space.contains(action), f"{action} is outside of the bounds"
        self.left, self.at = self.left - 1, self.at + 1
        return np.array([0.0, self.at]), float(self.at), self.left == 0, False, {}


class Endless(Counted):
    """Never ends."""

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        return np.zeros(2), 1.0, False, False, {}


class Broken(Counted):
    """Pays NaN on the last step."""

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        seen, reward, ended, cut, facts = super().step(action)
        return seen, np.nan if ended else reward, ended, cut, facts


class Blind(Counted):
    """Shows NaN after the first step."""

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        _, reward, ended, cut, facts = super().step(action)
        return np.full(2, np.nan), reward, ended, cut, facts


class Fragile(Counted):
    """Pays the actions' sum; breaks where the first one is large."""

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if action[0] > 0.5:
            raise RuntimeError("broken")
        seen, _, ended, cut, facts = super().step(action)
        return seen, float(action.sum()), ended, cut, facts


class Square(Counted):
    """Actions of two by two; pays their sum."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2, 2), np.float32)

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        seen, _, _, _, facts = super().step(action)
        return seen, float(action.sum()), True, False, facts


class Given(gymnasium.Env[Any, Any]):
    """Gives what a test says: one value in place of a right one, or raises it."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-0.1, 0.3, (2,), np.float64)
    said: ClassVar[dict[str, Any]] = {}

    def give(self, name: str, right: Any) -> Any:
        value = self.said.get(name, right)
        if isinstance(value, BaseException):
            raise value
        return value

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        right = self.give("first", np.zeros(3, np.float32)), self.give("info", {})
        return self.give("reset", right)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), repr(action)
        seen = self.give("seen", np.ones(3, np.float32))
        ends = self.give("terminated", False), self.give("truncated", False)
        return self.give("step", (seen, self.give("reward", 1.0), *ends, self.give("info", {})))

    def close(self) -> None:
        self.give("close", None)


class Drawing(Counted):
    """Draws from everything that a process has."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float64)

    def __init__(self) -> None:
        self.place = np.random.uniform() + random.random()
        self.wind = gymnasium.spaces.Box(-1.0, 1.0, (), np.float64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        gymnasium.Env.reset(self, seed=seed)
        self.left = 5 + random.randrange(9)
        return self.observation_space.sample(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        paid = self.place + random.gauss(0, 1) + np.random.uniform() + torch.randn(1).item()
        paid += self.action_space.sample().sum() + self.np_random.normal() + self.wind.sample()
        self.left -= 1
        return self.observation_space.sample(), paid + action[0], self.left == 0, False, {}


for made in (Counted, Endless, Broken, Blind, Fragile, Square, Drawing):
    entry = f"tests.evaluation_support:{made.__name__}"
    gymnasium.register(id=f"GearTest/{made.__name__}-v0", entry_point=entry)
gymnasium.register("GearTest/Given-v0", f"{__name__}:Given", max_episode_steps=3)


class Remembering:
    """Deterministic; its action depends on the observation, the target, past rewards and time."""

    def __init__(self, weights: Array, *, discrete: bool = False) -> None:
        self.weights, self.discrete = weights, discrete  # (S + 2, A)
        self.left: dict[int, float] = {}
        self.step: dict[int, int] = {}

    def reset(self, indices: Array, targets: Array) -> None:
        for index, target in zip(indices.tolist(), targets.tolist(), strict=True):
            self.left[index], self.step[index] = target, 0

    def one(self, observation: Array, left: float, step: int) -> Array:
        x = np.concatenate([observation, [left / 100.0, step / 10.0]])
        values = np.sin(x @ self.weights) * 2.0
        return np.asarray(values.argmax() if self.discrete else values)

    def act(self, observations: Array, indices: Array | None = None) -> Array:
        assert indices is not None, "the runner names the slots"
        rows = zip(observations, indices.tolist(), strict=True)
        return np.stack([self.one(o, self.left[i], self.step[i]) for o, i in rows])

    def observe_reward(self, rewards: Array, indices: Array | None = None) -> None:
        assert indices is not None, "the runner names the slots"
        for index, reward in zip(indices.tolist(), rewards.tolist(), strict=True):
            self.left[index] -= reward
            self.step[index] += 1


class Constant:
    """The same action always."""

    def __init__(self, action: Array) -> None:
        self.action = action

    def reset(self, indices: Array, targets: Array) -> None: ...

    def act(self, observations: Array, indices: Array | None = None) -> Array:
        return np.stack([self.action] * len(observations))

    def observe_reward(self, rewards: Array, indices: Array | None = None) -> None: ...
