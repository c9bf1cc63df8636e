"""Spikes of a run's logged loss, found without torch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import inf
from statistics import median

import numpy as np

from gear_offline.artifacts.json_lines import read_records
from gear_offline.config.arguments import check_arguments
from gear_offline.config.recipe import Recipe
from gear_offline.core.types import Int64Array
from gear_offline.errors import InputError
from gear_offline.runs.run import Run, open_run

BEFORE, LEAST = 20, 5  # records before one that it is compared with
MADS = 6.0  # a spike is so many median absolute deviations above the median of those ...
FLAT = 0.01  # ... each taken for this share of the median at least


@dataclass(frozen=True, kw_only=True)
class Spike:
    """Records of metrics.jsonl, one after the other, whose loss is high."""

    first: int  # batches
    last: int
    loss: float  # the highest one
    usual: float  # median of the records before

    def __str__(self) -> str:
        times = f"{self.loss / self.usual:.3g} times the usual one" if self.usual else "usually 0"
        return f"{self.first}..{self.last}: loss {self.loss:.3g}, {times}"


@check_arguments()
def find_spikes(run: Run | str | os.PathLike[str]) -> list[Spike]:
    """Return the spikes of a run's logged loss, the highest first.

    A record of metrics.jsonl belongs to a spike if its loss is above ``median + 6 MAD`` of the last
    20 ordinary records, at least 5.  MAD is their median absolute deviation, or 1 % of the median
    where that is more.  Records one after another are one spike.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``, ``RUN_DAMAGED``.
    """
    spikes: list[Spike] = []
    ordinary = deque[float](maxlen=BEFORE)
    for first, last, loss in logged_losses(run if isinstance(run, Run) else open_run(run)):
        usual, spread = inf, 0.0
        if len(ordinary) >= LEAST:
            usual = median(ordinary)
            spread = median(abs(each - usual) for each in ordinary)
        if not loss > usual + MADS * max(spread, FLAT * abs(usual)):
            ordinary.append(loss)
        elif spikes and spikes[-1].last + 1 == first:
            spikes[-1] = replace(spikes[-1], last=last, loss=max(loss, spikes[-1].loss))
        else:
            spikes.append(Spike(first=first, last=last, loss=loss, usual=usual))
    return sorted(spikes, key=lambda spike: spike.usual - spike.loss)


def find_batches(run: Run, first: int, last: int) -> Int64Array:
    """Return (n,) the batches of a run in a range, both ends included; ``USAGE`` without any."""
    newest = run.recipe.train.batch_of(run.recipe.train.steps - 1)
    batches = list_batches(run.recipe, max(0, first), min(last, newest) + 1)
    if not len(batches):
        problem = f"no batches from {first} to {last}"
        raise InputError("USAGE", problem, str(run.path), f"the run has those of 0 to {newest}")
    return batches


def list_batches(recipe: Recipe, first: int, end: int) -> Int64Array:
    """Return (n,) the batches from `first` to before `end` that are not skipped."""
    numbers = np.arange(first, end)
    for low, high in recipe.train.skip:
        numbers = numbers[(numbers < low) | (numbers > high)]
    return numbers


def logged_losses(run: Run, first: int = 0, last: float = inf) -> Iterator[tuple[int, int, float]]:
    """Yield first and last batch, and the loss, of each record with batches from `first` on."""
    records, batch_of = read_records(run.path / "metrics.jsonl"), run.recipe.train.batch_of
    for before, now in pairwise(chain([{"step": 0}], records)):
        begin, end = batch_of(before["step"]), batch_of(now["step"] - 1)
        if now.get("loss") is not None and begin <= last and end >= first:
            yield begin, end, float(now["loss"])
