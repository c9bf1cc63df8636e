"""Frames of three cameras drawn from LeRobot's videos: our shards, `--video keep`, LeRobot itself.

    python -m benchmarks video                     makes the videos, 6,000 steps
    VIDEO_SETS=DIR python -m benchmarks video      takes those in DIR; makes, and leaves, them there
    VIDEO_STEPS=700 ...                            fewer steps

All read the steps of one recorded list: those that our loader draws, 64 a batch.  LeRobotDataset is
read by torch's DataLoader with as many workers as there are cores, and in the process itself, for
some seconds.  Each of its figures is of its own backend (torchcodec, or PyAV where that is
missing).  With a GPU, a transformer of patches is trained there on frames that stay in videos, and
on one batch of them again and again: what takes longer is the time that the GPU waits.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.common import timed
from gear_offline.core.system import usable_cores
from gear_offline.core.text import say
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.errors import package_needed
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader

CAMERAS = [f"observation.images.{name}" for name in ("top", "left", "right")]
SIDE, FPS, BATCH = 224, 30, 64
STEPS, QUICK_STEPS, EPISODE_STEPS = 6000, 160, 100
PEER_SECONDS, TRAINED_SECONDS = 10.0, 6.0
PATCH, WIDTHS = 16, {"small": (384, 6), "base": (768, 12)}  # width and heads of 12 layers
# as LeRobot writes them; and with long groups of pictures, as cameras and editors do
CODECS = {"av1, groups of 2": ("libsvtav1", 2), "h264, groups of 250": ("libx264", 250)}
INSTALL = "pip install --no-deps lerobot==0.4.4 'torchcodec>=0.11' datasets; then what it asks for"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about four minutes, 6 GB of disk."""
    steps = QUICK_STEPS if quick else int(os.environ.get("VIDEO_STEPS", STEPS))
    lengths, rows = np.full(steps // EPISODE_STEPS or 1, min(EPISODE_STEPS, steps)), []
    for name, (codec, group) in CODECS.items():
        with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as text:
            folder, sets = Path(text), Path(os.environ.get("VIDEO_SETS", text), codec)
            if not sets.exists():
                write_lerobot(sets / "set", lengths, codec=codec, group=group)
            for row in measure(folder, sets, int(lengths.sum()), 8 if quick else 60):
                rows.append({"videos": name, **row})
                say(f"{name}: {row}")
    return {"steps": int(lengths.sum()), "batch": BATCH, "cores": usable_cores(), "results": rows}


def measure(folder: Path, sets: Path, steps: int, batches: int) -> Iterable[dict[str, Any]]:
    """Yield the rows of one dataset; what is kept of it lies in `sets`."""
    options: Any = {"context_length": 1, "device": "cpu", "observations": CAMERAS}
    columns = [*CAMERAS, "observation.state", "actions"]
    for video in ("decode", "keep"):
        path = {"decode": folder, "keep": sets}[video] / video
        made: Any = {"columns": columns, "video": video, "quiet": True}
        convert_seconds = 0.0
        if not path.exists():
            if video == "decode" and find_spec("pyarrow") is None:
                continue  # which reads the rows
            convert_seconds = timed(partial(convert, sets / "set", path, **made))
        dataset = open_dataset(path)
        step_bytes = len(CAMERAS) * SIDE * SIDE * 3
        budget = max(steps // 4, 7 * BATCH) * step_bytes  # a quarter of the frames
        kept: Any = {"host_budget": budget} if dataset.videos else {}
        with GearLoader(dataset, BATCH, **options, **kept) as loader:
            segments = [loader.segments_at(step) for step in range(batches)]
            rate = _rate(loader, batches)
        name = {"decode": "shards, decoded when converted", "keep": "shards, --video keep"}[video]
        nbytes = dataset.manifest.total_bytes + dataset.manifest.video_bytes
        yield {"reader": name, "frames/s": rate, "convert_s": convert_seconds, "bytes": nbytes}
        if dataset.videos and torch.cuda.is_available():
            for size in WIDTHS:
                yield {"reader": f"{name}, trained on a GPU, {size}"} | train(dataset, size, kept)
    firsts = dataset.episodes.offsets
    recorded = [(firsts[each.episodes] + each.starts).tolist() for each in segments]
    try:
        with package_needed(f"LeRobot is not beside us: {INSTALL}", "lerobot"):
            from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except RuntimeError as error:
        say(str(error))
        return
    peer = LeRobotDataset("none/made", root=sets / "set")
    for workers in (usable_cores(), 0):
        loaded = DataLoader(peer, batch_sampler=recorded, num_workers=workers)
        name = f"LeRobotDataset, {peer.video_backend}, {workers} workers"
        yield {"reader": name, "frames/s": _rate(iter(loaded), batches, PEER_SECONDS)}


def _rate(batches: Iterator[Any], count: int, most: float = np.inf) -> float:
    """Return the frames/s of `count` batches, or of `most` seconds, after the first one."""
    next(batches)
    began, taken, done = time.perf_counter(), 0.0, 0
    while done < count - 1 and taken < most:
        next(batches)
        done, taken = done + 1, time.perf_counter() - began
    return done * BATCH * len(CAMERAS) / taken


class Vision(nn.Module):
    """A transformer of patches that tells actions from the frames of all cameras."""

    def __init__(self, width: int, heads: int, actions: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2, width))
        layer: Any = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, dropout=0.0)
        self.layers = nn.ModuleList(
            layer(activation="gelu", batch_first=True, norm_first=True) for _ in range(12)
        )
        self.head = nn.Linear(width, actions)

    def forward(self, frames: Tensor) -> Tensor:
        """Return (B, A) of (cameras, B, h, w, 3) bytes."""
        pixels = frames.flatten(0, 1).permute(0, 3, 1, 2).to(torch.bfloat16) / 255
        rows = self.patches(pixels).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            rows = layer(rows)
        actions: Tensor = self.head(rows.mean(1)).unflatten(0, frames.shape[:2]).mean(0)
        return actions


def train(dataset: Dataset, size: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train on batches of a loader, and on one batch alone: the share of time that is waited."""
    shape: Any = {"context_length": 1, "device": "cuda", "observations": CAMERAS, **options}
    model = Vision(*WIDTHS[size], dataset.spec["actions"].shape[0]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step(batch: Batch) -> None:
        frames = torch.stack([batch.states[camera][:, 0] for camera in CAMERAS])
        with torch.autocast("cuda", torch.bfloat16):
            error = nn.functional.mse_loss(model(frames).float(), batch.actions[:, 0])
        optimizer.zero_grad()
        error.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def run(batches: Iterator[Batch]) -> float:
        """Return the seconds of a step."""
        ends: Any = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < TRAINED_SECONDS or count < 2:
            step(next(batches))
            ends[count % 2].record()
            count += 1
            ends[count % 2].synchronize()  # of the step before: the host is one ahead of the GPU
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    with GearLoader(dataset, BATCH, **shape) as loader:
        batch = next(loader)
        step(batch)
        run(loader)  # until its memory is full
        alone, fed, again = run(repeat(batch)), run(loader), run(repeat(batch))
    alone = min(alone, again)
    facts = {"frames/s": BATCH * len(CAMERAS) / fed, "step_ms": 1e3 * alone}
    return facts | {"waits": 1 - alone / fed}


def write_lerobot(
    root: Path,
    lengths: Any,
    *,
    cameras: Iterable[str] = tuple(CAMERAS),
    side: int = SIDE,
    codec: str = "libsvtav1",
    group: int = 2,
) -> None:
    """Write a dataset of LeRobot's format 3: (E,) lengths, a video of all episodes a camera."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    steps, episodes, rng = int(np.sum(lengths)), len(lengths), np.random.default_rng(0)
    firsts, numbers = np.cumsum([0, *lengths]), np.repeat(np.arange(episodes), lengths)
    within = np.arange(steps) - firsts[numbers]

    def write(place: str, columns: dict[str, Any]) -> None:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), root / place)

    def vectors(width: int) -> Any:
        values = pa.array(rng.random(steps * width, np.float32))
        return pa.FixedSizeListArray.from_arrays(values, width)

    rows = {"observation.state": vectors(6), "action": vectors(6)}
    rows |= {"timestamp": (within / FPS).astype(np.float32), "frame_index": within}
    rows |= {"episode_index": numbers, "index": np.arange(steps), "task_index": 0 * within}
    write("data/chunk-000/file-000.parquet", rows)
    write("meta/tasks.parquet", {"task_index": [0], "__index_level_0__": ["move"]})
    zeros = np.zeros(episodes, np.int64)
    listed = {"episode_index": zeros.cumsum() + np.arange(episodes), "tasks": [["move"]] * episodes}
    listed |= {"length": np.asarray(lengths), "dataset_from_index": firsts[:-1]}
    listed |= {"dataset_to_index": firsts[1:]}
    places = ["data", "meta/episodes", *(f"videos/{camera}" for camera in cameras)]
    listed |= {f"{place}/{n}_index": zeros for place in places for n in ("chunk", "file")}
    for camera in cameras:
        listed[f"videos/{camera}/from_timestamp"] = firsts[:-1] / FPS
        listed[f"videos/{camera}/to_timestamp"] = firsts[1:] / FPS
    write("meta/episodes/chunk-000/file-000.parquet", listed)
    kinds = {"observation.state": ("float32", 6), "action": ("float32", 6)}
    kinds |= {"timestamp": ("float32", 1)} | dict.fromkeys([*rows][3:], ("int64", 1))
    features: Any = {n: {"dtype": d, "shape": [w], "names": None} for n, (d, w) in kinds.items()}
    frame = {"dtype": "video", "shape": [side, side, 3], "names": ["height", "width", "channels"]}
    features |= dict.fromkeys(cameras, frame)
    info = {"codebase_version": "v3.0", "robot_type": "made", "fps": FPS, "chunks_size": 1000}
    info |= {"total_episodes": episodes, "total_frames": steps, "total_tasks": 1}
    info |= {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"}
    info |= {"video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"}
    info |= {"splits": {"train": f"0:{episodes}"}, "features": features}
    (root / "meta" / "info.json").write_text(json.dumps(info))
    (root / "meta" / "stats.json").write_text("{}")

    def encode(number: int, camera: str) -> None:
        path = root / f"videos/{camera}/chunk-000/file-000.mp4"
        path.parent.mkdir(parents=True)
        write_video(path, moving_frames(steps, side, number), codec, group)

    names = [*cameras]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(encode, range(len(names)), names))


def moving_frames(steps: int, side: int, seed: int) -> Iterator[Any]:
    """Yield frames of a textured picture that moves."""
    rng = np.random.default_rng(seed)
    picture = rng.integers(0, 255, (side // 8, side // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    for step in range(steps):
        yield np.roll(picture, (3 * step, 2 * step), (0, 1))


def write_video(path: Path, frames: Iterable[Any], codec: str, group: int) -> None:
    """Write frames with a key frame at least every `group`, as LeRobot does.

    In a thread of its own: SVT-AV1 gives whoever calls it a real-time priority, and so to all
    threads and processes that it starts later.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_encode, path, frames, codec, group).result()


def _encode(path: Path, frames: Iterable[Any], codec: str, group: int) -> None:
    import av

    options = {"g": str(group), "crf": "30", "preset": "12" if codec == "libsvtav1" else "fast"}
    with av.open(path, "w") as out:
        stream: Any = out.add_stream(codec, rate=FPS, options=options)
        stream.pix_fmt = "yuv420p"
        for number, pixels in enumerate(frames):
            if not number:
                stream.height, stream.width = pixels.shape[:2]
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
