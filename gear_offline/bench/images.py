"""Frames: what the GPU engine moves of them, and how long training waits for them.

Windows of 30 steps with stacks of 4 are K + 3 = 33 frames of 84 x 84 bytes; delivered bytes are
those 33 frames, each written into the batch once.  Peers of the same run: one large pinned copy,
and the same stacks stored ready-made, so that 120 frames a window are read (in million windows/s).
Times are CUDA events, after warm-up; the figure is the median of the turns.

Training: the recipe atari-pong on random frames, a captured step; ``data_wait_share`` is the
recipe's own stall meter, beside the wall time of a step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from gear_offline.bench.gather import LAUNCH_BYTES, _bus, event_seconds
from gear_offline.config.recipe import load_recipe
from gear_offline.convert import convert
from gear_offline.core.progress import progress
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import UnavailableError
from gear_offline.kernels.columns import ColumnGroup, Field
from gear_offline.sampling import make_sampler
from gear_offline.tables.table import Table
from gear_offline.training.learner import Learner
from gear_offline.training.training_model import ModelSizes

FRAME, STACK, CONTEXT, EPISODE = (84, 84), 4, 30, 1000
FRAME_BYTES = FRAME[0] * FRAME[1]
LEAD = STACK - 1
BATCH = 128  # of the paper's Atari runs, but Pong's
TRAINING = {
    "from host memory": ("loader.placement=host",),
    "from host memory, compiled": ("loader.placement=host", "train.compile=on"),
    "from GPU memory": ("loader.placement=hbm",),
    "from GPU memory, compiled": ("loader.placement=hbm", "train.compile=on"),
    "gathered by the CPU": ("loader.engine=off", "train.graph=off"),
}


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about four minutes, with 4 GiB of GPU and of pinned memory (`quick`: a quarter)."""
    if not torch.cuda.is_available():
        raise UnavailableError(
            "DEVICE", "this benchmark needs a CUDA device", remedy="run it on a machine with a GPU"
        )
    turns = 3 if quick else 9
    memory = np.ones((1 if quick else 4) << 30, np.uint8)
    rows = []
    for tier in ("host", "hbm"):
        rows.append(_gather(memory, tier, stored=1, turns=turns))
        rows.append(_gather(memory, tier, stored=STACK, turns=turns))
        torch.cuda.empty_cache()
    bus = _bus(turns)
    del memory
    steps = 10_000 if quick else 40_000
    with _frames_like(steps) as dataset, progress(len(TRAINING), "train", unit="rows") as advance:
        training = []
        for name, options in TRAINING.items():
            training.append({"name": name, **_train(dataset, options, seconds=2 if quick else 10)})
            advance(1)
    return {
        "gpu": torch.cuda.get_device_name(),
        "table_bytes": (1 if quick else 4) << 30,
        "frame_bytes": FRAME_BYTES,
        "frame_stack": STACK,
        "context_length": CONTEXT,
        "results": rows,
        "bus_gigabytes_per_second": bus,
        "training": training,
    }


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a measurement."""
    rows: list[tuple[Any, ...]] = [("what", "GB/s", "M windows/s", "ms a step", "waits for data")]
    for row in document["results"]:
        cells = (row["gigabytes_per_second"], row["million_windows_per_second"])
        rows.append((f"{row['stored']}, {row['tier']}", *(f"{c:.3f}" for c in cells), "", ""))
    rows.append(("pinned copy", f"{document['bus_gigabytes_per_second']:.1f}", "", "", ""))
    for row in document["training"]:
        cells = (f"{row['milliseconds']:.3f}", f"{row['data_wait_share']:.2%}")
        rows.append((f"training {row['name']}", "", "", *cells))
    return rows


def _gather(memory: Any, tier: Any, *, stored: int, turns: int) -> dict[str, Any]:
    """Gather whole windows of single frames (`stored` is 1) or of ready-made stacks."""
    from gear_offline.kernels.gather_gpu import GpuGather
    from gear_offline.tables.placement import place_table

    history, width = (LEAD, FRAME_BYTES) if stored == 1 else (0, stored * FRAME_BYTES)
    margin = CONTEXT + history
    rows = memory[: len(memory) // width * width].reshape(-1, width)
    episodes = (len(rows) - 2 * margin) // EPISODE
    field = Field(
        name="states",
        dtype=np.dtype(np.uint8),
        shape=(stored, *FRAME)[stored == 1 :],
        history=history,
    )
    placed = place_table(
        Table(
            episodes=EpisodeIndex(np.full(episodes, EPISODE, np.int64)),
            groups=(ColumnGroup(fields=(field,), rows=rows[: episodes * EPISODE + 2 * margin]),),
            margin=margin,
        ),
        device="cuda",
        placement=tier,
    )
    law = make_sampler("uniform_steps", placed.episodes)
    delivered = (CONTEXT + history) * width
    count = LAUNCH_BYTES // delivered
    engine = GpuGather(
        placed.groups,
        placed.episodes.offsets,
        device=placed.device,
        draw=law.gpu,
        seed=0,
        batch_size=count,
        context_length=CONTEXT,
        reads_host=placed.host_bytes > 0,
    )
    drawn = law.sample(0, 0, 1, count)[0]
    whole = np.clip(drawn.starts, history, EPISODE - CONTEXT)  # no padding: every byte is moved
    names = [drawn.episodes, whole, np.full(count, CONTEXT), np.full(count, -1)]
    named = torch.from_numpy(np.stack(names, axis=1)).cuda()
    windows = engine.allocate((count,))

    seconds = event_seconds(lambda: engine.gather_into(windows, named), turns=turns, calls=2)
    placed.close()
    return {
        "tier": tier,
        "stored": "single frames" if stored == 1 else f"stacks of {stored}",
        "windows": count,
        "window_bytes": delivered,
        "gigabytes_per_second": count * delivered / seconds / 1e9,
        "million_windows_per_second": count / seconds / 1e6,
    }


@contextmanager
def _frames_like(steps: int) -> Iterator[Dataset]:
    """Make a dataset of random frames and discrete actions."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="gear-offline-bench-") as folder:
        source = Path(folder) / "frames-like.hdf5"
        ends = np.zeros(steps, dtype=bool)
        ends[EPISODE - 1 :: EPISODE] = True
        with h5py.File(source, "w") as file:
            frames = file.create_dataset("observations", (steps, *FRAME), np.uint8)
            for begin in range(0, steps, EPISODE):
                size = (min(EPISODE, steps - begin), *FRAME)
                frames[begin : begin + EPISODE] = generator.integers(0, 256, size, np.uint8)
            file["actions"] = generator.integers(0, 6, steps)
            file["rewards"] = generator.normal(size=steps).astype(np.float32)
            file["terminals"] = ends
            file["timeouts"] = np.zeros(steps, dtype=bool)
        convert(source, Path(folder) / "dataset", quiet=True)
        yield open_dataset(Path(folder) / "dataset")


def _train(
    dataset: Dataset, options: tuple[str, ...], *, seconds: float, device: str = "cuda"
) -> dict[str, float]:
    """Return wall time of a step and the share of it that waits for its batch."""
    recipe = load_recipe(
        "atari-pong",
        [
            "data.path=unused",
            "data.collect=null",
            f"loader.batch_size={BATCH}",
            f"loader.context_length={CONTEXT}",
            f"model.max_timestep={EPISODE}",
            f"train.device={device}",
            "train.steps=100000",
            "train.compile=off",
            "train.log_every=100000",
            *options,
        ],
    )
    sizes = ModelSizes(state_dim=FRAME_BYTES, action_dim=6, discrete=True, frame_shape=FRAME)
    learner = Learner(recipe, sizes, dataset, torch.device(device))
    for _ in range(5):
        learner.advance()
    learner.report()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(10):
            learner.advance()
        learner.check()  # waits for the GPU
        count += 10
    wall = (time.perf_counter() - begin) / count
    return {
        "batch_size": BATCH,
        "milliseconds": wall * 1e3,
        "data_wait_share": learner.report()["data_wait_share"],
    }
