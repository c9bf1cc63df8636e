"""Policies that make data: random, linear with a file format, and an RL library's own.

``sb3:ALGORITHM`` or ``sbx:ALGORITHM``, e.g. ``sb3:PPO``, are trained on the spot by
Stable-Baselines3 or its JAX sister, SBX.  Saved models of these libraries are not read: their files
hold pickles, which can run code.

Shape legend: S numbers in an observation, A in an action.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gear_offline.collect.record import Policy
from gear_offline.core.files import write_file, writing
from gear_offline.core.types import Array, Float64Array
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.environments import EnvironmentFacts, make_environment, versioned_id

FILE_FORMAT = "gear-offline-linear-policy-1"
MAX_POLICY_BYTES = 64 << 20
MIN_STD = 1e-8  # features that never move are divided by 1, as in ARS's own code
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


def save_linear_policy(policy: LinearPolicy, path: Path, *, environment_id: str) -> None:
    """Write `policy` as a safetensors file, whole or not at all, replacing `path`."""
    facts = {
        "format": FILE_FORMAT,
        "environment_id": environment_id,
        "algorithm": policy.algorithm,
        "discrete": json.dumps(policy.discrete),
    }
    tensors = {"mean": policy.mean, "std": policy.std, "weight": policy.weight}
    content = save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, metadata=facts)
    with writing(path):
        write_file(path, content)


def load_linear_policy(path: Path, facts: EnvironmentFacts) -> LinearPolicy:
    """Read a policy that `save_linear_policy` wrote for this environment; ``MODEL`` if it is not.

    Older files may hold an id without a version, which means the newest one here.
    """
    remedy = "give a file that `collect --save-policy` wrote for this environment"
    try:
        if path.stat().st_size > MAX_POLICY_BYTES:
            raise ValueError("it is too large for a linear policy")
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.get("format") != FILE_FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}, not {FILE_FORMAT!r}")
        trained_in = metadata.get("environment_id") or "an environment that it does not name"
        if versioned_id(trained_in) != facts.environment_id:
            raise ValueError(f"it was trained in {trained_in}, not in {facts.environment_id}")
        _check_tensors(tensors, facts)
        if metadata.get("discrete") != json.dumps(facts.discrete):
            raise ValueError("its kind of action is not the environment's")
    except FileNotFoundError as error:
        what = "there is no such policy file, and it is no name of a policy"
        remedy = f"use random, ars, sb3:ALGORITHM or sbx:ALGORITHM, or {remedy}"
        raise InputError("MODEL", what, str(path), remedy) from error
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise InputError("MODEL", f"not a usable policy: {error}", str(path), remedy) from error
    weights = tensors["weight"], tensors["mean"], tensors["std"]
    return LinearPolicy(*weights, facts.discrete, metadata.get("algorithm", "linear"))


def _check_tensors(tensors: dict[str, Array], facts: EnvironmentFacts) -> None:
    size = facts.state_size
    shapes = {"weight": (facts.action_size, size), "mean": (size,), "std": (size,)}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != shapes or any(tensor.dtype != np.float64 for tensor in tensors.values()):
        raise ValueError(f"its tensors are {found}, not {shapes} of float64")
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise ValueError("it holds NaN or infinite values")
    if (tensors["std"] <= 0).any():
        raise ValueError("std holds values that are not positive")


@dataclass(frozen=True, eq=False)
class LibraryPolicy:
    """A model that an RL library trained, acting without exploration."""

    model: Any  # has ``predict(observation, deterministic=True)``
    algorithm: str

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        action, _ = self.model.predict(observation, deterministic=True)
        return np.asarray(action).reshape(-1) if np.ndim(action) else np.asarray(action)


def is_of_library(policy: str) -> bool:
    """Return whether an RL library trains the policy of this name."""
    return policy.partition(":")[0] in LIBRARIES


def train_with_library(policy: str, environment_id: str, *, steps: int, seed: int) -> Policy:
    """Train ``library:ALGORITHM`` with the library's own defaults and an ``MlpPolicy``."""
    library, _, name = policy.partition(":")
    module_name, package = LIBRARIES[library]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        what, remedy = f"{package} is not installed", "pip install 'gear-offline[rl]'"
        raise UnavailableError("PACKAGE_MISSING", what, policy, remedy) from error
    known = {key: value for key, value in vars(module).items() if key.isupper()}
    known = {key: value for key, value in known.items() if hasattr(value, "learn")}
    if name not in known:
        what = f"{package} has no algorithm {name!r}"
        raise InputError("USAGE", what, "policy", f"use one of {', '.join(sorted(known))}")
    environment = make_environment(environment_id)
    try:
        options = {"device": "cpu"} if library == "sb3" else {}
        model = known[name]("MlpPolicy", environment, seed=seed, **options)
        model.learn(steps)
    finally:
        environment.close()
    version = getattr(module, "__version__", "")
    return LibraryPolicy(model, f"{package} {version} {name}, {model.num_timesteps} steps")
