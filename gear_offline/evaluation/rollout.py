"""Play a fixed list of episodes with one batched policy.

The list is fixed before the first step: each entry has its own seed and target return, and every
entry is played to its end exactly once.  So short episodes cannot crowd out long ones, which is
what happens when a vector environment resets itself and the first N finished episodes count.

The policy sees all environments as one batch, in this process; they step in worker processes, or
here where there is little to do.  Which slot plays which episode does not depend on the workers,
so neither do the returns.  Gymnasium's vector environments reset themselves, without seeds, and
send one message an environment; here it is one a worker.

Shape legend: E environments (slots), m of them that act, n episodes, S state size, A action size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.core.system import usable_cores
from gear_offline.core.types import BoolArray, Float64Array, Int64Array
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import (
    EnvironmentFacts,
    Known,
    describe,
    known_of,
    make_environment,
)
from gear_offline.workers import Caller, Worker

FALLBACK_MAX_STEPS = 10_000  # for environments that are registered without a time limit
# A worker takes a second to start: as long as MuJoCo's Hopper takes for 10,000 to 30,000 steps.
STEPS_FOR_WORKERS = 40_000
# Observations (m, *shape), rewards (m,) float64, terminated (m,), truncated (m,).
Transitions = tuple[npt.NDArray[Any], Float64Array, BoolArray, BoolArray]


class ActingPolicy(Protocol):
    """What a rollout asks of a policy: it acts for several environments (slots) at once."""

    def reset(self, indices: Int64Array, targets: Float64Array) -> None:
        """Begin a new episode in the slots `indices` (m,), asked for the returns `targets` (m,)."""
        ...

    def act(
        self, observations: npt.NDArray[Any], indices: Int64Array | None = None
    ) -> npt.NDArray[Any]:
        """Return the actions for `observations` (m, S), or frames (m, h, w), of `indices` (m,).

        (m, A) floating, or (m,) integers for discrete actions.
        """
        ...

    def observe_reward(self, rewards: Float64Array, indices: Int64Array | None = None) -> None:
        """Take the rewards (m,) of the actions just returned for the slots `indices`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """What came of a list of episodes, in the order of that list."""

    returns: Float64Array  # (n,) undiscounted sums of the rewards
    lengths: Int64Array  # (n,) steps
    terminated: BoolArray  # (n,) the environment ended the episode; False: a time limit did


class Environments(Closing):
    """`count` environments of one kind that step together; a context manager.

    The slots are dealt out to `processes` workers; 1: they step in this process, as do
    environments that only this process knows.
    """

    def __init__(self, environment_id: str, count: int, *, processes: int = 1) -> None:
        self._stack = ExitStack()
        known = known_of(environment_id)
        processes = min(processes, count) if known is not None else 1
        with ExitStack() as stack:
            local = count if processes == 1 else 1  # one to look at
            self._slots = stack.enter_context(_Slots(environment_id, local))
            self._workers = [
                stack.enter_context(Worker()) for _ in range(processes if processes > 1 else 0)
            ]
            for first, worker in enumerate(self._workers):
                slots = len(range(first, count, processes))
                worker.start(f"{__name__}:step_in_worker", known, environment_id, slots)
            self._stack = stack.pop_all()
        self.facts, self.count = self._slots.facts, count

    def reset(self, slots: Int64Array, seeds: Sequence[int]) -> npt.NDArray[Any]:
        """Begin an episode in each of `slots` (m,); return its first observations (m, *shape)."""
        if not self._workers:
            return self._slots.reset(slots, seeds)
        parts = self._in_workers("reset", slots, np.asarray(seeds, np.int64))
        observations = np.empty((len(slots), *parts[0][1].shape[1:]), parts[0][1].dtype)
        for rows, part in parts:
            observations[rows] = part
        return observations

    def step(self, slots: Int64Array, actions: npt.NDArray[Any]) -> Transitions:
        """Step `slots` (m,) with usable `actions` (m, A) or (m,)."""
        if not self._workers:
            return self._slots.step(slots, actions)
        parts = self._in_workers("step", slots, actions)
        first = parts[0][1]
        whole = tuple(np.empty((len(slots), *a.shape[1:]), a.dtype) for a in first)
        for rows, part in parts:
            for array, values in zip(whole, part, strict=True):
                array[rows] = values
        return whole  # type: ignore[return-value]

    def _in_workers(self, method: str, slots: Int64Array, values: npt.NDArray[Any]) -> list[Any]:
        """Have each worker do its slots' share; return (rows of `slots`, answer) pairs."""
        count = len(self._workers)
        shares = [np.flatnonzero(slots % count == number) for number in range(count)]
        busy = [
            (worker, rows) for worker, rows in zip(self._workers, shares, strict=True) if rows.size
        ]
        for worker, rows in busy:
            worker.send((method, slots[rows] // count, values[rows]))
        return [(rows, worker.receive()) for worker, rows in busy]

    def close(self) -> None:
        self._stack.close()


class _Slots(Closing):
    """Environments of this process, stepped one after the other."""

    def __init__(self, environment_id: str, count: int) -> None:
        self._made: list[Any] = []
        try:
            for _ in range(count):
                self._made.append(make_environment(environment_id))
            self.facts = describe(self._made[0], environment_id)
        except BaseException:
            self.close()
            raise
        # Frames stay bytes; all else is float64, as most simulators give it.
        self._dtype = self.facts.observation_dtype if self.facts.frames else np.dtype(np.float64)

    def reset(self, slots: Sequence[int] | Int64Array, seeds: Any) -> npt.NDArray[Any]:
        observations = self._empty(len(slots))
        for row, (slot, seed) in enumerate(zip(slots, seeds, strict=True)):
            observations[row], _ = self._made[slot].reset(seed=int(seed))
        return observations

    def step(self, slots: Sequence[int] | Int64Array, actions: npt.NDArray[Any]) -> Transitions:
        count, shaped = len(slots), self.facts.shaped
        observations, rewards = self._empty(count), np.zeros(count)
        terminated, truncated = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        for row, slot in enumerate(slots):
            observations[row], rewards[row], terminated[row], truncated[row], _ = self._made[
                slot
            ].step(shaped(actions[row]))
        return observations, rewards, terminated, truncated

    def _empty(self, count: int) -> npt.NDArray[Any]:
        return np.empty((count, *self.facts.observation_shape), self._dtype)

    def close(self) -> None:
        for environment in self._made:
            environment.close()


def step_in_worker(caller: Caller, known: Known, environment_id: str, count: int) -> None:
    """Serve `Environments`: a job that ends with its caller."""
    known.learn()
    with _Slots(environment_id, count) as slots:
        while True:
            method, chosen, values = caller.receive()
            caller.send(
                slots.reset(chosen, values) if method == "reset" else slots.step(chosen, values)
            )


def processes_for(episodes: int, facts: EnvironmentFacts) -> int:
    """Return how many processes to play in: all cores, or one where there is little to do."""
    steps = episodes * (facts.step_limit or FALLBACK_MAX_STEPS)
    return usable_cores() if steps >= STEPS_FOR_WORKERS else 1


def play_episodes(
    policy: ActingPolicy,
    environments: Environments,
    *,
    seeds: Sequence[int],
    targets: Sequence[float],
    max_steps: int | None = None,
    on_episode: Callable[[int], None] = lambda count: None,
) -> Episodes:
    """Play episode i with ``seeds[i]`` and ``targets[i]``, for every i, to its end.

    Episodes are cut after `max_steps`; default: the environment's own limit, or 10,000.
    `on_episode` is told how many episodes have ended, whenever some have.
    """
    facts, count = environments.facts, len(seeds)
    limit = max_steps or facts.step_limit or FALLBACK_MAX_STEPS
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)
    terminated = np.zeros(count, np.bool_)
    asked = np.asarray(targets, np.float64)
    playing = np.full(min(environments.count, count), -1, np.int64)  # slot -> episode; -1: idle
    observations = np.zeros(0)
    waiting = iter(range(count))
    while True:
        fresh = list(zip(np.flatnonzero(playing < 0), waiting, strict=False))
        if fresh:
            slots, begun = np.array(fresh).T
            playing[slots] = begun
            first = environments.reset(slots, [seeds[episode] for episode in begun])
            if not observations.size:
                observations = np.zeros((playing.size, *first.shape[1:]), first.dtype)
            observations[slots] = first
            policy.reset(slots, asked[begun])
        active = np.flatnonzero(playing >= 0)
        if not active.size:
            return Episodes(returns=returns, lengths=lengths, terminated=terminated)
        seen = observations[active]
        actions = facts.bounded(_finite(policy.act(seen, active), seen, facts))
        observations[active], rewards, ended, cut = environments.step(active, actions)
        if not np.isfinite(rewards).all():
            raise _broken("a reward", facts)
        policy.observe_reward(rewards, active)
        episodes = playing[active]
        returns[episodes] += rewards
        lengths[episodes] += 1
        terminated[episodes] = ended
        over = ended | cut | (lengths[episodes] >= limit)
        if over.any():
            playing[active[over]] = -1
            on_episode(int(over.sum()))


def _finite(
    actions: npt.NDArray[Any], observations: npt.NDArray[Any], facts: EnvironmentFacts
) -> npt.NDArray[Any]:
    if np.isfinite(actions).all():
        return actions
    if not np.isfinite(observations).all():
        raise _broken("an observation", facts)
    raise InputError(
        "MODEL",
        "the policy returned an action that is NaN or infinite",
        remedy="the weights have probably diverged: train with a lower learning rate",
    )


def _broken(what: str, facts: EnvironmentFacts) -> InputError:
    return InputError(
        "ENVIRONMENT",
        f"the environment gave {what} that is NaN or infinite",
        where=facts.environment_id,
        remedy="its simulation has broken down, or its reward has no value there: mend it",
    )
