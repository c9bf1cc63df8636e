"""Goals by hindsight: for each segment the state of another step, which a policy is to reach.

As OGBench's `GCDataset` does (Park et al. 2025, arXiv:2410.20092), but a pure function of (seed,
step, slot): goals have random numbers of their own, so segments are those of a loader without.

Shape legend: T steps of a block, B segments of a rank, S shape of a state, E episodes, N steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from torch import Tensor

from gear_offline.batches.sampling.draws import GOAL_LAWS, Facts, SegmentStream
from gear_offline.batches.sampling.masses import WeightedChoice
from gear_offline.config.sections import GoalSettings
from gear_offline.core.parts import calling_part, find_part
from gear_offline.core.types import Int64Array, UInt64Array
from gear_offline.errors import InputError
from gear_offline.kernels.draws import GOAL_STREAM, Segments, bound_draws, slot_draws
from gear_offline.kernels.gather import Windows, real_steps

GOALS = "goals"
CURRENT, FUTURE, FINAL, RANDOM = range(4)


class GoalSampler:
    """Draws the goals of segments; `facts` are of the data, with the length of windows."""

    field, steps, repeat, behind = "states", 1, False, 0

    def __init__(self, options: GoalSettings, stream: SegmentStream, facts: Facts) -> None:
        index = stream.selection.index
        self._stream, self._index, self._span = stream, index, facts.need("context_length")
        self._law = options.kind and _OwnLaw(options.kind, facts)
        if self._law:
            return
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
        if self._law:
            return self._law.draw(segments.episodes, now, np.stack([first, second], axis=-1))
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

    def tensors(self, windows: Windows) -> dict[str, Tensor]:
        """Return the states (T, B, 1, *S) of windows of one step."""
        return {GOALS: windows.tensors()["states"]}


class _OwnLaw:
    """A function of the user's that draws goals, checked to draw each one by itself."""

    def __init__(self, name: str, facts: Facts) -> None:
        self._name, self._function = name, find_part(GOAL_LAWS, name)
        self._facts = replace(facts, column=cache(facts.need("column")))  # for each block again
        lengths = facts.episodes.lengths[:8]
        numbers = slot_draws(0, 0, 1, lengths.size, stream=GOAL_STREAM)
        episodes, pairs = np.arange(lengths.size), np.stack(numbers, axis=-1)[0]
        whole, again = (self.draw(episodes, lengths // 2, pairs) for _ in range(2))
        last = self.draw(episodes[-1:], lengths[-1:] // 2, pairs[-1:])
        for drawn, count, problem in (
            (again, lengths.size, "it draws other goals each time"),
            (last, 1, "the goal of a segment depends on other segments"),
        ):
            before, goals = (np.stack([each.episodes, each.starts]) for each in (whole, drawn))
            if not np.array_equal(before[:, -count:], goals):
                remedy = "make each goal of its own two draws alone"
                raise InputError("LOADER_OPTION", problem, name, remedy)

    def draw(self, episodes: Int64Array, steps: Int64Array, numbers: UInt64Array) -> Segments:
        """Return goals (...) of windows that end with these steps, by numbers (..., 2)."""
        shape, lengths = episodes.shape, self._facts.episodes.lengths
        draws = (numbers >> np.uint64(11)).reshape(-1, 2) * 2.0**-53  # in [0, 1)
        arguments = episodes.ravel(), steps.ravel(), draws
        with calling_part(GOAL_LAWS, "drawing", self._name):
            drawn = self._function(self._facts, *(values.copy() for values in arguments))
            pair = drawn if isinstance(drawn, tuple) else (arguments[0], drawn)
            goals = [np.asarray(values) for values in pair]
        is_whole = len(goals) == 2 and all(g.dtype.kind in "iu" and g.size for g in goals)
        if not is_whole or any(g.shape != (episodes.size,) for g in goals):
            returned = goals if isinstance(drawn, tuple) else goals[1:]
            problem = f"it returns {', '.join(f'{g.dtype} {g.shape}' for g in returned)}"
            remedy = f"return ({episodes.size},) steps of these episodes, or (episodes, steps)"
            raise InputError("LOADER_OPTION", problem, self._name, remedy)
        others, starts = (g.astype(np.int64) for g in goals)
        is_inside = (others >= 0) & (others < lengths.size) & (starts >= 0)
        is_inside &= starts < lengths[np.where(is_inside, others, 0)]
        if not is_inside.all():
            n = int(is_inside.argmin())
            problem = f"it draws step {starts[n]} of episode {others[n]}, which there is not"
            remedy = "facts.episodes has lengths: steps are 0 to lengths[episode] - 1"
            raise InputError("LOADER_OPTION", problem, self._name, remedy)
        return Segments(
            episodes=others.reshape(shape),
            starts=starts.reshape(shape),
            probability=np.broadcast_to(np.nan, shape),
        )
