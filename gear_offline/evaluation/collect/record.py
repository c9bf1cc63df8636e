"""Play planned episodes and keep every transition of each.

A plan fixes an episode: its policy, its reset seed, its random stream.  The same plan gives the
same episode in every process, so the data do not depend on their number.  Episodes are handed out
in the order of the plans: taking them as they finish, up to a number of steps, would favour short
ones.  Evaluation (`gear_offline.evaluation.rollout`) batches one policy over environments; here
every episode may have a policy of its own, which acts beside its environment.

Shape legend: T steps of an episode, S observation, A action.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from gear_offline.core.draws import Draws
from gear_offline.core.files import Closing
from gear_offline.core.types import Array, Float64Array
from gear_offline.core.workers import Caller, WorkerPool
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.sources.flags import TERMINAL_FLAGS, TIME_FLAGS
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import (
    Environment,
    EnvironmentFacts,
    Options,
    Pack,
    finite_actions,
    make_environment,
    not_finite,
    pack_environment,
    simulator_data,
)

TRAIN, EVALUATE, RECORD, LEARN = 1, 2, 3, 4  # the first element of a stream's path: its purpose
LEARNER = "learner"  # column: whose history a step is of


def stream(seed: int, *path: int) -> np.random.Generator:
    """Return the random generator at `path`; equal arguments give equal draws."""
    # a spawn key: unlike entropy, it differs from the same path with a 0 behind
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=path)))


def reset_seed(seed: int, *path: int) -> int:
    """Return the 31-bit seed for an environment's reset at `path`."""
    return int(np.random.SeedSequence(seed, spawn_key=path).generate_state(1)[0] >> 1)


class EpisodePolicy(Protocol):
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

    policy: EpisodePolicy
    reset_seed: int
    goes_on: bool = False  # reset without a seed: the environment keeps its task
    noise_path: tuple[int, ...]  # of the episode's own stream: random actions, action noise
    # Deviation of Gaussian noise in half ranges of the action; of choices: share of random ones.
    action_noise: float = 0.0
    # told of each step: observation, action, reward, next observation, whether it terminated
    on_step: Callable[[Array, Array, float, Array, bool], None] | None = None
    learner: int | None = None  # whose history the episode goes on


class HistoryPlan(Protocol):
    """Plans the episodes of a history, each when the one before it has been played."""

    def episodes(self, facts: EnvironmentFacts) -> Iterator[EpisodePlan]: ...


Plan = EpisodePlan | HistoryPlan


def fields_of(rows: Array) -> dict[str, Array]:
    """Return the fields of records of observations, by name; what has none is ``""``."""
    return {name: rows[name] for name in rows.dtype.names} if rows.dtype.names else {"": rows}


def episode_plan(policy: EpisodePolicy, path: tuple[int, ...], action_noise: float) -> EpisodePlan:
    """Return the plan of the episode at a `stream`'s path, its seed first."""
    return EpisodePlan(
        policy=policy, reset_seed=reset_seed(*path), noise_path=path, action_noise=action_noise
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """An episode as it was played."""

    reset_seed: int
    observations: Array  # (T + 1, S), or frames (T + 1, h, w): the last one is not acted on
    actions: Array  # (T, A) in the environment's dtype or (T,) int64, as they were applied
    rewards: Float64Array  # (T,)
    terminated: bool  # the environment ended it; False: a time limit did
    learner: int | None  # of its plan
    infos: dict[str, Array]  # MuJoCo's ``qpos`` and ``qvel`` before each step, (T, ...) float32

    @property
    def steps(self) -> int:
        return len(self.rewards)

    @property
    def total(self) -> float:
        """The undiscounted return."""
        return float(self.rewards.sum())

    def columns(self) -> dict[str, Array]:
        """Return the rows (T, ...) of a file in D4RL's layout, in the environment's dtypes.

        Frames have no ``next_observations``, which would double the file.  ``terminals`` and
        ``timeouts`` are never both true on a row.
        """
        last = np.arange(self.steps) == self.steps - 1
        observations = dict[str, Array]()
        for name, rows in fields_of(self.observations).items():
            field = f"observations/{name.removeprefix('observations/')}".removesuffix("/")
            observations[field] = rows
        following = {f"next_{n}": rows[1:] for n, rows in observations.items() if rows.ndim < 3}
        return {
            **{name: rows[:-1] for name, rows in observations.items()},
            **following,
            "actions": self.actions,
            "rewards": self.rewards,
            "terminals": last & self.terminated,
            "timeouts": last & (not self.terminated),
            **{f"infos/{name}": rows for name, rows in self.infos.items()},
            **({} if self.learner is None else {LEARNER: np.full(self.steps, self.learner, "i4")}),
        }


def is_recorded(column: str) -> bool:
    """Return true if a played episode has the column, or its end says what is in it."""
    top, _, rest = column.partition("/")
    names = ("observations", "next_observations", "actions", "rewards", *TERMINAL_FLAGS)
    return top in (*names, *TIME_FLAGS) or (top == "infos" and rest in ("qpos", "qvel"))


def check_recorded(dataset: Dataset) -> None:
    """Refuse data with columns that episodes which are played have not (``COLUMN``)."""
    names = [column.name for column in dataset.spec]
    if missing := [name for name in names if not is_recorded(name)]:
        columns = ",".join(name for name in names if is_recorded(name))
        problem = f"the data have {' and '.join(missing)}, which no episode that is played has"
        remedy = f"train on data without: convert {dataset.name} OTHER --columns {columns}"
        raise InputError("COLUMN", problem, dataset.name, remedy)


class Player(Closing):
    """One environment of this process that plays plans."""

    def __init__(self, environment: Environment) -> None:
        self._environment, self.facts = environment, environment.facts
        self._data, facts = simulator_data(environment), self.facts
        if not np.isfinite([facts.low, facts.high]).all():
            remedy = "give its action_space finite bounds in a wrapper"
            problem = "its actions have no bounds"
            raise InputError("ENVIRONMENT", problem, facts.environment_id, remedy)

    def play_all(self, plan: Plan) -> Iterator[Episode]:
        """Play the episode of a plan, or those of a history."""
        plans = [plan] if isinstance(plan, EpisodePlan) else plan.episodes(self.facts)
        return map(self.play, plans)

    def play(self, plan: EpisodePlan) -> Episode:
        """Play an episode; global generators that its policy may draw from are seeded, too."""
        with Draws(plan.reset_seed):
            return self._play(plan)

    def _play(self, plan: EpisodePlan) -> Episode:
        facts, generator = self.facts, stream(*plan.noise_path)
        seed = None if plan.goes_on else plan.reset_seed
        observations = [self._environment.reset(seed=seed)[0]]
        actions, rewards = list[Array](), list[float]()
        infos: dict[str, list[Array]] = {} if self._data is None else {"qpos": [], "qvel": []}
        terminated = truncated = False
        while not (terminated or truncated):
            action = finite_actions(plan.policy.act(observations[-1], generator))
            # What is stored is what was applied: the environment gets the value after the cast.
            actions.append(noisy(facts, action, plan.action_noise, generator))
            for name, rows in infos.items():
                rows.append(getattr(self._data, name).copy())
            observation, reward, terminated, truncated, _ = self._environment.step(actions[-1])
            observations.append(observation)
            rewards.append(reward)
            if plan.on_step is not None:
                plan.on_step(observations[-2], actions[-1], reward, observation, terminated)
        last_fields = fields_of(observations[-1]).values()
        if not all(np.isfinite(values).all() for values in last_fields):  # it is recorded, too
            raise not_finite("a last observation", facts.environment_id)
        return Episode(
            reset_seed=plan.reset_seed,
            observations=np.asarray(observations),
            actions=np.asarray(actions),
            rewards=np.asarray(rewards),
            terminated=terminated,
            learner=plan.learner,
            infos={name: np.asarray(rows, np.float32) for name, rows in infos.items()},
        )

    def close(self) -> None:
        self._environment.close()


def check_noise(facts: EnvironmentFacts, noise: float) -> None:
    """Refuse a share of random choices above 1; ``USAGE``."""
    if facts.discrete and noise > 1.0:
        problem = f"got {noise:g}: with discrete actions it is the probability of a random one"
        raise InputError("USAGE", problem, "action_noise", "give 0 to 1")


def noisy(
    facts: EnvironmentFacts, action: Array, noise: float, generator: np.random.Generator
) -> Array:
    """Add the noise of an `EpisodePlan` to an action, clip it, cast it to the stored dtype."""
    if facts.discrete:
        if noise and generator.random() < noise:
            action = np.asarray(generator.integers(facts.choices))
        return np.asarray(action, dtype=np.int64)
    if noise:
        half = 0.5 * (facts.high - facts.low)
        action = action + noise * half * generator.standard_normal(facts.low.size)
    return facts.clip_actions(action)


class Crew(Closing):
    """Plays plans in this process (``processes=1``) or in several; a context manager."""

    def __init__(
        self, environment_id: str, options: Options | None = None, *, processes: int
    ) -> None:
        self._player = Player(make_environment(environment_id, options))
        self.facts = self._player.facts
        self._known = pack_environment(environment_id, options)
        several = processes > 1 and self._known is not None
        self._pool = WorkerPool(processes) if several else None

    def play(self, plans: Iterable[Plan]) -> Iterator[Episode]:
        """Yield the episodes of `plans` (maybe endless) in order; stop reading when enough."""
        if self._pool is None:
            return chain.from_iterable(map(self._player.play_all, plans))
        jobs = ((self._known, plan) for plan in plans)
        return chain.from_iterable(self._pool.run(f"{__name__}:play_in_worker", jobs))

    def close(self) -> None:
        self._player.close()
        if self._pool is not None:
            self._pool.close()


@functools.cache
def _player(pack: Pack) -> Player:
    return Player(pack.make())


def play_in_worker(caller: Caller, pack: Pack, plan: Plan) -> list[Episode]:
    """Do one job of `Crew` in a worker."""
    return list(_player(pack).play_all(plan))
