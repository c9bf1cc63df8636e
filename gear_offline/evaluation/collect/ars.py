"""Augmented Random Search, version V2-t: a good linear policy in minutes, with NumPy alone.

Mania, Guy and Recht, "Simple random search of static linear policies is competitive for
reinforcement learning", NeurIPS 2018 (arXiv:1803.07055).  Each iteration tries N directions in the
space of weights, each forwards and backwards, and moves along the b best of them.  Observations
are normalised by their running mean and deviation (V2); only the top b directions count (t).
A constant alive bonus is taken off the reward (`ArsOptions.alive_bonus`), as the paper does.

Every rollout has its own random streams: the training is the same for any number of processes, and
each of its rollouts can be played again later, to be recorded.

Shape legend: N directions, A action, S observation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np

from gear_offline.core.progress import Progress
from gear_offline.core.text import count_text, say
from gear_offline.core.types import Array, Float64Array
from gear_offline.evaluation.collect.policies import LinearPolicy
from gear_offline.evaluation.collect.record import (
    EVALUATE,
    TRAIN,
    Crew,
    EpisodePlan,
    episode_plan,
    reset_seed,
    stream,
)

ALGORITHM = "ARS-V2t linear"
MIN_STD = 1e-8  # features that never move are divided by 1, as in the authors' code
EVALUATE_EVERY = 10  # iterations
EVALUATION_EPISODES = 5
CONFIRMATION_EPISODES = 15  # five lucky episodes do not end the training


@dataclass(frozen=True, kw_only=True)
class ArsOptions:
    """Hyper-parameters, and when training ends."""

    directions: int = 8  # the paper's N: tried in each iteration, each forwards and backwards
    top: int = 4  # b: the best directions that are used
    noise: float = 0.03  # nu: standard deviation of a direction
    step_size: float = 0.02  # alpha
    alive_bonus: float = 0.0  # off the reward of every step, so that standing still does not pay
    attempt_steps: int = 1_000_000  # then an attempt is given up for fresh random streams
    promising: float | None = None  # mean return that earns an attempt twice those steps more
    train_steps: int = 1_000_000  # environment steps of all attempts
    target: float | None = None  # mean return at which training stops


# The paper's V2-t values as RL Baselines3 Zoo lists them ("closest to original paper",
# hyperparams/ars.yml); all others, such as HalfCheetah: the authors' own example command.
_ALIVE = ArsOptions(noise=0.025, alive_bonus=1.0)
OPTIONS = {
    "Hopper": replace(
        _ALIVE,
        step_size=0.01,
        attempt_steps=150_000,
        promising=1_200.0,
        train_steps=2_000_000,
        target=2_500.0,
    ),
    "Walker2d": replace(_ALIVE, directions=40, top=30, step_size=0.03),
    "Ant": replace(_ALIVE, directions=60, top=20, step_size=0.015),
    # Not in the paper: its noise of 0.03 is lost in a pole that falls within 30 steps.
    "InvertedPendulum": ArsOptions(noise=0.1, step_size=0.1, attempt_steps=200_000, target=1_000.0),
    "Swimmer": ArsOptions(directions=1, top=1, noise=0.01),
}


def options_for(environment_id: str, *, train_steps: int | None = None) -> ArsOptions:
    """Return the hyper-parameters for an environment, by its name without the version."""
    name = re.split("[:/]", environment_id)[-1].partition("-v")[0]
    options = OPTIONS.get(name, ArsOptions())
    return replace(options, train_steps=train_steps or options.train_steps)


class RunningMoments:
    """Mean and variance of all observations so far, merged rollout by rollout."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean = np.zeros(size)
        self.squares = np.zeros(size)  # summed squared deviation from the mean

    def merge(self, observations: Array) -> None:
        """Add a rollout's observations (T, S) (Chan et al.'s pairwise formula)."""
        rows = np.asarray(observations, np.float64).reshape(len(observations), -1)
        mean = rows.mean(axis=0)
        total, difference = self.count + len(rows), mean - self.mean
        self.mean = self.mean + difference * (len(rows) / total)
        between = difference**2 * (self.count * len(rows) / total)
        self.squares = self.squares + ((rows - mean) ** 2).sum(axis=0) + between
        self.count = total

    def std(self) -> Float64Array:
        """Return the sample deviation (S,); 1 where a feature has not moved."""
        std = np.sqrt(self.squares / max(self.count - 1, 1))
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
    """Return the next weight (A, S): one ARS step along the `top` best of `directions` (N, A, S).

    `forward` and `backward` are the (N,) returns of ``weight +/- noise * direction``.
    """
    best = np.argsort(-np.maximum(forward, backward), kind="stable")[:top]
    deviation = np.concatenate([forward[best], backward[best]]).std()
    if deviation == 0.0:
        return weight  # every rollout returned the same: no direction is better
    gain = (forward[best] - backward[best])[:, None, None] * directions[best]
    return np.asarray(weight + step_size / (len(best) * deviation) * gain.sum(axis=0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """The policy, without exploration, at one evaluation."""

    policy: LinearPolicy
    attempt: int
    iteration: int
    mean_return: float  # alive bonus included


@dataclass(frozen=True, kw_only=True, eq=False)
class Iteration:
    """One iteration, with all facts to play its rollouts again."""

    base: LinearPolicy
    attempt: int
    number: int
    lengths: tuple[int, ...] = ()  # of the 2N rollouts: forwards and backwards along each direction


@dataclass(kw_only=True, eq=False)
class Training:
    """Everything that a training did, over all attempts."""

    seed: int
    options: ArsOptions
    action_noise: float = 0.0  # on the actions of evaluations
    snapshots: list[Snapshot] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    steps: int = 0  # of training rollouts; evaluations are not counted
    attempts: int = 0

    @property
    def is_over(self) -> bool:
        """True if the steps are used, or the target is reached."""
        target, last = self.options.target, self.snapshots[-1:]
        reached = target is not None and bool(last) and last[0].mean_return >= target
        return reached or self.steps >= self.options.train_steps

    @property
    def best(self) -> Snapshot:
        """The snapshot with the highest mean return."""
        return max(self.snapshots, key=lambda s: s.mean_return)

    def at_level(self, level: float) -> Snapshot:
        """Return the snapshot up to the best whose return is nearest to `level` of the best's."""
        # from 0, as returns mostly begin there; from the worst snapshot where returns are negative
        best, low = self.best, min(0.0, *(snapshot.mean_return for snapshot in self.snapshots))
        way = [s for s in self.snapshots if s.attempt == best.attempt]
        way = [s for s in way if s.iteration <= best.iteration]
        level_return = low + level * (best.mean_return - low)
        return min(way, key=lambda s: abs(s.mean_return - level_return))

    def direction(self, at: Iteration, number: int) -> Float64Array:
        """Return one of the N directions (A, S) that an iteration tries."""
        path = (TRAIN, at.attempt, at.number, number)
        return stream(self.seed, *path).standard_normal(at.base.weight.shape)

    def rollout_plan(self, at: Iteration, rollout: int) -> EpisodePlan:
        """Return the plan of one of an iteration's 2N rollouts."""
        number, backwards = divmod(rollout, 2)
        path = (self.seed, TRAIN, at.attempt, at.number, number)
        noise = -self.options.noise if backwards else self.options.noise
        return EpisodePlan(
            policy=replace(at.base, weight=at.base.weight + noise * self.direction(at, number)),
            # Both ways start from the same state: their difference is the policy's.
            reset_seed=reset_seed(*path),
            noise_path=(*path, backwards),
        )

    def replay(self, steps: int) -> Iterator[EpisodePlan]:
        """Yield rollouts to play again, evenly spaced in time, of at least `steps` together.

        They come from the attempt that reached the best policy, up to that point.  If those are too
        few, they come from all attempts, and are all rollouts if even those are.
        """
        best, pool = self.best, self.iterations
        way = [i for i in pool if i.attempt == best.attempt and i.number < best.iteration]
        if sum(sum(i.lengths) for i in way) >= steps:
            pool = way
        lengths = np.concatenate([i.lengths for i in pool])
        share, enough = steps / int(lengths.sum()), False
        while not enough:
            # Rollout j is taken where the line j * share passes an integer.
            mask = np.diff(np.floor(np.arange(len(lengths) + 1) * min(1.0, share))) > 0
            enough = share >= 1.0 or int(lengths[mask].sum()) >= steps
            share *= 1.02
        rollouts = ((at, number) for at in pool for number in range(len(at.lengths)))
        for at, number in compress(rollouts, mask):
            yield self.rollout_plan(at, number)


def train(
    crew: Crew, options: ArsOptions, seed: int, *, action_noise: float = 0.0, quiet: bool = False
) -> Training:
    """Train a linear policy in attempts with fresh streams: the method's luck varies much by seed.

    Budgets are steps, not seconds, so that the result does not depend on the machine's speed.
    Snapshots are evaluated under `action_noise`: a gait that only holds without it is worth little
    when its recordings are to have noise, so training goes on past such a gait.
    """
    training = Training(seed=seed, options=options, action_noise=action_noise)
    until = "" if options.target is None else f" (ends at a return of {options.target:g})"
    title = f"train {ALGORITHM}{until}"
    with Progress(title, total=options.train_steps, unit="steps", quiet=quiet) as progress:
        while not training.is_over:
            _attempt(crew, training, progress)
    steps, attempts = count_text(training.steps, "step"), count_text(training.attempts, "attempt")
    best = f"best mean return {training.best.mean_return:.0f}"
    say(f"trained {steps} in {attempts}: {best}", quiet=quiet)
    return training


def _attempt(crew: Crew, training: Training, progress: Progress) -> None:
    """Search from weights of zero until the attempt has used its steps, or training is over."""
    facts, options, attempt = crew.facts, training.options, training.attempts
    training.attempts += 1
    moments = RunningMoments(facts.state_size)
    weight = np.zeros((facts.action_size, facts.state_size))
    policy = LinearPolicy(weight, moments.mean, moments.std(), facts.discrete, ALGORITHM)
    number, began, allowed = 0, training.steps, options.attempt_steps
    while training.steps < began + allowed and not training.is_over:
        at = Iteration(base=policy, attempt=attempt, number=number)
        plans = [training.rollout_plan(at, rollout) for rollout in range(2 * options.directions)]
        totals, lengths = [], []
        for episode in crew.play(plans):
            totals.append(episode.total)
            lengths.append(episode.steps)
            moments.merge(episode.observations[:-1])
        training.iterations.append(replace(at, lengths=tuple(lengths)))
        training.steps += sum(lengths)
        progress.update(training.steps)
        shifted = np.array(totals) - options.alive_bonus * np.array(lengths)
        weight = update(
            policy.weight,
            np.stack([training.direction(at, number) for number in range(options.directions)]),
            shifted[0::2],
            shifted[1::2],
            top=options.top,
            step_size=options.step_size,
        )
        policy = replace(policy, weight=weight, mean=moments.mean, std=moments.std())
        number += 1
        used = training.steps >= min(began + allowed, options.train_steps)
        if used or number % EVALUATE_EVERY == 0:
            snapshot = _evaluate_policy(crew, training, policy, number)
            training.snapshots.append(snapshot)
            if options.promising is not None and snapshot.mean_return >= options.promising:
                allowed = 3 * options.attempt_steps


def _evaluate_policy(
    crew: Crew, training: Training, policy: LinearPolicy, iteration: int
) -> Snapshot:
    """Play some episodes; more where they reach the target."""
    # the same start states at every evaluation, so that snapshots compare fairly
    plans = [
        episode_plan(policy, (training.seed, EVALUATE, episode), training.action_noise)
        for episode in range(EVALUATION_EPISODES + CONFIRMATION_EPISODES)
    ]
    returns = [episode.total for episode in crew.play(plans[:EVALUATION_EPISODES])]
    target = training.options.target
    if target is not None and np.mean(returns) >= target:
        returns += [episode.total for episode in crew.play(plans[EVALUATION_EPISODES:])]
    return Snapshot(
        policy=policy,
        attempt=training.attempts - 1,
        iteration=iteration,
        mean_return=float(np.mean(returns)),
    )
