"""Play planned episodes side by side and record every transition of each.

A plan fixes an episode: its policy, its reset seed, its action noise.  The same plan gives the same
episode in every process and beside any other episodes.  Environments are stepped one after the
other and the policy acts for all of them as a batch; each is reset here, explicitly, when its
episode has ended.  So no reset observation is ever taken for a transition, and the last
``next_observations`` of an episode is the true final observation.

Shape legend: T steps of an episode, S observation, A action, B environments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.collect.environment import (
    EnvironmentFacts,
    describe,
    simulator_data,
)
from gear_offline.collect.policy import Policy
from gear_offline.collect.streams import stream
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import make_environment

AnyArray = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodePlan:
    """All that decides an episode.

    Attributes
    ----------
    policy
        Acts in it.
    reset_seed
        Seed of the environment's reset.
    noise_path
        Path of the episode's own random stream (a random policy's draws, action noise).
    action_noise
        Standard deviation of Gaussian noise, in half ranges of the action; for discrete actions
        the probability of a uniformly drawn action.
    maker
        Which maker the episode belongs to; copied to the episode.
    expected_return
        What the episode returned when it was played before; recording checks it.
    """

    policy: Policy
    reset_seed: int
    noise_path: tuple[int, ...]
    action_noise: float = 0.0
    maker: int = 0
    expected_return: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One recorded episode, in the dtypes of the file.

    Attributes
    ----------
    columns
        ``observations`` (T, S), or frames (T, h, w) uint8; ``next_observations`` likewise, but not
        for frames; ``actions`` (T, A) float32 or (T,) int64;
        ``rewards`` (T,) float32; ``terminals``, ``timeouts`` (T,) bool, never both true on a row;
        ``infos/qpos``, ``infos/qvel`` float32, before the step, for MuJoCo.
    maker, reset_seed
        From the plan.
    simulated_return
        float64 sum of the simulator's rewards, before the cast to float32.
    """

    columns: dict[str, AnyArray]
    maker: int
    reset_seed: int
    simulated_return: float

    @property
    def steps(self) -> int:
        return len(self.columns["rewards"])


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeScore:
    """What training needs of an episode.

    Attributes
    ----------
    total_reward
        Sum of the rewards.
    steps
        T.
    count, mean, squares
        Number, mean (S,) and summed squared deviation (S,) of the observations acted on.
    """

    total_reward: float
    steps: int
    count: int
    mean: Float64Array
    squares: Float64Array


@dataclass(eq=False)
class _Lane:
    """One environment and the episode it is playing."""

    environment: Any
    facts: EnvironmentFacts
    data: Any
    index: int = -1
    plan: EpisodePlan | None = None
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    seen: list[AnyArray] = field(default_factory=list)
    actions: list[AnyArray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    positions: list[AnyArray] = field(default_factory=list)
    velocities: list[AnyArray] = field(default_factory=list)
    terminated: bool = False

    def begin(self, index: int, plan: EpisodePlan) -> None:
        self.index, self.plan, self.terminated = index, plan, False
        self.generator = stream(*plan.noise_path)
        self.actions, self.rewards, self.positions, self.velocities = [], [], [], []
        observation, _ = self.environment.reset(seed=plan.reset_seed)
        self.seen = [np.array(observation)]

    def applied(self, action: AnyArray) -> AnyArray:
        """Add the plan's noise, clip to the bounds, and cast to what will be stored."""
        assert self.plan is not None, "a lane acts only within an episode"
        noise, facts = self.plan.action_noise, self.facts
        if facts.discrete:
            if noise and self.generator.random() < noise:
                action = np.asarray(self.generator.integers(facts.actions))
            return np.asarray(action, dtype=np.int64)
        if noise:
            half = 0.5 * (facts.high - facts.low)
            action = action + noise * half * self.generator.standard_normal(facts.low.size)
        return np.minimum(np.maximum(action, facts.low), facts.high).astype(np.float32)

    def step(self, action: AnyArray) -> bool:
        """Apply `action`, record the transition, and return whether the episode ended."""
        if self.data is not None:
            self.positions.append(self.data.qpos.copy())
            self.velocities.append(self.data.qvel.copy())
        # What is stored is what was applied: the environment gets the value after the cast.
        given = int(action) if self.facts.discrete else action
        observation, reward, terminated, truncated, _ = self.environment.step(given)
        self.seen.append(np.array(observation))  # an environment may write to its array again
        self.actions.append(action)
        self.rewards.append(float(reward))
        self.terminated = bool(terminated)
        return self.terminated or bool(truncated)

    def episode(self) -> Episode:
        assert self.plan is not None, "a lane ends only an episode that it began"
        facts, steps = self.facts, len(self.rewards)
        total, expected = float(np.sum(self.rewards)), self.plan.expected_return
        if expected is not None and total != expected:
            raise GearError(
                "COLLECT_NOT_REPEATABLE",
                f"an episode returned {expected} in training and {total} when it was recorded",
                where=facts.environment_id,
                remedy="the environment does not depend on its seed alone: leave replay out",
            )
        seen = np.asarray(self.seen, dtype=facts.observation_dtype)
        last = np.zeros(steps, dtype=np.bool_)
        last[-1] = True
        columns: dict[str, AnyArray] = {
            "observations": seen[:-1],
            **({} if facts.frames else {"next_observations": seen[1:]}),  # frames once, not twice
            "actions": np.asarray(self.actions, dtype=np.int64 if facts.discrete else np.float32),
            "rewards": np.asarray(self.rewards, dtype=np.float32),
            "terminals": last & self.terminated,
            "timeouts": last & (not self.terminated),
        }
        if self.data is not None:
            columns["infos/qpos"] = np.asarray(self.positions, dtype=np.float32)
            columns["infos/qvel"] = np.asarray(self.velocities, dtype=np.float32)
        return Episode(
            columns=columns,
            maker=self.plan.maker,
            reset_seed=self.plan.reset_seed,
            simulated_return=total,
        )

    def score(self) -> EpisodeScore:
        acted_on = np.asarray(self.seen[:-1], dtype=np.float64).reshape(len(self.rewards), -1)
        mean = acted_on.mean(axis=0)
        return EpisodeScore(
            total_reward=float(np.sum(self.rewards)),
            steps=len(self.rewards),
            count=len(acted_on),
            mean=mean,
            squares=((acted_on - mean) ** 2).sum(axis=0),
        )


class Player:
    """B environments of one kind in this process.

    Parameters
    ----------
    environment_id
        Gymnasium id.
    environments
        B; they act as one batch.
    """

    def __init__(self, environment_id: str, environments: int) -> None:
        made: list[Any] = []
        try:
            for _ in range(environments):
                made.append(make_environment(environment_id))
            self.facts = describe(made[0], environment_id)
        except BaseException:
            for environment in made:
                environment.close()
            raise
        self._lanes = [_Lane(e, self.facts, simulator_data(e)) for e in made]

    def close(self) -> None:
        for lane in self._lanes:
            lane.environment.close()

    def record(self, plans: Iterable[EpisodePlan]) -> Iterator[Episode]:
        """Play `plans`, which may be endless; yield their episodes in the order of the plans."""
        return (episode for _, episode in _in_order(self._play(plans, record=True)))

    def score(self, plans: Iterable[EpisodePlan]) -> list[EpisodeScore]:
        """Play `plans` and return their scores in the order of the plans."""
        return [score for _, score in _in_order(self._play(plans, record=False))]

    def _play(self, plans: Iterable[EpisodePlan], *, record: bool) -> Iterator[tuple[int, Any]]:
        waiting = enumerate(plans)
        busy: list[_Lane] = []
        for lane, (index, plan) in zip(self._lanes, waiting, strict=False):
            lane.begin(index, plan)
            busy.append(lane)
        while busy:
            for lane, action in zip(list(busy), _act(busy), strict=True):
                if not lane.step(lane.applied(action)):
                    continue
                yield lane.index, lane.episode() if record else lane.score()
                following = next(waiting, None)
                if following is None:
                    busy.remove(lane)
                else:
                    lane.begin(*following)


def _act(lanes: list[_Lane]) -> list[AnyArray]:
    """Return each lane's action; lanes that share a policy act as one batch."""
    groups: dict[int, list[int]] = {}
    for position, lane in enumerate(lanes):
        groups.setdefault(id(lane.plan.policy if lane.plan else None), []).append(position)
    actions: list[AnyArray] = [np.empty(0)] * len(lanes)
    for positions in groups.values():
        members = [lanes[p] for p in positions]
        plan = members[0].plan
        assert plan is not None, "busy lanes have a plan"
        seen = np.array([member.seen[-1] for member in members])
        batch = plan.policy.act(seen, [member.generator for member in members])
        if not np.isfinite(batch).all():
            raise GearError(
                "POLICY_NONFINITE",
                "the policy returned an action that is NaN or infinite",
                where=members[0].facts.environment_id,
                remedy="train it with smaller steps",
            )
        for position, action in zip(positions, batch, strict=True):
            actions[position] = action
    return actions


def _in_order(results: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield numbered results by number: short episodes finish first but must not come first.

    Taking episodes as they finish, up to a number of steps, would favour short ones.
    """
    early: dict[int, Any] = {}
    expected = 0
    for index, result in results:
        early[index] = result
        while expected in early:
            yield expected, early.pop(expected)
            expected += 1
