"""The items of a table: which episodes are there, how often each was drawn, what may come.

As in Reverb (Cassirer et al. 2021, arXiv:2102.04736): an item is inserted first, then the remover
chooses among all, also the new one; an item that was drawn often enough is gone before the next
draw.  What is there follows from the episodes, their order, the seed and the draws.

Shape legend: E episodes of the dataset, n items, B slots of a batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

import numpy as np

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import LimiterSettings
from gear_offline.core.text import count_text
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array, UInt64Array
from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.kernels.draws import CumulativeWeights
from gear_offline.kernels.philox import bounded, draws
from gear_offline.kernels.segments import Segments
from gear_offline.sampling.base import REMOVER_STREAM, Members, Sampler, slot_draws
from gear_offline.sampling.prioritized import HostPriorities

CHANCE = ("uniform", "prioritized")  # removers


class Items:
    """The items of a table, by the options of ``data``.

    Each remover takes the item of the smallest key, among equals the oldest.  The key of one that
    leaves it to chance is the time of a clock that rings once, exponentially distributed with the
    item's weight as its rate, wound up when the item comes: the next to ring is each item with a
    probability in proportion to its weight, whatever has rung before.

    Attributes
    ----------
    kept
        (E,) bool, the items when the last ones came: some may have been drawn often enough since.
    times
        (E,) int64, how often each episode was drawn, where that is limited.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.settings, self.seed = recipe.data, recipe.seed
        self.slots = recipe.loader.batch_size
        self.kept, self.times = np.zeros(0, np.bool_), np.zeros(0, np.int64)
        self._keys, self._heap = np.zeros(0), list[tuple[float, int]]()  # and of some that are gone
        self._clock = 0.0  # when one rang last
        self._first: int | None = None  # items before anything was admitted
        self._inserted = self._size = self._drawn = self._coming = self._pending = 0
        self._counted: Counted | None = None
        limits = (self.settings.max_size, self.settings.max_times_sampled, self.settings.limiter)
        self._is_limited = any(limits)

    def follow(self, dataset: Dataset) -> BoolArray | None:
        """Insert the episodes that have come since; return (E,) the items, None: all of them."""
        if not self._is_limited:
            return None
        self.insert(dataset, len(self.kept))
        if self._first is None:
            self._first = self._inserted = self._size
        return self.kept if self._size else None

    def insert(self, dataset: Dataset, begin: int = 0) -> None:
        """Insert the episodes of a piece, or of a dataset from one on."""
        first, keys = len(self.kept), self._new_keys(dataset, begin)
        if not len(keys):
            return
        self.kept = np.append(self._there, np.ones(len(keys), np.bool_))
        self.times = np.append(self.times, np.zeros(len(keys), np.int64))
        self._keys = np.append(self._keys, keys)
        for number in range(first, len(self.kept)):
            self._keys[number] += self._clock
            heapq.heappush(self._heap, (float(self._keys[number]), number))
            self._size += 1
            while self._size > (self.settings.max_size or math.inf):
                ringing, out = heapq.heappop(self._heap)
                if self.kept[out] and self.settings.remover in CHANCE and ringing < math.inf:
                    self._clock = ringing
                self._size -= int(self.kept[out])
                self.kept[out] = False
        self._inserted += len(keys)

    def _new_keys(self, dataset: Dataset, begin: int) -> Float64Array:
        """Return (n,) keys of the episodes from `begin` on; of clocks, how long they run."""
        remover, first, count = self.settings.remover, len(self.kept), len(dataset) - begin
        weights = np.arange(first, first + count, dtype=np.float64)
        if remover not in ("fifo", "lifo"):
            weights = np.ones(count) if remover == "uniform" else self._priorities(dataset, begin)
        if remover not in CHANCE:
            return weights if remover in ("fifo", "min_heap") else -weights
        numbers, _ = draws(
            seed=self.seed, stream=REMOVER_STREAM, first_step=first, steps=count, count=1
        )
        with np.errstate(divide="ignore"):  # of a weight of 0, whose clock never rings
            return np.asarray(-np.log((numbers[:, 0] + 0.5) * 2.0**-64) / weights)

    def _priorities(self, dataset: Dataset, begin: int) -> Float64Array:
        name, values = self.settings.priority, dataset.returns[begin:]
        if name is not None:
            at = dataset.episodes.offsets[begin:]
            rows = dataset.read(name, int(at[0]), dataset.spec.steps)
            values = rows.reshape(len(rows), -1)[at[:-1] - at[0]].astype(np.float64)
        positive = self.settings.remover == "prioritized"
        good = np.isfinite(values) & (values >= 0 if positive else True)
        if not good.all() or values.size != len(dataset) - begin:
            what = f"{name or 'return'} is no priority of every episode from number {begin} on"
            remedy = f"name a column of one finite number a step{', at least 0' * positive}"
            raise InputError("SELECTION", what, "data.priority", remedy)
        return values.reshape(-1)

    def counted(self, sampler: Sampler, step: int) -> Sampler:
        """Return the sampler from `step` on, which draws no episode more often than it may."""
        if self.settings.max_times_sampled is not None:
            sampler = self._counted = Counted(sampler, self, step)
        return sampler

    def advance(self, step: int, *, ahead: int = 0) -> None:
        """Take out what was drawn often enough before `step`; so many steps `ahead` are to come."""
        self._drawn, self._coming, self._pending = step * self.slots, ahead * self.slots, 0
        if self._counted is not None:
            times = self._counted.times_at(step)
            self.times = np.append(times, self.times[len(times) :])
            self._size = int(self._there.sum())

    @property
    def _there(self) -> BoolArray:
        """(E,), the items."""
        most = self.settings.max_times_sampled
        return self.kept if most is None else self.kept & (self.times < most)

    @property
    def _rule(self) -> tuple[int, float, float, float]:
        """Items that are needed, draws for each insert, how few and how many may be open."""
        rule = self.settings.limiter or LimiterSettings(min_size=1)
        least = rule.min_size or max(1, self._first or 0)
        return least, rule.samples_per_insert or 1.0, *rule.allowed(least)

    def takes(self, piece: Dataset) -> bool:
        """Whether a piece may be admitted behind those before, or the run would wait for ever."""
        takes = self.may_insert(self._pending + len(piece)) or bool(self.lacks())
        self._pending += len(piece) * takes
        return takes

    def may_insert(self, count: int) -> bool:
        """Whether the limiter admits so many more."""
        least, ratio, _, most = self._rule
        error = (self._inserted + count) * ratio - self._drawn
        return self._size + count <= least or error <= most

    def lacks(self, dataset: Dataset | None = None) -> str:
        """Return what must come before the draws that are ahead, with a dataset as it is now."""
        if dataset is not None:
            self.follow(dataset)
            self._pending = 0
        size, inserted = self._size + self._pending, self._inserted + self._pending
        most, (least, ratio, low, _) = self.settings.max_times_sampled, self._rule
        lacking = self._coming + self._drawn + low - inserted * ratio
        missing, why = math.ceil(max(lacking, 0.0) / ratio), f"samples_per_insert {ratio:g}"
        if size < least:
            missing, why = least - size, f"min_size {least}, {size} are there"
        elif missing <= 0 and most is not None:
            left = most * size - int(self.times[self._there].sum())
            missing, why = math.ceil((self._coming - left) / most), f"max_times_sampled {most}"
        is_open = missing <= 0 or not self._is_limited
        return "" if is_open else f"{count_text(missing, 'episode')} ({why})"

    def state(self, step: int) -> dict[str, Array]:
        """Return what a run goes on with at `step`, where draws are counted."""
        if self._counted is None:
            return {}
        self.advance(step)
        keys, clock = np.where(self.kept, self._keys, np.nan), [self._clock, self._inserted]
        return {"times": self.times, "keys": keys, "clock": np.array(clock)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take over what `state` returned."""
        self.times, self._keys = state["times"], state["keys"]
        self.kept = ~np.isnan(self._keys)
        self._clock, self._inserted = float(state["clock"][0]), int(state["clock"][1])
        self._size = int(self._there.sum())
        self._heap = [(float(self._keys[n]), n) for n in np.flatnonzero(self.kept).tolist()]
        heapq.heapify(self._heap)


class Counted(Members):
    """Draws one after the other: what was drawn ``max_times_sampled`` times is gone then.

    Episodes by weight, or in an order, then any start.  From `step` on; what was drawn in earlier
    steps depends on what was there then.
    """

    ahead = False

    def __init__(self, sampler: Sampler, items: Items, step: int) -> None:
        self._most = items.settings.max_times_sampled or 0
        there = items.kept & (items.times < self._most)
        super().__init__(sampler, np.arange(len(there)), sampler.index)
        self._first_step, self._first_times = step, items.times
        order, weights = sampler.episode_order, sampler.episode_weight
        if order is None and not isinstance(sampler.gpu, CumulativeWeights):
            what = f"{sampler.name} draws no episodes by weight or in an order"
            remedy = "use uniform_episodes, uniform_steps, weighted, fifo, lifo or heap"
            raise InputError("SELECTION", what, "data.max_times_sampled", remedy)
        self._order = None if order is None else order[there[order]]
        weights = np.zeros(len(there)) if weights is None else weights
        masses = np.floor(weights * 2.0**62).astype(np.int64)
        self._first_masses = np.maximum(masses, weights > 0) * there
        self._masses = HostPriorities(np.arange(len(there) + 1), np.zeros(0, np.uint64), first=0)
        self._size = int(there.sum())
        self._of = (items.seed, items.slots)
        self._rewind()

    def _rewind(self) -> None:
        self._at, self._times = self._first_step, self._first_times.copy()
        self._there, self._place = self._size, 0
        self._masses.load_state(self._first_masses.copy(), 0)

    def times_at(self, step: int) -> Int64Array:
        """Return (E,) how often each was drawn before `step`."""
        if step < self._at:
            self._rewind()
        if step < self._at:
            what = f"what was drawn in step {step} depends on what was there then"
            raise InputError("SELECTION", what, remedy=f"ask for steps from {self._at} on")
        if step > self._at:
            seed, count = self._of
            for numbers in slot_draws(seed, self._at, step - self._at, count)[0]:
                self._draw(numbers)
            self._at = step
        return self._times.copy()

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, second = slot_draws(seed, first_step, steps, count)
        assert (seed, count) == self._of, "draws are counted for the seed and batches of one run"
        self.times_at(first_step)
        found = np.array([self._draw(numbers) for numbers in first]).reshape(steps, 4, count)
        self._at += steps
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
        """Return (4, B): episodes, their probabilities, times, and how many there were."""
        found = list[tuple[int, float, int, int]]()
        while len(found) < len(numbers):
            if not self._there:
                self._rewind()
                what = f"every episode was drawn {self._most} times, and none has come since"
                raise InputError("SELECTION", what, "data.max_times_sampled", "start actors")
            picks, chances = self._pick(numbers[len(found) :])
            for pick, chance in zip(picks.tolist(), chances.tolist(), strict=True):
                self._times[pick] += 1
                found.append((pick, chance, int(self._times[pick]), self._there))
                if self._times[pick] >= self._most:
                    self._there, self._place = self._there - 1, self._place + 1
                    self._masses.set(np.array([pick]), np.zeros(1, np.uint64))
                    break
        return np.array(found, np.float64).T

    def _pick(self, numbers: UInt64Array) -> tuple[Int64Array, Float64Array]:
        if self._order is not None:
            return np.full(len(numbers), self._order[self._place]), np.ones(len(numbers))
        total = self._masses.total
        picks = self._masses.find(bounded(numbers, total).astype(np.uint64))
        return picks, self._masses.masses_of(picks) / np.float64(total)
