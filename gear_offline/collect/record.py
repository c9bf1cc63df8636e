"""Play planned episodes and record every transition of each.

A plan fixes an episode: its policy, its reset seed, its random stream.  The same plan gives the
same episode in every process, so the data do not depend on their number.  Episodes are handed out
in the order of the plans: taking them as they finish, up to a number of steps, would favour short
ones.

Shape legend: T steps of an episode, S observation, A action.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gear_offline.core.closing import Closing
from gear_offline.core.types import Array, Float64Array
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.environments import (
    EnvironmentFacts,
    Known,
    known_of,
    make_environment,
    probe,
    simulator_data,
)
from gear_offline.workers import Caller, WorkerPool

# First element of a stream's path: what the stream is for.
TRAIN, EVALUATE, RECORD = 1, 2, 3


def stream(seed: int, *path: int) -> np.random.Generator:
    """Return the random generator at `path`; equal arguments give equal draws."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, path)))


def reset_seed(seed: int, *path: int) -> int:
    """Return the 31-bit seed for an environment's reset at `path`."""
    return int(_sequence(seed, path).generate_state(1)[0] >> 1)


def _sequence(seed: int, path: tuple[int, ...]) -> np.random.SeedSequence:
    # As a spawn key, unlike as entropy, a path differs from the same path with a 0 at its end.
    return np.random.SeedSequence(seed, spawn_key=path)


class Policy(Protocol):
    """Acts in an episode, given its own random generator.

    `algorithm` says what made it, e.g. ``"ARS-V2t linear"``; it goes into the file.
    """

    @property
    def algorithm(self) -> str: ...

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        """Return an action (A,), or a choice, for an observation."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodePlan:
    """All that decides an episode."""

    policy: Policy
    reset_seed: int
    noise_path: tuple[int, ...]  # of the episode's own stream: random actions, action noise
    # Deviation of Gaussian noise in half ranges of the action; of choices: share of random ones.
    action_noise: float = 0.0
    expected_return: float | None = None  # when it was played before; recording checks it
    on_step: Callable[[float, Array], None] | None = None  # told the reward and the action


def episode_plan(policy: Policy, path: tuple[int, ...], action_noise: float) -> EpisodePlan:
    """Return the plan of the episode at a `stream`'s path, its seed first."""
    return EpisodePlan(
        policy=policy, reset_seed=reset_seed(*path), noise_path=path, action_noise=action_noise
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One recorded episode.

    Its columns, in the dtypes of the file: ``observations`` (T, S), or frames (T, h, w) uint8;
    ``next_observations`` likewise, but not for frames; ``actions`` (T, A) float32 or (T,) int64;
    ``rewards`` (T,) float32; ``terminals``, ``timeouts`` (T,) bool, never both true on a row;
    ``infos/qpos``, ``infos/qvel`` float32, before the step, for MuJoCo.
    """

    columns: dict[str, Array]
    reset_seed: int

    @property
    def steps(self) -> int:
        return len(self.columns["rewards"])


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeScore:
    """What training needs of an episode."""

    total_reward: float
    steps: int
    mean: Float64Array  # (S,) of the observations acted on
    squares: Float64Array  # (S,) summed squared deviation from it


@dataclass(kw_only=True, eq=False)
class _Played:
    """An episode as it was played; observations are one more than steps."""

    seen: list[Array]
    actions: list[Array] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    positions: list[Array] = field(default_factory=list)
    velocities: list[Array] = field(default_factory=list)
    terminated: bool = False


class Player(Closing):
    """One environment of this process that plays plans."""

    def __init__(self, environment_id: str) -> None:
        self.facts = probe(environment_id)
        _check_recordable(self.facts)
        self._environment = make_environment(environment_id)
        self._data = simulator_data(self._environment)

    def record(self, plan: EpisodePlan) -> Episode:
        """Play a plan and return every transition."""
        played, facts = self._play(plan), self.facts
        total = float(np.sum(played.rewards))
        if plan.expected_return is not None and total != plan.expected_return:
            returns = f"{plan.expected_return} in training and {total} when it was recorded"
            remedy = "the environment does not depend on its seed alone: leave replay out"
            what = f"an episode returned {returns}"
            raise GearError("ENVIRONMENT", what, facts.environment_id, remedy)
        floats = facts.observation_dtype.kind == "f"
        seen = np.asarray(played.seen, dtype=np.float32 if floats else facts.observation_dtype)
        last = np.arange(len(played.rewards)) == len(played.rewards) - 1
        columns: dict[str, Array] = {
            "observations": seen[:-1],
            **({} if facts.frames else {"next_observations": seen[1:]}),  # frames once, not twice
            "actions": np.asarray(played.actions, np.int64 if facts.discrete else np.float32),
            "rewards": np.asarray(played.rewards, dtype=np.float32),
            "terminals": last & played.terminated,
            "timeouts": last & (not played.terminated),
        }
        if self._data is not None:
            columns["infos/qpos"] = np.asarray(played.positions, dtype=np.float32)
            columns["infos/qvel"] = np.asarray(played.velocities, dtype=np.float32)
        return Episode(columns=columns, reset_seed=plan.reset_seed)

    def score(self, plan: EpisodePlan) -> EpisodeScore:
        """Play a plan and return what training needs."""
        played = self._play(plan)
        acted_on = np.asarray(played.seen[:-1], np.float64).reshape(len(played.rewards), -1)
        mean = acted_on.mean(axis=0)
        return EpisodeScore(
            total_reward=float(np.sum(played.rewards)),
            steps=len(played.rewards),
            mean=mean,
            squares=((acted_on - mean) ** 2).sum(axis=0),
        )

    def _play(self, plan: EpisodePlan) -> _Played:
        environment, generator = self._environment, stream(*plan.noise_path)
        observation, _ = environment.reset(seed=plan.reset_seed)
        played, over = _Played(seen=[np.array(observation)]), False
        while not over:
            chosen = plan.policy.act(played.seen[-1], generator)
            action = noisy(self.facts, chosen, plan.action_noise, generator)
            if self._data is not None:
                played.positions.append(self._data.qpos.copy())
                played.velocities.append(self._data.qvel.copy())
            # What is stored is what was applied: the environment gets the value after the cast.
            applied = self.facts.shaped(action)
            observation, reward, terminated, truncated, _ = environment.step(applied)
            played.seen.append(np.array(observation))  # it may write to its array again
            played.actions.append(action)
            played.rewards.append(float(reward))
            if plan.on_step is not None:
                plan.on_step(played.rewards[-1], action)
            played.terminated, over = bool(terminated), bool(terminated or truncated)
        return played

    def close(self) -> None:
        self._environment.close()


def noisy(
    facts: EnvironmentFacts, action: Array, noise: float, generator: np.random.Generator
) -> Array:
    """Add noise as of `EpisodePlan` to an action, clip it, and cast it to what will be stored."""
    if not np.isfinite(action).all():
        what = "the policy returned an action that is NaN or infinite"
        remedy = "train it with smaller steps"
        raise GearError("MODEL", what, facts.environment_id, remedy)
    if facts.discrete:
        if noise and generator.random() < noise:
            action = np.asarray(generator.integers(facts.choices))
        return np.asarray(action, dtype=np.int64)
    if noise:
        half = 0.5 * (facts.high - facts.low)
        action = action + noise * half * generator.standard_normal(facts.low.size)
    return np.minimum(np.maximum(action, facts.low), facts.high).astype(np.float32)


def _check_recordable(facts: EnvironmentFacts) -> None:
    if not np.isfinite([facts.low, facts.high]).all():
        what, remedy = "its actions have no bounds", "wrap it with RescaleAction"
    elif not facts.step_limit:
        what = "it has no step limit, so an episode might never end"
        remedy = "register it with max_episode_steps"
    else:
        return
    raise InputError("ENVIRONMENT", what, where=facts.environment_id, remedy=remedy)


class Crew(Closing):
    """Plays plans in this process (``processes=1``) or in several; a context manager."""

    def __init__(self, environment_id: str, *, processes: int) -> None:
        self._player = Player(environment_id)
        self.facts = self._player.facts
        self._id, self._known = environment_id, known_of(environment_id)
        several = processes > 1 and self._known is not None
        self._pool = WorkerPool(processes) if several else None

    def record(self, plans: Iterable[EpisodePlan]) -> Iterator[Episode]:
        """Yield the episodes of `plans` (maybe endless) in order; stop reading when enough."""
        return self._play("record", plans)

    def score(self, plans: Iterable[EpisodePlan]) -> list[EpisodeScore]:
        """Return the scores of `plans` in order."""
        return list(self._play("score", plans))

    def _play(self, method: str, plans: Iterable[EpisodePlan]) -> Iterator[Any]:
        if self._pool is None:
            yield from map(getattr(self._player, method), plans)
            return
        jobs = ((self._id, self._known, method, plan) for plan in plans)
        yield from self._pool.run(f"{__name__}:play_in_worker", jobs)

    def close(self) -> None:
        """End the workers."""
        self._player.close()
        if self._pool is not None:
            self._pool.close()


@functools.cache
def _player(environment_id: str, known: Known) -> Player:
    known.learn()
    return Player(environment_id)


def play_in_worker(
    caller: Caller, environment_id: str, known: Known, method: str, plan: EpisodePlan
) -> Episode | EpisodeScore:
    """Do one job of `Crew` in a worker; a method of `Player`."""
    play = getattr(_player(environment_id, known), method)
    result: Episode | EpisodeScore = play(plan)
    return result
