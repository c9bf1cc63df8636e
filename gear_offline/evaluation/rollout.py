"""Play fixed lists of episodes, each with one batched policy.

The list is fixed before the first step: each entry has its own seed and target return, and every
entry is played to its end exactly once.  So short episodes cannot crowd out long ones, which is
what happens when a vector environment resets itself and the first N finished episodes count.

Environments step in worker processes, or here where there is little to do; the policy acts in this
one, for all that play.  What goes to and fro lies in memory that all share.  Which slot plays which
episode, and who acts together, does not depend on the workers, so neither do the returns.  Nor do
they depend on other policies that play at the same time, each in slots of its own.

Shape legend: E environments (slots), m of them that act, n episodes, S state size, A action size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from gear_offline.core.draws import Draws
from gear_offline.core.files import Closing
from gear_offline.core.system import usable_cores
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.core.workers import Caller, Worker
from gear_offline.evaluation.environments import (
    MOST_STEPS,
    Environment,
    EnvironmentFacts,
    Options,
    Pack,
    finite_actions,
    make_environment,
    pack_environment,
)

STEPS_FOR_WORKERS = 20_000  # fewer take no longer than workers take to start
SLOTS_OF_A_WORKER = 4  # a message takes as long as a fifth of a step
IDLE, TO_STEP, TO_RESET = range(3)  # what a slot is to do
NO_SEED = -1  # an environment goes on as it is
Played = TypeVar("Played")


class ActingPolicy(Protocol):
    """A policy that acts for several environments at once.

    `indices` (m,) are their slots, None: all.  A new episode is asked for the returns `targets`
    (m,), or for the states (m, S) that are its goals.  `observations` are states (m, S), frames
    (m, h, w), or records (m,) of what a Dict space has.  Their actions are (m, A) floating or (m,)
    integers; then their `rewards` (m,) are told.
    """

    def reset(self, indices: Int64Array, targets: Float64Array) -> None: ...

    def act(self, observations: Array, indices: Int64Array | None = None) -> Array: ...

    def observe_reward(self, rewards: Float64Array, indices: Int64Array | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """The results of n episodes, in the order of their list."""

    returns: Float64Array  # (n,) undiscounted sums of the rewards; of goals: reached, 0 or 1
    lengths: Int64Array  # (n,) steps
    terminated: BoolArray  # (n,) the environment ended the episode; False: a time limit did
    actions: tuple[Array, ...]  # (t, A) or (t,) of the first episodes, where kept


class Environments(Closing):
    """`count` environments of one kind that step together; a context manager.

    The slots are dealt out to `processes` workers, by default to as many as pay off for so many
    `episodes`.  With 1 they step in this process, as do environments that only this process knows.
    With `cores`, 2 or more, they step on up to so many of others.
    `slots` are (count,) records of what each is `todo` (TO_RESET with `seed`, or TO_STEP with
    `action`), and of what came of it.

    With `goals` an episode is a `task` that the environment numbers, as OGBench's do:
    ``reset(options={"task_id": 1})`` gives ``info["goal"]``, and each step ``info["success"]``,
    which stands for the reward.
    """

    def __init__(
        self,
        environment_id: str,
        count: int,
        *,
        episodes: int = 0,
        cores: int | None = None,
        processes: int | None = None,
        goals: bool = False,
        options: Options | None = None,
    ) -> None:
        self._workers: list[Worker] = []
        with ExitStack() as stack:

            def make() -> Environment:
                return stack.enter_context(make_environment(environment_id, options))

            self._made = [make()]  # slot -> environment; one to look at
            self.facts = self._made[0].facts
            pack, record = pack_environment(environment_id, options), _record(self.facts, goals)
            if processes is None:
                steps = episodes * (self.facts.step_limit or MOST_STEPS)
                few = cores is None and steps < STEPS_FOR_WORKERS
                paying = min(cores or usable_cores(), -(-count // SLOTS_OF_A_WORKER))
                processes = 1 if few else paying
            processes = min(processes, count)
            if pack is None or (processes == 1 and cores in (None, 1)):
                self._made += [make() for _ in range(count - 1)]
                self.slots = np.zeros(count, record)
            else:
                # without a name: nothing stays of it when this process is killed
                file = stack.enter_context(open(os.memfd_create("gear-slots"), "w+b"))
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                shared = np.memmap(file, record, "w+", shape=(count,))
                self.slots = shared.view(np.ndarray)  # a memmap is slow to index
                # neighbours: each worker has environments of all asked returns, which end apart
                self._worker_of = np.arange(count) * processes // count
                for number in range(processes):
                    worker = stack.enter_context(Worker())
                    numbers = np.flatnonzero(self._worker_of == number)
                    worker.start(f"{__name__}:step_in_worker", pack, goals, path, count, numbers)
                    self._workers.append(worker)
            self._stack = stack.pop_all()

    def step(self) -> None:
        """Have the slots do what is `todo`."""
        if not self._workers:
            _work(self._made, self.slots, np.arange(len(self.slots)))
            return
        busy = np.unique(self._worker_of[self.slots["todo"] != IDLE])
        workers = [self._workers[number] for number in busy]
        for worker in workers:
            worker.send(None)
        for worker in workers:
            worker.receive()

    def close(self) -> None:
        self._stack.close()


def _record(facts: EnvironmentFacts, goals: bool) -> np.dtype[Any]:
    # Numbers are float64, as most simulators give them; bytes, choices and records as they are.
    is_float = facts.observation_dtype.kind == "f"
    observed = np.dtype(np.float64) if is_float else facts.observation_dtype
    action: Any = np.int64 if facts.discrete else (facts.action_dtype, facts.low.size)
    return np.dtype(
        [
            ("todo", np.uint8),
            ("seed", np.int64),
            ("action", action),
            ("observation", observed, facts.observation_shape),
            ("reward", np.float64),
            ("terminated", np.bool_),
            ("truncated", np.bool_),
            *([("task", np.int64), ("goal", observed, facts.observation_shape)] if goals else []),
        ],
        align=True,
    )


def _work(
    environments: Sequence[Environment] | Mapping[int, Environment],
    slots: Array,
    numbers: Int64Array,
) -> None:
    """Do what the slots `numbers` are to do, each in its environment."""
    todo, observations, actions = slots["todo"], slots["observation"], slots["action"]
    goals = "goal" in (slots.dtype.names or ())
    for slot in numbers:
        environment = environments[slot]
        if todo[slot] == TO_RESET:
            options = {"task_id": int(slots["task"][slot])} if goals else None
            number = int(slots["seed"][slot])
            seed = None if number == NO_SEED else number
            observations[slot], info = environment.reset(seed=seed, options=options)
            if goals:
                slots["goal"][slot] = environment.goal_fact(info, "goal")
        elif todo[slot] == TO_STEP:
            observation, reward, ended, cut, info = environment.step(actions[slot])
            observations[slot] = observation
            slots["reward"][slot] = environment.goal_fact(info, "success") if goals else reward
            slots["terminated"][slot], slots["truncated"][slot] = ended, cut


def step_in_worker(
    caller: Caller, pack: Pack, goals: bool, path: str, count: int, numbers: Int64Array
) -> None:
    """Serve `Environments`: a job that ends with its caller."""
    environments = {slot: pack.make() for slot in numbers}
    record = _record(next(iter(environments.values())).facts, goals)
    slots = np.memmap(path, record, "r+", shape=(count,)).view(np.ndarray)
    with Draws():
        while True:
            caller.receive()
            _work(environments, slots, numbers)
            caller.send(None)


def play_together(
    environments: Environments, players: Sequence[Generator[None, None, Played]]
) -> list[Played | Exception]:
    """Step environments until all `players` are through; return what each returns, or its error.

    An error of the environments is raised: it may be of any.
    """
    results = dict[int, Played | Exception]()
    while len(results) < len(players):
        for number, player in [*enumerate(players)] * 2:  # all ask before one waits for its actions
            if number not in results:
                try:
                    next(player)
                except StopIteration as end:
                    results[number] = end.value
                except Exception as error:
                    results[number] = error
        if len(results) < len(players):
            environments.step()
    return [results[number] for number in range(len(players))]


def reseed(player: Generator[None, None, Played], seed: int) -> Generator[None, None, Played]:
    """Play with streams of one's own for what a policy draws from the global generators."""
    draws = Draws(seed)
    while True:
        with draws:
            try:
                next(player)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        yield


def turns(
    policy: ActingPolicy,
    environments: Environments,
    slots: Array | None = None,
    *,
    seeds: Sequence[int],
    targets: Sequence[float],
    memory: int = 1,
    generator: np.random.Generator | None = None,
    keep_actions: int = 0,
    on_episode: Callable[[int], None] = lambda count: None,
) -> Generator[None, None, Episodes]:
    """Play episode i with ``seeds[i]`` and ``targets[i]``, for every i, to its end.

    Yields twice a step: while the policy chooses its actions, and when its `slots`, by default all,
    are to do what is in them.  Where the environments have goals, targets are numbers of tasks.
    The first `keep_actions` episodes keep their actions.  `on_episode` is told how many episodes
    have ended, whenever some have.

    With a `memory` of M episodes each of them is followed by M - 1 more in its environment, which
    is reset without a seed, and a `Policy` forgets only before the first.  Results are of all.
    A `Policy` draws its actions by the `generator`.
    """
    from gear_offline.models.policy import Policy  # loads torch, which workers do without

    facts, slots = environments.facts, environments.slots if slots is None else slots
    total = len(seeds) * memory
    returns, lengths = np.zeros(total), np.zeros(total, np.int64)
    terminated = np.zeros(total, np.bool_)
    target_returns = np.asarray(targets, np.float64)
    kept_actions: list[list[Array]] = [[] for _ in range(keep_actions)]
    fields = {name: slots[name] for name in slots.dtype.names or ()}  # views
    todo, goals = fields["todo"], "goal" in fields
    todo[:] = IDLE
    playing = np.full(slots.size, -1, np.int64)  # slot -> episode; -1: none
    goes_on = np.zeros(slots.size, np.bool_)  # to the next episode of its memory
    waiting = iter(range(0, total, memory))
    ask: Any = None  # of a policy with an `act` of its own there is no other way
    if isinstance(policy, Policy) and type(policy).act is Policy.act:
        ask = partial(policy.ask, generator=generator)
    while True:
        begun, stepped = (np.flatnonzero(todo == done) for done in (TO_RESET, TO_STEP))
        todo[:] = IDLE  # also if the policy fails
        if begun.size:
            if isinstance(policy, Policy):
                policy.forget(begun[playing[begun] % memory == 0])
            asked = fields["goal"][begun] if goals else target_returns[playing[begun] // memory]
            policy.reset(begun, asked)
        if stepped.size:
            rewards, episodes = fields["reward"][stepped], playing[stepped]
            if isinstance(policy, Policy):  # data have what was done, within the bounds
                policy.observe_reward(rewards, stepped, actions=fields["action"][stepped])
            else:
                policy.observe_reward(rewards, stepped)
            if goals:
                returns[episodes] = 0.0  # the last step's success counts, as OGBench has it
            returns[episodes] += rewards
            lengths[episodes] += 1
            ended = terminated[episodes] = fields["terminated"][stepped]
            over = ended | fields["truncated"][stepped]
            if over.any():
                following = episodes[over] + 1
                goes_on[stepped[over]] = is_more = following % memory > 0
                playing[stepped[over]] = np.where(is_more, following, -1)
                on_episode(int(over.sum()))
        active = np.flatnonzero((playing >= 0) & ~goes_on)
        if active.size:
            observed = fields["observation"][active]
            actions = ask(observed, active) if ask else partial(policy.act, observed, active)
        yield
        if active.size:
            fields["action"][active] = facts.clip_actions(finite_actions(actions()))
            todo[active] = TO_STEP
            first = playing[active] % memory == 0
            for slot in active[first & (playing[active] < keep_actions * memory)]:
                kept_actions[playing[slot] // memory].append(fields["action"][slot].copy())
        fields["seed"][goes_on], todo[goes_on] = NO_SEED, TO_RESET
        goes_on[:] = False
        for slot, episode in zip(np.flatnonzero(playing < 0), waiting, strict=False):
            playing[slot] = episode
            fields["seed"][slot], todo[slot] = seeds[episode // memory], TO_RESET
            if goals:
                fields["task"][slot] = targets[episode // memory]
        if not todo.any():
            break
        yield
    actions = tuple(np.array(episode) for episode in kept_actions)
    return Episodes(returns=returns, lengths=lengths, terminated=terminated, actions=actions)
