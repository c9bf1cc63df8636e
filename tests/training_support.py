"""What tests of training share: a tiny environment, data that fit it, and a recipe of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from gear_offline.artifacts.checkpoint import checkpoint_name, list_checkpoints
from gear_offline.artifacts.json_lines import read_records
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.core.workers import Caller
from gear_offline.data.convert.conversion import convert
from gear_offline.data.sources import from_episodes
from gear_offline.errors import GearError
from gear_offline.evaluation.play import play_job
from tests.support import last_words, make_dataset

ENVIRONMENT = "GearOfflineTiny-v0"
STATE_DIM, ACTION_DIM, STEP_LIMIT = 3, 2, 6


EPISODE_LENGTHS = [4, 1, 6, 3, 5]


class TinyEnvironment(gymnasium.Env[npt.NDArray[np.float32], npt.NDArray[np.float32]]):
    """Rewards the first action; the state is what was done last."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-9, 9, (STATE_DIM,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (ACTION_DIM,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._state = self.np_random.normal(size=STATE_DIM).astype(np.float32)
        return self._state, {}

    def step(self, action: Any) -> Any:
        self._state = np.roll(self._state, 1)
        self._state[0] = action[0]
        return self._state, float(action[0]), False, False, {}


def register_environment() -> None:
    """Make the tiny environment known to this process alone, however it was known before."""
    gymnasium.registry.pop(ENVIRONMENT, None)
    gymnasium.register(ENVIRONMENT, lambda **_: TinyEnvironment(), max_episode_steps=STEP_LIMIT)


def register_importable() -> None:
    """Register the tiny environment so that other processes can make it."""
    gymnasium.registry.pop(ENVIRONMENT, None)
    entry = "tests.training_support:TinyEnvironment"
    gymnasium.register(ENVIRONMENT, entry, max_episode_steps=STEP_LIMIT)


class FakePool:
    """Plays in this process, `delay` polls after it was asked, or twice as many by turns.

    Step `deadly` kills a worker.
    """

    delay, deadly = 0, 0
    made: ClassVar[list[FakePool]] = []

    def __init__(self, workers: int, *, threads: int) -> None:
        self.workers, self.most, self.closed = workers, 0, False
        self.left: dict[int, int] = {}
        self.jobs: list[Any] = []
        FakePool.made.append(self)

    @property
    def has_room(self) -> bool:
        return len(self.left) < self.workers

    def submit(self, function: str, *job: Any) -> int:
        self.jobs.append(job)
        self.left[len(self.jobs)] = FakePool.delay * (1 + len(self.jobs) % 2)  # the first is late
        self.most = max(self.most, len(self.left))
        return len(self.jobs)

    def wait(self, seconds: float) -> list[tuple[int, Any]]:
        self.left = {number: left - 1 for number, left in self.left.items()}
        ended = [number for number, left in self.left.items() if left < 0]
        return [(number, self._value(number)) for number in ended]

    def _value(self, number: int) -> Any:
        del self.left[number]
        job = self.jobs[number - 1]
        if job[1].name == checkpoint_name(FakePool.deadly):
            return GearError("WORKER_LOST", "a worker process has ended (killed by SIGKILL)")
        try:
            with torch.random.fork_rng(devices=[]):
                return play_job(Caller(), *job)
        except GearError as error:
            return error

    def close(self) -> None:
        self.closed = True


def tiny_data(folder: Path, lengths: Sequence[int] = EPISODE_LENGTHS) -> Path:
    """Make data that fit the tiny environment, and register it."""
    register_environment()
    return make_dataset(
        folder, lengths, state_dim=STATE_DIM, action_dim=ACTION_DIM, environment_id=ENVIRONMENT
    ).path


def played_data(folder: Path) -> Path:
    """Make three episodes of the tiny environment, which other processes can make, too."""
    register_importable()
    shapes = {"observations": (STATE_DIM,), "actions": (ACTION_DIM,), "rewards": ()}
    columns = {name: np.ones((6, *shape), np.float32) for name, shape in shapes.items()}
    source = from_episodes([columns | {"truncated": True}] * 3, environment=ENVIRONMENT)
    convert(source, folder, quiet=True)
    return folder


TINY = """
loader.batch_size=4 loader.context_length=3 loader.returns_scale=10
model.hidden_size=8 model.layers=1 model.max_timestep=null
optimizer.learning_rate=1e-2 optimizer.warmup_steps=3
train.steps=20 train.device=cpu train.threads=1 train.trackers=[]
train.log_every=3 train.checkpoint_every=5 train.evaluate_every=7
evaluate.episodes=2 evaluate.environments=2
"""


def tiny_recipe(data: Path, *overrides: str) -> Recipe:
    """Return a recipe for the dataset at `data` that trains in a second."""
    return load_recipe(
        "paper", last_words("name=tiny", f"data.path={data}", *TINY.split(), *overrides)
    )


def measured(run: Path) -> list[dict[str, Any]]:
    """Return what metrics say of training, without times."""
    return [
        {key: record[key] for key in ("step", "loss", "gradient_norm", "learning_rate")}
        for record in read_records(run / "metrics.jsonl")
    ]


def learnt(run: Path) -> dict[str, Any]:
    """Return everything of a run that must not depend on kills: weights, moments, metrics."""
    step, last = list_checkpoints(run / "checkpoints")[-1]
    played = [
        (record["step"], [target["returns"] for target in record["targets"]])
        for record in read_records(run / "evaluations.jsonl")
    ]
    return {
        "step": step,
        "model": (last / "model.safetensors").read_bytes(),
        "training": (last / "training.safetensors").read_bytes(),
        "config": (last / "config.json").read_bytes(),
        "metrics": measured(run),
        "evaluations": played,
        "recipe": load_recipe(run).replace({"description": ""}),
    }
