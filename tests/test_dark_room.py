"""The dark room: against loops and walks by hand."""

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env

from gear_offline.evaluation.dark_room import goals_of

ROOM = "gear_offline/DarkRoom-v0"
STEPS = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1), 4: (0, 0)}


def test_the_room_is_an_environment_of_one_goal_until_the_next_seed() -> None:
    made = gymnasium.make(ROOM)
    check_env(made.unwrapped)
    generator = np.random.default_rng(0)
    for seed in (3, None, None, 84, None, 4):
        (row, column), _ = made.reset(seed=seed)
        assert (row, column) == (4, 4)
        if seed is not None:
            goal = goals_of(9, "all")[seed % 81]
        for number in range(1, 21):
            action = int(generator.integers(5))
            row = min(max(row + STEPS[action][0], 0), 8)
            column = min(max(column + STEPS[action][1], 0), 8)
            seen, reward, terminated, truncated, _ = made.step(action)
            assert tuple(seen) == (row, column) and not terminated
            assert reward == float((row, column) == tuple(goal)) and truncated == (number == 20)


def test_goals_are_parted_and_dealt_out_evenly() -> None:
    parts = {name: set(map(tuple, goals_of(9, name).tolist())) for name in ("train", "held_out")}
    assert [len(part) for part in parts.values()] == [60, 21]
    assert parts["train"] | parts["held_out"] == {divmod(cell, 9) for cell in range(81)}
    # of NumPy's frozen generator: data of one release are those of the next
    assert goals_of(9, "held_out")[:3].tolist() == [[2, 4], [3, 0], [6, 7]]
    room, found = gymnasium.make(ROOM, goals="held_out", size=5), list[tuple[int, int]]()
    for seed in range(1000, 1000 + 3 * 7):
        for row, column in np.ndindex(5, 5):
            room.reset(seed=seed)
            walk = [int(row > 2)] * abs(row - 2) + [2 + (column > 2)] * abs(column - 2) + [4]
            if [room.step(action)[1] for action in walk][-1]:
                found.append((row, column))
    assert len(found) == 21 and sorted(found) == sorted([*set(found)] * 3)
