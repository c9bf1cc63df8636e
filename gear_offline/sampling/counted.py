"""Draws that are counted: an episode is gone once it was drawn so often.

Shape legend: E episodes, B slots of a batch.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from gear_offline.core.types import BoolArray, Float64Array, Int64Array, UInt64Array
from gear_offline.errors import InputError
from gear_offline.kernels.draws import CumulativeWeights
from gear_offline.kernels.philox import bounded
from gear_offline.kernels.segments import Segments
from gear_offline.sampling.base import Members, Sampler, slot_draws
from gear_offline.sampling.prioritized import HostPriorities


class Counted(Members):
    """Draws one after the other: what was drawn `most` times is gone then.

    Episodes by weight, or in an order, then any start.  It begins at `step` with the episodes that
    were `kept` then and the `times`, both (E,), each had been drawn; what was drawn before depends
    on what was there before.  When none is left, all that were kept are there again, as if they had
    never been drawn: a learner waits for new ones first, except while the disk is full.
    `stream` is the seed, and the slots of a batch.
    """

    ahead = False

    def __init__(
        self,
        sampler: Sampler,
        kept: BoolArray,
        times: Int64Array,
        *,
        most: int,
        step: int,
        stream: tuple[int, int],
    ) -> None:
        super().__init__(sampler, np.arange(len(kept)), sampler.index)
        order, weights = sampler.episode_order, sampler.episode_weight
        if order is None and not isinstance(sampler.gpu, CumulativeWeights):
            what = f"{sampler.name} draws no episodes by weight or in an order"
            remedy = "use uniform_episodes, uniform_steps, weighted, fifo, lifo or heap"
            raise InputError("SELECTION", what, "data.max_times_sampled", remedy)
        if weights is None or order is not None:
            weights = np.zeros(len(kept))
        masses = np.floor(weights * 2.0**62).astype(np.int64)
        self._all_masses, self._whole_order = np.maximum(masses, weights > 0), order
        self._masses = HostPriorities(np.arange(len(kept) + 1), np.zeros(0, np.uint64), first=0)
        self._kept, self._most, self._stream, self._first = kept, most, stream, (step, times)
        self._begin(step, times)

    def _begin(self, step: int, times: Int64Array) -> None:
        """Go to `step`, before which episodes were drawn so often."""
        there, order = self._kept & (times < self._most), self._whole_order
        self._step, self._times, self._size = step, times.copy(), int(there.sum())
        self._order = iter(() if order is None else order[there[order]].tolist())
        self._masses.load_state(self._all_masses * there, 0)
        self._let_next_come()

    def _let_next_come(self) -> None:
        """Give the next episode of the order the only mass; without an order all have theirs."""
        for episode in islice(self._order, 1):
            self._masses.set(np.array([episode]), np.ones(1, np.uint64))

    def times_at(self, step: int) -> Int64Array:
        """Return (E,) how often each was drawn before `step`."""
        if step < self._step:
            self._begin(*self._first)
        if step < self._step:
            what = f"what was drawn in step {step} depends on what was there then"
            raise InputError("SELECTION", what, remedy=f"ask for steps from {self._step} on")
        if step > self._step:
            seed, slots = self._stream
            for numbers in slot_draws(seed, self._step, step - self._step, slots)[0]:
                self._draw(numbers)
            self._step = step
        return self._times.copy()

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, second = slot_draws(seed, first_step, steps, count)
        assert (seed, count) == self._stream, "draws are counted for one run's seed and batches"
        self.times_at(first_step)
        found = np.array([self._draw(numbers) for numbers in first]).reshape(steps, 4, count)
        self._step += steps
        episodes, times, sizes = found[:, (0, 2, 3)].astype(np.int64).swapaxes(0, 1)
        lengths = self.index.lengths[episodes]
        return Segments(
            episodes=episodes,
            starts=bounded(second, lengths),
            probability=found[:, 1] / lengths,
            times_sampled=times,
            table_size=sizes,
        )

    def _draw(self, numbers: UInt64Array) -> Float64Array:
        """Count a step's draws; return (4, B): episodes, probabilities, times, table sizes."""
        found = list[tuple[int, float, int, int]]()
        while len(found) < len(numbers):
            if not self._masses.total:  # also where what is left has no weight
                self._begin(self._step, np.where(self._kept, 0, self._times))
            total = self._masses.total
            episodes = self._masses.find(bounded(numbers[len(found) :], total).astype(np.uint64))
            chances = self._masses.masses_of(episodes) / np.float64(total)
            for episode, chance in zip(episodes.tolist(), chances.tolist(), strict=True):
                self._times[episode] += 1
                found.append((episode, chance, int(self._times[episode]), self._size))
                if self._times[episode] == self._most:  # others' probabilities change
                    self._size -= 1
                    self._masses.set(np.array([episode]), np.zeros(1, np.uint64))
                    self._let_next_come()
                    break
        return np.array(found, np.float64).T
