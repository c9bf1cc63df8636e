"""A maze to reach goals in: a point in two dimensions, with OGBench's interface, of NumPy alone.

As in OGBench (Park et al. 2025, arXiv:2410.20092), ``reset(options={"task_id": 1})`` begins one of
five tasks and gives ``info["goal"]``, an observation; each step gives ``info["success"]``, and
success ends the episode with a reward of 1.  Without a task the point is somewhere and there is no
goal: what `PlayPolicy` plays in.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from gear_offline.core.types import Array, Float64Array

WALLS = (
    "#########",
    "#.......#",
    "###.###.#",
    "#...#...#",
    "#.#.#.###",
    "#.#.#...#",
    "#.#.###.#",
    "#.#.#...#",
    "#########",
)
# rows and columns of start and goal
TASKS = (
    ((7, 1), (1, 7)),
    ((1, 1), (7, 7)),
    ((7, 5), (7, 1)),
    ((7, 3), (5, 5)),
    ((1, 1), (3, 5)),
)
SPEED = 0.4  # of an action of 1, in cells a step
NEAR = 0.5  # cells from the goal that count as there
SPREAD = 0.1  # of starts and goals about the middle of their cells
PIXELS = 24  # of a cell
WALL, FLOOR, GOAL, POINT = (90, 90, 90), (245, 245, 245), (46, 160, 67), (9, 105, 218)

Cell = tuple[int, int]
OPEN = np.array([[letter == "." for letter in row] for row in WALLS])
CELLS: tuple[Cell, ...] = tuple((int(row), int(column)) for row, column in np.argwhere(OPEN))


class Maze(gymnasium.Env[npt.NDArray[np.float32], npt.NDArray[np.float32]]):
    """Observations are (row, column) of the point, actions its move, both (2,) float32.

    The middle of a cell is at whole numbers.  A move that would end in a wall is not made in that
    direction: the point slides along.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - Gymnasium's name

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        high = np.array(OPEN.shape, np.float32)
        self.observation_space = gymnasium.spaces.Box(0.0, high)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        self.task_infos = [{"task_name": f"task{n}"} for n in range(1, 1 + len(TASKS))]
        self._point = np.zeros(2)
        self._goal: Float64Array | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Begin the task ``options["task_id"]``, from 1 on; without one, anywhere."""
        super().reset(seed=seed)
        task, self._goal = (options or {}).get("task_id"), None
        if task is None:
            self._point = self._about(CELLS[self.np_random.integers(len(CELLS))])
            return self._observe(), {}
        if not 1 <= task <= len(TASKS):
            raise ValueError(f"tasks are 1 to {len(TASKS)}, got {task}")
        start, goal = TASKS[task - 1]
        self._point, self._goal = self._about(start), self._about(goal)
        return self._observe(), {"goal": self._goal.astype(np.float32)}

    def step(
        self, action: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move; the reward is the success."""
        for axis in range(2):
            moved = self._point.copy()
            moved[axis] += SPEED * float(np.clip(action[axis], -1.0, 1.0))
            if OPEN[cell_of(moved)]:
                self._point = moved
        success = self._goal is not None and bool(np.linalg.norm(self._point - self._goal) <= NEAR)
        return self._observe(), float(success), success, False, {"success": float(success)}

    def render(self) -> npt.NDArray[np.uint8]:
        """Return a picture (h, w, 3): the point, and the goal where there is one."""
        picture = np.where(OPEN[..., None], FLOOR, WALL).astype(np.uint8)
        picture = picture.repeat(PIXELS, 0).repeat(PIXELS, 1)
        places = (np.indices(picture.shape[:2]) + 0.5) / PIXELS - 0.5
        for centre, colour in ((self._goal, GOAL), (self._point, POINT)):
            if centre is not None:
                away = np.hypot(*(places - centre[:, None, None]))
                picture[away < 0.3] = colour
        return picture

    def play_policy(self) -> PlayPolicy:
        """Return the policy that play data are made with."""
        return PlayPolicy()

    def _about(self, cell: Cell) -> Float64Array:
        return np.array(cell) + self.np_random.uniform(-SPREAD, SPREAD, 2)

    def _observe(self) -> npt.NDArray[np.float32]:
        return self._point.astype(np.float32)


class PlayPolicy:
    """Walks to a random far cell by a shortest way, then to another, until the episode ends."""

    algorithm = "walks to random far cells"

    def __init__(self) -> None:
        self._episode: np.random.Generator | None = None
        self._aim: Cell = CELLS[0]

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        """Return the move (2,); a new `generator` begins a new episode."""
        cell = cell_of(observation)
        if generator is not self._episode or cell == self._aim:
            self._episode = generator
            cells = list(way_to(cell))  # from the nearest to the farthest
            self._aim = cells[generator.integers(len(cells) // 2, len(cells))]
        ahead = np.array(way_to(self._aim)[cell]) - observation
        return ahead / max(float(np.linalg.norm(ahead)), SPEED)


def cell_of(point: Array) -> Cell:
    """Return the cell (row, column) that a point is in."""
    row, column = np.rint(point).astype(int)
    return int(row), int(column)


@cache
def way_to(aim: Cell) -> dict[Cell, Cell]:
    """Return the next cell of a shortest way to `aim` from every cell, the nearest ones first."""
    following, reached = {aim: aim}, [aim]
    for row, column in reached:  # which grows
        for cell in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if OPEN[cell] and cell not in following:
                following[cell] = row, column
                reached.append(cell)
    return following
