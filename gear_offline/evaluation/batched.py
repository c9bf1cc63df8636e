"""Environments whose tensors lie on one device: thousands that step at once, without the host.

A class of them is named as other environments are, ``FILE.py:Name``; on the CPU, where one of them
is asked for, `Single` plays it.  `find_batched` has those of environments that Gymnasium names.

Shape legend: N environments, n episodes, S state elements, A action elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from gear_offline.core.parts import is_admitted
from gear_offline.core.types import Array, Int64Array
from gear_offline.evaluation.dark_room import MOVES, goals_of
from gear_offline.evaluation.environments import Options, guard, maker_of

Stepped = tuple[Tensor, Tensor, Tensor, Tensor]


class BatchedEnvironment(ABC):
    """`count` environments that step together, with all tensors on `device`.

    A class of one's own takes options behind these two, and has the spaces of one of them:
    `observation_space`, a Box of shape (S,), and `action_space`, a Box of shape (A,) or Discrete.
    Nothing resets itself: an episode that has ended is stepped on, and nobody looks, until `reset`.
    """

    observation_space: gymnasium.spaces.Box
    action_space: gymnasium.spaces.Box | gymnasium.spaces.Discrete
    captured = True  # reset() and step() only launch kernels, and change tensors in place

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device

    def starts(self, seeds: Int64Array) -> Tensor:
        """Return (n, ...) what the episodes of seeds begin with; by default the seeds."""
        return torch.from_numpy(seeds).to(self.device)

    @abstractmethod
    def reset(self, starts: Tensor, where: Tensor) -> Tensor:
        """Begin episodes with `starts` (N, ...) in the environments of a mask (N,).

        Returns observations (N, S), float32, of which those of the mask are looked at.
        """

    @abstractmethod
    def step(self, actions: Tensor) -> Stepped:
        """Act with (N, A) float32 within the bounds, or with (N,) int64 choices.

        Returns (N, S) observations, and (N,) rewards, whether the episode is at an end, and whether
        it is cut off.  The time limit of `max_episode_steps` is no matter of the environment's.
        """

    @classmethod
    def single(cls, **options: Any) -> Single:
        """Return one of them as an environment of Gymnasium, on the CPU."""
        return Single(cls(1, torch.device("cpu"), **options))


class Single(gymnasium.Env[Array, Any]):
    """One environment of a batched class; an episode without a seed draws one."""

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's name

    def __init__(self, batched: BatchedEnvironment) -> None:
        self._batched = batched
        self.observation_space = batched.observation_space
        self.action_space = batched.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        seed = int(self.np_random.integers(1 << 31)) if seed is None else seed
        starts = self._batched.starts(np.array([seed]))
        return self._batched.reset(starts, torch.ones(1, dtype=torch.bool))[0].numpy().copy(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        results = self._batched.step(torch.as_tensor(np.asarray(action))[None])
        observation, reward, terminated, truncated = (values[0] for values in results)
        return observation.numpy().copy(), float(reward), bool(terminated), bool(truncated), {}


class DLPackEnvironment(BatchedEnvironment):
    """Environments of JAX, Warp or any library whose arrays speak DLPack.

    A class of one's own has `reset_arrays` and `step_arrays`, functions of a state that only they
    look into, and `from_dlpack`, which makes the library's array of a tensor: of JAX
    ``staticmethod(jax.dlpack.from_dlpack)``.  Nothing is copied.
    """

    captured = False
    from_dlpack: Callable[[Any], Any]

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(count, device)
        self._state: Any = None

    def starts(self, seeds: Int64Array) -> Tensor:
        return super().starts(seeds % (1 << 31)).int()  # JAX has no wider ones by default

    @abstractmethod
    def reset_arrays(self, state: Any, starts: Any, where: Any) -> tuple[Any, Any]:
        """Return state and observations after `reset`; the first `state` is None."""

    @abstractmethod
    def step_arrays(self, state: Any, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return the state, and what `step` returns, after a step."""

    def reset(self, starts: Tensor, where: Tensor) -> Tensor:
        arrays = map(self.from_dlpack, (starts, where))
        self._state, observations = self.reset_arrays(self._state, *arrays)
        return from_dlpack(observations)

    def step(self, actions: Tensor) -> Stepped:
        self._state, *results = self.step_arrays(self._state, self.from_dlpack(actions))
        observations, rewards, terminated, truncated = map(from_dlpack, results)
        return observations, rewards, terminated, truncated


class DarkRooms(BatchedEnvironment):
    """Rooms of `gear_offline.evaluation.dark_room`; observations are one-hot, row and column."""

    def __init__(
        self,
        count: int,
        device: torch.device,
        goals: Literal["train", "held_out", "all", "one"] = "all",
        size: int = 9,
    ) -> None:
        super().__init__(count, device)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (2 * size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self._goals, self._size = goals_of(size, goals), size
        self._moves, self._one_hot = torch.from_numpy(MOVES).to(device), torch.eye(size).to(device)
        self._goal = torch.zeros((count, 2), dtype=torch.int64, device=device)
        self._position = torch.full_like(self._goal, size // 2)
        self._never = torch.zeros(count, dtype=torch.bool, device=device)

    def starts(self, seeds: Int64Array) -> Tensor:
        """Return the goals (n, 2), counted in circles."""
        return torch.from_numpy(self._goals[seeds % len(self._goals)]).to(self.device)

    def reset(self, starts: Tensor, where: Tensor) -> Tensor:
        self._goal.copy_(torch.where(where[:, None], starts, self._goal))
        self._position.masked_fill_(where[:, None], self._size // 2)
        return self._one_hot[self._position].flatten(1)

    def step(self, actions: Tensor) -> Stepped:
        self._position.add_(self._moves[actions]).clamp_(0, self._size - 1)
        rewards = (self._position == self._goal).all(1).float()
        return self._one_hot[self._position].flatten(1), rewards, self._never, self._never


OWN: dict[str, type[BatchedEnvironment]] = {"gear_offline/DarkRoom-v0": DarkRooms}


def find_batched(environment_id: str, options: Options) -> type[BatchedEnvironment] | None:
    """Return the class that is an environment's batched one, if it has one with such options."""
    maker = OWN.get(environment_id)
    if maker is None and is_admitted(environment_id):
        maker = maker_of(environment_id)
    is_batched = isinstance(maker, type) and issubclass(maker, BatchedEnvironment)
    is_plain = not options.keys() & {"additional_wrappers", "observation_columns"}
    return maker if is_batched and is_plain else None


def make_batched(
    environment_id: str, options: Options, count: int, device: torch.device
) -> BatchedEnvironment:
    """Make the environments of `find_batched`; what `gymnasium.make` takes is no option of it."""
    found = find_batched(environment_id, options)
    assert found is not None, "asked for behind find_batched"
    own = {key: value for key, value in options.items() if key != "max_episode_steps"}
    made = guard(environment_id, "making it", found, count, device, **own)
    made.count, made.device = count, device  # also of one that leaves `super().__init__` out
    return made
