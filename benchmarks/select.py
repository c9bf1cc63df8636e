"""Choosing among up to 10^9 items: priorities on the CPU and the GPU, against torch's ways.

One call draws a million segments (random numbers and the search for the episode included), or
changes as many priorities; on the GPU those of a batch.  Peers: `torch.multinomial` (at most 2^24
weights), and cumulative float64 sums with a binary search, as one would write it: an update
computes all sums anew.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Call, alternate, gpu_seconds
from gear_offline.batches.sampling import Prioritized, make_sampler
from gear_offline.data.dataset.schema import EpisodeIndex

SIZES, QUICK_SIZES = (10**5, 10**7), (10**5,)
GPU_SIZES, QUICK_GPU_SIZES = (1 << 24, 10**8, 10**9), (10**6,)
DRAWS, QUICK_DRAWS = 1_000_000, 100_000
MULTINOMIAL_MOST = 1 << 24
EPISODE_STEPS = 1000
BATCH = 16_384  # of updates on the GPU
LEAST_WEIGHT = 1e-12  # the largest is 1


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure all sizes; 10^9 priorities need 40 GB of GPU memory with the peers."""
    count = QUICK_DRAWS if quick else DRAWS
    rows = []
    for items in QUICK_SIZES if quick else SIZES:
        rows += _rows("CPU", items, alternate(_on_cpu(items, count), turns=3, seconds=0.3))
    if torch.cuda.is_available():
        for items in QUICK_GPU_SIZES if quick else GPU_SIZES:
            calls = _on_gpu(items, count)
            seconds = {name: gpu_seconds(call, calls=4) for name, call in calls.items()}
            rows += _rows("GPU", items, seconds)
            del calls
            gc.collect()  # closures that name each other
            torch.cuda.empty_cache()
    return {"draws": count, "results": rows}


def _rows(where: str, items: int, seconds: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"where": where, "items": items, "what": name, "microseconds": value * 1e6}
        for name, value in seconds.items()
    ]


def _sampler(items: int, name: str, **options: Any) -> Any:
    index = EpisodeIndex(np.full(max(items // EPISODE_STEPS, 1), EPISODE_STEPS, np.int64))
    return make_sampler(name, index, **options)


def _on_cpu(items: int, count: int) -> dict[str, Call]:
    prioritized = _sampler(items, "prioritized", alpha=1.0)
    shuffled, uniform = _sampler(items, "shuffled_epochs"), _sampler(items, "uniform_steps")
    steps = itertools.count()
    drawn = prioritized.sample(1, 0, 1, count)
    names = np.stack([drawn.episodes[0], drawn.starts[0]], axis=-1)
    losses = itertools.cycle(np.random.default_rng(0).random((2, count), np.float32))
    weights = torch.rand(items, dtype=torch.float64)
    calls: dict[str, Call] = {
        "draw by priority": lambda: prioritized.sample(1, next(steps), 1, count),
        "update": lambda: prioritized.update(names, next(losses)),
        "draw without replacement": lambda: shuffled.sample(1, next(steps), 1, count),
        "draw uniformly": lambda: uniform.sample(1, next(steps), 1, count),
    }
    if items <= MULTINOMIAL_MOST:
        calls["torch.multinomial"] = lambda: torch.multinomial(weights, count, replacement=True)
    return calls


def _on_gpu(items: int, count: int) -> dict[str, Call]:
    from gear_offline.kernels.gather_gpu import GpuGather  # needs CuPy

    device = torch.device("cuda", 0)
    sampler: Prioritized = _sampler(items, "prioritized", alpha=1.0)
    tree = sampler.on_device(device)
    fill_masses(tree.masses)
    tree.add_up()
    shape: dict[str, Any] = {"context_length": 1, "rank_batch": count, "seed": 1}
    gather = GpuGather([], sampler.index.offsets, device=device, draw=sampler.gpu, **shape)
    steps = itertools.count()
    losses = itertools.cycle(torch.rand(8, BATCH, device=device))

    def draw() -> Tensor:
        """Gather no columns, only the names, timesteps and masks of windows of one step."""
        return gather.draw_and_gather(next(steps), 1).segments[0]

    more = EpisodeIndex(np.full(sampler.index.episodes * 101 // 100, EPISODE_STEPS, np.int64))

    def grow() -> None:
        """As a learner does: allocate, copy, give back."""
        larger: Any = make_sampler("prioritized", more, alpha=1.0)
        larger.on_device(device)
        larger.take_over(sampler)
        del larger
        torch.cuda.empty_cache()

    names = draw()[:BATCH].clone()
    calls: dict[str, Call] = {
        "draw by priority": draw,
        f"update {BATCH:,}": lambda: tree.update(names, next(losses)),
        "update 64": lambda: tree.update(names[:64], next(losses)[:64]),
        "grow by 1 %": grow,
    }
    return calls | _peers(tree.masses, count)


def _peers(masses: Tensor, count: int) -> dict[str, Call]:
    weights = masses.double()
    changed = torch.randint(len(masses), (BATCH,), device=masses.device)
    values = torch.rand(BATCH, device=masses.device, dtype=torch.float64)
    sums = weights.cumsum(0)

    def add_up() -> None:
        weights[changed] = values
        torch.cumsum(weights, 0, out=sums)

    def search() -> None:
        numbers = torch.rand(count, device=masses.device, dtype=torch.float64) * sums[-1]
        torch.searchsorted(sums, numbers, right=True)

    calls: dict[str, Call] = {"cumulative sums: draw": search, "cumulative sums: update": add_up}
    if len(masses) <= MULTINOMIAL_MOST:
        calls["torch.multinomial"] = lambda: torch.multinomial(weights, count, replacement=True)
    return calls


def fill_masses(masses: Tensor) -> None:
    """Write masses of weights that lie evenly over twelve orders of magnitude."""
    generator = torch.Generator(masses.device).manual_seed(0)
    share = (1.0 - LEAST_WEIGHT) / -np.log(LEAST_WEIGHT)  # of the mean weight in the largest
    most = min(2.0**62 / (len(masses) * share), 2.0**61)
    for begin in range(0, len(masses), 1 << 27):
        part = masses[begin : begin + (1 << 27)]
        exponents = torch.rand(
            len(part), generator=generator, device=masses.device, dtype=torch.float64
        )
        part.copy_(torch.exp(exponents.mul_(np.log(LEAST_WEIGHT))).mul_(most).clamp_(min=1.0))
