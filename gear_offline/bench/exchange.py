"""The exchange between two ranks as two nodes of this machine, both reading at once.

``collective`` over gloo; ``rdma`` too where ``GEAR_OFFLINE_INTERFACE`` names an interface with an
RDMA device.  Over Soft-RoCE in a virtual machine that only shows that it works.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from gear_offline.core.progress import progress, say
from gear_offline.errors import GearError

SIZES = ((1024, 8), (1024, 1024), (65536, 128))  # bytes of a read, reads of a rank
ROW_BYTES, EPISODES = 64, 200


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure and return the document."""
    turns = 20 if quick else 200
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    rates: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, progress(2, "exchange", unit="ways") as advance:
        for mode in ("off", "on"):
            store = f"file://{folder}/{mode}"
            ranks = [
                context.Process(target=_rank, args=(rank, store, mode, turns, results), daemon=True)
                for rank in range(2)
            ]
            for process in ranks:
                process.start()
            rows = results.get()  # None where there is no RDMA
            for process in ranks:
                process.join()
            rates += rows or []
            advance(1)
    return {"rates": rates}


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [("transport", "a step reads", "ms a step", "MB/s a rank")]
    for row in document["rates"]:
        reads = f"{row['reads']:,} x {row['bytes']:,} B"
        rate = row["reads"] * row["bytes"] / row["seconds"] / 1e6
        rows.append((row["transport"], reads, f"{1e3 * row['seconds']:.3f}", f"{rate:,.0f}"))
    return rows


def _rank(rank: int, store: str, mode: Any, turns: int, results: Any) -> None:
    import torch.distributed as dist

    from gear_offline.distributed.world import World

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        rows = [
            _measure(World(rank=rank, nodes=(0, 1)), mode, nbytes, reads, turns)
            for nbytes, reads in SIZES
        ]
    except GearError as error:
        say(f"no RDMA: {error}", quiet=bool(rank))
        rows = []
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def _measure(world: Any, mode: Any, nbytes: int, count: int, turns: int) -> dict[str, Any]:
    """Return the median time of a step in which each rank reads from the other."""
    from gear_offline.distributed.exchange import Held, Reads, open_exchange

    steps = nbytes // ROW_BYTES
    lengths = np.full(2 * EPISODES, 1000)
    nodes = np.arange(2 * EPISODES) % 2
    rows = np.random.default_rng(world.rank).integers(0, 255, (EPISODES * 1000, ROW_BYTES))
    landing = np.zeros((steps * count, ROW_BYTES), np.uint8)
    held = Held(lengths=lengths, nodes=nodes, rows=(rows.astype(np.uint8),))
    exchange = open_exchange(held, (landing,), world, mode=mode, quiet=True)
    generator = np.random.default_rng(0)
    readers = np.repeat([0, 1], count)
    times = []
    for turn in range(-3, turns):
        reads = Reads(
            readers=readers,
            owners=1 - readers,
            episodes=2 * generator.integers(0, EPISODES, 2 * count) + 1 - readers,
            starts=generator.integers(0, max(1000 - steps, 1), 2 * count),
            steps=np.full(2 * count, min(steps, 1000)),
            rows=np.tile(np.arange(count) * steps, 2),
        )
        begin = time.perf_counter()
        exchange.post(turn, reads)
        exchange.wait(turn)
        times.append(time.perf_counter() - begin)
    exchange.close()
    seconds = statistics.median(times[3:])
    read_bytes = min(steps, 1000) * ROW_BYTES
    return {"transport": exchange.name, "bytes": read_bytes, "reads": count, "seconds": seconds}
