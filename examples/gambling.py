"""A game of luck: the best return of the data is that of a bad action.

The gambling environment of Paster, McIlraith and Ba, "You Can't Count on Luck" (NeurIPS 2022,
arXiv 2205.15967).  In the first of two steps one of three actions is chosen, the second step pays.

======  ===============  =============
action  pays             in the mean
======  ===============  =============
0       5 or -15         -5
1       1 or -6          -2.5
2       1                1, the best
======  ===============  =============
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

PAYS = ((5.0, -15.0), (1.0, -6.0), (1.0, 1.0))  # each of a pair half of the time
Observation = npt.NDArray[np.float32]


class Gambling(gymnasium.Env[Observation, np.int64]):
    """Observations are one-hot: the table (0), then what is to be paid (1 + 2 * action + luck)."""

    observation_space = spaces.Box(0.0, 1.0, (7,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Sit down at the table."""
        super().reset(seed=seed)
        self.pays: float | None = None
        return np.eye(7, dtype=np.float32)[0], {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Choose in the first step; be paid in the second."""
        if self.pays is None:
            luck = int(self.np_random.integers(2))
            self.pays = PAYS[action][luck]
            return np.eye(7, dtype=np.float32)[1 + 2 * action + luck], 0.0, False, False, {}
        return np.zeros(7, np.float32), self.pays, True, False, {}


gymnasium.register("Gambling-v0", Gambling, max_episode_steps=2)
