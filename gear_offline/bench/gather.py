"""What the GPU engine moves: from GPU memory, from pinned host memory, and for one small batch.

Times are CUDA events around several launches, after warm-up; the figure is the median of the
turns.  Bytes are those of the columns that land in the batch, each counted once; timesteps, mask
and names (16 bytes a step and a segment) are written besides: ``all_gigabytes_per_second`` counts
them, too.  Peers of the same run: one large pinned copy (the
bus), `torch.index_select` of whole segments in GPU memory, and the CPU loader with a copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gear_offline.bench.loader import CONTEXT, EPISODES, STEPS, _hopper_like
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import UnavailableError
from gear_offline.kernels.columns import ColumnGroup, Field
from gear_offline.loaders.loader import GearLoader
from gear_offline.sampling import make_sampler
from gear_offline.tables.table import Table

# segment: steps of the window, bytes of a row
SEGMENTS = {
    256: (4, 64),
    880: (5, 176),
    1280: (20, 64),
    2048: (4, 512),
    4096: (4, 1024),
    65536: (4, 16384),
    1 << 20: (4, 1 << 18),
}
# The same bytes a step as one record and as columns: steps of a window, and (dtype, width) of
# each group.
LAYOUTS: dict[str, tuple[int, dict[str, list[tuple[str, int]]]]] = {
    "state vectors": (
        20,
        {
            "records": [("float32", 16)],  # 11 + 3 + 1 + 1
            "columns": [("float32", 11), ("float32", 3), ("float32", 1), ("float32", 1)],
        },
    ),
    "frames": (
        30,
        {"records": [("uint8", 84 * 84 + 16)], "columns": [("uint8", 84 * 84), ("float32", 4)]},
    ),
}
EPISODE_STEPS = 1000
LAUNCH_BYTES = 1 << 30


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about two minutes, with 4 GiB of GPU and of pinned memory (`quick`: a quarter)."""
    if not torch.cuda.is_available():
        raise UnavailableError(
            "DEVICE", "this benchmark needs a CUDA device", remedy="run it on a machine with a GPU"
        )
    table_bytes = (1 if quick else 4) << 30
    memory = np.ones(table_bytes // 4, np.float32)
    turns = 3 if quick else 9
    rows = []
    for tier in ("host", "hbm"):
        for size, (span, row_bytes) in SEGMENTS.items():
            rows.append(_tier_row(memory, tier, size, span, row_bytes, turns))
            torch.cuda.empty_cache()
    return {
        "gpu": torch.cuda.get_device_name(),
        "table_bytes": table_bytes,
        "results": rows,
        "layouts": _layouts(memory, turns),
        "bus_gigabytes_per_second": _bus(turns),
        "small_batch": _small_batch(quick=quick, turns=turns),
    }


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a measurement."""
    rows: list[tuple[Any, ...]] = [
        ("what", "segment", "GB/s", "with mask etc.", "M segments/s", "x peer")
    ]
    for row in document["results"]:
        cells = [row["gigabytes_per_second"], row["all_gigabytes_per_second"]]
        cells += [row["million_segments_per_second"], row["ratio"]]
        name = f"gather, {row['tier']}"
        rows.append((name, f"{row['segment_bytes']:,} B", *(f"{cell:.2f}" for cell in cells)))
    for row in document["layouts"]:
        cells = [row["gigabytes_per_second"], row["million_segments_per_second"]]
        name = f"{row['layout']} of {row['what']}, {row['tier']}"
        size = f"{row['segment_bytes']:,} B"
        rows.append((name, size, f"{cells[0]:.2f}", "", f"{cells[1]:.2f}", ""))
    rows.append(("pinned copy", "", f"{document['bus_gigabytes_per_second']:.1f}", "", "", ""))
    for name, value in document["small_batch"].items():
        rows.append((name, "", f"{value:.2f}", "", "", ""))
    return rows


def event_seconds(call: Callable[[], object], *, turns: int, calls: int) -> float:
    """Return the median seconds of a call on the GPU, over `turns` of `calls` calls."""
    for _ in range(3):
        call()
    found: list[float] = []
    for _ in range(turns):
        start, stop = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3 / calls)
    return statistics.median(found)


def _tier_row(
    memory: Any, tier: Any, size: int, span: int, row_bytes: int, turns: int
) -> dict[str, Any]:
    from gear_offline.kernels.gather_gpu import GpuGather
    from gear_offline.tables.placement import place_table

    rows = memory[: len(memory) // (row_bytes // 4) * (row_bytes // 4)].reshape(-1, row_bytes // 4)
    steps = len(rows) - 2 * span
    episode = min(EPISODE_STEPS, steps)
    lengths = np.full(steps // episode, episode, np.int64)
    field = Field(name="states", dtype=np.dtype(np.float32), shape=(rows.shape[1],))
    placed = place_table(
        Table(
            episodes=EpisodeIndex(lengths),
            groups=(ColumnGroup(fields=(field,), rows=rows[: int(lengths.sum()) + 2 * span]),),
            margin=span,
        ),
        device="cuda",
        placement=tier,
    )
    law = make_sampler("uniform_steps", placed.episodes)
    count = max(LAUNCH_BYTES // size, 1)
    engine = GpuGather(
        placed.groups,
        placed.episodes.offsets,
        device=placed.device,
        draw=law.gpu,
        seed=0,
        batch_size=count,
        context_length=span,
        reads_host=placed.host_bytes > 0,
    )
    drawn = law.sample(0, 0, 1, count)[0]
    whole = np.minimum(drawn.starts, lengths[0] - span)  # no padding: every byte is moved
    names = [drawn.episodes, whole, np.full(count, span), np.full(count, -1)]
    named = torch.from_numpy(np.stack(names, axis=1)).cuda()
    windows = engine.allocate((count,))

    seconds = event_seconds(lambda: engine.gather_into(windows, named), turns=turns, calls=2)
    peer = _index_select(windows, size, turns) if tier == "hbm" else _bus(turns)
    speed = count * size / seconds / 1e9
    placed.close()
    return {
        "tier": tier,
        "segment_bytes": size,
        "segments": count,
        "gigabytes_per_second": speed,
        "all_gigabytes_per_second": speed * (size + 16 * (span + 1)) / size,
        "million_segments_per_second": count / seconds / 1e6,
        "peer": "torch.index_select" if tier == "hbm" else "pinned copy",
        "ratio": speed / peer,
    }


def _layouts(memory: Any, turns: int) -> list[dict[str, Any]]:
    """The batch's bytes of steps as records and as columns, by kernels, from either tier."""
    from gear_offline.kernels.gather_gpu import GpuGather
    from gear_offline.tables.placement import place_table

    found = []
    for tier in ("host", "hbm"):
        for what, (span, layouts) in LAYOUTS.items():
            for layout, parts in layouts.items():
                step_bytes = sum(np.dtype(d).itemsize * w for d, w in layouts["columns"])
                episodes = memory.nbytes // (step_bytes + 16) // EPISODE_STEPS - 1
                groups, at = [], 0
                for number, (name, width) in enumerate(parts):
                    dtype = np.dtype(name)
                    size = (episodes * EPISODE_STEPS + 2 * span) * width * dtype.itemsize
                    rows = memory.view(np.uint8)[at : at + size].view(dtype).reshape(-1, width)
                    at += size + -size % 4096  # pages are pinned once
                    field = Field(name=f"column {number}", dtype=dtype, shape=(width,))
                    groups.append(ColumnGroup(fields=(field,), rows=rows))
                placed = place_table(
                    Table(
                        episodes=EpisodeIndex(np.full(episodes, EPISODE_STEPS, np.int64)),
                        groups=tuple(groups),
                        margin=span,
                    ),
                    device="cuda",
                    placement=tier,
                )
                law = make_sampler("uniform_steps", placed.episodes)
                count = min(LAUNCH_BYTES // (span * step_bytes), 1 << 17)
                engine = GpuGather(
                    placed.groups,
                    placed.episodes.offsets,
                    device=placed.device,
                    draw=law.gpu,
                    seed=0,
                    batch_size=count,
                    context_length=span,
                    reads_host=placed.host_bytes > 0,
                )
                fill = engine.static()
                seconds = event_seconds(fill.enqueue, turns=turns, calls=2)
                placed.close()
                found.append(
                    {
                        "what": what,
                        "tier": tier,
                        "layout": layout,
                        "segment_bytes": span * step_bytes,
                        "gigabytes_per_second": count * span * step_bytes / seconds / 1e9,
                        "million_segments_per_second": count / seconds / 1e6,
                    }
                )
    return found


def _index_select(windows: Any, size: int, turns: int) -> float:
    """GB/s of `torch.index_select` of whole, aligned segments out of GPU memory."""
    source = windows.buffers[0].reshape(-1, size // 4)
    index = torch.randint(len(source), (len(source),), device="cuda")
    out = torch.empty_like(source)
    seconds = event_seconds(
        lambda: torch.index_select(source, 0, index, out=out), turns=turns, calls=2
    )
    return len(source) * size / seconds / 1e9


def _bus(turns: int) -> float:
    pinned = torch.empty(LAUNCH_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(LAUNCH_BYTES, dtype=torch.uint8, device="cuda")
    seconds = event_seconds(lambda: target.copy_(pinned, non_blocking=True), turns=turns, calls=2)
    return LAUNCH_BYTES / seconds / 1e9


def _small_batch(*, quick: bool, turns: int) -> dict[str, float]:
    """One batch of 64 windows of 20 hopper records: GPU time, host time, and the loaders' rates."""
    steps, episodes = (STEPS // 10, EPISODES // 10) if quick else (STEPS, EPISODES)
    found: dict[str, float] = {}
    with _hopper_like(steps, episodes) as (dataset, _):
        for tier in ("hbm", "host"):
            options: dict[str, Any] = {"batch_size": 64, "context_length": CONTEXT}
            loader = GearLoader(dataset, device="cuda", engine="on", placement=tier, **options)
            batches = loader.device_batches()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(100):
                    batches.enqueue()
            on_gpu = event_seconds(graph.replay, turns=turns, calls=5) / 100
            found[f"{tier}: GPU microseconds a fill, B=64"] = on_gpu * 1e6
            found[f"{tier}: host microseconds a call"] = _host_microseconds(batches.enqueue)
            found[f"{tier}: GearLoader, batches/s"] = _rate(loader)
            options["batch_size"] = 1 << 17
            large = GearLoader(dataset, device="cuda", engine="on", placement=tier, **options)
            filled = large.device_batches()
            seconds = event_seconds(filled.enqueue, turns=turns, calls=2)
            found[f"{tier}: million segments/s, B=131,072"] = (1 << 17) / seconds / 1e6
        options["batch_size"] = 64
        off = GearLoader(dataset, device="cuda", engine="off", **options)
        found["CPU gather and copy, batches/s"] = _rate(off)
    return found


def _host_microseconds(call: Callable[[], object], calls: int = 500) -> float:
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def _rate(loader: GearLoader, batches: int = 20_000) -> float:
    for _ in range(2_000):
        next(loader)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(batches):
        next(loader)
    torch.cuda.synchronize()
    return batches / (time.perf_counter() - begin)
