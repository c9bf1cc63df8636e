"""A dark room with a hidden goal: a task for learning in context, of NumPy alone.

As in Algorithm Distillation (Laskin et al. 2022, arXiv:2210.14215): 9 x 9 cells, 20 steps an
episode, a start in the middle.  An observation is the position, which says nothing of the goal.
Each step that ends on the goal has a reward of 1: with a goal at distance d an episode returns
21 - d at most, 20 where it is the start.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np

from gear_offline.core.types import Int64Array

MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)])  # up, down, left, right, stay


def goals_of(size: int, share: str) -> Int64Array:
    """Return the goals (n, 2) of a share of the cells: ``train``, ``held_out``, ``all`` or ``one``.

    A quarter is held out, rounded up: 21 of 81.  The permutation is always the same one.  The
    ``one`` is the first of the others.
    """
    count = size * size
    # the legacy generator: its numbers do not change with NumPy's versions
    order = np.random.RandomState(0).permutation(count)
    held_out = -(-count // 4)
    bounds = {"train": (held_out, count), "held_out": (0, held_out), "all": (0, count)}
    first, last = (bounds | {"one": (held_out, held_out + 1)})[share]
    return np.stack(np.divmod(order[first:last], size), axis=1)


class DarkRoom(gymnasium.Env[Int64Array, np.int64]):
    """Observations are (row, column), each one of `size`; actions: up, down, left, right, stay.

    ``reset(seed=n)`` takes goal n of `goals`, counted in circles, so seeds in a row have every goal
    equally often.  Without a seed the goal stays: the next episode is of the same task.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's name

    def __init__(
        self,
        goals: Literal["train", "held_out", "all", "one"] = "all",
        size: int = 9,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.MultiDiscrete([size, size])
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self._goals, self._size = goals_of(size, goals), size
        self._goal: Int64Array | None = None
        self._position = np.full(2, size // 2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Int64Array, dict[str, Any]]:
        """Go to the middle; the goal is that of the seed, or stays."""
        super().reset(seed=seed)
        if seed is None and self._goal is None:
            seed = int(self.np_random.integers(len(self._goals)))
        if seed is not None:
            self._goal = self._goals[seed % len(self._goals)]
        self._position = np.full(2, self._size // 2)
        return self._position, {}

    def step(self, action: np.int64) -> tuple[Int64Array, float, bool, bool, dict[str, Any]]:
        """Move, or stay where a wall is; the reward is 1 on the goal, else 0."""
        self._position = np.clip(self._position + MOVES[action], 0, self._size - 1)
        return self._position, float((self._position == self._goal).all()), False, False, {}
