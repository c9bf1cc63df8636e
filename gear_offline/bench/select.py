"""Selecting on the CPU: weighted choice, priorities, shuffled epochs, over 10^4 to 10^8 items.

One call draws `DRAWS` items, or changes as many priorities.  Random numbers and the search for the
episode are part of a strategy and left out here: the draws are given, this is the choice alone.
For `torch.multinomial` (at most 2^24 items) and ``numpy.random.Generator.choice`` they are not
separable, so theirs are included; the first call that builds tables is measured apart, the peers
build theirs in every call.  Rounds take turns; figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gear_offline.laws.bijection import KeyedOrder
from gear_offline.laws.sum_tree import SumTree
from gear_offline.laws.thresholds import Thresholds

SIZES, QUICK_SIZES = (10**4, 10**5, 10**6, 10**7, 10**8), (10**4, 10**5)
DRAWS, QUICK_DRAWS = 1_000_000, 100_000
MULTINOMIAL_MOST = 1 << 24
Array = npt.NDArray[Any]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(items: int, draws: int, *, rounds: int) -> dict[str, Any]:
    """Return the figures of one size.

    Parameters
    ----------
    items
        Weights, drawn over twelve orders of magnitude.
    draws
        In one call.
    rounds
        Calls of each kind, after one that is not counted.
    """
    generator = np.random.default_rng(0)
    weights = np.exp(generator.uniform(np.log(1e-12), 0.0, size=items))
    numbers = generator.integers(0, 2**64, size=draws, dtype=np.uint64)
    chosen = np.unique(generator.integers(0, items, size=draws))
    places = np.arange(draws, dtype=np.int64) % items
    epochs = np.zeros(draws, dtype=np.int64)
    started = time.perf_counter()
    thresholds = Thresholds(weights)
    build_seconds = time.perf_counter() - started
    tree = SumTree(np.maximum(weights * (2.0**62 / items), 1.0).astype(np.uint64))
    below = numbers % np.uint64(tree.total)
    masses = tree.masses[chosen].copy()
    order = KeyedOrder(items)
    calls: dict[str, Callable[[], object]] = {
        "weighted": lambda: thresholds.find(numbers),
        "priorities: draw": lambda: tree.find(below),
        "priorities: update": lambda: tree.set(chosen, masses),
        "shuffled": lambda: order(seed=1, first_epoch=0, epochs=epochs, places=places),
        "numpy choice": lambda: generator.choice(items, size=draws, p=shares),
    }
    shares = weights / weights.sum()
    if items <= MULTINOMIAL_MOST:
        tensor = torch.from_numpy(weights)
        calls["torch.multinomial"] = lambda: torch.multinomial(tensor, draws, replacement=True)
    found: dict[str, list[float]] = {key: [] for key in calls}
    for number in range(rounds + 1):
        for key, call in calls.items():
            taken = _seconds(call)
            if number:
                found[key].append(taken)
    return {
        "items": items,
        "draws": draws,
        "updates": int(chosen.size),
        "build_seconds": build_seconds,
        "seconds": {key: median(values) for key, values in found.items()},
        "priority_bytes_per_item": tree.nbytes / items,
    }


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure all sizes.  Needs 8 GB of memory, with `quick` next to none."""
    sizes, draws = (QUICK_SIZES, QUICK_DRAWS) if quick else (SIZES, DRAWS)
    return {"results": [measure(items, draws, rounds=2 if quick else 5) for items in sizes]}


def table(document: dict[str, Any]) -> list[list[str]]:
    """Return header and rows: milliseconds a call, and the ratio of a peer to `weighted`."""
    names = list(document["results"][0]["seconds"])
    rows = [["items", "draws", *(f"{name} (ms)" for name in names), "build (ms)", "multinomial /"]]
    for result in document["results"]:
        seconds = result["seconds"]
        peer = seconds.get("torch.multinomial")
        ratio = "-" if peer is None else f"{peer / seconds['weighted']:.2f}"
        cells = [f"{1e3 * seconds[n]:.1f}" if n in seconds else "-" for n in names]
        counts = [f"{result['items']:,}", f"{result['draws']:,}"]
        rows.append([*counts, *cells, f"{1e3 * result['build_seconds']:.0f}", ratio])
    return rows
