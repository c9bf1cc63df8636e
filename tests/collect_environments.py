"""Small environments whose every transition can be recognised; import registers them."""

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

Observation = npt.NDArray[np.float64]
LIMIT = 12


class Counter(gymnasium.Env[Observation, npt.NDArray[np.float32]]):
    """Observation: (tag of the episode, step, last action); ends after a seeded number of steps.

    The tag is the reset seed, so a row from another episode or from after a reset shows.  Some
    episodes are longer than the time limit, some end exactly there: both flags on one row.  It
    gives one array again and again, and writes to it, as some environments do.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def __init__(self) -> None:
        self.seen = np.zeros(3)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.tag, self.steps = float(seed or 0), 0
        self.length = length_of(int(seed or 0))
        self.seen[:] = self.tag, 0.0, 0.0
        return self.seen, {}

    def step(self, action: Any) -> Any:
        assert self.steps < min(self.length, LIMIT), "stepped after the end of an episode"
        self.steps += 1
        self.seen[:] = self.tag, float(self.steps), float(action[0])
        return self.seen, self.steps + 0.1, self.steps >= self.length, False, {}


def length_of(seed: int) -> int:
    """Steps of the episode that starts with this seed, were there no time limit."""
    return 1 + seed % (LIMIT + 3)


class Clock(gymnasium.Env[Observation, npt.NDArray[np.float32]]):
    """Observe the seconds since 1970: neighbours are one number in float32."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.now = 1.75e9
        return np.array([self.now]), {}

    def step(self, action: Any) -> Any:
        self.now += 0.1
        return np.array([self.now]), 1.0, False, False, {}


class Push(gymnasium.Env[Observation, npt.NDArray[np.float32]]):
    """Push a point to the origin: a linear policy solves it, which ARS finds in seconds."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x = float(self.np_random.uniform(-1.0, 1.0))
        return np.array([self.x, 1.0]), {}

    def step(self, action: Any) -> Any:
        self.x += 0.3 * float(action[0])
        return np.array([self.x, 1.0]), 1.0 - min(abs(self.x), 1.0), False, False, {}


class Unbounded(Push):
    """Actions without bounds: nothing uniform can be drawn."""

    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)


for made, limit in (("Counter", LIMIT), ("Clock", LIMIT), ("Push", 10), ("Unbounded", 10)):
    gymnasium.register(f"{made}-v0", f"{__name__}:{made}", max_episode_steps=limit)
gymnasium.register("Endless-v0", f"{__name__}:Push")
CLOCK = "tests.collect_environments:Clock-v0"
COUNTER = "tests.collect_environments:Counter-v0"
PUSH = "tests.collect_environments:Push-v0"
