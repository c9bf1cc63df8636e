"""The two uniform laws: over steps, and over episodes.

Shape legend: E episodes, N steps, T steps of one episode, B slots of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.kernels.philox import bounded
from gear_offline.sampling.base import (
    Float64Array,
    Segments,
    SlotLaw,
    StepLocator,
    register,
    slot_draws,
)


@register("uniform_steps")
@dataclass(frozen=True)
class UniformSteps(SlotLaw):
    """Every (episode, start) of the table is equally likely: 1/N each.

    The law of the Decision Transformer paper: an episode in proportion to its length, then a start
    uniformly over its steps.  Drawing one of the N steps is that law exactly.

    Attributes
    ----------
    index
        Episode index.
    """

    index: EpisodeIndex
    name = "uniform_steps"

    @cached_property
    def _episode_of(self) -> StepLocator:
        return StepLocator(self.index)

    @property
    def options(self) -> Mapping[str, Any]:
        """None."""
        return {}

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return those of `steps` steps from `first_step` on under `seed`, (steps, count)."""
        first, _ = slot_draws(seed=seed, first_step=first_step, steps=steps, count=count)
        row = bounded(first, self.index.steps)
        episodes = self._episode_of(row)
        return Segments(
            episodes=episodes,
            starts=row - self.index.offsets[episodes],
            probability=np.broadcast_to(np.float64(1.0 / self.index.steps), row.shape),
        )

    def density(self, segments: Segments) -> Float64Array:
        """Return the probability of each segment in one slot."""
        return np.full(segments.shape, 1.0 / self.index.steps)


@register("uniform_episodes")
@dataclass(frozen=True)
class UniformEpisodes(SlotLaw):
    """Every episode is equally likely, then every start in it: 1/(E T) each.

    Steps of short episodes are seen more often than under `UniformSteps`.

    Attributes
    ----------
    index
        Episode index.
    """

    index: EpisodeIndex
    name = "uniform_episodes"

    @property
    def episode_weight(self) -> Float64Array:
        """(E,) float64, how likely each episode is: as any other."""
        return np.ones(self.index.episodes)

    @property
    def options(self) -> Mapping[str, Any]:
        """None."""
        return {}

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return those of `steps` steps from `first_step` on under `seed`, (steps, count)."""
        first, second = slot_draws(seed=seed, first_step=first_step, steps=steps, count=count)
        episodes = bounded(first, self.index.episodes)
        lengths = self.index.lengths[episodes]
        return Segments(
            episodes=episodes,
            starts=bounded(second, lengths),
            probability=1.0 / (np.float64(self.index.episodes) * lengths),
        )

    def density(self, segments: Segments) -> Float64Array:
        """Return the probability of each segment in one slot."""
        return 1.0 / (np.float64(self.index.episodes) * self.index.lengths[segments.episodes])
