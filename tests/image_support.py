"""A tiny environment of frames, and data that fit it."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from gear_offline.data.dataset.dataset import Dataset
from tests.support import make_dataset

ENVIRONMENT = "GearOfflineFrames-v0"
SIZE, ACTIONS, STEP_LIMIT = 36, 3, 7
Frame = npt.NDArray[np.uint8]


def draw(place: int, generator: np.random.Generator) -> Frame:
    """A dim noisy frame with a bright band at one of three places."""
    frame = generator.integers(0, 40, size=(SIZE, SIZE), dtype=np.uint8)
    third = SIZE // ACTIONS
    frame[:, place * third : (place + 1) * third] += 180
    return frame


class BandEnvironment(gymnasium.Env[Frame, np.int64]):
    """A band of light moves at random; naming its place of one step before is rewarded."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(ACTIONS)
        self.before = self.place = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(ACTIONS))
        self.before = 0
        return draw(self.place, self.np_random), {}

    def step(self, action: np.int64) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        reward = float(int(action) == self.before)
        self.before, self.place = self.place, int(self.np_random.integers(ACTIONS))
        return draw(self.place, self.np_random), reward, False, False, {}


def register_environment() -> None:
    """Make it known to Gymnasium; once is enough."""
    if ENVIRONMENT not in gymnasium.registry:
        gymnasium.register(ENVIRONMENT, lambda **_: BandEnvironment(), max_episode_steps=STEP_LIMIT)


def image_columns(
    steps: int, frame: tuple[int, ...], *, seed: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """Return random columns of frames without a black pixel, all (steps, ...)."""
    generator = np.random.default_rng(seed)
    return {
        "observations": generator.integers(1, 256, size=(steps, *frame), dtype=np.uint8),
        "actions": generator.integers(0, 4, size=steps),
        "rewards": generator.normal(size=steps).astype(np.float32),
    }


def band_data(folder: Path, *, episodes: int = 30, seed: int = 0) -> Dataset:
    """Play the environment perfectly: the action tells where the band was a frame earlier."""
    register_environment()
    environment, rows = BandEnvironment(), list[Any]()
    for episode in range(episodes):
        frame, _ = environment.reset(seed=seed + episode)
        for _ in range(STEP_LIMIT):
            action = environment.before
            following, reward, _, _, _ = environment.step(np.int64(action))
            rows.append((frame, action, np.float32(reward)))
            frame = following
    frames, actions, rewards = (np.array(column) for column in zip(*rows, strict=True))
    columns = {"observations": frames, "actions": actions, "rewards": rewards}
    lengths = [STEP_LIMIT] * episodes
    return make_dataset(folder, lengths, columns=columns, environment_id=ENVIRONMENT)
