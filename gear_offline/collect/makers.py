"""What a file is made of: makers, each with a policy and a share of the steps.

A quality is a mix of parts.  Parts of a training are ``replay`` (the training's own rollouts),
``expert`` (its best policy), ``medium`` and ``level:X`` (the policy whose return was nearest to a
third, or to X, of the best one's).  ``random`` needs no training; ``policy`` is one that was given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gear_offline.collect.ars import Iteration, Training
from gear_offline.collect.policies import RandomPolicy
from gear_offline.collect.record import RECORD, EpisodePlan, Policy, episode_plan
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import EnvironmentFacts

LEVELS = {"expert": 1.0, "medium": 1 / 3}  # shares of the best return
QUALITIES: dict[str, dict[str, float]] = {
    "random": {"random": 1.0},
    "medium": {"medium": 1.0},
    "expert": {"expert": 1.0},
    "replay": {"replay": 1.0},
    "medium-expert": {"medium": 0.5, "expert": 0.5},
    "mixed": {"replay": 0.4, "level:0.25": 0.15, "level:0.5": 0.15, "expert": 0.3},
}


@dataclass(frozen=True, eq=False)
class Maker:
    """One part of a file."""

    name: str  # random, replay, medium, expert, level:X or policy
    algorithm: str  # what made its policy
    steps: int  # that it should give
    action_noise: float
    policy: Policy | None  # None for replay, whose every episode has another one
    plans: Iterator[EpisodePlan]  # endless, except for replay


def requested_mix(
    policy: str, quality: str | None, mix: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the shares that `quality` or `mix` ask for, scaled to a sum of 1."""
    if quality is not None and mix is not None:
        raise InputError("USAGE", "quality and mix exclude each other", where="mix")
    if policy != "ars":
        if mix is not None or quality is not None:
            what = f"policy {policy!r} has one quality only"
            remedy = "leave quality and mix out, or use policy 'ars'"
            raise InputError("USAGE", what, where="quality", remedy=remedy)
        return {"random" if policy == "random" else "policy": 1.0}
    if mix is None:
        mix = QUALITIES.get(quality or "expert")
    if mix is None:
        remedy = f"use one of {', '.join(QUALITIES)}"
        raise InputError("USAGE", f"no quality {quality!r}", where="quality", remedy=remedy)
    usable = {
        part: share
        for part, share in mix.items()
        if (part in ("random", "replay") or _level(part)) and 0 < share < math.inf
    }
    if len(usable) < max(1, len(mix)):
        what = f"the mix {dict(mix)} is not usable"
        remedy = "parts are random, replay, medium, expert and level:X with 0 < X <= 1; "
        remedy += "shares are positive"
        raise InputError("USAGE", what, where="mix", remedy=remedy)
    total = math.fsum(usable.values())
    return {part: share / total for part, share in usable.items()}


def _level(part: str) -> float | None:
    """Return the share of the best return that the policy of a part has; None of other parts."""
    kind, _, text = part.partition(":")
    try:
        level = float(text) if kind == "level" else LEVELS.get(part, 0.0)
    except ValueError:
        return None
    return level if 0 < level <= 1 else None


def mix_makers(
    mix: Mapping[str, float],
    facts: EnvironmentFacts,
    source: Training | Policy | None,
    steps: int,
    seed: int,
    action_noise: float,
) -> list[Maker]:
    """Return the makers of a mix, with `steps` shared out among them.

    Parts of a training come from `source`, and so does a given policy; random data need none.
    Action noise is for the policies; random and replayed episodes have none.
    """
    makers = []
    for number, (part, share) in enumerate(mix.items()):
        wanted, noise, policy = max(1, round(share * steps)), action_noise, source
        if part == "replay":
            assert isinstance(source, Training), "only random data need no training"
            algorithm = f"{source.best.policy.algorithm}, training rollouts"
            makers.append(Maker(part, algorithm, wanted, 0.0, None, _replayed(source, wanted)))
            continue
        if part == "random":
            policy, noise = RandomPolicy(facts.low, facts.high, facts.choices), 0.0
        elif isinstance(source, Training):
            policy = source.at_level(_level(part) or 1.0).policy
        assert policy is not None and not isinstance(policy, Training)
        plans = _endless(policy, (seed, RECORD, number), noise)
        makers.append(Maker(part, policy.algorithm, wanted, noise, policy, plans))
    return makers


def _endless(policy: Policy, path: tuple[int, ...], noise: float) -> Iterator[EpisodePlan]:
    for episode in itertools.count():
        yield episode_plan(policy, (*path, episode), noise)


def _replayed(training: Training, steps: int) -> Iterator[EpisodePlan]:
    for iteration, rollouts in choose_rollouts(training, steps):
        plans = training.rollout_plans(iteration)
        yield from (plans[rollout] for rollout in rollouts)


def choose_rollouts(training: Training, steps: int) -> list[tuple[Iteration, list[int]]]:
    """Return training rollouts, evenly spaced in time, that add up to at least `steps`.

    They come from the attempt that found the best policy, up to where it did; from all attempts
    if those are too few; and are all rollouts if even those are.
    """
    best = training.best
    pool = [
        i for i in training.iterations if i.attempt == best.attempt and i.number < best.iteration
    ]
    if sum(int(i.lengths.sum()) for i in pool) < steps:
        pool = training.iterations
    lengths = np.concatenate([i.lengths for i in pool])
    fraction = min(1.0, steps / int(lengths.sum()))
    while True:
        # Rollout j is taken where the line j * fraction passes an integer.
        marks = np.floor(np.arange(len(lengths) + 1) * fraction)
        taken = np.diff(marks) > 0
        if fraction >= 1.0 or int(lengths[taken].sum()) >= steps:
            break
        fraction = min(1.0, fraction * 1.02)
    parts = np.split(taken, np.cumsum([len(i.lengths) for i in pool])[:-1])
    chosen = zip(pool, parts, strict=True)
    return [(i, np.flatnonzero(part).tolist()) for i, part in chosen if part.any()]
