"""Environments of one kind that step side by side: in worker processes, or here.

What goes to and fro lies in memory that all share; a message says to a worker that there is
something to do.  Nothing here imports torch, so that a worker starts in half a second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from gear_offline.core.closing import Closing
from gear_offline.core.system import usable_cores
from gear_offline.core.types import Array, Int64Array
from gear_offline.evaluation.environments import (
    Environment,
    EnvironmentFacts,
    Known,
    Options,
    known_of,
    make_environment,
)
from gear_offline.workers import Caller, Worker

FALLBACK_MAX_STEPS = 10_000  # for environments that are registered without a time limit
STEPS_FOR_WORKERS = 20_000  # fewer take no longer than workers take to start
SLOTS_OF_A_WORKER = 4  # a message takes as long as a fifth of a step
SLOTS_FOR_GROUPS = 128  # fewer keep a policy on a GPU too little busy
IDLE, STEP, RESET = range(3)  # what a slot is to do


class Environments(Closing):
    """`count` environments of one kind in groups that step together; a context manager.

    The slots are dealt out to `processes` workers, by default to as many as pay off for so many
    `episodes` on so many `cores`; 1: they step in this process, as do environments that only this
    process knows.
    `slots` are (count,) records of what each is `todo` (RESET with `seed`, or STEP with `action`),
    and of what came of it; `groups` are their numbers.

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
            self.limit = self.facts.step_limit or FALLBACK_MAX_STEPS  # of an episode
            self.groups = np.array_split(np.arange(count), 2 if count >= SLOTS_FOR_GROUPS else 1)
            known, record = known_of(environment_id, options), _record(self.facts, goals)
            if processes is None:
                few = episodes * self.limit < STEPS_FOR_WORKERS
                paying = min(cores or usable_cores(), -(-count // SLOTS_OF_A_WORKER))
                processes = 1 if few else paying
            processes = min(processes, count)
            if processes == 1 or known is None:
                self._made += [make() for _ in range(count - 1)]
                self.slots = np.zeros(count, record)
            else:
                # without a name: nothing stays of it when this process is killed
                file = stack.enter_context(open(os.memfd_create("gear-slots"), "w+b"))
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                shared = np.memmap(file, record, "w+", shape=(count,))
                self.slots = shared.view(np.ndarray)  # a memmap is slow to index
                for first in range(processes):
                    worker = stack.enter_context(Worker())
                    own = [group[group % processes == first] for group in self.groups]
                    worker.start(f"{__name__}:step_in_worker", known, goals, path, count, own)
                    self._workers.append(worker)
            self._stack = stack.pop_all()

    def send(self, group: int) -> None:
        """Have the slots of a group do what is `todo`; returns before it is done."""
        for worker in self._workers_of(group):
            worker.send(group)

    def receive(self, group: int) -> None:
        """Return when the slots of a group that was sent have done it."""
        for worker in self._workers_of(group):
            worker.receive()
        if not self._workers:
            _work(self._made, self.slots, self.groups[group])

    def _workers_of(self, group: int) -> list[Worker]:
        if not self._workers:
            return []
        slots = self.groups[group]
        busy = slots[self.slots["todo"][slots] != IDLE]
        return [self._workers[number] for number in np.unique(busy % len(self._workers))]

    def close(self) -> None:
        self._stack.close()


def _record(facts: EnvironmentFacts, goals: bool) -> np.dtype[Any]:
    # Frames stay bytes; all else is float64, as most simulators give it.
    seen = facts.observation_dtype if facts.frames else np.dtype(np.float64)
    action: Any = np.int64 if facts.discrete else (facts.action_dtype, facts.low.size)
    return np.dtype(
        [
            ("todo", np.uint8),
            ("seed", np.int64),
            ("action", action),
            ("observation", seen, facts.observation_shape),
            ("reward", np.float64),
            ("terminated", np.bool_),
            ("truncated", np.bool_),
            *([("task", np.int64), ("goal", seen, facts.observation_shape)] if goals else []),
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
        if todo[slot] == RESET:
            options = {"task_id": int(slots["task"][slot])} if goals else None
            seed = int(slots["seed"][slot])
            observations[slot], info = environment.reset(seed=seed, options=options)
            if goals:
                slots["goal"][slot] = environment.told(info, "goal")
        elif todo[slot] == STEP:
            seen, reward, ended, cut, info = environment.step(actions[slot])
            observations[slot] = seen
            slots["reward"][slot] = environment.told(info, "success") if goals else reward
            slots["terminated"][slot], slots["truncated"][slot] = ended, cut


def step_in_worker(
    caller: Caller,
    known: Known,
    goals: bool,
    path: str,
    count: int,
    groups: Sequence[Int64Array],
) -> None:
    """Serve `Environments`: a job that ends with its caller."""
    made = {slot: known.make() for group in groups for slot in group}
    record = _record(next(iter(made.values())).facts, goals)
    slots = np.memmap(path, record, "r+", shape=(count,)).view(np.ndarray)
    while True:
        group = caller.receive()
        _work(made, slots, groups[group])
        caller.send(None)
