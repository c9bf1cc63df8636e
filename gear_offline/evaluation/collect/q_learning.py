"""Tabular Q-learning: a learner whose whole history is worth recording.

Watkins' rule after each step, and once more over the last `REPLAYED` steps, newest first, after
each episode (Lin 1992's experience replay).  Values of what was never tried begin high, so a
learner tries all that is near before it repeats itself.  Rewards should be about 1 in size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gear_offline.core.text import say
from gear_offline.core.types import Array
from gear_offline.errors import InputError
from gear_offline.evaluation.collect.record import LEARN, EpisodePlan
from gear_offline.evaluation.environments import EnvironmentFacts

ALGORITHM = "tabular Q-learning"
DISCOUNT = 0.9
RATE = 0.5
OPTIMISM = 0.5  # first values, in those of a reward of 1 in every step from here on
REPLAYED = 200

Row = list[float]  # the values of the actions in one state


class QLearner:
    """A learner over `choices` actions, which acts by its values; equal ones are drawn among."""

    algorithm = ALGORITHM

    def __init__(self, choices: int) -> None:
        self.values: dict[bytes, Row] = {}  # by the bytes of an observation
        self.steps = 0
        self._first_values = [OPTIMISM / (1.0 - DISCOUNT)] * choices
        self._replay: deque[tuple[Row, int, float, Row | None]] = deque(maxlen=REPLAYED)

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        """Return one of the best actions."""
        row = self._row(observation)
        best = max(row)
        actions = [action for action, value in enumerate(row) if value == best]
        return np.asarray(actions[generator.integers(len(actions))])

    def learn(
        self, observation: Array, action: Array, reward: float, following: Array, terminated: bool
    ) -> None:
        """Move the value of an action towards its reward and what the next state is worth."""
        next_row = None if terminated else self._row(following)
        self._replay.append((self._row(observation), int(action), reward, next_row))
        self.steps += 1
        self._update(*self._replay[-1])

    def replay(self) -> None:
        """Update the last steps once more, the newest one first."""
        for step in reversed(self._replay):
            self._update(*step)

    def _row(self, observation: Array) -> Row:
        return self.values.setdefault(observation.tobytes(), [*self._first_values])

    def _update(self, row: Row, action: int, reward: float, next_row: Row | None) -> None:
        target = reward + (DISCOUNT * max(next_row) if next_row is not None else 0.0)
        row[action] += RATE * (target - row[action])


def plan_histories(
    facts: EnvironmentFacts, count: int, seed: int, steps: int, action_noise: float
) -> list[LearnerPlan]:
    """Plan histories of `steps` or more each; refuse actions that are not discrete."""
    if facts.discrete:
        return [LearnerPlan(seed, number, steps, action_noise) for number in range(count)]
    problem, remedy = "q_learning needs discrete actions", "use policy ars"
    raise InputError("ENVIRONMENT", problem, facts.environment_id, remedy)


@dataclass(frozen=True)
class LearnerPlan:
    """The history of learner `number`.

    The first reset has the seed ``seed + number``, later ones have none: an environment that keeps
    its task keeps it.
    """

    seed: int
    number: int
    steps: int
    action_noise: float

    def episodes(self, facts: EnvironmentFacts) -> Iterator[EpisodePlan]:
        """Yield the next episode as what was played has taught."""
        learner, episode = QLearner(facts.choices), 0
        while learner.steps < self.steps:
            yield EpisodePlan(
                policy=learner,
                reset_seed=self.seed + self.number,
                goes_on=episode > 0,
                noise_path=(self.seed, LEARN, self.number, episode),
                action_noise=self.action_noise,
                on_step=learner.learn,
                learner=self.number,
            )
            learner.replay()
            episode += 1
        if len(learner.values) > learner.steps / 2 and self.number == 0:
            share = f"{len(learner.values):,} of {learner.steps:,} steps"
            problem = f"{share} met a new observation, where a table knows nothing"
            say(f"warning: {problem}: record more steps, or use policy ars")
