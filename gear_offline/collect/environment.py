"""Environments for collecting: checked once, with access to MuJoCo's state."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError
from gear_offline.evaluation.environments import versioned_id

AnyArray = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentFacts:
    """What a recorder and a policy need to know of an environment.

    Attributes
    ----------
    environment_id
        Gymnasium id, with the version that was taken.
    observation_shape, observation_dtype
        Of one stored observation; floats are stored as float32.
    actions
        Number of discrete actions, or 0 when actions are continuous.
    low, high
        (A,) float32 bounds of continuous actions; empty for discrete ones.
    step_limit
        Steps after which Gymnasium truncates an episode.
    simulator_state
        True when the environment bares MuJoCo's ``qpos`` and ``qvel``.
    """

    environment_id: str
    observation_shape: tuple[int, ...]
    observation_dtype: np.dtype[Any]
    actions: int
    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    step_limit: int
    simulator_state: bool

    @property
    def discrete(self) -> bool:
        return self.actions > 0

    @property
    def frames(self) -> bool:
        """Whether observations are frames: uint8 with two or more dimensions."""
        return self.observation_dtype == np.uint8 and len(self.observation_shape) >= 2

    @property
    def action_size(self) -> int:
        """Numbers in an action, or the number of discrete actions."""
        return self.actions or int(self.low.size)

    @property
    def observation_size(self) -> int:
        """Numbers in one observation."""
        return int(np.prod(self.observation_shape, dtype=np.int64))


def describe(environment: Any, environment_id: str) -> EnvironmentFacts:
    """Return the facts of `environment`.

    Raises
    ------
    InputError
        ``COLLECT_ENVIRONMENT`` for spaces that cannot be recorded, or without a step limit.
    """
    import gymnasium

    seen, acted = environment.observation_space, environment.action_space
    spec = environment.spec
    limit = int(getattr(spec, "max_episode_steps", None) or 0)  # 0: none
    problem = remedy = ""
    if not isinstance(seen, gymnasium.spaces.Box) or seen.dtype.kind not in "biuf":
        problem, remedy = f"observations {seen} are not one numeric Box", "wrap the environment"
    elif isinstance(acted, gymnasium.spaces.Discrete):
        if int(acted.start) != 0:
            problem, remedy = f"actions {acted} do not start at 0", "wrap the environment"
    elif not isinstance(acted, gymnasium.spaces.Box) or len(acted.shape) != 1:
        problem, remedy = f"actions {acted} are neither Discrete nor a flat Box", "wrap it"
    elif not acted.is_bounded():
        problem, remedy = f"actions {acted} have no bounds", "wrap it with RescaleAction"
    if not problem and not limit:
        problem = "the environment has no step limit, so an episode might never end"
        remedy = "register it with max_episode_steps"
    if problem:
        raise InputError("COLLECT_ENVIRONMENT", problem, where=environment_id, remedy=remedy)
    discrete = isinstance(acted, gymnasium.spaces.Discrete)
    none = np.zeros(0, dtype=np.float32)
    return EnvironmentFacts(
        environment_id=versioned_id(environment_id),
        observation_shape=tuple(seen.shape),
        observation_dtype=np.dtype(np.float32) if seen.dtype.kind == "f" else np.dtype(seen.dtype),
        actions=int(acted.n) if discrete else 0,
        low=none if discrete else np.asarray(acted.low, dtype=np.float32),
        high=none if discrete else np.asarray(acted.high, dtype=np.float32),
        step_limit=limit,
        simulator_state=simulator_data(environment) is not None,
    )


def simulator_data(environment: Any) -> Any:
    """Return MuJoCo's ``MjData`` of `environment`, or None where there is none."""
    data = getattr(environment.unwrapped, "data", None)
    return data if hasattr(data, "qpos") and hasattr(data, "qvel") else None


def package_version(name: str) -> str:
    """Return the installed version of the package `name`, or an empty string."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
