"""Drawing on the GPU or on the CPU, the GPU gathers: microseconds a batch of the whole loader.

Both draw the same segments, of which the rows lie in GPU memory.  "batch" is the loader's next
batch.  Of priorities, "weights" and "update" are `LossFeedback`'s, "turn" is all three.  "train" is
a batch before a fixed piece of work on the GPU, launched one by one or as a CUDA graph; "none" is
that work alone.  Each turn waits for the GPU at its ends.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import CONTEXT, Call, alternate, need_cuda, write_rows
from gear_offline.batches.sampling import Facts, Sampler, make_sampler
from gear_offline.batches.sampling.draws import SegmentStream
from gear_offline.core.text import say
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.kernels.columns import ColumnGroup, Field, GroupAddresses
from gear_offline.kernels.gather_gpu import GpuGather
from gear_offline.loaders.feedback import DeviceFeedback, LossFeedback
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import BLOCK_STEPS, GPU_LIMITS, MemoryRows, window_bytes
from gear_offline.loaders.segments import LocalSegments

ITEMS, QUICK_ITEMS = (10**3, 10**5, 10**7, 10**9), (10**3, 10**5)
BATCHES, QUICK_BATCHES = (16, 256, 4_096, 16_384), (16, 4_096)
STRATEGIES = ("uniform_steps", "return_weighted", "shuffled_epochs", "prioritized")
EPISODE_STEPS = 250
WIDE_ITEMS = 10**8  # from here on rows are one number, else those of Hopper
WORK = 4096  # of a product of matrices: 0.2 ms on an H200
BESIDE = (10**7, (256, 4_096))  # items and batches that come beside other work
TURNS, SECONDS = 5, 0.02
GPU, CPU = "GPU", "CPU"  # who draws


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure all sizes, less than two minutes; 10^9 items take 15 GB of both memories."""
    need_cuda()
    return {"results": measure(torch.device("cuda", 0), quick=quick)}


def measure(device: torch.device, *, quick: bool = False) -> list[dict[str, Any]]:
    """Return the rows of the grid, and on a GPU those of batches beside other work."""
    rows, began = list[dict[str, Any]](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        path = Path(folder) / "data"
        write_rows(path, 100, (2,), actions=1, episode_steps=50, shard_bytes=1 << 20)
        for items in QUICK_ITEMS if quick else ITEMS:
            table = Table.of(items, device)
            for strategy in STRATEGIES:
                samplers = table.samplers(strategy)
                for batch in QUICK_BATCHES if quick else BATCHES:
                    loaders = {
                        who: table.loader(path, samplers[who], who, batch) for who in samplers
                    }
                    beside = items == BESIDE[0] and batch in BESIDE[1]
                    cells = _cells(loaders, device, beside=beside)
                    for what, calls, batches in cells:
                        taken = alternate(calls, turns=TURNS, seconds=SECONDS, label=what)
                        row: dict[str, Any] = {
                            "items": items,
                            "strategy": strategy,
                            "batch": batch,
                            "what": what,
                        }
                        row |= {who: round(1e6 * each / batches, 2) for who, each in taken.items()}
                        row["GPU_by_CPU"] = round(row[GPU] / row[CPU], 3)
                        rows.append(row)
                        say(f"{time.monotonic() - began:5.1f} s: {row}")
                    del loaders, cells
                del samplers
                gc.collect()  # closures that name each other
    return rows


@dataclass(frozen=True, eq=False)
class Table:
    """Episodes of equal length, and rows for them in GPU memory."""

    facts: Facts
    groups: list[GroupAddresses]
    rows: Tensor  # (N, W) float32
    device: torch.device

    @classmethod
    def of(cls, items: int, device: torch.device) -> Table:
        """Return a table of so many steps."""
        index = EpisodeIndex(np.full(items // EPISODE_STEPS, EPISODE_STEPS, np.int64))
        sizes = {"states": 11, "actions": 3, "rewards": 1, "returns_to_go": 1}
        if items >= WIDE_ITEMS:
            sizes = {"rewards": 1}
        offsets = np.cumsum([0, *sizes.values()])
        fields = tuple(
            Field(name=name, dtype=np.dtype(np.float32), shape=(size,), offset=int(offset))
            for (name, size), offset in zip(sizes.items(), offsets, strict=False)
        )
        group = ColumnGroup(fields=fields, rows=np.empty((0, int(offsets[-1])), np.float32))
        rows = torch.zeros((items, group.width), device=device)
        addresses = rows.data_ptr() + index.offsets[:-1] * group.row_bytes
        returns = np.random.default_rng(0).normal(size=index.episodes)
        facts = Facts(episodes=index, returns=returns)
        return cls(facts, [GroupAddresses(group=group, addresses=addresses)], rows, device)

    def samplers(self, strategy: str) -> dict[str, Sampler]:
        """Return a sampler for each who draws: priorities stay where they were first asked for."""
        return {who: make_sampler(strategy, self.facts) for who in (GPU, CPU)}

    def loader(self, path: Path, sampler: Sampler, who: str, batch: int) -> GearLoader:
        """Return a loader, of data at `path`, that has got this table in their place."""
        options: dict[str, Any] = {"context_length": CONTEXT, "engine": "off"}
        options |= {"device": self.device, "batch_size": batch}
        loader = GearLoader(open_dataset(path, verify=False), **options)
        gather = GpuGather(
            self.groups,
            self.facts.episodes.offsets,
            device=self.device,
            context_length=CONTEXT,
            rank_batch=batch,
            draw=sampler.gpu if who == GPU else None,
            keep=self.rows,
        )
        stream = SegmentStream(
            selection=sampler, seed=0, global_batch=batch, first_slot=0, rank_batch=batch
        )
        window = window_bytes(gather.groups, CONTEXT)
        steps = min(GPU_LIMITS.segments, GPU_LIMITS.nbytes // window) // batch  # as rows.py has it
        loader.selection, loader.loss_sampler = sampler, sampler.loss_sampler
        loader.rows = MemoryRows(
            memory=self.rows,
            segments=LocalSegments(stream),
            block_steps=max(1, min(steps, BLOCK_STEPS)) if sampler.can_prefetch else 1,
            device=self.device,
            gather=gather,
            extra_gathers=(),
        )
        return loader


def _cells(
    loaders: dict[str, GearLoader], device: torch.device, *, beside: bool
) -> Iterator[tuple[str, dict[str, Call], int]]:
    """Yield what is measured, a call of each who draws, and how many batches a call takes."""
    steps = loaders[GPU].rows.block_steps
    yield "batch", {who: _blocks(loader, steps) for who, loader in loaders.items()}, steps
    if loaders[GPU].loss_sampler is not None:
        yield from _feedback(loaders, device)
    if beside and device.type == "cuda":
        yield "train", _beside(loaders, steps, device), steps
        if loaders[CPU].loss_sampler is None:  # else the host hears of the losses first
            yield "train, captured", _captured(loaders, steps, device), steps


def _blocks(loader: GearLoader, steps: int) -> Call:
    def take() -> None:
        for _ in range(steps):
            next(loader)

    return take


def _feedback(
    loaders: dict[str, GearLoader], device: torch.device
) -> Iterator[tuple[str, dict[str, Call], int]]:
    weights, updates, turns = dict[str, Call](), dict[str, Call](), dict[str, Call]()
    size = loaders[GPU].batch_size
    losses = itertools.cycle(torch.rand(8, size, device=device))

    def add(who: str, loader: GearLoader) -> None:
        feedback, batch = LossFeedback(loader), next(loader)

        def turn() -> None:
            batch = next(loader)
            feedback.importance()
            feedback.update(batch, next(losses))

        weights[who], turns[who] = feedback.importance, turn
        updates[who] = lambda: feedback.update(batch, next(losses))

    for who, loader in loaders.items():
        add(who, loader)
    static = loaders[GPU].static_batch()
    waitless = DeviceFeedback(loaders[GPU], static)

    def without_waiting() -> None:
        static.enqueue()
        waitless.importance()
        waitless.update(static.batch, next(losses))

    yield "weights", weights, 1
    yield "update", updates, 1
    yield "turn", turns | {"GPU, DeviceFeedback": without_waiting}, 1


def _beside(loaders: dict[str, GearLoader], steps: int, device: torch.device) -> dict[str, Call]:
    left = torch.ones((WORK, WORK), device=device, dtype=torch.bfloat16)
    product = torch.empty_like(left)
    batches: dict[str, Iterator[object]] = {**loaders, "none": itertools.repeat(None)}

    def train(source: Iterator[object]) -> Call:
        def call() -> None:
            for _ in range(steps):
                next(source)
                torch.mm(left, left, out=product)

        return call

    return {who: train(source) for who, source in batches.items()}


def _captured(loaders: dict[str, GearLoader], steps: int, device: torch.device) -> dict[str, Call]:
    """As `_beside`, each step one CUDA graph; the CPU draws a block ahead into pinned memory."""
    left = torch.ones((WORK, WORK), device=device, dtype=torch.bfloat16)
    product = torch.empty_like(left)

    def train(loader: GearLoader | None) -> Call:
        static = None if loader is None else loader.static_batch()

        def step() -> None:
            if static is not None:
                static.enqueue()
            torch.mm(left, left, out=product)

        if static is not None:
            static.prepare()
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        def call() -> None:
            for _ in range(steps):
                if static is not None:
                    static.prepare()
                graph.replay()

        return call

    return {who: train(loader) for who, loader in {**loaders, "none": None}.items()}
