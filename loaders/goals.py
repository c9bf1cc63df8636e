"""Goals by hindsight: for each segment the state of another step, which a policy is to reach.

As OGBench's `GCDataset` does (Park et al. 2025, arXiv:2410.20092), but a pure function of (seed,
step, slot): goals have random numbers of their own, so segments are those of a loader without.

Shape legend: T steps of a block, B segments of a rank, S shape of a state, E episodes, N steps.
"""

from __future__ import annotations

import numpy as np

from gear_offline.batches.sampling.draws import SegmentStream
from gear_offline.batches.sampling.masses import WeightedChoice
from gear_offline.batches.tables.fields import EXTRA
from gear_offline.config.sections import GoalSettings
from gear_offline.kernels.draws import GOAL_STREAM, Segments, bound_draws, slot_draws
from gear_offline.kernels.gather import Windows, real_steps

GOALS = "goals"
CURRENT, FUTURE, FINAL, RANDOM = range(4)


class GoalSampler:
    """Draws the goals of segments."""

    def __init__(self, options: GoalSettings, stream: SegmentStream, context_length: int) -> None:
        index = stream.selection.index
        self._stream, self._index, self._span = stream, index, context_length
        shares = [options.current, options.future, options.final, options.random]  # as the kinds
        self._kinds = WeightedChoice(np.array(shares))
        self._ahead: WeightedChoice | None = None
        if options.discount is not None:
            weights = options.discount ** np.arange(index.lengths.max(), dtype=np.float64)
            weights[-1] /= 1.0 - options.discount  # and all beyond
            self._ahead = WeightedChoice(weights)
            self._beyond = np.cumsum(self._ahead.probability[::-1])[::-1]

    def draw(self, first_step: int, segments: Segments) -> Segments:
        """Return the goals of (T, B) segments, of this rank or of all.

        `starts` are the goals' steps, `probability` that of each one given its segment.
        """
        (steps, slots), stream = segments.shape, self._stream
        count = stream.global_batch
        first_slot = stream.first_slot if slots < count else 0
        numbers = slot_draws(stream.seed, first_step, steps, count, stream=GOAL_STREAM)
        first, second = (words[:, first_slot : first_slot + slots] for words in numbers)
        lengths = self._index.lengths[segments.episodes]
        real = real_steps(segments, self._index.lengths, self._span).reshape(steps, slots)
        now, last = segments.starts + real - 1, lengths - 1
        if self._ahead is None:
            ahead = bound_draws(second, np.maximum(last - now, 1))
        else:
            ahead = self._ahead.search.find(second)
        goal_kinds = self._kinds.search.find(first)
        inside = np.choose(goal_kinds, [now, np.minimum(now + 1 + ahead, last), last, last])
        episodes, anywhere = self._stream.selection.locate(bound_draws(second, self._index.steps))
        goals = np.where(goal_kinds == RANDOM, anywhere, inside)
        episodes = np.where(goal_kinds == RANDOM, episodes, segments.episodes)
        # how probable that goal was, whatever kind it came from
        is_last, shares = goals == last, self._kinds.probability
        future = np.where(now == last, is_last, goals > now) / np.maximum(last - now, 1)
        if self._ahead is not None:
            later = np.maximum(goals - now - 1, 0)
            chances = np.where(is_last, self._beyond[later], self._ahead.probability[later])
            future = (future > 0) * chances
        within = shares[CURRENT] * (goals == now) + shares[FUTURE] * future
        within += shares[FINAL] * is_last
        chance = (episodes == segments.episodes) * within + shares[RANDOM] / self._index.steps
        return Segments(episodes=episodes, starts=goals, probability=chance)


def with_goals(windows: Windows, goals: Windows) -> Windows:
    """Return windows with the states of `goals`, windows of one step, as one more field."""
    states = goals.tensors()["states"].contiguous()  # (T, B, 1, S)
    return windows.with_field(EXTRA + GOALS, states, tuple(states.shape[3:]))
