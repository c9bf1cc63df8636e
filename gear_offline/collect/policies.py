"""Policies that make data: random, linear, and an RL library's own.

``sb3:ALGORITHM`` or ``sbx:ALGORITHM``, e.g. ``sb3:PPO``, are trained on the spot by
Stable-Baselines3 or its JAX sister, SBX.  Saved models of these libraries are not read: their files
hold pickles, which can run code.

Shape legend: S numbers in an observation, A in an action.
"""

from __future__ import annotations

import importlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.collect.record import Policy
from gear_offline.core.types import Array, Float64Array
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.environments import EnvironmentFacts, make_environment
from gear_offline.sources.base import package_needed
from gear_offline.sources.hdf5 import Hdf5File

WEIGHTS = ("weight", "observation_mean", "observation_std")  # of a linear policy in a file
# Name before the colon: module and what pip calls it.
LIBRARIES = {"sb3": ("stable_baselines3", "stable-baselines3"), "sbx": ("sbx", "sbx-rl")}


@dataclass(frozen=True, eq=False)
class RandomPolicy:
    """Uniform actions within the bounds (A,), or one of so many choices."""

    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
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


def recorded_policy(path: Path, facts: EnvironmentFacts) -> LinearPolicy:
    """Return the policy that `collect` trained for a file of this environment; else ``MODEL``."""
    remedy = "give a file that `collect --policy ars` made in this environment"
    if not path.exists():
        what = "there is no such file, and it is no name of a policy"
        remedy = f"use random, ars, sb3:ALGORITHM or sbx:ALGORITHM, or {remedy}"
        raise InputError("MODEL", what, str(path), remedy)
    try:
        with Hdf5File(path) as file:
            made_in, algorithm = (file.attribute("/", name) for name in ("env_id", "algorithm"))
            columns = [file.column(f"metadata/policy/{name}") for name in WEIGHTS]
        weight, mean, std = (column.read(0, column.shape[0]) for column in columns)
    except GearError as error:
        what = f"it holds no trained policy: {error.what}"
        raise InputError("MODEL", what, str(path), remedy) from error
    size = facts.state_size
    fits = (weight.shape, mean.shape, std.shape) == ((facts.action_size, size), (size,), (size,))
    usable = fits and np.isfinite([*weight.flat, *mean, *std]).all() and (std > 0).all()
    if made_in != facts.environment_id or not usable:
        what = "its weights do not fit the environment, or are not finite"
        if made_in != facts.environment_id:
            what = f"it was trained in {made_in}, not in {facts.environment_id}"
        raise InputError("MODEL", what, str(path), remedy)
    return LinearPolicy(weight, mean, std, facts.discrete, str(algorithm))


@dataclass(frozen=True, eq=False)
class LibraryPolicy:
    """A model that an RL library trained, acting without exploration."""

    model: Any  # has ``predict(observation, deterministic=True)``
    algorithm: str

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        action, _ = self.model.predict(observation, deterministic=True)
        return np.asarray(action).reshape(-1) if np.ndim(action) else np.asarray(action)


def play_policy(environment_id: str) -> Policy:
    """Return the policy that an environment brings, of aims of its own; else ``MODEL``."""
    with closing(make_environment(environment_id)) as environment:
        made = getattr(environment.unwrapped, "play_policy", None)
        if made is None:
            what, remedy = "it has no play_policy()", "gear_offline/Maze-v0 has one"
            raise InputError("MODEL", what, where=environment_id, remedy=remedy)
        policy: Policy = made()
        return policy


def train_with_library(policy: str, environment_id: str, *, steps: int, seed: int) -> Policy:
    """Train ``library:ALGORITHM`` with the library's own defaults and an ``MlpPolicy``."""
    library, _, name = policy.partition(":")
    module_name, package = LIBRARIES[library]
    with package_needed(f"{policy} is trained by {package}", "rl"):
        module = importlib.import_module(module_name)
    every = vars(module).items()
    known = {key: value for key, value in every if key.isupper() and hasattr(value, "learn")}
    if name not in known:
        what = f"{package} has no algorithm {name!r}"
        raise InputError("USAGE", what, "policy", f"use one of {', '.join(sorted(known))}")
    with closing(make_environment(environment_id)) as environment:
        options = {"device": "cpu"} if library == "sb3" else {}
        model = known[name]("MlpPolicy", environment, seed=seed, **options)
        model.learn(steps)
    version = getattr(module, "__version__", "")
    return LibraryPolicy(model, f"{package} {version} {name}, {model.num_timesteps} steps")
