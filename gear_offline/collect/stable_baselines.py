"""Stronger makers: policies that Stable-Baselines3 (or its JAX sister, SBX) trains on the spot.

``sb3:ALGORITHM`` or ``sbx:ALGORITHM``, e.g. ``sb3:PPO``, ``sbx:TQC``.  Saved models of these
libraries are not read: their files hold pickles, which can run code.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.environments import make_environment

# Name before the colon: module and what pip calls it.
LIBRARIES = {"sb3": ("stable_baselines3", "stable-baselines3"), "sbx": ("sbx", "sbx-rl")}


@dataclass(frozen=True, eq=False)
class StableBaselinesPolicy:
    """A trained model, acting without exploration.

    Attributes
    ----------
    model
        Has ``predict(observations, deterministic=True)``.
    algorithm
        Library, version and algorithm.
    """

    model: Any
    algorithm: str

    def act(
        self, observations: npt.NDArray[Any], generators: Sequence[np.random.Generator]
    ) -> npt.NDArray[Any]:
        """Return the mean actions (B, A), or (B,) integers."""
        actions, _ = self.model.predict(observations, deterministic=True)
        return np.asarray(actions)


def train(policy: str, environment_id: str, *, steps: int, seed: int) -> StableBaselinesPolicy:
    """Train `policy` with the library's own defaults and an ``MlpPolicy``.

    Raises
    ------
    UnavailableError
        ``COLLECT_LIBRARY`` when the library is not installed.
    InputError
        ``COLLECT_POLICY`` when it has no such algorithm.
    """
    library, _, name = policy.partition(":")
    module_name, package = LIBRARIES[library]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UnavailableError(
            "COLLECT_LIBRARY",
            f"{package} is not installed",
            where=policy,
            remedy="pip install 'gear-offline[rl]'",
        ) from error
    algorithm = getattr(module, name, None) if name.isupper() else None
    if not hasattr(algorithm, "learn"):
        known = sorted(n for n in vars(module) if n.isupper() and hasattr(vars(module)[n], "learn"))
        raise InputError(
            "COLLECT_POLICY",
            f"{package} has no algorithm {name!r}",
            remedy=f"use one of {', '.join(known)}",
        )
    environment = make_environment(environment_id)
    try:
        options = {"device": "cpu"} if library == "sb3" else {}
        assert algorithm is not None, "checked above"
        model = algorithm("MlpPolicy", environment, seed=seed, **options)
        model.learn(steps)
        version = getattr(module, "__version__", "")
        return StableBaselinesPolicy(
            model, f"{package} {version} {name}, {model.num_timesteps} steps"
        )
    finally:
        environment.close()
