"""What a file is made of: makers, each with a policy and a share of the steps.

A quality of ARS is a mix of parts: ``replay`` (the training's own rollouts), ``expert`` (its best
policy), ``medium`` and ``level:X`` (the policy whose return was nearest to a third, or to X, of the
best one's).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gear_offline.collect.ars import Training
from gear_offline.collect.policies import LIBRARIES
from gear_offline.collect.record import RECORD, EpisodePlan, Policy, episode_plan
from gear_offline.config.problems import nearest
from gear_offline.errors import InputError

NAMED = ("random", "ars", "play")
LEVELS = {
    "expert": 1.0,
    "level:0.5": 0.5,
    "medium": 1 / 3,
    "level:0.25": 0.25,
}  # of the best return
QUALITIES = {
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

    name: str  # random, policy or a part of a quality
    algorithm: str  # what made its policy
    steps: int  # that it should give
    action_noise: float
    policy: Policy | None  # None for replay, whose every episode has another one
    plans: Iterator[EpisodePlan]  # endless, except for replay


def parts_of(policy: str, quality: str | None) -> Mapping[str, float]:
    """Return the parts that a file has, and their shares of the steps; ``USAGE``."""
    library, _, algorithm = policy.partition(":")
    of_library = library in LIBRARIES and algorithm.isidentifier() and algorithm.isupper()
    if not (policy in NAMED or of_library):
        known = ", ".join([*NAMED, *(f"{name}:ALGORITHM" for name in LIBRARIES)])
        guess = nearest(policy, NAMED, cutoff=0.6)
        remedy = f"did you mean {guess!r}?" if guess else "write an algorithm like sb3:PPO"
        what = f"it must be one of {known}, got {policy!r}"
        raise InputError("USAGE", what, where="policy", remedy=remedy)
    if policy == "ars":
        quality = quality or "expert"
        if quality in QUALITIES:
            return QUALITIES[quality]
        remedy = f"use one of {', '.join(QUALITIES)}"
        raise InputError("USAGE", f"no quality {quality!r}", where="quality", remedy=remedy)
    if quality is not None:
        what = f"policy {policy!r} has one quality only"
        remedy = "leave quality out, or use policy 'ars'"
        raise InputError("USAGE", what, where="quality", remedy=remedy)
    return {"random" if policy == "random" else "policy": 1.0}


def make_makers(
    parts: Mapping[str, float],
    source: Training | Policy,
    steps: int,
    seed: int,
    action_noise: float,
) -> list[Maker]:
    """Return the makers of parts, from a training or of one policy, with `steps` shared out.

    Action noise is for the policies; random and replayed episodes have none.
    """
    makers = []
    for number, (part, share) in enumerate(parts.items()):
        wanted = max(1, round(share * steps))
        if isinstance(source, Training) and part == "replay":
            algorithm = f"{source.best.policy.algorithm}, training rollouts"
            makers.append(Maker(part, algorithm, wanted, 0.0, None, source.replay(wanted)))
            continue
        policy = source.at_level(LEVELS[part]).policy if isinstance(source, Training) else source
        noise = 0.0 if part == "random" else action_noise
        plans = _endless(policy, (seed, RECORD, number), noise)
        makers.append(Maker(part, policy.algorithm, wanted, noise, policy, plans))
    return makers


def _endless(policy: Policy, path: tuple[int, ...], noise: float) -> Iterator[EpisodePlan]:
    for episode in itertools.count():
        yield episode_plan(policy, (*path, episode), noise)
