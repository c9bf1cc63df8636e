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
_REMEDY = "give a file that `collect --save-policy` wrote"


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
    """``action = weight @ ((observation - mean) / std)``; the largest element if discrete.

    Attributes
    ----------
    weight
        (A, S) float64.
    mean, std
        (S,) float64, normalisation of observations; ``std`` is positive.
    discrete
        True when the action is the index of the largest element.
    algorithm
        What trained it.
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

    def perturbed(self, delta: Float64Array) -> LinearPolicy:
        """Return the policy with `delta` (A, S) added to its weight."""
        return LinearPolicy(self.weight + delta, self.mean, self.std, self.discrete, self.algorithm)


def save_linear_policy(policy: LinearPolicy, path: Path, *, environment_id: str) -> None:
    """Write `policy` as a safetensors file, whole or not at all, replacing `path`."""
    from safetensors.numpy import save

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
    """Read a policy that `save_linear_policy` wrote for this environment."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.stat().st_size > MAX_POLICY_BYTES:
            raise ValueError("it is too large for a linear policy")
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except PermissionError as error:
        raise _unusable(path, "you may not read it", "check its permissions") from error
    except FileNotFoundError as error:
        what = "there is no such policy file, and it is no name of a policy"
        remedy = f"use random, ars, sb3:ALGORITHM or sbx:ALGORITHM, or {_REMEDY}"
        raise _unusable(path, what, remedy) from error
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise _unusable(path, f"not a readable safetensors file: {error}") from error
    trained_in = metadata.get("environment_id", "")
    # older files may hold an id without a version, which means the newest one here
    is_here = versioned_id(trained_in) == facts.environment_id
    if trained_in and not is_here:  # the shapes differ for that reason
        what = f"the policy was trained in {trained_in!r}, not in {facts.environment_id!r}"
        raise _unusable(path, what, "collect in the environment that it was trained in")
    problem = _problem(metadata, tensors, facts)
    if problem or not is_here:
        raise _unusable(path, problem or "it does not say which environment it is for")
    weights = tensors["weight"], tensors["mean"], tensors["std"]
    return LinearPolicy(*weights, facts.discrete, metadata.get("algorithm", "linear"))


def _problem(metadata: dict[str, str], tensors: dict[str, Array], facts: EnvironmentFacts) -> str:
    """Return what is wrong with a policy's file; empty if nothing is."""
    size = facts.state_size
    shapes = {"weight": (facts.action_size, size), "mean": (size,), "std": (size,)}
    if metadata.get("format") != FILE_FORMAT:
        return f"its format is {metadata.get('format')!r}, not {FILE_FORMAT!r}"
    if set(tensors) != set(shapes):
        return f"its tensors are {sorted(tensors)}, not {sorted(shapes)}"
    if metadata.get("discrete") != json.dumps(facts.discrete):
        return "its kind of action is not the environment's"
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.dtype != np.float64 or tensor.shape != shape:
            return f"{name} is {tensor.dtype} {tensor.shape}, not float64 {shape}"
        if not np.isfinite(tensor).all():
            return f"{name} holds NaN or infinite values"
    return "std holds values that are not positive" if (tensors["std"] <= 0).any() else ""


def _unusable(path: Path, what: str, remedy: str = _REMEDY) -> InputError:
    return InputError("MODEL", what, where=str(path), remedy=remedy)


@dataclass(frozen=True, eq=False)
class LibraryPolicy:
    """A model that an RL library trained, acting without exploration.

    `model` has ``predict(observation, deterministic=True)``.
    """

    model: Any
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
        raise UnavailableError(
            "PACKAGE_MISSING",
            f"{package} is not installed",
            where=policy,
            remedy="pip install 'gear-offline[rl]'",
        ) from error
    algorithm = getattr(module, name, None) if name.isupper() else None
    if algorithm is None or not hasattr(algorithm, "learn"):
        known = sorted(n for n in vars(module) if n.isupper() and hasattr(vars(module)[n], "learn"))
        what = f"{package} has no algorithm {name!r}"
        raise InputError("USAGE", what, where="policy", remedy=f"use one of {', '.join(known)}")
    environment = make_environment(environment_id)
    try:
        options = {"device": "cpu"} if library == "sb3" else {}
        model = algorithm("MlpPolicy", environment, seed=seed, **options)
        model.learn(steps)
    finally:
        environment.close()
    version = getattr(module, "__version__", "")
    return LibraryPolicy(model, f"{package} {version} {name}, {model.num_timesteps} steps")
