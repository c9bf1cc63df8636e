"""Which episodes a table of limited size has: each that comes beyond it has another one removed.

An item of the table is an episode, with a priority that it keeps.  As in Reverb (Cassirer et al.
2021, arXiv:2102.04736) it is inserted first, and then the remover chooses among all, also the new
one.  What is left follows from the episodes, their order and the seed.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from gear_offline.config.sections import DataSettings
from gear_offline.core.types import BoolArray, Float64Array
from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.kernels.philox import draws
from gear_offline.sampling.base import REMOVER_STREAM


class Items:
    """The items of a table, by `DataSettings.max_size`, `remover` and `priority`.

    Each remover takes the item of the smallest key, among equals the oldest.  The key of one that
    leaves it to chance is the time of a clock that rings once, exponentially distributed with the
    item's weight as its rate, wound up when the item comes: the next to ring is each item with a
    probability in proportion to its weight, whatever has rung before.
    """

    def __init__(self, settings: DataSettings, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._heap: list[tuple[float, int]] = []  # key and number of the items that are there
        self._now = 0.0  # when a clock rang last
        self._kept: list[bool] = []

    def follow(self, dataset: Dataset) -> BoolArray | None:
        """Insert the episodes that have come since; return (E,) the items, None: all of them."""
        size = self._settings.max_size
        if size is None:
            return None
        for key in self._keys(dataset, len(self._kept)).tolist():
            heapq.heappush(self._heap, (key + self._now, len(self._kept)))
            self._kept.append(True)
            if len(self._heap) > size:
                ringing, number = heapq.heappop(self._heap)
                self._kept[number] = False
                if self._settings.remover in ("uniform", "prioritized") and ringing < math.inf:
                    self._now = ringing
        return np.array(self._kept)

    def _keys(self, dataset: Dataset, first: int) -> Float64Array:
        """Return (n,) keys of the episodes from `first` on; of clocks, how long they run."""
        remover, numbers = self._settings.remover, np.arange(first, len(dataset), dtype=np.float64)
        if remover in ("fifo", "lifo"):
            return numbers if remover == "fifo" else -numbers
        weights = np.ones(numbers.size)
        if remover != "uniform":
            weights = self._priorities(dataset, first)
        if remover in ("min_heap", "max_heap"):
            return weights if remover == "min_heap" else -weights
        first_draw, _ = draws(
            seed=self._seed, stream=REMOVER_STREAM, first_step=first, steps=numbers.size, count=1
        )
        with np.errstate(divide="ignore"):  # of a weight of 0, whose clock never rings
            return np.asarray(-np.log((first_draw[:, 0] + 0.5) * 2.0**-64) / weights)

    def _priorities(self, dataset: Dataset, first: int) -> Float64Array:
        name, where = self._settings.priority, "data.priority"
        if name is None:
            values = dataset.returns[first:]
        else:
            spec, begins = dataset.spec[name], dataset.episodes.offsets[first:-1].tolist()
            if math.prod(spec.shape) != 1 or spec.dtype.kind == "c":
                what = f"{spec} is not one number a step"
                raise InputError("COLUMN", what, where, "name a column of one number a step")
            read = [dataset.read(name, step, step + 1).reshape(-1) for step in begins]
            values = np.concatenate([np.zeros(0), *read]).astype(np.float64)
        low = 0.0 if self._settings.remover == "prioritized" else -math.inf
        if not (np.isfinite(values) & (values >= low)).all():
            what = f"{name or 'return'} is no priority of every episode from number {first} on"
            remedy = f"name a column of finite numbers{', at least 0' * (low == 0.0)}"
            raise InputError("SELECTION", what, where, remedy)
        return values
