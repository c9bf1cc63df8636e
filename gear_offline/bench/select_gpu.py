"""Selecting on the GPU: draws from and updates of up to 10^9 priorities, and one batch by each law.

Times are CUDA events, medians of calls that each have a step of their own.  Peers of the same run:
`torch.multinomial` (at most 2^24 weights), and cumulative float64 sums with a binary search, as one
would write it: an update computes all sums anew.

Shape legend: N items, n draws or updates of a call.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gear_offline.bench.gather import event_seconds
from gear_offline.bench.loader import CONTEXT, EPISODES, STEPS, _hopper_like
from gear_offline.bench.train import paper_learner, step_seconds
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.kernels.philox import bounded, draws
from gear_offline.sampling import Prioritized, Sampler, ShuffledEpochs, make_sampler
from gear_offline.sampling.base import Facts
from gear_offline.sampling.prioritized import PriorityOptions

EPISODE_STEPS = 1000
AT_ONCE = 1 << 27  # masses made together
LEAST_WEIGHT = 1e-12  # the largest is 1
MULTINOMIAL_MOST = 1 << 24
ROWS_OF_BATCHES = 8  # names of updates, taken in turn
LAWS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in ("uniform_steps", "uniform_episodes", "return_weighted")),
    *((name, {}) for name in ("top_percent", "shuffled_epochs", "prioritized")),
)


def measure(items: int, count: int, *, turns: int, device: torch.device) -> dict[str, Any]:
    """Return the figures of `items` priorities, `count` draws or updates a call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    index = EpisodeIndex(np.full(max(items // EPISODE_STEPS, 1), EPISODE_STEPS, np.int64))
    facts = Facts(episodes=index)
    law = Prioritized(facts, PriorityOptions(alpha=1.0))
    tree = law.on_device(device)
    torch.cuda.synchronize()
    made = time.perf_counter()
    fill_masses(tree.masses)
    tree.add_up()
    torch.cuda.synchronize()
    filled = time.perf_counter()
    select = _Calls(law, device, count)
    exact = _is_exact(law, select, count)
    losses = torch.rand(ROWS_OF_BATCHES, count, device=device)
    names = [select.drawn(1_000_000 + i).clone() for i in range(ROWS_OF_BATCHES)]
    turn = itertools.cycle(range(ROWS_OF_BATCHES))

    def update() -> None:
        number = next(turn)
        tree.update(names[number], losses[number])

    calls: dict[str, Callable[[], object]] = {"draw": select.next, "update": update}
    for own in (1024, 64):
        calls[f"draw {own:,}"] = _Calls(law, device, own).next
        calls[f"update {own:,}"] = partial(tree.update, names[0][:own], losses[0, :own])
    calls["shuffled"] = _Calls(ShuffledEpochs(facts), device, count).next
    _never_wait(calls.values())
    seconds = {name: event_seconds(call, turns=turns, calls=4) for name, call in calls.items()}
    held = int(tree.masses.sum()) == tree.total and tree.refused == 0
    found = {
        "items": index.steps,
        "count": count,
        "build_seconds": made - began,
        "fill_seconds": filled - made,
        "bytes_per_item": law.nbytes / index.steps,
        "seconds": seconds | _peers(tree.masses, count, turns),
        "host_synchronisations": 0,
        "draws_exact": exact,
        "sums_exact_after_updates": held,
        "graph_replays_exact": _graph_is_exact(law, names, losses),
    }
    torch.cuda.empty_cache()
    return found


def _never_wait(calls: Iterable[Callable[[], object]]) -> None:
    """Make each call once; torch raises where one waits for the GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for call in calls:
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def fill_masses(masses: Tensor) -> None:
    """Write masses of weights that lie evenly over twelve orders of magnitude."""
    generator = torch.Generator(masses.device).manual_seed(0)
    share = (1.0 - LEAST_WEIGHT) / -np.log(LEAST_WEIGHT)  # of the mean weight in the largest
    most = min(2.0**62 / (len(masses) * share), 2.0**61)
    if len(masses) < 1000:
        most = 2.0**62 / len(masses)
    for begin in range(0, len(masses), AT_ONCE):
        part = masses[begin : begin + AT_ONCE]
        exponents = torch.rand(
            len(part), generator=generator, device=masses.device, dtype=torch.float64
        )
        weights = torch.exp(exponents.mul_(np.log(LEAST_WEIGHT)))
        part.copy_(weights.mul_(most).clamp_(min=1.0))


class _Calls:
    """Draws of one size, each call at a step of its own."""

    def __init__(self, law: Sampler, device: torch.device, count: int) -> None:
        from gear_offline.kernels.select import DeviceSelect

        assert law.gpu is not None
        self._select = DeviceSelect(law.gpu, law.index.offsets, device=device, batch_size=count)
        self.names = torch.empty(1, count, 2, dtype=torch.int64, device=device)
        self.chances = None
        if isinstance(law, Prioritized):
            self.chances = torch.empty(1, count, dtype=torch.float64, device=device)
        self._step = 0

    def next(self) -> None:
        self.drawn(self._step)
        self._step += 1

    def drawn(self, step: int) -> Tensor:
        self._select.enqueue(seed=1, first_step=step, names=self.names, chances=self.chances)
        return self.names[0]


def _is_exact(law: Prioritized, select: _Calls, count: int) -> bool:
    """Return whether one call drew what a search of cumulative integer sums finds."""
    tree = law.on_device(select.names.device)
    names = select.drawn(7).cpu().numpy()
    first, _ = draws(seed=1, stream=0, first_step=7, steps=1, count=count)
    numbers = torch.from_numpy(bounded(first[0], tree.total)).to(select.names.device)
    sums = tree.masses.cumsum(0)
    rows = torch.searchsorted(sums, numbers, right=True).cpu().numpy()
    mine = law.index.offsets[names[:, 0]] + names[:, 1]
    chances = law.density(law.sample(1, 7, 1, count)[0])[:1]
    assert select.chances is not None
    return bool((rows == mine).all() and (chances == select.chances[0, :1].cpu().numpy()).all())


def _graph_is_exact(law: Prioritized, names: Sequence[Tensor], losses: Tensor) -> bool:
    """Return whether a captured update gives the sums that the masses have."""
    tree = law.on_device(losses.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree.update(names[1], losses[2])
    before = tree.updates
    for _ in range(3):
        graph.replay()
    return tree.updates == before + 3 and int(tree.masses.sum()) == tree.total


def _peers(masses: Tensor, count: int, turns: int) -> dict[str, float]:
    """Return seconds a call of the peers that can take part."""
    weights = masses.double()
    changed = torch.randint(len(masses), (count,), device=masses.device)
    values = torch.rand(count, device=masses.device, dtype=torch.float64)
    sums = torch.empty_like(weights)

    def add_up() -> None:
        weights[changed] = values
        torch.cumsum(weights, 0, out=sums)

    def search() -> None:
        numbers = torch.rand(count, device=masses.device, dtype=torch.float64) * sums[-1]
        torch.searchsorted(sums, numbers, right=True)

    add_up()
    found = {
        "cumsum: draw": event_seconds(search, turns=turns, calls=2),
        "cumsum: update": event_seconds(add_up, turns=turns, calls=2),
    }
    if len(masses) <= MULTINOMIAL_MOST:
        found["torch.multinomial"] = event_seconds(
            lambda: torch.multinomial(weights, count, replacement=True), turns=turns, calls=2
        )
    return found


def batches(*, quick: bool, turns: int) -> list[dict[str, Any]]:
    """Return microseconds of one fused batch by each law, hopper-like records in GPU memory."""
    from gear_offline.loaders.loader import GearLoader

    steps, episodes = (STEPS // 10, EPISODES // 10) if quick else (STEPS, EPISODES)
    found = []
    with _hopper_like(steps, episodes) as (dataset, _):
        for name, options in LAWS:
            row: dict[str, Any] = {"law": name}
            for size in (64, 1024):
                law = make_sampler(name, dataset, context_length=CONTEXT, **options)
                padding: Any = law.padding or "right"
                loader = GearLoader(
                    dataset,
                    batch_size=size,
                    context_length=CONTEXT,
                    selection=law,
                    device="cuda",
                    engine="on",
                    placement="hbm",
                    padding=padding,
                )
                row[f"microseconds, B={size:,}"] = 1e6 * _captured(
                    loader.device_batches().enqueue, turns
                )
            found.append(row)
    return found


def training(*, quick: bool, turns: int) -> dict[str, float]:
    """Return milliseconds of a training step of the paper's model, one CUDA graph each."""
    steps, episodes = (STEPS // 10, EPISODES // 10) if quick else (STEPS, EPISODES)
    found = {}
    with _hopper_like(steps, episodes) as (dataset, _):
        for name in ("uniform_steps", "prioritized"):
            learner = paper_learner(
                dataset,
                ("train.graph=on", "train.compile=off", f"selection.strategy={name}"),
            )
            found[name] = 1e3 * step_seconds(learner.advance, turns=turns)
    return found


def _captured(call: Callable[[], object], turns: int) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            call()
    return event_seconds(graph.replay, turns=turns, calls=3) / 100
