"""Augmented Random Search, version V2-t: a good linear policy in minutes, with NumPy alone.

Mania, Guy and Recht, "Simple random search of static linear policies is competitive for
reinforcement learning", NeurIPS 2018 (arXiv:1803.07055).  Each iteration tries N directions in the
space of weights, each forwards and backwards, and moves along the b best of them.  Observations
are normalised by their running mean and deviation (V2); only the top b directions count (t).
A constant alive bonus is taken off the reward (`ArsOptions.alive_bonus`), as the paper does.

Every rollout has its own random streams, so that the training is the same for any number of
processes, and so that each of its rollouts can be played again later, to be recorded.

Shape legend: N directions, A action, S observation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gear_offline.collect.policies import MIN_STD, LinearPolicy
from gear_offline.collect.record import (
    EVALUATE,
    TRAIN,
    Crew,
    EpisodePlan,
    EpisodeScore,
    reset_seed,
    stream,
)
from gear_offline.core.types import Float64Array, Int64Array

ALGORITHM = "ARS-V2t linear"
EVALUATE_EVERY = 10  # iterations
EVALUATION_EPISODES = 5
CONFIRMATION_EPISODES = 15  # five lucky episodes do not end the training


@dataclass(frozen=True, kw_only=True)
class ArsOptions:
    """Hyper-parameters, in the paper's letters where it has them.

    Attributes
    ----------
    directions
        N, tried in each iteration, each forwards and backwards.
    top
        b, the best directions that are used.
    noise
        nu, standard deviation of a direction.
    step_size
        alpha.
    alive_bonus
        Taken off the reward of every step during training, so that standing still does not pay.
    attempt_steps
        Environment steps after which an attempt is given up for fresh random streams.
    promising
        Mean return that earns an attempt twice those steps more.
    train_steps
        Environment steps of all attempts, unless the caller says otherwise.
    target
        Mean return at which training stops, unless the caller says otherwise.
    """

    directions: int = 8
    top: int = 4
    noise: float = 0.03
    step_size: float = 0.02
    alive_bonus: float = 0.0
    attempt_steps: int = 1_000_000
    promising: float | None = None
    train_steps: int = 1_000_000
    target: float | None = None


# The paper's V2-t values as RL Baselines3 Zoo lists them ("closest to original paper",
# hyperparams/ars.yml); HalfCheetah's N is the 8 of the authors' own example command.
OPTIONS = {
    "Hopper": ArsOptions(
        directions=8,
        top=4,
        noise=0.025,
        step_size=0.01,
        alive_bonus=1.0,
        attempt_steps=150_000,
        promising=1_200.0,
        train_steps=2_000_000,
        target=2_500.0,
    ),
    "HalfCheetah": ArsOptions(directions=8, top=4, noise=0.03, step_size=0.02),
    "Walker2d": ArsOptions(directions=40, top=30, noise=0.025, step_size=0.03, alive_bonus=1.0),
    "Ant": ArsOptions(directions=60, top=20, noise=0.025, step_size=0.015, alive_bonus=1.0),
    # Not in the paper: its noise of 0.03 is lost in a pole that falls within 30 steps.
    "InvertedPendulum": ArsOptions(
        directions=8, top=4, noise=0.1, step_size=0.1, attempt_steps=200_000, target=1_000.0
    ),
    "Swimmer": ArsOptions(directions=1, top=1, noise=0.01, step_size=0.02),
}


def options_for(environment_id: str) -> ArsOptions:
    """Return the hyper-parameters for an environment, by its name without the version."""
    return OPTIONS.get(re.split("[:/]", environment_id)[-1].partition("-v")[0], ArsOptions())


@dataclass(eq=False)
class RunningMoments:
    """Mean and variance of all observations so far, merged rollout by rollout.

    Attributes
    ----------
    count
        Observations seen.
    mean, squares
        (S,) float64: mean, and summed squared deviation from it.
    """

    count: int
    mean: Float64Array
    squares: Float64Array

    def merge(self, score: EpisodeScore) -> None:
        """Add a rollout's observations (Chan et al.'s pairwise formula)."""
        total = self.count + score.steps
        difference = score.mean - self.mean
        self.mean = self.mean + difference * (score.steps / total)
        self.squares = (
            self.squares + score.squares + difference**2 * (self.count * score.steps / total)
        )
        self.count = total

    def std(self) -> Float64Array:
        """Return the sample deviation (S,); 1 where a feature has not moved."""
        if self.count < 2:
            return np.ones_like(self.mean)
        std = np.sqrt(self.squares / (self.count - 1))
        return np.where(std < MIN_STD, 1.0, std)


def update(
    weight: Float64Array,
    directions: Float64Array,
    forward: Float64Array,
    backward: Float64Array,
    *,
    top: int,
    step_size: float,
) -> Float64Array:
    """Return the next weight (A, S): one ARS step along the best directions.

    Parameters
    ----------
    weight
        (A, S).
    directions
        (N, A, S) standard normal.
    forward, backward
        (N,) returns of ``weight +/- noise * direction``.
    top
        Directions that are used: those with the largest of their two returns.
    step_size
        Divided by the deviation of the returns that are used.
    """
    best = np.argsort(-np.maximum(forward, backward), kind="stable")[:top]
    deviation = np.concatenate([forward[best], backward[best]]).std()
    if deviation == 0.0:
        return weight  # every rollout returned the same: no direction is better
    gain = (forward[best] - backward[best])[:, None, None] * directions[best]
    return np.asarray(weight + step_size / (len(best) * deviation) * gain.sum(axis=0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """The policy at one evaluation.

    Attributes
    ----------
    policy
        Without exploration.
    attempt, iteration
        When.
    steps
        Training steps of all attempts so far.
    mean_return
        Over `episodes` episodes, alive bonus included.
    episodes
        `EVALUATION_EPISODES`, and `CONFIRMATION_EPISODES` more where those reached the target.
    """

    policy: LinearPolicy
    attempt: int
    iteration: int
    steps: int
    mean_return: float
    episodes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Iteration:
    """One iteration, with what is needed to play its rollouts again."""

    base: LinearPolicy
    attempt: int
    number: int
    returns: Float64Array  # (2N,): forwards and backwards of each direction in turn
    lengths: Int64Array  # (2N,)


@dataclass(kw_only=True, eq=False)
class Training:
    """Everything that a training did.

    Attributes
    ----------
    environment_id, seed, options
        What was asked.
    snapshots, iterations
        In order, over all attempts.
    steps
        Environment steps of training rollouts (evaluations not counted).
    action_noise
        Noise on the actions of evaluations, as in `EpisodePlan`.
    """

    environment_id: str
    seed: int
    options: ArsOptions
    action_noise: float = 0.0
    snapshots: list[Snapshot] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    steps: int = 0
    attempts: int = 0

    @property
    def best(self) -> Snapshot:
        """The snapshot with the highest mean return."""
        return max(self.snapshots, key=lambda s: s.mean_return)

    def near(self, mean_return: float) -> Snapshot:
        """The snapshot of the best attempt, before its best one, nearest to `mean_return`."""
        best = self.best
        earlier = [
            s for s in self.snapshots if s.attempt == best.attempt and s.iteration <= best.iteration
        ]
        return min(earlier, key=lambda s: abs(s.mean_return - mean_return))

    def rollout_plans(self, iteration: Iteration, *, maker: int = 0) -> list[EpisodePlan]:
        """Return the plans of an iteration's 2N rollouts: forwards, backwards, next direction."""
        return _rollout_plans(iteration.base, self.options, self.seed, iteration, maker)


def _direction(seed: int, attempt: int, number: int, d: int, shape: tuple[int, ...]) -> Any:
    return stream(seed, TRAIN, attempt, number, d).standard_normal(shape)


def _rollout_plans(
    base: LinearPolicy, options: ArsOptions, seed: int, at: Iteration, maker: int
) -> list[EpisodePlan]:
    plans: list[EpisodePlan] = []
    for d in range(options.directions):
        delta = options.noise * _direction(seed, at.attempt, at.number, d, base.weight.shape)
        for side, signed in enumerate((delta, -delta)):
            path = (seed, TRAIN, at.attempt, at.number, d, side)
            plans.append(
                EpisodePlan(
                    policy=base.perturbed(signed),
                    # Both ways start from the same state, so their difference is the policy's.
                    reset_seed=reset_seed(*path[:-1]),
                    noise_path=path,
                    maker=maker,
                    expected_return=float(at.returns[len(plans)]) if at.returns.size else None,
                )
            )
    return plans


def train(
    crew: Crew,
    *,
    seed: int,
    steps: int,
    options: ArsOptions | None = None,
    target: float | None = None,
    action_noise: float = 0.0,
    on_progress: Callable[[int, Snapshot | None], None] = lambda steps, snapshot: None,
) -> Training:
    """Train a linear policy.

    An attempt that has used `ArsOptions.attempt_steps` (three times those, if it is promising) is
    followed by one with fresh streams, until `steps` are used or `target` is reached: the method's
    luck varies much by seed.  Budgets are steps, not seconds, so that the result does not depend
    on the machine's speed.

    Parameters
    ----------
    crew
        Plays the rollouts.
    seed
        Names all streams.
    steps
        Environment steps of training in all.
    options
        Hyper-parameters; default: `options_for` the environment.
    target
        Stop at the first snapshot whose mean return reaches it.
    action_noise
        Noise under which snapshots are evaluated.  A gait that only holds without it is worth
        little when its recordings are to have noise, so training goes on past such a gait.
    on_progress
        Called after each iteration with its steps and, after an evaluation, its snapshot.
    """
    facts = crew.facts
    options = options or options_for(facts.environment_id)
    training = Training(
        environment_id=facts.environment_id, seed=seed, options=options, action_noise=action_noise
    )
    while training.steps < steps:
        for used, snapshot in _attempt(crew, training, steps, target):
            on_progress(used, snapshot)
            if snapshot and target is not None and snapshot.mean_return >= target:
                return training
    return training


def _attempt(
    crew: Crew, training: Training, limit: int, target: float | None
) -> Iterator[tuple[int, Snapshot | None]]:
    facts, options, seed = crew.facts, training.options, training.seed
    attempt = training.attempts
    training.attempts += 1
    size = facts.state_size
    moments = RunningMoments(0, np.zeros(size), np.zeros(size))
    policy = LinearPolicy(
        np.zeros((facts.action_size, size)),
        moments.mean,
        moments.std(),
        facts.discrete,
        ALGORITHM,
    )
    number = 0
    end = min(limit, training.steps + options.attempt_steps)
    extended = min(limit, training.steps + 3 * options.attempt_steps)
    while training.steps < end:
        at = Iteration(
            base=policy,
            attempt=attempt,
            number=number,
            returns=np.zeros(0),
            lengths=np.zeros(0, dtype=np.int64),
        )
        scores = crew.score(_rollout_plans(policy, options, seed, at, 0))
        returns = np.array([s.total_reward for s in scores])
        lengths = np.array([s.steps for s in scores], dtype=np.int64)
        training.iterations.append(replace(at, returns=returns, lengths=lengths))
        training.steps += int(lengths.sum())
        shape = policy.weight.shape
        shifted = returns - options.alive_bonus * lengths
        weight = update(
            policy.weight,
            np.stack(
                [_direction(seed, attempt, number, d, shape) for d in range(options.directions)]
            ),
            shifted[0::2],
            shifted[1::2],
            top=options.top,
            step_size=options.step_size,
        )
        for score in scores:
            moments.merge(score)
        number += 1
        policy = replace(policy, weight=weight, mean=moments.mean, std=moments.std())
        snapshot = None
        if number % EVALUATE_EVERY == 0 or training.steps >= end:
            snapshot = _evaluate(crew, training, policy, attempt, number, target)
            training.snapshots.append(snapshot)
            if options.promising is not None and snapshot.mean_return >= options.promising:
                end = extended
        yield int(lengths.sum()), snapshot


def _evaluate(
    crew: Crew,
    training: Training,
    policy: LinearPolicy,
    attempt: int,
    number: int,
    target: float | None,
) -> Snapshot:
    # The same start states at every evaluation, so that snapshots compare fairly.
    paths = [
        (training.seed, EVALUATE, i) for i in range(EVALUATION_EPISODES + CONFIRMATION_EPISODES)
    ]
    plans = [
        EpisodePlan(
            policy=policy,
            reset_seed=reset_seed(*p),
            noise_path=p,
            action_noise=training.action_noise,
        )
        for p in paths
    ]
    returns = [s.total_reward for s in crew.score(plans[:EVALUATION_EPISODES])]
    if target is not None and np.mean(returns) >= target:
        returns += [s.total_reward for s in crew.score(plans[EVALUATION_EPISODES:])]
    return Snapshot(
        policy=policy,
        attempt=attempt,
        iteration=number,
        steps=training.steps,
        mean_return=float(np.mean(returns)),
        episodes=len(returns),
    )
