"""The items of a table: the episodes that are there, their counts of draws, new ones.

As in Reverb (Cassirer et al. 2021, arXiv:2102.04736): an item is inserted first, then the remover
chooses among all, also the new one; an item that was drawn often enough is gone before the next
draw.  What is there follows from the episodes, their order, the seed and the draws.  A rate limiter
says by a few counts when episodes may come and segments may be drawn.

Shape legend: E episodes of the dataset, n of them that are new, B slots of a batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from itertools import islice

import numpy as np

from gear_offline.batches.sampling.draws import CumulativeWeights, HostFunction, Sampler
from gear_offline.batches.sampling.masses import HostPriorities
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import DataSettings, LimiterSettings
from gear_offline.core.text import count_text
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array, UInt64Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.kernels.draws import REMOVER_STREAM, Segments, bound_draws, slot_draws

HAVE_PRIORITY = ("min_heap", "max_heap", "prioritized")  # removers that look at it
BY_CHANCE = ("uniform", "prioritized")


class CountedDraws:
    """Draws one after the other, which remove episodes drawn `most` times.

    Episodes by weight, or in an order, then any start.  They begin at `step` with the episodes that
    were `kept` then and the `times`, both (E,), each had been drawn.  Draws depend on the episodes
    that were there before.  When none is left, all kept ones are there again, as if never drawn.
    A learner waits for new ones first, except while the disk is full.
    `stream` is the seed, and the slots of a batch.
    """

    def __init__(
        self,
        sampler: Sampler,
        in_table: BoolArray,
        times: Int64Array,
        *,
        most: int,
        step: int,
        stream: tuple[int, int],
    ) -> None:
        order, weights = sampler.episode_order, np.zeros(len(in_table))
        if order is None and not isinstance(sampler, CumulativeWeights):
            problem = f"{sampler.name} draws no episodes by weight or in an order"
            remedy = "use uniform_episodes, uniform_steps, weighted, fifo, lifo or heap"
            raise InputError("SELECTION", problem, "data.max_times_sampled", remedy)
        if order is None and sampler.episode_weight is not None:
            weights = sampler.episode_weight
        masses = np.floor(weights * 2.0**62).astype(np.int64)
        self._all_masses, self._whole_order = np.maximum(masses, weights > 0), order
        self._masses = HostPriorities(np.arange(len(in_table) + 1), np.zeros(0, np.uint64), first=0)
        self._in_table, self._most, self._stream = in_table, most, stream
        self._first = step, times
        self._lengths = sampler.index.lengths
        self._begin(step, times)

    def _begin(self, step: int, times: Int64Array) -> None:
        """Go to `step`; before it episodes were drawn `times` (E,) times."""
        drawable, order = self._in_table & (times < self._most), self._whole_order
        self._step, self._times, self._size = step, times.copy(), int(drawable.sum())
        self._order = iter(() if order is None else order[drawable[order]].tolist())
        self._masses.load_state(self._all_masses * drawable, 0)
        self._let_next_come()

    def _let_next_come(self) -> None:
        """Give the next episode of the order the only mass; without an order all have theirs."""
        for episode in islice(self._order, 1):
            self._masses.set(np.array([episode]), np.ones(1, np.uint64))

    def times_at(self, step: int) -> Int64Array:
        """Return (E,) the number of draws of each episode before `step`."""
        if step < self._step:
            self._begin(*self._first)
        if step < self._step:
            problem = f"what was drawn in step {step} depends on what was there then"
            raise InputError("SELECTION", problem, remedy=f"ask for steps from {self._step} on")
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
        draws = np.array([self._draw(numbers) for numbers in first]).reshape(steps, 4, count)
        self._step += steps
        episodes, times, sizes = draws[:, (0, 2, 3)].astype(np.int64).swapaxes(0, 1)
        lengths = self._lengths[episodes]
        return Segments(
            episodes=episodes,
            starts=bound_draws(second, lengths),
            probability=draws[:, 1] / lengths,
            times_sampled=times,
            table_size=sizes,
        )

    def _draw(self, numbers: UInt64Array) -> Float64Array:
        """Count a step's draws; return (4, B): episodes, probabilities, times, table sizes."""
        draws = list[tuple[int, float, int, int]]()
        while len(draws) < len(numbers):
            if not self._masses.total:  # also where what is left has no weight
                self._begin(self._step, np.where(self._in_table, 0, self._times))
            total = self._masses.total
            values = bound_draws(numbers[len(draws) :], total)
            episodes = self._masses.find(values.astype(np.uint64))
            chances = self._masses.masses_of(episodes) / np.float64(total)
            for episode, chance in zip(episodes.tolist(), chances.tolist(), strict=True):
                self._times[episode] += 1
                draws.append((episode, chance, int(self._times[episode]), self._size))
                if self._times[episode] == self._most:  # others' probabilities change
                    self._size -= 1
                    self._masses.set(np.array([episode]), np.zeros(1, np.uint64))
                    self._let_next_come()
                    break
        return np.array(draws, np.float64).T


class Items:
    """The items of a table, by the options of ``data``."""

    def __init__(self, recipe: Recipe) -> None:
        self._data, self._seed, self._slots = recipe.data, recipe.seed, recipe.loader.batch_size
        # (E,) each: the items when the last ones came, of which some may have been drawn often
        # enough since; where that is limited, how often each was drawn; `_new_keys`.
        self.kept, self.times = np.zeros(0, np.bool_), np.zeros(0, np.int64)
        self._keys = np.zeros(0)
        self._clock = 0.0  # key of the item that was removed last by chance, see `_new_keys`
        self._inserted = self._drawn = self._coming = 0  # episodes; segments, also until next look
        self._rule = recipe.data.limiter or LimiterSettings(min_size=1)
        self._ratio = self._rule.samples_per_insert or 1.0
        self._min_size = 0  # of the limiter, since the first items came
        self._least = self._most = 0.0  # inserts * ratio - draws
        self._counted: CountedDraws | None = None

    def insert(self, dataset: Dataset) -> BoolArray | None:
        """Insert the episodes that have come since; return (E,) the items, None: all of them."""
        data = self._data
        if not (data.max_size or data.max_times_sampled or data.limiter):
            return None
        if len(dataset) > len(self.kept):
            self._add(self._new_keys(dataset))
        if not self._min_size:
            self._inserted = int(self.kept.sum())
            self._min_size = self._rule.min_size or max(1, self._inserted)
            self._least, self._most = self._rule.error_bounds(self._min_size)
        return self.kept

    def _new_keys(self, dataset: Dataset) -> Float64Array:
        """Return (n,) keys of the episodes that have come.

        The smallest key is removed, among equals the oldest.  By chance it is the time at which a
        clock rings once, exponentially distributed with the item's weight as its rate, wound up
        when the item comes.  The next to ring is each item with a probability in proportion to its
        weight, whatever has rung before.  The keys are the times that the clocks run.
        """
        remover, first, count = self._data.remover, len(self.kept), len(dataset) - len(self.kept)
        keys = np.arange(first, first + count, dtype=np.float64)
        if remover in HAVE_PRIORITY:
            keys = episode_priorities(self._data, dataset, first)
        if remover in ("lifo", "max_heap"):
            keys = -keys
        if remover not in BY_CHANCE:
            return keys
        weights = np.ones(count) if remover == "uniform" else keys
        at, _ = slot_draws(self._seed, first, count, 1, stream=REMOVER_STREAM)
        with np.errstate(divide="ignore"):  # of a weight of 0, whose clock never rings
            return np.asarray(-np.log((at[:, 0] + 0.5) * 2.0**-64) / weights)

    def _add(self, keys: Float64Array) -> None:
        """Add items of these keys one after the other; beyond `max_size` each removes one."""
        first, most = len(self.kept), self._data.max_size
        self.kept = np.append(self._drawable, np.ones(len(keys), np.bool_))
        self.times = np.append(self.times, np.zeros(len(keys), np.int64))
        self._keys = np.append(self._keys, keys)
        self._inserted += len(keys)
        if most is None:
            return
        candidates = np.flatnonzero(self.kept[:first])
        size = len(candidates)
        # No more old ones go than new ones come, hence those of the smallest keys.
        candidates = candidates[np.argsort(self._keys[candidates], kind="stable")[: len(keys)]]
        heap = [(float(self._keys[n]), n) for n in candidates.tolist()]  # sorted, hence a heap
        for number in range(first, len(self.kept)):
            self._keys[number] += self._clock
            heapq.heappush(heap, (float(self._keys[number]), number))
            size += 1
            if size > most:
                size -= 1
                key, removed = heapq.heappop(heap)
                self.kept[removed] = False
                if self._data.remover in BY_CHANCE and key < math.inf:
                    self._clock = key

    def count_draws(self, sampler: Sampler, step: int) -> Sampler:
        """Return the sampler from `step` on; it draws no episode more often than allowed."""
        most, stream = self._data.max_times_sampled, (self._seed, self._slots)
        if most is None:
            return sampler
        self._counted = draws = CountedDraws(
            sampler, self.kept, self.times, most=most, step=step, stream=stream
        )
        plain = HostFunction(sampler.index, draws.sample, counts_draws=True)
        return plain.with_facts(**sampler.identity)

    def advance(self, step: int, *, coming: int = 0) -> None:
        """Remove items drawn often enough before `step`; `coming` more steps follow."""
        self._drawn, self._coming = step * self._slots, coming * self._slots
        if self._counted is not None:
            times = self._counted.times_at(step)
            self.times = np.append(times, self.times[len(times) :])

    @property
    def _drawable(self) -> BoolArray:
        """(E,), the items that may still be drawn."""
        most = self._data.max_times_sampled
        return self.kept if most is None else self.kept & (self.times < most)

    def may_insert(self, episodes: int, behind: int = 0) -> bool:
        """Return true if the limiter admits that many episodes, `behind` others."""
        more = behind + episodes
        error = (self._inserted + more) * self._ratio - self._drawn
        return int(self._drawable.sum()) + more <= self._min_size or error <= self._most

    def may_admit(self, episodes: int, behind: int) -> bool:
        """Return true if so many episodes fit `behind` those that are admitted already.

        Beyond the limit they fit, too, where the run would wait for ever without them.
        """
        if not self._min_size or self.may_insert(episodes, behind):
            return True
        return self.missing(behind) is not None

    def missing(self, behind: int = 0) -> str | None:
        """Return the episodes that coming draws wait for when `behind` more are there, if any.

        As text: "3 episodes (why)".
        """
        if not self._min_size:
            return None
        drawable, most = self._drawable, self._data.max_times_sampled
        size, inserted = int(drawable.sum()) + behind, self._inserted + behind
        if size < self._min_size:
            why = f"min_size {self._min_size}, {size} are there"
            return f"{count_text(self._min_size - size, 'episode')} ({why})"
        draws = self._drawn + self._coming + self._least - inserted * self._ratio
        if draws > 0:
            why = f"samples_per_insert {self._ratio:g}"
            return f"{count_text(math.ceil(draws / self._ratio), 'episode')} ({why})"
        if most is not None:
            draws = self._coming + int(self.times[drawable].sum()) - most * size
            if draws > 0:
                why = f"max_times_sampled {most}"
                return f"{count_text(math.ceil(draws / most), 'episode')} ({why})"
        return None

    def state(self, step: int) -> dict[str, Array]:
        """Return the state from which a run resumes at `step`, where draws are counted."""
        if self._counted is None:
            return {}
        self.advance(step)
        keys, clock = np.where(self.kept, self._keys, np.nan), [self._clock, self._inserted]
        return {"times": self.times, "keys": keys, "clock": np.array(clock)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore the result of `state`."""
        self.times, self._keys = state["times"], state["keys"]
        self.kept = ~np.isnan(self._keys)
        self._clock, self._inserted = float(state["clock"][0]), int(state["clock"][1])


def episode_priorities(data: DataSettings, dataset: Dataset, first: int = 0) -> Float64Array:
    """Return (n,) priorities of the episodes from `first` on: returns, or values of a column."""
    name, values = data.priority, dataset.returns[first:]
    if name is not None:
        at = dataset.episodes.offsets[first:]
        rows = dataset.read(name, int(at[0]), dataset.spec.steps)
        values = rows.reshape(len(rows), -1)[at[:-1] - at[0]].astype(np.float64)
    least = 0.0 if data.remover == "prioritized" else -math.inf
    if values.size != len(dataset) - first or not (np.isfinite(values) & (values >= least)).all():
        problem = f"{name or 'return'} is no priority of every episode from number {first} on"
        remedy = f"name a column of one finite number a step{', at least 0' * (least == 0)}"
        raise InputError("SELECTION", problem, "data.priority", remedy)
    return values.reshape(-1)
