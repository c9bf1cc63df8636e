"""Play a fixed list of episodes with one batched policy.

The list is fixed before the first step: each entry has its own seed and target return, and every
entry is played to its end exactly once.  So short episodes cannot crowd out long ones, which is
what happens when a vector environment resets itself and the first N finished episodes count.

Environments step in worker processes, or here where there is little to do; the policy acts in this
one.  Many slots form two groups: while one steps, the policy acts for the other, so that no worker
waits (a core that has slept steps MuJoCo 1.4 times as slowly).  What goes to and fro lies in memory
that all share.  Which slot plays which episode, and who acts together, does not depend on the
workers, so neither do the returns.

Shape legend: E environments (slots), m of them that act, n episodes, S state size, A action size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import numpy as np

from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.evaluation.environments import finite_actions
from gear_offline.evaluation.stepping import IDLE, RESET, STEP, Environments
from gear_offline.models.policy import Policy


class ActingPolicy(Protocol):
    """What a rollout asks of a policy: it acts for several environments at once.

    `indices` (m,) are their slots, None: all.  A new episode is asked for the returns `targets`
    (m,), or for the states (m, S) that are its goals.  Actions, (m, A) floating or (m,) integers,
    are for `observations` (m, S), or frames (m, h, w); then their `rewards` (m,) are told.
    """

    def reset(self, indices: Int64Array, targets: Float64Array) -> None: ...

    def act(self, observations: Array, indices: Int64Array | None = None) -> Array: ...

    def observe_reward(self, rewards: Float64Array, indices: Int64Array | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """What came of a list of episodes, in the order of that list."""

    returns: Float64Array  # (n,) undiscounted sums of the rewards; of goals: reached, 0 or 1
    lengths: Int64Array  # (n,) steps
    terminated: BoolArray  # (n,) the environment ended the episode; False: a time limit did
    actions: tuple[Array, ...]  # (t, A) or (t,) of the first episodes, where kept


def play_episodes(
    policy: ActingPolicy,
    environments: Environments,
    *,
    seeds: Sequence[int],
    targets: Sequence[float],
    keep_actions: int = 0,
    on_episode: Callable[[int], None] = lambda count: None,
) -> Episodes:
    """Play episode i with ``seeds[i]`` and ``targets[i]``, for every i, to its end.

    Where the environments have goals, targets are numbers of tasks.  Episodes are cut after the
    environment's own limit, or 10,000 steps.  Of the first `keep_actions` episodes the actions are
    kept.  `on_episode` is told how many episodes have ended, whenever some have.
    """
    facts, slots = environments.facts, environments.slots
    returns, lengths = np.zeros(len(seeds)), np.zeros(len(seeds), np.int64)
    terminated = np.zeros(len(seeds), np.bool_)
    asked = np.asarray(targets, np.float64)
    kept: list[list[Array]] = [[] for _ in range(keep_actions)]
    goals = "goal" in (slots.dtype.names or ())
    slots["todo"] = IDLE
    playing = np.full(slots.size, -1, np.int64)  # slot -> episode; -1: none
    waiting = iter(range(len(seeds)))
    for group in cycle(range(len(environments.groups))):
        numbers = environments.groups[group]
        if slots["todo"][numbers].any():
            environments.receive(group)
        begun = numbers[slots["todo"][numbers] == RESET]
        if begun.size:
            policy.reset(begun, slots["goal"][begun] if goals else asked[playing[begun]])
        stepped = numbers[slots["todo"][numbers] == STEP]
        if stepped.size:
            result, episodes = slots[stepped], playing[stepped]
            if isinstance(policy, Policy):  # data have what was done, within the bounds
                policy.observe_reward(result["reward"], stepped, actions=result["action"])
            else:
                policy.observe_reward(result["reward"], stepped)
            if goals:
                returns[episodes] = 0.0  # the last step's success counts, as OGBench has it
            returns[episodes] += result["reward"]
            lengths[episodes] += 1
            terminated[episodes] = result["terminated"]
            over = (
                result["terminated"]
                | result["truncated"]
                | (lengths[episodes] >= environments.limit)
            )
            if over.any():
                playing[stepped[over]] = -1
                on_episode(int(over.sum()))
        slots["todo"][numbers] = IDLE
        active = numbers[playing[numbers] >= 0]
        if active.size:
            chosen = finite_actions(policy.act(slots["observation"][active], active))
            slots["action"][active] = facts.bounded(chosen)
            slots["todo"][active] = STEP
            for slot in active[playing[active] < keep_actions]:
                kept[playing[slot]].append(slots["action"][slot].copy())
        for slot, episode in zip(numbers[playing[numbers] < 0], waiting, strict=False):
            playing[slot] = episode
            slots["seed"][slot], slots["todo"][slot] = seeds[episode], RESET
            if goals:
                slots["task"][slot] = targets[episode]
        if slots["todo"][numbers].any():
            environments.send(group)
        elif not slots["todo"].any():
            break
    actions = tuple(np.array(episode) for episode in kept)
    return Episodes(returns=returns, lengths=lengths, terminated=terminated, actions=actions)
