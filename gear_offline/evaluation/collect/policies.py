"""Policies that make data of a quality: random, linear, and an RL library's own.

``sb3:ALGORITHM`` or ``sbx:ALGORITHM``, e.g. ``sb3:PPO``, are trained on the spot by
Stable-Baselines3 or its JAX sister, SBX.  Saved models are not read: those of these libraries hold
pickles, which can run code.

Shape legend: S numbers in an observation, A in an action.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from gear_offline.config.problems import nearest
from gear_offline.core.system import torch_alone
from gear_offline.core.types import Array, Float64Array
from gear_offline.errors import InputError, package_needed
from gear_offline.evaluation.collect.record import EpisodePolicy
from gear_offline.evaluation.environments import Options, guard, make_environment

# Name before the colon: module and what pip calls it.
LIBRARIES = {"sb3": ("stable_baselines3", "stable-baselines3"), "sbx": ("sbx", "sbx-rl")}
NAMED = ("random", "ars", "q_learning", "play")
# Parts of a file and their shares of the steps.  Of a training, ``replay`` is its own rollouts,
# ``expert`` its best policy, others the one nearest to a share of the best one's return.
QUALITIES = {
    "random": {"random": 1.0},
    "medium": {"medium": 1.0},
    "expert": {"expert": 1.0},
    "replay": {"replay": 1.0},
    "medium-expert": {"medium": 0.5, "expert": 0.5},
    "mixed": {"replay": 0.4, "level:0.25": 0.15, "level:0.5": 0.15, "expert": 0.3},
}
LEVELS = {"expert": 1.0, "level:0.5": 0.5, "medium": 1 / 3, "level:0.25": 0.25}


def quality_parts(policy: str, quality: str | None) -> Mapping[str, float]:
    """Return the parts that a file has, and their shares of the steps; ``USAGE``."""
    library, _, algorithm = policy.partition(":")
    of_library = library in LIBRARIES and algorithm.isidentifier() and algorithm.isupper()
    if not (policy in NAMED or of_library):
        choices = ", ".join([*NAMED, *(f"{name}:ALGORITHM" for name in LIBRARIES)])
        guess = nearest(policy, NAMED, cutoff=0.6)
        remedy = f"did you mean {guess!r}?" if guess else "write an algorithm like sb3:PPO"
        problem = f"it must be one of {choices}, got {policy!r}"
        raise InputError("USAGE", problem, where="policy", remedy=remedy)
    if policy == "ars" and (quality or "expert") in QUALITIES:
        return QUALITIES[quality or "expert"]
    if policy == "ars" or quality is not None:
        problem = f"no quality {quality!r} with policy {policy!r}"
        remedy = f"leave it out, or use policy 'ars' with one of {', '.join(QUALITIES)}"
        raise InputError("USAGE", problem, where="quality", remedy=remedy)
    return {"random" if policy == "random" else "policy": 1.0}


@dataclass(frozen=True, eq=False)
class RandomPolicy:
    """Uniform actions within the bounds (A,), or one of `choices`."""

    low: Array
    high: Array
    choices: int = 0
    algorithm: str = "uniform random"

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        if self.choices:
            return np.asarray(generator.integers(self.choices))
        return generator.uniform(self.low, self.high)


@dataclass(frozen=True, eq=False)
class LinearPolicy:
    """``action = weight @ ((observation - mean) / std)``; the largest element if `discrete`.

    `weight` is (A, S), `mean` and `std` (positive) are (S,), all float64; `algorithm` is what
    trained it.
    """

    weight: Float64Array
    mean: Float64Array
    std: Float64Array
    discrete: bool = False
    algorithm: str = "linear"

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        """Return the action.

        No BLAS: its last bits depend on the CPU, and a difference in the last bit grows to a
        different episode within a hundred steps.
        """
        row = np.asarray(observation, dtype=np.float64).reshape(-1)
        scores: Float64Array = np.add.reduce(self.weight * ((row - self.mean) / self.std), axis=1)
        return np.asarray(scores.argmax()) if self.discrete else scores


@dataclass(frozen=True, eq=False)
class LibraryPolicy:
    """A model that an RL library trained, acting without exploration."""

    model: Any  # has ``predict(observation, deterministic=True)``
    algorithm: str

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        action, _ = self.model.predict(observation, deterministic=True)
        return np.asarray(action).reshape(-1) if np.ndim(action) else np.asarray(action)


def play_policy(environment_id: str, options: Options | None = None) -> EpisodePolicy:
    """Return the policy that an environment brings, of aims of its own; else ``MODEL``."""
    with make_environment(environment_id, options) as environment:
        make = getattr(environment.raw.unwrapped, "play_policy", None)
        if make is None:
            problem, remedy = "it has no play_policy()", "gear_offline/Maze-v0 has one"
            raise InputError("MODEL", problem, where=environment_id, remedy=remedy)
        policy: EpisodePolicy = guard(environment_id, "play_policy()", make)
        return policy


def train_with_library(
    policy: str, environment_id: str, options: Options | None = None, *, steps: int, seed: int
) -> EpisodePolicy:
    """Train ``library:ALGORITHM`` with the library's own defaults and an ``MlpPolicy``."""
    library, _, name = policy.partition(":")
    module_name, package = LIBRARIES[library]
    with package_needed(f"{policy} is trained by {package}", "rl"):
        module = importlib.import_module(module_name)
    every = vars(module).items()
    algorithms = {key: value for key, value in every if key.isupper() and hasattr(value, "learn")}
    if name not in algorithms:
        problem = f"{package} has no algorithm {name!r}"
        raise InputError("USAGE", problem, "policy", f"use one of {', '.join(sorted(algorithms))}")
    alone = torch_alone(f"training {policy}", quiet=False)
    with alone, make_environment(environment_id, options) as environment:
        if not isinstance(environment.raw.observation_space, gymnasium.spaces.Box):
            problem = f"{policy} is trained on observations that are one Box"
            raise InputError(
                "ENVIRONMENT", problem, environment_id, "wrap it in FlattenObservation"
            )
        where = {"device": "cpu"} if library == "sb3" else {}
        model = algorithms[name]("MlpPolicy", environment.raw, seed=seed, **where)
        guard(environment_id, f"learning with {policy}", model.learn, steps)
    version = getattr(module, "__version__", "")
    return LibraryPolicy(model, f"{package} {version} {name}, {model.num_timesteps} steps")
