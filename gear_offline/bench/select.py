"""Selecting: weighted choice, priorities, shuffled epochs, over 10^4 to 10^8 items on the CPU, and
priorities up to 10^9 items and every law's batches on a GPU (`gear_offline.bench.select_gpu`).

One call draws `DRAWS` items, or changes as many priorities.  Random numbers and the search for the
episode are part of a strategy and left out here: the draws are given, this is the choice alone.
For `torch.multinomial` (at most 2^24 items) and ``numpy.random.Generator.choice`` they are not
separable, so theirs are included; the first call that builds tables is measured apart, the peers
build theirs in every call.  Rounds take turns; figures are medians.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gear_offline.bench.select_peers import torchrl_calls
from gear_offline.sampling.episodes import WeightedChoice
from gear_offline.sampling.epochs import KeyedOrder
from gear_offline.sampling.prioritized import SumTree

SIZES, QUICK_SIZES = (10**4, 10**5, 10**6, 10**7, 10**8), (10**4, 10**5)
DRAWS, QUICK_DRAWS = 1_000_000, 100_000
GPU_SIZES, QUICK_GPU_SIZES = (1 << 24, 10**8, 10**9), (10**5, 10**6)
MULTINOMIAL_MOST = 1 << 24
OWN = ("weighted", "priorities: draw", "priorities: update", "shuffled")
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
    choice = WeightedChoice(weights)
    build_seconds = time.perf_counter() - started
    tree = SumTree(np.maximum(weights * (2.0**62 / items), 1.0).astype(np.uint64))
    below = numbers % np.uint64(tree.total)
    masses = tree.masses[chosen].copy()
    changes = itertools.cycle((masses[::-1].copy(), masses))  # each call changes something
    order = KeyedOrder(items)
    calls: dict[str, Callable[[], object]] = {
        "weighted": lambda: choice.search.find(numbers),
        "priorities: draw": lambda: tree.find(below),
        "priorities: update": lambda: tree.set(chosen, next(changes)),
        "shuffled": lambda: order(1, 0, epochs, places),
        "numpy choice": lambda: generator.choice(items, size=draws, p=shares),
    }
    shares = weights / weights.sum()
    if items <= MULTINOMIAL_MOST:
        tensor = torch.from_numpy(weights)
        calls["torch.multinomial"] = lambda: torch.multinomial(tensor, draws, replacement=True)
    calls |= torchrl_calls(weights, chosen, draws)
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


def run(
    *,
    quick: bool = False,
    items: Sequence[int] | None = None,
    gpu_items: Sequence[int] | None = None,
    draws: int | None = None,
) -> dict[str, Any]:
    """Measure all sizes, on the GPU as well if there is one.

    Parameters
    ----------
    quick
        Small sizes.
    items
        Sizes on the CPU; 10^8 needs 8 GB of memory.
    gpu_items
        Sizes on the GPU; 10^9 needs 40 GB of GPU memory with the peers.
    draws
        And updates, of a call.
    """
    sizes = tuple(items) if items is not None else (QUICK_SIZES if quick else SIZES)
    count = draws or (QUICK_DRAWS if quick else DRAWS)
    document: dict[str, Any] = {}
    if torch.cuda.is_available():
        document["gpu"] = _on_gpu(gpu_items, count, quick=quick)
    results = [measure(size, count, rounds=2 if quick else 5) for size in sizes]
    return {"results": results} | document


def _on_gpu(items: Sequence[int] | None, count: int, *, quick: bool) -> dict[str, Any]:
    from gear_offline.bench import select_gpu

    if items is None:
        items = QUICK_GPU_SIZES if quick else GPU_SIZES
    turns = 3 if quick else 9
    device = torch.device("cuda", torch.cuda.current_device())
    return {
        "name": torch.cuda.get_device_name(),
        "results": [select_gpu.measure(size, count, turns=turns, device=device) for size in items],
        "batches": select_gpu.batches(quick=quick, turns=turns),
        "training_milliseconds": select_gpu.training(quick=quick, turns=min(turns, 5)),
    }


def table(document: dict[str, Any]) -> list[list[str]]:
    """Return header and rows: milliseconds a call, and the ratio of a peer to ours."""
    head = ["what", "items", "draws", "ms", "peer", "peer, ms", "ratio"]
    rows: list[list[str]] = []
    for result in document["results"]:
        seconds = result["seconds"]
        known = "torch.multinomial" in seconds
        peers = {"weighted": "torch.multinomial" if known else "numpy choice"}
        peers |= {f"priorities: {verb}": f"TorchRL: {verb}" for verb in ("draw", "update")}
        for name in OWN:
            rows.append(_row(f"CPU: {name}", result, seconds[name], peers.get(name), seconds))
    gpu = document.get("gpu", {"results": [], "batches": []})
    for result in gpu["results"]:
        seconds = result["seconds"]
        for name in ("draw", "update", "draw 1,024", "update 1,024", "shuffled"):
            rows.append(_row(f"GPU: {name}", result, seconds[name], f"cumsum: {name}", seconds))
        if "torch.multinomial" in seconds:
            rows.append(_row("GPU: draw", result, seconds["draw"], "torch.multinomial", seconds))
        rows.append(_row("GPU: build", result, result["build_seconds"], None, seconds))
    for row in gpu["batches"]:
        for key, value in row.items():
            if key != "law":
                cells = ["", "", f"{value / 1e3:.4f}", "", "", ""]
                rows.append([f"GPU batch, {row['law']}, {key.split(', ')[1]}", *cells])
    for name, value in gpu.get("training_milliseconds", {}).items():
        rows.append([f"GPU training step, {name}", "", "", f"{value:.3f}", "", "", ""])
    return [head, *rows]


def _row(
    name: str,
    result: dict[str, Any],
    value: float,
    peer: str | None,
    seconds: dict[str, float],
) -> list[str]:
    count = result.get("count", result.get("draws", 0))
    cells = [name, f"{result['items']:,}", f"{count:,}", f"{1e3 * value:.3f}"]
    if peer is None or peer not in seconds:
        return [*cells, "", "", ""]
    return [*cells, peer, f"{1e3 * seconds[peer]:.2f}", f"{seconds[peer] / value:.2f}"]
